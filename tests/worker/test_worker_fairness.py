"""Places of a worker are shared fairly between its topics: slow handlers of one do not hold up another one."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from idemgate import Gate
from idemgate.worker import places
from idemgate.worker import worker as worker_module
from idemgate.worker.worker import Worker

pytestmark = pytest.mark.one_in(3)

SLOW, QUICK = "slow", "quick"


class Handlers:
    """Handlers of topics that end when the test says so. `started` has the topic of each handler that started."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self.started: list[str] = []
        self.may_end: dict[str, asyncio.Semaphore] = {}
        self._loop = asyncio.get_running_loop()

    def add(self, name: str, *, awaiting: bool) -> Any:
        topic, may_end = self.gate.topic(name), asyncio.Semaphore(0)
        self.may_end[name] = may_end

        async def handle(delivery: Any) -> None:
            self.started.append(name)
            await may_end.acquire()

        def block(delivery: Any) -> None:
            asyncio.run_coroutine_threadsafe(handle(delivery), self._loop).result(60)

        topic.handler(handle if awaiting else block)
        return topic.aio

    def end_all(self) -> None:
        for may_end in self.may_end.values():
            for _ in range(1000):
                may_end.release()


@pytest.fixture
async def handlers(gate: Gate) -> AsyncIterator[Handlers]:
    made = Handlers(gate)
    yield made
    made.end_all()


def waits_or_is_held(worker: Worker, name: str) -> Callable[[], bool]:
    """Return a check that the worker holds a delivery of the topic, or waits for room to fetch one that is known.

    A fetch of another topic that was sent before may still bring deliveries to that room.
    """

    def check() -> bool:
        one = next(one for one in worker._consumers if one.topic.name == name)
        waits = one.places in worker._places.line and one.poller.has_work(0)
        return bool(one.places.held) or (waits and not any(other.places.requested for other in worker._consumers))

    return check


@pytest.fixture
def constant_prefetch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep an adaptive prefetch at its first size.

    After it shrinks, deliveries beyond it run first, or are returned when they have waited for `MAX_HOLD`.
    """
    monkeypatch.setattr(places, "SPAN", 1e9)
    monkeypatch.setattr(worker_module, "MAX_HOLD", 1e9)


MIXED = [pytest.param(kinds, marks=pytest.mark.slow) for kinds in ((True, False), (False, True))]


@pytest.mark.usefixtures("constant_prefetch")
@pytest.mark.parametrize("prefetch", [0, 1, 4, None])
@pytest.mark.parametrize("concurrency", [1, 2, 8])
@pytest.mark.parametrize("kinds", [(True, True), (False, False), *MIXED])
async def test_a_quick_topic_waits_for_one_slow_handler_at_most(
    gate: Gate, handlers: Handlers, eventually: Any, kinds: tuple[bool, bool], concurrency: int, prefetch: int | None
) -> None:
    # Given a worker whose places are all taken by slow handlers, with many more messages behind them
    slow, quick = handlers.add(SLOW, awaiting=kinds[0]), handlers.add(QUICK, awaiting=kinds[1])
    await slow.trigger_many([(n, n) for n in range(40)])
    async with Worker(gate, concurrency=concurrency, prefetch=prefetch) as worker:
        await eventually(lambda: handlers.started == [SLOW] * concurrency)
        for turn in range(1, 4):
            # (the worker holds no delivery of the turn before)
            await eventually(lambda turn=turn: gate.counters["worker.acked"] == 2 * (turn - 1))
            # When another topic gets a message, and one slow handler ends
            await quick.trigger(turn)
            await eventually(waits_or_is_held(worker, QUICK))
            handlers.may_end[SLOW].release()
            # Then the message is the next to start
            await eventually(lambda turn=turn: len(handlers.started) >= concurrency + 2 * turn - 1)
            assert handlers.started[concurrency + 2 * turn - 2] == QUICK
            # And a slow handler gets the place behind it
            handlers.may_end[QUICK].release()
            await eventually(lambda turn=turn: len(handlers.started) >= concurrency + 2 * turn)
            assert Counter(handlers.started)[SLOW] == concurrency + turn
        handlers.end_all()
        await eventually(lambda: gate.counters["worker.acked"] == 43)


async def test_topics_with_a_backlog_converge_to_equal_shares(gate: Gate, handlers: Handlers, eventually: Any) -> None:
    # Given a worker whose places are all taken by one topic
    slow, quick = handlers.add(SLOW, awaiting=True), handlers.add(QUICK, awaiting=True)
    await slow.trigger_many([(n, n) for n in range(40)])
    ended: Counter[str] = Counter()

    def running() -> Counter[str]:
        return Counter(handlers.started) - ended

    async with Worker(gate, concurrency=4, prefetch=0) as worker:
        await eventually(lambda: running()[SLOW] == 4)
        await quick.trigger_many([(n, n) for n in range(40)])
        await eventually(waits_or_is_held(worker, QUICK))
        # When its handlers end in turn with those of another topic with as many messages
        for _ in range(6):
            for name in (SLOW, QUICK):
                if running()[name]:
                    ended[name] += 1
                    handlers.may_end[name].release()
                    await eventually(lambda: running().total() == 4)
        # Then each has half of the places
        assert running() == {SLOW: 2, QUICK: 2}
        handlers.end_all()
        await eventually(lambda: gate.counters["worker.acked"] == 80)


async def test_each_of_many_topics_gets_a_place_before_any_gets_two(
    gate: Gate, handlers: Handlers, eventually: Any
) -> None:
    # Given one place, and five topics that wait for it
    names = [SLOW, *(f"topic-{n}" for n in range(5))]
    topics = [handlers.add(name, awaiting=True) for name in names]
    await topics[0].trigger_many([(n, n) for n in range(9)])
    async with Worker(gate, concurrency=1, prefetch=0) as worker:
        await eventually(lambda: handlers.started == [SLOW])
        for name, topic in zip(names[1:], topics[1:], strict=True):
            await topic.trigger_many([(n, n) for n in range(3)])
            await eventually(waits_or_is_held(worker, name))
        # When handlers end
        for turn in range(1, 6):
            handlers.may_end[handlers.started[-1]].release()
            await eventually(lambda turn=turn: len(handlers.started) > turn)
        # Then each of them ran once
        assert sorted(handlers.started) == sorted(names)
        handlers.end_all()
        await eventually(lambda: gate.counters["worker.acked"] == 24)
