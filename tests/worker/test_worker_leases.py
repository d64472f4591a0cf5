"""Leases of deliveries: kept while their handlers run, and known to be lost when they are."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest

from idemgate import Gate, current
from idemgate.store.heartbeat import HeartbeatThread
from idemgate.store.held import HeldRenewal
from idemgate.testing import Clock
from idemgate.testing.proxy import Proxy
from idemgate.worker import consumer
from idemgate.worker.poller import Poller
from idemgate.worker.worker import Worker
from tests.renewals import FunctionRenewal


@pytest.fixture
async def rival(url: str, namespace: str, clock: Clock) -> AsyncIterator[Gate]:
    """Another process' gate on the same namespace and clock."""
    made = Gate(url, namespace=namespace, clock=clock)
    yield made
    await made.aio.close()
    made.close()


async def stolen(rival: Gate, clock: Clock, n: int = 1) -> list[Any]:
    """Lets leases lapse and takes their deliveries, unless a heartbeat came in between: then once more."""
    topic, found = rival.topic("t", lease="1s").aio, []
    while len(found) < n:
        clock.advance("2s")
        found += await topic.take(n)
        await asyncio.sleep(0)
    return found


@pytest.mark.parametrize("awaiting", [False, True])
async def test_heartbeats_keep_the_lease_of_a_long_handler(live: Gate, eventually: Any, awaiting: bool) -> None:
    # Given a lease of 1.2 s, a handler of 2.5 s, and another worker, which would take what lapses
    topic, attempts = live.topic("t", lease="1200ms"), []

    async def wait(delivery: Any) -> None:
        attempts.append(delivery.attempt)
        await asyncio.sleep(2.5)
        assert not delivery.lost

    def block(delivery: Any) -> None:
        attempts.append(delivery.attempt)
        time.sleep(2.5)
        assert not current().lease_lost

    topic.handler(wait if awaiting else block)
    await topic.aio.trigger("a")
    async with Worker(live):
        await eventually(lambda: attempts)
        while live.counters["worker.acked"] == 0:
            assert await topic.aio.take() == []
            await asyncio.sleep(0.02)
    # Then it ran once
    assert attempts == [1]
    assert (live.counters["worker.lapsed"], live.counters["worker.lease_lost"]) == (0, 0)


async def test_heartbeats_go_on_while_the_event_loop_is_blocked(live: Gate, eventually: Any) -> None:
    topic, attempts = live.topic("t", lease="1200ms"), []

    @topic.handler
    async def rude(delivery: Any) -> None:
        attempts.append(delivery.attempt)
        time.sleep(2.5)  # noqa: ASYNC251 - that is the test

    await topic.aio.trigger("a")
    async with Worker(live):
        await eventually(lambda: live.counters["worker.acked"] == 1)
    assert (attempts, live.counters["worker.lapsed"]) == ([1], 0)


@pytest.mark.parametrize("awaiting", [False, True])
async def test_a_handler_learns_that_its_lease_is_lost(
    gate: Gate, rival: Gate, clock: Clock, eventually: Any, awaiting: bool
) -> None:
    # Given a handler that looks whether it should stop
    topic, ended, running = gate.topic("t", lease="1s"), [], threading.Event()

    async def watch(delivery: Any) -> None:
        running.set()
        while not current().lease_lost:
            await asyncio.sleep(0.005)
        ended.append((delivery.lost, delivery.token))

    def watch_here(delivery: Any) -> None:
        running.set()
        while not current().lease_lost:
            time.sleep(0.005)
        ended.append((delivery.lost, delivery.token))

    topic.handler(watch if awaiting else watch_here)
    await topic.aio.trigger("a")
    async with Worker(gate, concurrency=1, prefetch=0):  # has no room for what lapses
        await eventually(running.is_set)
        # When its lease lapses and another worker has the message
        (theirs,) = await stolen(rival, clock)
        # Then its handler learns it, and its settlement changes nothing
        await eventually(lambda: gate.counters["worker.lost"] == 1)
    assert [lost for lost, _ in ended] == [True]
    assert theirs.token > ended[0][1]
    assert gate.counters["worker.lease_lost"] == 1
    # And the other's settlement counts
    assert await rival.topic("t").aio.ack(theirs) == "ok"


async def test_what_was_lost_before_it_started_is_not_started(
    gate: Gate, rival: Gate, clock: Clock, eventually: Any
) -> None:
    # Given one delivery that runs and two that were prefetched behind it
    topic, handled, go = gate.topic("t", lease="1s"), [], asyncio.Event()

    @topic.handler
    async def handle(delivery: Any) -> None:
        handled.append(delivery.key)
        await go.wait()

    await topic.aio.trigger_many([("a", 1), ("b", 2), ("c", 3)])
    async with Worker(gate, concurrency=1, prefetch=2):
        await eventually(lambda: handled and gate.counters["worker.taken"] == 3)
        # When all their leases lapse and another worker has them
        theirs = await stolen(rival, clock, 3)
        await eventually(lambda: gate.counters["worker.lease_lost"] == 3)
        await rival.topic("t").aio.ack(theirs)
        go.set()
        # Then the ones that waited are passed over, and their room is free again
        await topic.aio.trigger_many([("d", 4), ("e", 5), ("f", 6)])
        await eventually(lambda: gate.counters["worker.acked"] == 3)
    assert handled == ["a", "d", "e", "f"]


async def test_an_acknowledgement_that_crosses_a_heartbeat_is_no_loss(
    live: Gate, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given heartbeats every two milliseconds, of a lease that no stall of the machine ends
    class FrequentRenewal(HeldRenewal[Any]):
        def __init__(self, lease: float, *options: Any, **more: Any) -> None:
            super().__init__(lease, *options, **more)
            self.interval = 0.002
            self.due = self.last

    monkeypatch.setattr(consumer, "HeldRenewal", FrequentRenewal)
    topic = live.topic("t", lease="60s", slots=4)
    topic.handler(lambda delivery: None)
    async with Worker(live, concurrency=64):
        # When very many deliveries end meanwhile
        for start in range(0, 3000, 300):
            await topic.aio.trigger_many([(n, None) for n in range(start, start + 300)])
        await eventually(lambda: live.counters["worker.acked"] >= 3000)
    # Then no loss is counted
    assert live.counters["worker.lease_lost"] == live.counters["worker.lost"] == 0


async def test_a_store_that_is_away_for_longer_than_the_lease_costs_it(
    url: str, namespace: str, eventually: Any
) -> None:
    # Given a running handler, and a way to the store that can be cut
    with Proxy(url) as proxy:
        gate = Gate(proxy.url, namespace=namespace, timeout="1s")
        topic, go, seen = gate.topic("t", lease="1500ms", backoff=0), asyncio.Event(), []

        @topic.handler
        async def handle(delivery: Any) -> None:
            seen.append(delivery)
            if delivery.key == "a":
                await go.wait()

        await topic.aio.trigger("a")
        async with Worker(gate):
            await eventually(lambda: seen)
            # When nothing passes any more
            proxy.black_hole = True
            proxy.cut_all()
            # Then the handler learns it, although no reply reaches the worker
            await eventually(lambda: seen[0].lost)
            assert gate.counters["worker.lease_lost"] == 1
            # And when the store is back, work goes on
            proxy.black_hole = False
            proxy.cut_all()
            go.set()
            with Gate(url, namespace=namespace) as direct:
                await asyncio.to_thread(direct.topic("t").trigger, "b")
            await eventually(lambda: any(delivery.key == "b" for delivery in seen))
            await eventually(lambda: gate.counters["worker.acked"] >= 2)
        await gate.aio.close()
        gate.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
async def test_a_forked_child_keeps_nothing_alive_and_is_not_stuck(live: Gate, eventually: Any) -> None:
    # Given a handler that forks while the heartbeat's lock is held by its thread
    topic, codes = live.topic("t", lease="1s"), []

    @topic.handler
    def fork(delivery: Any) -> None:
        with live.context.heartbeat._wake:
            pid = os.fork()
            if pid == 0:
                os._exit(child(live))
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    def child(gate: Gate) -> int:
        # Held by another thread at the fork, it would never be free again here.
        gate.context.heartbeat._wake = threading.Condition(threading.Lock())
        gate.context.heartbeat._wake.acquire()
        watchdog = threading.Timer(5, os._exit, (9,))
        watchdog.daemon = True
        watchdog.start()
        for beat in tuple(gate.context.heartbeat._renewals):  # as leaving the parent's guarded code would
            gate.context.heartbeat.remove(beat())
        with gate.claim("child") as claim:
            alive = [one for one in threading.enumerate() if one.name == "idemgate-heartbeat"]
            kept = len(gate.context.heartbeat._renewals)
        gate.close()
        return 0 if claim.started and (len(alive), kept) == (1, 1) else 3

    await topic.aio.trigger("a")
    async with Worker(live):
        await eventually(lambda: live.counters["worker.acked"] == 1)
    # Then the child did its own guarded work, with a heartbeat of its own, and ended
    assert codes == [0]


def test_a_finalizer_that_starts_a_lease_does_not_end_the_heartbeat_thread(live: Gate) -> None:
    # Given garbage whose finalizer starts a lease and makes garbage: Python 3.11 may run it at any allocation
    started: list[FunctionRenewal] = []

    class Garbage:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            started.append(FunctionRenewal(60, lambda _: [], lambda: None))
            live.context.heartbeat.add(started[-1])
            if len(started) < 200:
                Garbage()

    thresholds = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        Garbage()
        # When the renewals are read, then that raises nothing
        while len(started) < 200:
            list(live.context.heartbeat.living())
    finally:
        gc.set_threshold(*thresholds)


# -- leases that have nearly ended before the handler starts -----------------------------------------------------------


@pytest.fixture
def process_clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Shift the worker's monotonic clock: `process_clock(20)` is a process that stalled for 20 s."""
    shift = 0.0

    def stall(seconds: float) -> None:
        nonlocal shift
        shift += seconds

    monkeypatch.setattr(consumer, "monotonic", lambda: time.monotonic() + shift)
    return stall


@pytest.mark.parametrize("awaiting", [False, True])
@pytest.mark.parametrize(("stalled", "started"), [(599, 1), (501, 1), (400, 3)])
async def test_a_delivery_whose_lease_has_nearly_ended_is_not_started(
    gate: Gate, process_clock: Any, eventually: Any, awaiting: bool, stalled: float, started: int
) -> None:
    # Given one delivery that runs and two that wait behind it, with leases of ten minutes
    topic, attempts, go = gate.topic("t", lease="10m"), [], threading.Event()

    def block(delivery: Any) -> None:
        attempts.append((delivery.key, delivery.attempt))
        go.wait(30)

    async def wait(delivery: Any) -> None:
        await asyncio.to_thread(block, delivery)

    topic.handler(wait if awaiting else block)
    await topic.aio.trigger_many([("a", 1), ("b", 2), ("c", 3)])
    async with Worker(gate, concurrency=1, prefetch=2):
        await eventually(lambda: gate.counters["worker.taken"] == 3)
        await eventually(lambda: attempts)
        # When the process stalls for this many seconds of their leases
        process_clock(stalled)
        go.set()
        # Then those with less than a sixth of their lease left are taken anew before they start
        await eventually(lambda: gate.counters["worker.acked"] == 3)
    assert gate.counters["worker.not_started"] == gate.counters["worker.returned"] == 3 - started
    # And that was no attempt
    assert sorted(attempts) == [("a", 1), ("b", 1), ("c", 1)]


async def test_a_lease_that_was_granted_late_is_renewed_at_once(
    gate: Gate, clock: Clock, process_clock: Any, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a reply that takes six of the lease's ten minutes
    topic, go, execute = gate.topic("t", lease="10m"), asyncio.Event(), Poller.execute

    async def execute_slowly(self: Poller, slot: int, *args: Any) -> Any:
        reply = await execute(self, slot, *args)
        if reply.deliveries:
            process_clock(360)
            clock.advance("6m")
        return reply

    monkeypatch.setattr(Poller, "execute", execute_slowly)

    @topic.handler
    async def handle(delivery: Any) -> None:
        await go.wait()

    began = clock.now()
    await topic.aio.trigger("a")
    async with Worker(gate, concurrency=1):
        # When the handler runs, then the lease is renewed without waiting for the interval of a hundred seconds
        await eventually(lambda: gate.counters["worker.taken"] == 1)

        async def renewed() -> bool:
            lease_until = (await topic.aio.peek("a")).lease_until
            return lease_until is not None and lease_until == began + timedelta(minutes=16)

        await eventually(renewed)
        go.set()


async def test_a_lease_counts_from_the_request(
    gate: Gate, process_clock: Any, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a reply that takes as long as the lease, and no renewal before the handler would start
    monkeypatch.setattr(HeartbeatThread, "hasten", lambda *_: None)
    topic, handled, execute, late = gate.topic("t", lease="10m"), [], Poller.execute, True

    async def execute_late(self: Poller, slot: int, *args: Any) -> Any:
        nonlocal late
        reply = await execute(self, slot, *args)
        if late and reply.deliveries:
            process_clock(600)
            late = False
        return reply

    monkeypatch.setattr(Poller, "execute", execute_late)
    topic.handler(lambda delivery: handled.append(delivery.attempt))
    await topic.aio.trigger("a")
    async with Worker(gate):
        # Then the handler starts with the next delivery, whose reply is in time
        await eventually(lambda: gate.counters["worker.acked"] == 1)
    assert (handled, gate.counters["worker.not_started"]) == ([1], 1)
