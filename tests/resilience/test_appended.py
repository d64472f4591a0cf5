"""The append-only file: kill -9 with each fsync policy, power that fails before all is on disk, and a file that is cut
at any byte."""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Callable
from math import inf
from pathlib import Path
from time import time
from typing import Any

import pytest

from idemgate import Gate
from idemgate.testing import Clock
from tests.cluster import wait_for
from tests.resilience.servers import APPEND, Server, cut_back, everything


def load(gate: Gate, name: int, halt: threading.Event, sure: list[tuple[str, str, int]]) -> None:
    """Guards and triggers until the server is gone; `sure` is what was acknowledged: (what, key, token)."""
    topic, number = gate.topic("t", slots=2), 0
    while not halt.is_set():
        key, number = f"{name}-{number}", number + 1
        try:
            claim = gate.claim(key, lease="1h")
            sure.append(("claimed", key, claim.token))
            if claim.complete(key):
                sure.append(("done", key, claim.token))
            topic.trigger(key, 1, event_id=key)
            sure.append(("triggered", key, 0))
        except Exception:
            return


@pytest.mark.timeout(600)
@pytest.mark.parametrize("policy", ["always", "everysec", "no"])
def test_what_was_acknowledged_before_kill_9_is_there_afterwards(
    tmp_path: Path, namespace: str, policy: str, kills: int, drawn: random.Random, record_fault: Callable[..., None]
) -> None:
    rounds, acknowledged, lost = min(max(2, kills // 10), 30), 0, 0
    with Server(tmp_path / "data", *APPEND, policy) as server:
        for turn in range(rounds):
            # Given guards and triggers from four threads
            gate, halt, sure = Gate(server.url, namespace=f"{namespace}-{turn}", timeout="100ms"), threading.Event(), []
            threads = [threading.Thread(target=load, args=(gate, n, halt, sure)) for n in range(4)]
            for one in threads:
                one.start()
            while len(sure) < drawn.randint(200, 600) and any(one.is_alive() for one in threads):
                halt.wait(0.001)
            # When the server is killed among them, and started again
            server.kill()
            for one in threads:
                one.join(60)
            gate.close()
            server.start()
            # Then all that was acknowledged is there: the operating system has what the server wrote
            acknowledged += len(sure)
            gone = missing(Gate(server.url, namespace=f"{namespace}-{turn}"), sure)
            if policy == "everysec":
                # But for what it had put off writing while a sync was under way: the last of each caller, no other
                for n in range(4):
                    own, own_gone = ([one for one in facts if one[1].startswith(f"{n}-")] for facts in (sure, gone))
                    assert {one[1] for one in own_gone} <= {one[1] for one in own[len(own) - len(own_gone) - 2 :]}
            else:
                assert gone == []
            lost += len(gone)
    figures = {"acknowledged": acknowledged, "lost": lost}
    record_fault(f"kill -9 of the server, appendfsync {policy}", rounds, promises="P2 P7", **figures)


def missing(gate: Gate, sure: list[tuple[str, str, int]]) -> list[tuple[str, str, int]]:
    """What was acknowledged and is not there."""
    with gate:
        topic = gate.topic("t", slots=2)
        return [fact for fact in sure if not _there(gate, topic, *fact)]


def _there(gate: Gate, topic: Any, what: str, key: str, token: int) -> bool:
    if what == "triggered":
        return topic.peek(key) is not None
    record = gate.inspect(key)
    return record.token == token and (what == "claimed" or record.state == "done")


def test_with_fsync_always_nothing_acknowledged_is_lost_when_the_power_fails(
    tmp_path: Path, namespace: str, kills: int, drawn: random.Random, record_fault: Callable[..., None]
) -> None:
    # Given what the file held when each call returned: all of that was synced before the reply
    known: list[tuple[int, tuple[str, str, int]]] = []
    with Server(tmp_path / "data", *APPEND, "always") as server, Gate(server.url, namespace=namespace) as gate:
        topic = gate.topic("t", slots=2)
        for n in range(30):
            claim = gate.claim(n)
            known.append((server.size(), ("claimed", str(n), claim.token)))
            claim.complete(n)
            known.append((server.size(), ("done", str(n), claim.token)))
            topic.trigger(str(n), n)
            known.append((server.size(), ("triggered", str(n), 0)))
        server.kill()
        whole = server.file.read_bytes()
    # When nothing of what came later is on disk
    cuts = drawn.sample(range(1, len(known)), min(len(known) - 1, max(4, kills)))
    for turn, last in enumerate(cuts):
        with cut_back(tmp_path / f"cut{turn}", tmp_path / "data", whole[: known[last][0]]) as again:
            # Then all that was acknowledged until then is there
            wanted = _latest(fact for _, fact in known[: last + 1])
            assert missing(Gate(again.url, namespace=namespace), wanted) == []
    record_fault("power lost, appendfsync always", len(cuts), promises="P2 P7", lost=0)


def _latest(facts: Any) -> list[tuple[str, str, int]]:
    return [*{(fact[0], fact[1]): fact for fact in facts}.values()]


@pytest.mark.timeout(600)
def test_what_was_lost_with_the_power_runs_again_with_higher_fences(
    tmp_path: Path, namespace: str, many: Callable[[int], int], record_fault: Callable[..., None]
) -> None:
    """`everysec` (and `no`) acknowledge before they sync: the last second is not promised. What breaks is P2 and P7,
    visibly; what holds is P4 and at-least-once for who triggers again."""
    n = min(many(1), 30)
    again = sum(_lost_with_the_power(tmp_path / str(turn), namespace) for turn in range(n))
    record_fault("power lost, appendfsync everysec", n, promises="P4", lost_and_run_again=again)


def _lost_with_the_power(home: Path, namespace: str) -> int:
    """How many keys were lost, and ran again."""
    home.mkdir()
    with Server(home / "data", *APPEND, "everysec") as server, Gate(server.url, namespace=namespace) as gate:
        topic = gate.topic("t")
        kept = gate.claim("kept")
        kept.complete("receipt")
        topic.trigger("kept", 1)
        # `everysec` puts off its writes, not only its syncs, while a sync is under way.
        wait_for(lambda: server.client.info("persistence")["aof_buffer_length"] == 0)
        synced = server.size()
        tokens: dict[str, int] = {}
        for n in range(20):
            claim = gate.claim(f"lost{n}")
            claim.complete("receipt")
            topic.trigger(f"lost{n}", n, event_id=f"lost{n}")
            tokens[f"lost{n}"] = claim.token
        taken = {one.key: one.token for one in topic.take(100)}
        server.kill()
        whole = server.file.read_bytes()
    # When the power fails before the last of it is on disk
    with (
        cut_back(home / "again", home / "data", whole[:synced]) as again,
        Gate(again.url, namespace=namespace) as gate,
    ):
        topic = gate.topic("t")
        # Then what was synced is there, and the rest is as if it had never been asked for
        assert gate.inspect("kept").state == "done"
        assert {gate.inspect(key).state for key in tokens} == {"absent"}
        # And it runs again, with tokens above all before, so a fence that has seen them refuses the former owners
        for key, token in tokens.items():
            claim = gate.claim(key)
            assert (claim.state, claim.attempt) == ("started", 1)
            assert claim.token > token
            assert topic.trigger(key, 1, event_id=key).status == "scheduled"
        delivered = {one.key: one.token for one in topic.take(100)}
        assert delivered.keys() == taken.keys()
        assert all(delivered[key] > taken[key] for key in taken)
    return len(tokens)


def test_a_file_cut_at_any_byte_has_each_script_whole_or_not_at_all(
    tmp_path: Path,
    namespace: str,
    kills: int,
    drawn: random.Random,
    seed: int,
    record_fault: Callable[..., None],
) -> None:
    # Given what all keys hold after each script of a day's work
    steps: list[tuple[int, dict[bytes, Any]]] = []
    ends: dict[bytes, float] = {}
    with Server(tmp_path / "data", *APPEND, "always") as server:
        clock = Clock()
        with Gate(server.url, namespace=namespace, clock=clock) as gate:
            for step in _work(gate, clock):
                step()
                steps.append((server.size(), everything(server.client)))
                for key in steps[-1][1]:
                    if (left := server.client.pttl(key)) > 0:
                        ends[key] = min(ends.get(key, inf), time() + left / 1000)
        server.kill()
        whole = server.file.read_bytes()
    offsets = range(steps[0][0], len(whole) + 1)
    chosen = offsets if kills >= len(offsets) else drawn.sample(offsets, max(12, kills))
    # When the file ends at any byte
    for turn, offset in enumerate(chosen):
        with cut_back(tmp_path / f"cut{turn}", tmp_path / "data", whole[:offset]) as again:
            # Then the server starts, and holds what was there after the last script that is in the file as a whole
            found = everything(again.client)
            before = [state for size, state in steps if size <= offset][-1]
            # (In a large run some of it expires meanwhile.)
            over = {key for key, end in ends.items() if end < time() + 1}
            assert _without(found, over) == _without(before, over), f"cut at {offset} of {len(whole)}"
        shutil.rmtree(tmp_path / f"cut{turn}")
    record_fault(
        "append-only file cut at a byte", len(chosen), promises="P6", bytes=len(offsets), half_states=0, seed=seed
    )


def _without(state: dict[bytes, Any], keys: set[bytes]) -> dict[bytes, Any]:
    return {key: value for key, value in state.items() if key not in keys}


def _work(gate: Gate, clock: Clock) -> list[Callable[[], object]]:
    """One of each script that writes, so that each has something to do. A step is one call."""
    topic = gate.topic("t", merge="append", backoff=0, priority=True, group_concurrency=1)
    claims: list[Any] = []
    held: dict[str, Any] = {}

    def take() -> None:
        held.update((one.key, one) for one in topic.take(10))

    return [
        lambda: gate.first("mark", "1h"),
        lambda: claims.append(gate.claim("a", lease="30s")),
        lambda: claims[0].checkpoint("half"),
        lambda: claims[0].extend("1m"),
        lambda: claims[0].complete("receipt"),
        lambda: claims.append(gate.claim("b")),
        lambda: claims[1].release(),
        lambda: gate.forget("b"),
        topic.open,
        lambda: topic.trigger("k", 1, group="g", event_id="e"),
        lambda: clock.advance("1ms"),  # so "k" is due first
        lambda: topic.trigger("k2", 1, group="g"),
        lambda: topic.trigger("k3", 1),
        lambda: topic.trigger("k", 2, group="g"),
        lambda: topic.trigger("later", 1, delay="1h"),
        lambda: topic.reschedule("later", delay="2h"),
        lambda: topic.flush("later"),
        take,
        lambda: topic.extend(held["k"]),
        lambda: topic.trigger("k", 3, group="g"),
        lambda: topic.nack(held["k"], reason="no"),
        lambda: topic.ack(held["k3"]),
        take,
        lambda: topic.bury(held["later"], reason="never"),
        lambda: topic.ack(held["k"]),
        topic.pause,
        topic.resume,
        take,
        lambda: clock.advance("2m"),
        take,
        lambda: topic.trigger("x", 1, delay="1h"),
        lambda: topic.cancel("x"),
        topic.dead.redrive,
        take,
        lambda: topic.bury(held["later"]),
        topic.dead.delete,
    ]
