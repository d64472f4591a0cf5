"""How much a worker takes, holds and runs at once, and how often it asks."""

from __future__ import annotations

import asyncio
from collections import Counter
from time import monotonic
from typing import Any

import pytest

from idemgate import Gate
from idemgate.core.calls import Call
from idemgate.testing import Clock
from idemgate.worker.consumer import TopicConsumer
from idemgate.worker.poller import Poller
from idemgate.worker.worker import Worker


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each script was asked for by the awaiting links of this test."""
    from idemgate.store.aio import AsyncLink

    counted: Counter[str] = Counter()
    real = AsyncLink.run

    async def run(self: AsyncLink, call: Call[Any], within: float | None = None) -> Any:
        counted[call.script.name] += 1
        return await real(self, call, within)

    monkeypatch.setattr(AsyncLink, "run", run)
    return counted


@pytest.mark.parametrize("awaiting", [False, True])
async def test_never_more_handlers_run_than_the_concurrency(gate: Gate, eventually: Any, awaiting: bool) -> None:
    # Given two topics, and handlers that count how many of them run
    running, most, threads = 0, 0, asyncio.get_running_loop()

    async def handle(delivery: Any) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1

    def block(delivery: Any) -> None:
        asyncio.run_coroutine_threadsafe(handle(delivery), threads).result(60)

    for name in ("one", "two"):
        topic = gate.topic(name, slots=2)
        topic.handler(handle if awaiting else block)
        await topic.aio.trigger_many([(n, n) for n in range(50)])
    # When a worker runs five at once
    async with Worker(gate, concurrency=5):
        await eventually(lambda: gate.counters["worker.acked"] == 100)
    # Then five it was
    assert most == 5


async def test_no_more_is_held_than_runs_and_is_prefetched(gate: Gate, clock: Clock, eventually: Any) -> None:
    # Given two topics with more work than one worker may hold, and handlers that wait
    go, started, topics = asyncio.Semaphore(0), [], [gate.topic("one"), gate.topic("two", slots=4)]

    async def handle(delivery: Any) -> None:
        started.append(delivery)
        await go.acquire()

    async def in_flight() -> int:
        return sum([(await topic.aio.stats()).in_flight for topic in topics])

    for topic in topics:
        topic.handler(handle)
        await topic.aio.trigger_many([(n, n) for n in range(20)])
    # When three run and two are prefetched
    async with Worker(gate, concurrency=3, prefetch=2) as worker:
        await eventually(lambda: gate.counters["worker.taken"] == 5)
        # Then no reason to look again makes it take more
        for _ in range(5):
            clock.advance("1s")
            for topic in topics:
                await topic.aio.trigger("urgent", 0)
            assert (await in_flight(), len(started)) == (5, 3)
        # And as each ends, one more is taken, no more
        for ended in range(1, 37):
            go.release()
            await eventually(lambda ended=ended: gate.counters["worker.acked"] == ended)
            await eventually(lambda ended=ended: gate.counters["worker.taken"] == min(42, ended + 5))
            assert await in_flight() <= 5
            assert len(started) == ended + 3
        for _ in range(6):
            go.release()
        await eventually(lambda: gate.counters["worker.acked"] == 42)
        assert worker.prefetch == 2


async def test_without_prefetch_only_what_runs_is_held(gate: Gate, eventually: Any) -> None:
    topic, go = gate.topic("t"), asyncio.Event()

    @topic.handler
    async def handle(delivery: Any) -> None:
        await go.wait()

    await topic.aio.trigger_many([(n, n) for n in range(9)])
    async with Worker(gate, concurrency=2, prefetch=0):
        await eventually(lambda: gate.counters["worker.taken"] == 2)
        assert (await topic.aio.stats()).in_flight == 2
        go.set()
        await eventually(lambda: gate.counters["worker.acked"] == 9)


async def test_many_slots_are_all_served(gate: Gate, eventually: Any) -> None:
    topic, seen = gate.topic("t", slots=64), Counter[str]()

    @topic.handler
    async def handle(delivery: Any) -> None:
        seen[delivery.key] += 1

    await topic.aio.trigger_many([(n, None) for n in range(300)])
    async with Worker(gate, concurrency=4):
        await eventually(lambda: gate.counters["worker.acked"] == 300)
        # And what comes later, to any of them
        await topic.aio.trigger_many([(n, None) for n in range(300, 400)])
        await eventually(lambda: gate.counters["worker.acked"] == 400)
    assert seen == Counter({str(n): 1 for n in range(400)})


async def test_two_workers_share_a_topic(gate: Gate, url: str, clock: Clock, eventually: Any) -> None:
    # Given two processes' worth of gates with the same topic
    other = Gate(url, namespace=gate.namespace, clock=clock)
    seen: Counter[tuple[str, int]] = Counter()
    by: Counter[str] = Counter()

    def register(one: Gate, name: str) -> Any:
        topic = one.topic("t", slots=4)

        @topic.handler
        async def handle(delivery: Any) -> None:
            seen[delivery.key, delivery.attempt] += 1
            by[name] += 1
            await asyncio.sleep(0)

        return topic

    topic, _ = register(gate, "first"), register(other, "second")
    # When both work at 500 messages
    async with Worker(gate, concurrency=4), Worker(other, concurrency=4):
        for start in range(0, 500, 50):
            await topic.aio.trigger_many([(n, n) for n in range(start, start + 50)])
        await eventually(lambda: gate.counters["worker.acked"] + other.counters["worker.acked"] == 500)
    # Then each is handled once, some by either
    assert seen == Counter({(str(n), 1): 1 for n in range(500)})
    assert by["first"] > 0
    assert by["second"] > 0
    await other.aio.close()
    other.close()


async def test_an_idle_worker_asks_each_slot_once_a_second(
    live: Gate, calls: Counter[str], monkeypatch: pytest.MonkeyPatch, eventually: Any
) -> None:
    # Given a worker with four slots, one message far in the future, and nothing to do
    pauses, real = list[float](), TopicConsumer.pause

    def pause(self: TopicConsumer) -> float:
        pauses.append(real(self))
        return pauses[-1]

    monkeypatch.setattr(TopicConsumer, "pause", pause)
    topic = live.topic("t", slots=4)
    topic.handler(lambda delivery: None)
    await topic.aio.trigger("later", delay="1h")
    async with Worker(live):
        await eventually(lambda: calls["topics/take"] >= 4)
        began, taken, looked = monotonic(), calls["topics/take"], len(pauses)
        # When it has asked eight times more
        await eventually(lambda: calls["topics/take"] >= taken + 8)
        # Then two rounds of four took two seconds, and it slept in between, for a second at most
        assert monotonic() - began >= 0.9
    assert len(pauses) - looked < 20
    assert max(pauses) <= 1.0


async def test_a_worker_on_a_clock_that_stands_still_sleeps(
    gate: Gate, calls: Counter[str], monkeypatch: pytest.MonkeyPatch, clock: Clock, eventually: Any
) -> None:
    # Given a message that is due in one millisecond of a clock that does not move
    rounds, real = Counter[str](), TopicConsumer.pause

    def pause(self: TopicConsumer) -> float:
        rounds["pause"] += 1
        return real(self)

    topic = gate.topic("t")
    handled: list[str] = []
    topic.handler(lambda delivery: handled.append(delivery.key))
    await topic.aio.trigger("a", delay="1ms")
    async with Worker(gate):
        await eventually(lambda: calls["topics/take"])
        monkeypatch.setattr(TopicConsumer, "pause", pause)
        # When the worker waits for a whole poll
        asked = calls["topics/take"]
        await eventually(lambda: calls["topics/take"] > asked)
        # Then it slept through it
        assert rounds["pause"] < 10
        assert handled == []
        clock.advance("1ms")
        await eventually(lambda: handled == ["a"])


async def test_the_next_is_taken_with_the_end_of_the_last(gate: Gate, calls: Counter[str], eventually: Any) -> None:
    topic = gate.topic("t")

    @topic.handler
    async def handle(delivery: Any) -> None: ...

    await topic.aio.trigger_many([(n, n) for n in range(20)])
    # When a worker runs one after the other
    async with Worker(gate, concurrency=1, prefetch=0):
        await eventually(lambda: gate.counters["worker.acked"] == 20)
    # Then one call ends each and takes the next
    assert calls["topics/settle_and_take"] > 10 > calls["topics/take"]
    assert calls["topics/settle_and_take"] + calls["topics/settle"] == 20


async def test_large_messages_are_taken_a_few_at_a_time_and_asked_for_again_at_once(
    gate: Gate, clock: Clock, eventually: Any
) -> None:
    # Given messages of which two go in one script call
    topic, handled = gate.topic("t"), list[str]()
    for number in range(7):
        await topic.aio.trigger(f"k{number}", "x" * 50_000)
        clock.advance("1ms")
    due = Poller(topic)
    await due.open()
    calls = topic.open()
    # When the first are taken, then it is known that there are more: nobody sleeps until the next poll
    first = await due.execute(0, calls.take(0, 100))
    assert (len(first.deliveries), due.pause()) == (2, 0)
    await topic.aio.release(first.deliveries)
    await due.close()

    @topic.handler
    async def handle(delivery: Any) -> None:
        handled.append(delivery.key)

    # And a worker handles all of them, in their order
    async with Worker(gate, concurrency=1):
        await eventually(lambda: gate.counters["worker.acked"] == 7)
    assert handled == [f"k{number}" for number in range(7)]
