"""`durability="fsync"` when the power fails: what WAITAOF answered for is on disk, whatever the fsync policy, where the
server's WAITAOF does what it says. With `everysec`, that of Redis 7.4 (until redis/redis#13793) and that of Valkey 9.1
answer before the sync, and the test is skipped.

A preloaded library (`disk.c`) tells how much of the append-only file a sync has written. Of a server that is only
killed the operating system has the rest of it, too, so the file is cut back to that.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from idemgate import Gate
from tests.resilience import servers
from tests.resilience.servers import APPEND, Preloaded, cut_back
from tests.resilience.test_appended import missing
from tools.reliability import server_of

pytestmark = pytest.mark.usefixtures("has_waitaof")

Fact = tuple[str, str, int]


class Synced(Preloaded):
    """`synced()`: so many bytes of its append-only file are on disk for certain."""

    variable = "DISK_FILE"

    def synced(self) -> int:
        return self.shared


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return servers.library("disk", tmp_path_factory.mktemp("disk"))


@pytest.mark.parametrize("policy", ["always", "everysec"])
async def test_what_was_acknowledged_is_there_when_the_power_fails(
    tmp_path: Path,
    library: Path,
    namespace: str,
    policy: str,
    many: Callable[[int], int],
    drawn: random.Random,
    seed: int,
    sound: Callable[[Gate], None],
    record_fault: Callable[..., None],
) -> None:
    # Given what was on disk when each call returned: with `everysec` each waits for the sync of its second
    known: list[tuple[int, list[Fact]]] = []
    with Synced(tmp_path / "data", library, *APPEND, policy) as server:
        honest(server)
        version, gate = server_of(server.url), Gate(server.url, namespace=namespace, durability="fsync", timeout="60s")
        for turn in range(10 if policy == "always" else min(many(1), 10)):
            known += await worked(gate, server, turn)
        await gate.aio.close()
        # And something that nobody waited for
        with Gate(server.url, namespace=namespace) as careless:
            careless.first("careless", "1h", scope="claim")
        server.kill()
        whole = server.file.read_bytes()
    # When the power fails just after one of them had returned
    cuts = drawn.sample(range(len(known)), min(len(known), many(4)))
    for turn, last in enumerate(cuts):
        with cut_back(tmp_path / f"cut{turn}", tmp_path / "data", whole[: known[last][0]]) as again:
            # Then all that was acknowledged until then is there, and what nobody waited for is not
            wanted = {(what, key): (what, key, token) for _, facts in known[: last + 1] for what, key, token in facts}
            gate = Gate(again.url, namespace=namespace)
            assert gate.inspect("careless").state == "absent"
            assert missing(gate, [*wanted.values()]) == []
            sound(gate)
        shutil.rmtree(tmp_path / f"cut{turn}")
    fault = f'power lost, durability="fsync", appendfsync {policy}'
    record_fault(fault, len(cuts), promises="P2 P7", lost=0, seed=seed, server=version)


def honest(server: Synced) -> None:
    """Skips where WAITAOF answers for what is not on disk. (The second is written just after a sync.)"""
    for key in ("first", "second"):
        server.client.set(key, key)
        assert server.client.execute_command("WAITAOF", 1, 0, 0)[0] == 1
        if server.synced() < server.size():
            pytest.skip("this server's WAITAOF answers before the sync")


async def worked(gate: Gate, server: Synced, turn: int) -> list[tuple[int, list[Fact]]]:
    """Guards and triggers, and what was on disk when their callers were answered."""
    topic, keys = gate.topic("t", slots=2), [f"{turn}-{n}" for n in range(10)]
    claims = await gate.aio.claim_many(keys, lease="1h")
    tokens = [(key, claim.token) for key, claim in zip(keys, claims, strict=True)]
    known: list[tuple[int, list[Fact]]] = [(server.synced(), [("claimed", *one) for one in tokens])]
    ended, told = await asyncio.gather(
        gate.aio.complete_many([(claim, "receipt") for claim in claims]),
        topic.aio.trigger_many([(key, 1) for key in keys]),
    )
    assert ended == [True] * 10
    assert {one.status for one in told} == {"scheduled"}
    facts = [(what, *one) for what in ("done", "triggered") for one in tokens]
    return [*known, (server.synced(), facts)]
