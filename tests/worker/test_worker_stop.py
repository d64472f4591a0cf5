"""How a worker ends: what runs may finish, what never started goes back, and what cannot end is left to its lease."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import Any

import pytest

from idemgate import Gate, InvalidArgument, StoreUnavailable
from idemgate.core.calls import Call
from idemgate.store.aio import AsyncLink
from idemgate.testing import Clock
from idemgate.testing.proxy import Proxy
from idemgate.topics.messages import Taken
from idemgate.worker.consumer import TopicConsumer
from idemgate.worker.coordinator import MembershipOption
from idemgate.worker.poller import Poller
from idemgate.worker.worker import Worker

Between = Callable[[Call[Any], Any], Any]


@pytest.fixture
def after_take(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Call[Any], Taken], Any]], None]:
    """Awaits something with each answer of a take, after the server gave it and before the worker has it."""

    def install(then: Callable[[Call[Any], Taken], Any]) -> None:
        real = AsyncLink.run

        async def run(self: AsyncLink, call: Call[Any], within: float | None = None) -> Any:
            answer = await real(self, call, within)
            if call.script.name == "topics/take":
                await then(call, answer)
            return answer

        monkeypatch.setattr(AsyncLink, "run", run)

    return install


@pytest.mark.parametrize("awaiting", [False, True])
async def test_what_runs_may_finish_and_what_waits_goes_back(gate: Gate, eventually: Any, awaiting: bool) -> None:
    # Given two deliveries that run and two that are prefetched
    topic, started, go, go_thread = gate.topic("t", max_attempts=1), [], asyncio.Event(), threading.Event()

    async def wait(delivery: Any) -> None:
        started.append(delivery.key)
        await go.wait()

    def block(delivery: Any) -> None:
        started.append(delivery.key)
        assert go_thread.wait(60)

    topic.handler(wait if awaiting else block)
    await topic.aio.trigger_many([(key, key) for key in "abcd"])
    async with Worker(gate, concurrency=2, prefetch=2) as worker:
        await eventually(lambda: len(started) == 2 and gate.counters["worker.taken"] == 4)
        # When it is asked to stop
        worker.stop()
        await eventually(lambda: gate.counters["worker.returned"] == 2)
        go.set()
        go_thread.set()
    # Then those that ran are done, and the others stand as if nobody had taken them
    assert started == ["a", "b"]
    stats = await topic.aio.stats()
    assert (stats.ready, stats.in_flight, stats["acked"], stats.dead) == (2, 0, 2, 0)
    for key in "cd":
        pending = (await topic.aio.peek(key)).pending
        assert pending is not None
        assert (pending.attempts, pending.reason) == (0, "now")


async def test_after_the_grace_time_async_handlers_are_cancelled_and_tried_again_at_once(
    gate: Gate, clock: Clock, eventually: Any
) -> None:
    # Given a handler that does not end
    topic, started, cleaned = gate.topic("t", backoff="1h"), asyncio.Event(), []

    @topic.handler
    async def endless(delivery: Any) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # it may await while it cleans up
            cleaned.append(delivery.key)

    await topic.aio.trigger("a")
    # When its worker stops, with hardly any grace
    async with Worker(gate, grace=0.02):
        await started.wait()
    # Then it was cancelled, cleaned up, and is due now; that was no attempt
    assert cleaned == ["a"]
    peek = await topic.aio.peek("a")
    assert peek.pending is not None
    assert (peek.pending.attempts, peek.due_at) == (0, clock.now())
    assert [gate.counters[f"worker.{name}"] for name in ("cut_short", "returned", "failed")] == [1, 1, 0]


async def test_a_handler_that_has_just_ended_is_not_cut_short(gate: Gate, eventually: Any) -> None:
    # Given two handlers of which one ends a step of the event loop after the other
    topic, running, go = gate.topic("t"), [], asyncio.Event()

    @topic.handler
    async def wait(delivery: Any) -> None:
        running.append(delivery.key)
        await go.wait()
        if delivery.key == "b":
            await asyncio.sleep(0)

    await topic.aio.trigger_many([(key, key) for key in "ab"])
    # When they end while their worker waits for them
    async with Worker(gate) as worker:
        await eventually(lambda: len(running) == 2)
        worker.stop()
        for _ in range(20):  # until it waits for them
            await asyncio.sleep(0)
        go.set()
    # Then both are done, and none is said to have been cut short
    assert gate.counters["worker.cut_short"] == 0
    assert (await topic.aio.stats())["acked"] == 2


async def test_a_handler_that_finishes_in_spite_of_being_cancelled_is_done(gate: Gate) -> None:
    topic, started = gate.topic("t"), asyncio.Event()

    @topic.handler
    async def stubborn(delivery: Any) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0.01)

    await topic.aio.trigger("a")
    async with Worker(gate, grace=0):
        await started.wait()
    stats = await topic.aio.stats()
    assert (stats["acked"], stats.pending, stats.in_flight) == (1, 0, 0)


async def test_a_handler_that_swallows_its_cancellation_is_left_to_its_lease(
    gate: Gate, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a handler that does not end when it is cancelled
    monkeypatch.setattr("idemgate.worker.worker.CLEANUP_SECONDS", 0.05)
    topic, started, go, lost = gate.topic("t", lease="30s"), asyncio.Event(), asyncio.Event(), []

    @topic.handler
    async def swallow(delivery: Any) -> None:
        started.set()
        while not go.is_set():
            with suppress(asyncio.CancelledError):
                await go.wait()
        lost.append(delivery.lost)

    await topic.aio.trigger("a")
    # When its worker stops, then that ends all the same
    async with Worker(gate, grace=0):
        await started.wait()
    assert gate.counters["worker.abandoned"] == 1
    # And a late end of the handler settles nothing: it can see that its lease is lost
    go.set()
    await eventually(lambda: lost)
    assert lost == [True]
    stats = await topic.aio.stats()
    assert (stats.in_flight, stats["acked"], gate.counters["worker.acked"]) == (1, 0, 0)


@pytest.mark.parametrize("membership", [None, "redis"])
async def test_a_stop_while_the_store_is_away_ends(
    url: str, namespace: str, eventually: Any, membership: MembershipOption
) -> None:
    # Given a running handler with a long lease, and a store that does not answer any more
    with Proxy(url) as proxy:
        gate = Gate(proxy.url, namespace=namespace, timeout="1s")
        topic, started = gate.topic("t", lease="10m"), asyncio.Event()

        @topic.handler
        async def handle(delivery: Any) -> None:
            started.set()
            await asyncio.Event().wait()

        async with gate.aio.worker(grace=0, membership=membership):
            await topic.aio.trigger("a")
            await asyncio.wait_for(started.wait(), 30)
            proxy.black_hole = True
            proxy.cut_all()
            # When its worker stops
            began = monotonic()
        # Then it waits for the store no longer than a few times the timeout, and not for the lease
        assert monotonic() - began < 20
        assert gate.counters["worker.cut_short"] == 1
        proxy.black_hole = False
        proxy.cut_all()
        await gate.aio.close()
        gate.close()


async def test_a_thread_that_does_not_end_is_left_to_its_lease(gate: Gate, clock: Clock, eventually: Any) -> None:
    # Given a sync handler that outlives the grace time
    topic, started, go, attempts = gate.topic("t", lease="30s"), threading.Event(), threading.Event(), []

    @topic.handler
    def block(delivery: Any) -> None:
        attempts.append(delivery.attempt)
        started.set()
        assert go.wait(100)

    await topic.aio.trigger("a")
    began = monotonic()
    async with Worker(gate, grace=0.02):
        await eventually(started.is_set)
    assert monotonic() - began < 60
    # Then nobody else gets it while its lease holds
    assert (await topic.aio.stats()).in_flight == 1
    assert await topic.aio.take() == []
    # And after that it is tried again
    go.set()
    clock.advance("30s")
    async with Worker(gate):
        await eventually(lambda: gate.counters["worker.acked"] == 1)
    assert attempts == [1, 2]


async def test_a_second_stop_ends_the_grace_time(gate: Gate, clock: Clock) -> None:
    topic, started, cleaned = gate.topic("t"), asyncio.Event(), []

    @topic.handler
    async def endless(delivery: Any) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.append(delivery.key)

    await topic.aio.trigger("a")
    began = monotonic()
    async with Worker(gate, grace="1h") as worker:
        await started.wait()
        worker.stop()
        worker.stop()
    assert monotonic() - began < 60
    # Its handler was cancelled, and is tried again at once
    assert cleaned == ["a"]
    assert (await topic.aio.peek("a")).due_at == clock.now()


async def test_a_body_that_fails_stops_the_worker_gracefully(gate: Gate) -> None:
    topic, started, go = gate.topic("t"), asyncio.Event(), asyncio.Event()

    @topic.handler
    async def handle(delivery: Any) -> None:
        started.set()
        await go.wait()

    await topic.aio.trigger("a")
    with pytest.raises(LookupError, match="of the body"):
        async with gate.aio.worker():
            await started.wait()
            asyncio.get_running_loop().call_later(0.05, go.set)
            raise LookupError("of the body")
    assert (await topic.aio.stats())["acked"] == 1


@pytest.mark.parametrize("times", [1, 2])
async def test_cancelling_the_body_stops_the_worker_and_cancelling_again_hurries(
    gate: Gate, clock: Clock, eventually: Any, times: int
) -> None:
    # Given an application that runs a worker
    topic, started, go, entered = gate.topic("t"), asyncio.Event(), asyncio.Event(), asyncio.Event()

    @topic.handler
    async def handle(delivery: Any) -> None:
        started.set()
        await go.wait()

    async def application() -> None:
        async with gate.aio.worker(grace="1h"):
            entered.set()
            await asyncio.Event().wait()

    await topic.aio.trigger("a")
    running = asyncio.create_task(application())
    await entered.wait()
    await started.wait()
    # When it is cancelled
    running.cancel()
    await asyncio.wait({running}, timeout=0.1)
    assert not running.done()
    if times == 2:
        running.cancel()
    else:
        go.set()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(asyncio.shield(running), 60)
    # Then the handler finished; or, cancelled twice, it was cancelled and is tried again at once
    stats = await topic.aio.stats()
    assert (stats["acked"], stats.ready, stats.in_flight) == ((1, 0, 0) if times == 1 else (0, 1, 0))


async def test_cancelling_while_it_starts_leaves_nothing_running(gate: Gate, eventually: Any) -> None:
    topic = gate.topic("t")
    topic.handler(lambda delivery: None)
    before = asyncio.all_tasks()

    async def application() -> None:
        async with gate.aio.worker():
            raise AssertionError("entered")

    for after in range(6):
        running = asyncio.create_task(application())
        for _ in range(after):
            await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    await eventually(lambda: asyncio.all_tasks() <= before)


async def test_what_a_take_under_way_brings_is_given_back(gate: Gate, after_take: Any, eventually: Any) -> None:
    # Given a take whose answer is under way
    topic, handled = gate.topic("t", max_attempts=1), []
    topic.handler(lambda delivery: handled.append(delivery.key))
    held, go = asyncio.Event(), asyncio.Event()

    async def hold(call: Call[Any], taken: Taken) -> None:
        if taken.deliveries:
            held.set()
            await go.wait()

    after_take(hold)
    await topic.aio.trigger("a")
    # When the worker is stopped meanwhile
    async with gate.aio.worker() as worker:
        await held.wait()
        worker.stop()
        await asyncio.sleep(0)
        go.set()
    # Then what it brought was not started, and stands as before
    assert handled == []
    stats = await topic.aio.stats()
    assert (stats.ready, stats.in_flight, stats["returned"]) == (1, 0, 1)


async def test_what_one_slot_gave_is_run_though_the_next_slot_fails(
    gate: Gate, monkeypatch: pytest.MonkeyPatch, eventually: Any
) -> None:
    # Given two slots with work, where the store goes away between the two
    topic, handled = gate.topic("t", slots=2), []
    topic.handler(lambda delivery: handled.append(delivery.key))
    await topic.aio.trigger_many([(n, n) for n in range(8)])
    real, taken, back = Poller.execute, [], asyncio.Event()

    async def execute(self: Poller, slot: int, call: Any, within: float | None = None) -> Any:
        if call.script.name == "topics/take":
            if taken and slot != taken[0] and not back.is_set():
                raise StoreUnavailable("away", "no")
            taken.append(slot)
        return await real(self, slot, call, within)

    monkeypatch.setattr(Poller, "execute", execute)
    async with gate.aio.worker():
        # Then what the first gave is run and acknowledged all the same
        await eventually(lambda: 0 < gate.counters["worker.acked"] == len(handled) < 8)
        assert (await topic.aio.stats()).in_flight == 0
        # And the rest when it is back
        back.set()
        await eventually(lambda: gate.counters["worker.acked"] == 8)
    assert sorted(handled) == [str(n) for n in range(8)]


async def test_a_worker_may_run_again_but_not_twice_at_once(gate: Gate, eventually: Any) -> None:
    topic, handled = gate.topic("t"), []
    topic.handler(lambda delivery: handled.append(delivery.key))
    worker = gate.aio.worker()
    for key in "ab":
        await topic.aio.trigger(key)
        async with worker:
            await eventually(lambda key=key: handled[-1:] == [key])
            with pytest.raises(InvalidArgument, match="is running already"):
                async with worker:
                    raise AssertionError("entered")
            # The one that runs is not disturbed
            await topic.aio.trigger(f"{key}2")
            await eventually(lambda key=key: handled[-1:] == [f"{key}2"])
    assert handled == ["a", "a2", "b", "b2"]


async def test_a_fault_of_the_worker_itself_is_not_hidden(
    gate: Gate, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, eventually: Any
) -> None:
    # Given a bug in a loop of the worker
    topic = gate.topic("t")
    topic.handler(lambda delivery: None)

    async def broken(self: TopicConsumer, room: int) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(TopicConsumer, "take", broken)
    # Then it is logged when it happens, and raised when the application leaves
    with pytest.raises(ZeroDivisionError):
        async with gate.aio.worker():
            await eventually(lambda: [one for one in caplog.records if one.msg == "worker.failed"])
