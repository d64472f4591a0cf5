"""A failover that loses writes, and one under sentinels that loses none."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from idemgate import Gate, StoreUnavailable
from idemgate.errors import NotDurable
from tests.cluster import wait_for
from tests.replication import pair, watched
from tests.resilience.counted import CountedWork


def test_what_a_failover_lost_may_run_again_with_higher_fences(
    tmp_path: Path, namespace: str, kills: int, sound: Callable[[Gate], None], record_fault: Callable[..., None]
) -> None:
    n = max(20, kills)
    with pair(tmp_path / "p") as two:
        old, new = (Gate(url, namespace=namespace) for url in two.urls)
        kept = old.claim("kept")
        kept.complete("receipt")
        old.topic("t").trigger("kept", 1)
        two.catch_up()
        # Given work that was acknowledged by a primary whose replica is cut off
        two.cut()
        tokens: dict[str, int] = {}
        for key in map(str, range(n)):
            claim = old.claim(key)
            claim.complete("receipt")
            assert old.topic("t").trigger(key, 1, event_id=key).status == "scheduled"
            tokens[key] = claim.token
        before = {one.key: one.token for one in old.topic("t").take(1000)}
        # When the replica takes its place
        two.promote()
        # Then what it has is as it was
        assert new.claim("kept").result == "receipt"
        # And what it has not runs a second time, with a higher token: that is what a failover without WAIT costs
        again = {key: new.claim(key) for key in tokens}
        assert all(claim.started and claim.token > tokens[key] for key, claim in again.items())
        # And who triggers again is delivered, once, with higher tokens than those of the former primary
        assert {new.topic("t").trigger(key, 1, event_id=key).status for key in tokens} == {"scheduled"}
        after = {one.key: one.token for one in new.topic("t").take(1000)}
        assert after.keys() == before.keys()
        assert all(after[key] > before[key] for key in after)
        # And both stores are sound, what the former primary has included
        for one in (old, new):
            one.close()
            sound(one)
    record_fault("failover with lost writes", n, promises="P4", run_twice=n, fences_not_risen=0)


def test_with_replicas_asked_for_nothing_that_was_acknowledged_is_lost(
    tmp_path: Path, namespace: str, kills: int, sound: Callable[[Gate], None], record_fault: Callable[..., None]
) -> None:
    with pair(tmp_path / "p") as two:
        gate = Gate(two.urls[0], namespace=namespace, durability="replicas", timeout="200ms")
        topic, sure, refused, cut = gate.topic("t"), [], Counter[str](), threading.Event()

        def work(part: int) -> None:
            for number in range(part, 10_000, 4):
                key = str(number)
                try:
                    claim = gate.claim(key)
                    assert claim.complete("receipt")
                    topic.trigger(key, 1, event_id=key)
                    sure.append(key)
                except NotDurable as error:
                    if not cut.is_set():  # a replica on a busy machine
                        continue
                    refused[error.executed] += 1
                    if refused.total() >= max(8, kills // 10):
                        return
                except StoreUnavailable:
                    refused["unknown"] += 1

        # Given four callers
        callers = [threading.Thread(target=work, args=(part,)) for part in range(4)]
        for one in callers:
            one.start()
        wait_for(lambda: len(sure) >= 100)
        # When the link to the replica is cut among their calls, and the replica takes the primary's place
        two.cut()
        cut.set()
        for one in callers:
            one.join(120)
        two.promote()
        gate.close()
        # Then all that was acknowledged is there, and the rest was refused
        with Gate(two.urls[1], namespace=namespace) as new:
            lost = [key for key in sure if new.inspect(key).state != "done" or new.topic("t").peek(key) is None]
            # And nothing came over by halves
            sound(new)
        assert lost == []
        assert refused["yes"] >= 1
    record_fault("failover with lost writes, durability=replicas", refused.total(), promises="P2 P7", kept=len(sure))


@pytest.mark.timeout(0)  # sentinels leave twelve seconds and more between two switches
async def test_a_planned_switch_of_sentinels_loses_nothing(
    tmp_path: Path, namespace: str, kills: int, sound: Callable[[Gate], None], record_fault: Callable[..., None]
) -> None:
    with watched(tmp_path / "s", "shop") as three:
        gate = Gate(three.url, namespace=namespace, timeout="60s")
        work, accepted = CountedWork(gate), list[int]()
        switches = min(max(1, kills // 100), 10)

        halt = asyncio.Event()

        async def produce(part: int) -> None:
            number = part
            while not halt.is_set():
                await work.do(number)
                accepted.append(number)
                number += 4

        # Given producers over both links, and a worker
        async with gate.aio.worker(concurrency=8):
            producing = asyncio.gather(*(produce(part) for part in range(4)))
            for _ in range(switches):
                mark = len(accepted)
                await asyncio.to_thread(wait_for, lambda mark=mark: len(accepted) > mark + 40)
                # When the sentinels replace the primary
                await asyncio.to_thread(three.switch)
                mark = len(accepted)
                # Then all go on by themselves
                await asyncio.to_thread(wait_for, lambda mark=mark: len(accepted) > mark + 40)
            halt.set()
            await asyncio.wait_for(producing, 120)
            await asyncio.to_thread(wait_for, lambda: set(accepted) <= work.runs.keys(), 120)
        # And nothing is lost, nothing guarded ran twice, no deliveries were lost to others
        stats = await work.topic.aio.stats()
        assert stats["accepted"] == len(accepted) == stats["acked_triggers"]
        assert set(work.guarded.values()) == {1}
        assert len(work.guarded) == 2 * len(accepted)
        assert gate.counters["once.completion_lost"] == gate.counters["worker.unsettled"] == 0
        await gate.aio.close()
        gate.close()
        await asyncio.to_thread(sound, gate)
    fault = "Sentinel switch under load, writes held back until the former primary is a replica"
    record_fault(fault, switches, promises="P2 P7", accepted=len(accepted), lost=0)


@pytest.mark.parametrize("awaiting", [False, True])
async def test_while_there_is_no_primary_calls_end_by_their_deadline(
    tmp_path: Path, namespace: str, awaiting: bool, sound: Callable[[Gate], None]
) -> None:
    with watched(tmp_path / "s", "shop") as three:
        gate = Gate(three.url, namespace=namespace, timeout="500ms")
        assert await _first(gate, awaiting, "before")
        # Given a primary that stands still: its connections stay open, nobody answers
        process = three.nodes[0].info("server")["process_id"]
        os.kill(process, signal.SIGSTOP)
        try:
            # When something is asked meanwhile
            with pytest.raises(StoreUnavailable):
                await _first(gate, awaiting, "meanwhile")
            # Then it goes on when the sentinels have found another one, without anybody's help
            patient = Gate(three.url, namespace=namespace, timeout="120s")
            assert await _first(patient, awaiting, "after")
            await asyncio.to_thread(sound, patient)
        finally:
            os.kill(process, signal.SIGCONT)
        for one in (gate, patient):
            await one.aio.close()
            one.close()


async def _first(gate: Gate, awaiting: bool, key: str) -> bool:
    return await (gate.aio.first(key, "1h") if awaiting else asyncio.to_thread(gate.first, key, "1h"))
