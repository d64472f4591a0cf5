"""A server that forgets: what came after its last snapshot where it has no append-only file, everything with FLUSHALL,
and nothing with DEBUG RELOAD, which writes a snapshot and reads it.

What is lost never happened: it may run again, under higher tokens. Nobody crashes, and what is left is sound.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from idemgate import Gate
from idemgate.testing import audit
from tests.cluster import wait_for
from tests.resilience.counted import CountedWork
from tests.resilience.servers import DEBUG, Server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """It has no append-only file."""
    with Server(tmp_path / "data", *DEBUG) as made:
        yield made


def test_what_came_after_the_last_snapshot_never_happened(
    server: Server,
    namespace: str,
    many: Callable[[int], int],
    sound: Callable[[Gate], None],
    record_fault: Callable[..., None],
) -> None:
    lost = [f"lost{n}" for n in range(many(20))]
    with Gate(server.url, namespace=namespace) as gate:
        topic = gate.topic("t", lease="60s")
        # Given what is done, held, scheduled and in flight
        gate.claim("kept").complete("receipt")
        held = gate.claim("held", lease="1h")
        topic.trigger("flight", 1)
        (flight,) = topic.take(1)
        topic.trigger("kept", 1, event_id="kept")
        # When the server falls back to the snapshot of that moment
        server.client.save()
        claims = {key: gate.claim(key) for key in lost}
        assert all(claim.complete("receipt") for claim in claims.values())
        for key in lost:
            topic.trigger(key, 1, event_id=key)
        before = {one.key: one for one in topic.take(1000)}
        server.kill()
        server.start()
        # Then all of it is there
        assert gate.claim("kept").result == "receipt"
        assert held.complete("receipt")
        assert topic.ack(flight) == "ok"
        assert topic.trigger("kept", 1, event_id="kept").status == "duplicate"
        # And what came later is not: it runs again, and is delivered again, with higher tokens
        again = {key: gate.claim(key) for key in lost}
        assert all(claim.started and claim.token > claims[key].token for key, claim in again.items())
        assert {topic.trigger(key, 1, event_id=key).status for key in lost} == {"scheduled"}
        after = {one.key: one for one in topic.take(1000)}
        assert after.keys() == before.keys() == {*lost, "kept"}
        assert all(after[key].token > before[key].token for key in after)
        # And calls of the owner before it change nothing
        assert not any(claim.release() for claim in claims.values())
        assert set(topic.ack([*before.values()])) == {"lost"}
        assert set(topic.ack([*after.values()])) == {"ok"}
        sound(gate)
    figures = {"lost_and_run_again": len(lost), "fences_not_risen": 0}
    record_fault("no append-only file: back to the last snapshot", 1, promises="P4 P5", **figures)


def test_dedup_ids_and_values_lost_by_the_server_are_new_again(
    server: Server,
    namespace: str,
    many: Callable[[int], int],
    sound: Callable[[Gate], None],
    record_fault: Callable[..., None],
) -> None:
    n = many(50)
    ids, later = [f"a{one}" for one in range(n)], [f"b{one}" for one in range(n)]
    with Gate(server.url, namespace=namespace) as gate:
        dedup = gate.dedup("s", "1h")
        # Given ids and values stored before a snapshot, and others after it
        assert dedup.add_many(ids) == [True] * n
        dedup.get_or_set_many([(one, "before") for one in ids])
        server.client.save()
        assert dedup.add_many(later) == [True] * n
        dedup.get_or_set_many([(one, "before") for one in later])
        # When the server restarts from the snapshot
        server.kill()
        server.start()
        # Then the ids of the snapshot are duplicates, and the later ones are new once more
        assert dedup.add_many(ids) == [False] * n
        assert dedup.add_many(later) == [True] * n
        assert dedup.add_many(later) == [False] * n
        found = dedup.get_or_set_many([(one, "after") for one in [*ids, *later]])
        assert [(one.value, one.first) for one in found] == [("before", False)] * n + [("after", True)] * n
        sound(gate)
        # And after FLUSHALL all ids are new
        server.client.flushall()
        assert dedup.add_many(ids) == [True] * n
        assert [one.first for one in dedup.get_or_set_many([(one, "again") for one in ids])] == [True] * n
        sound(gate)
    record_fault("dedup ids and values lost by the server", 2, promises="", first_once_more=4 * n)


@pytest.mark.parametrize("trouble", ["DEBUG RELOAD", "FLUSHALL"])
async def test_while_it_is_in_use_nobody_crashes_and_what_is_left_is_sound(
    server: Server,
    namespace: str,
    trouble: str,
    many: Callable[[int], int],
    sound: Callable[[Gate], None],
    record_fault: Callable[..., None],
) -> None:
    times, each = many(3), 40
    gate = Gate(server.url, namespace=namespace, timeout="60s")
    work = CountedWork(gate)

    async def produce(part: int) -> None:
        for number in range(part, part + each):
            await work.do(number, keys=7)

    async with gate.aio.worker(concurrency=8):
        for turn in range(times):
            # Given producers and a worker, when it happens among them
            producing = asyncio.create_task(produce(turn * each))
            await asyncio.to_thread(wait_for, lambda turn=turn: work.guarded.total() > 2 * turn * each + each)
            await asyncio.to_thread(server.client.execute_command, *trouble.split())
            # Then they go on by themselves
            await producing
        if trouble == "FLUSHALL":  # And who triggers again is delivered
            for number in range(times * each):
                await work.topic.aio.trigger(f"k{number % 7}", number, event_id=number)
        await asyncio.to_thread(wait_for, lambda: len(work.runs) == times * each)
        stats = await work.topic.aio.stats()
    if trouble == "DEBUG RELOAD":  # And nothing is lost or repeated
        assert (stats["accepted"], stats["acked_triggers"], stats["lapsed"]) == (times * each, times * each, 0)
        assert set(work.runs.values()) == set(work.guarded.values()) == {1}
    else:  # But that there is such a topic is known again when a program starts
        assert {*audit(gate).by_kind} == {"unregistered"}
        with Gate(server.url, namespace=namespace) as anew:
            anew.topic("t", slots=2, lease="60s", merge="append").open()
    await gate.aio.close()
    gate.close()
    sound(gate)
    promises = {"DEBUG RELOAD": "P2 P7", "FLUSHALL": ""}[trouble]
    record_fault(
        f"server: {trouble} in use", times, promises=promises, handled_twice=work.runs.total() - len(work.runs)
    )
