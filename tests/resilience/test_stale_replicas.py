"""Replicas may be behind their primary: nobody decides by what they say, nor shows it, even where only they are
named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from idemgate import Gate
from tests.cluster import cluster
from tests.replication import watched


@contextmanager
def of_a_cluster(home: Path) -> Iterator[tuple[str, list[int]]]:
    """A URL that names replicas only, and the ports of all."""
    with cluster(home, replicas=True) as ports:
        yield "redis+cluster://" + ",".join(f"127.0.0.1:{port}" for port in ports[3:]), ports


@contextmanager
def of_sentinels(home: Path) -> Iterator[tuple[str, list[int]]]:
    with watched(home, "shop") as three:
        yield three.url, [int(one.connection_pool.connection_kwargs["port"]) for one in three.nodes]


@pytest.mark.parametrize("store", [of_a_cluster, of_sentinels])
async def test_a_replica_is_never_asked(
    tmp_path: Path,
    namespace: str,
    store: Callable[[Path], Any],
    many: Callable[[int], int],
    sound: Callable[[Gate], None],
    record_fault: Callable[..., None],
) -> None:
    n = many(20)
    with store(tmp_path / "s") as (url, ports):
        gate = Gate(url, namespace=namespace, timeout="60s")
        topic = gate.topic("t", slots=4)
        # Given calls that write, and calls that only look, of both faces
        for key in map(str, range(n)):
            claim = gate.claim(key)
            assert gate.inspect(key).token == claim.token
            assert claim.complete("receipt")
            assert (await gate.aio.inspect(key)).state == "done"
            topic.trigger(key, 1)
            assert (await topic.aio.peek(key)).pending is not None
            assert gate.dedup("s", "1h").get_or_set(key, "value").first
            assert await gate.aio.dedup("s", "1h").get(key) == "value"
            assert len(topic.take(1)) == 1
        assert topic.stats().in_flight == n
        await gate.aio.close()
        gate.close()
        # Then primaries ran scripts, and replicas ran none: what they are told is only what these wrote
        roles = [asked(port) for port in ports]
        assert {role: sum(calls for one, calls in roles if one == role) > 0 for role, _ in roles} == {
            "master": True, "slave": False,
        }  # fmt: skip
        sound(gate)
    record_fault(f"replicas that may be behind ({store.__name__.replace('_', ' ')})", n, promises="P1 P2", asked=0)


def asked(port: int) -> tuple[str, int]:
    """Its role, and how many scripts it was asked to run."""
    with redis.Redis(port=port) as client:
        facts = client.info("commandstats")
        role: str = client.info("replication")["role"]
    return role, sum(facts.get(f"cmdstat_{one}", {"calls": 0})["calls"] for one in ("eval", "evalsha"))
