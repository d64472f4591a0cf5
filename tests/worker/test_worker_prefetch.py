"""What a worker holds without running it, when its handlers become slow: others get it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from idemgate import Gate
from idemgate.testing import Clock
from idemgate.topics.topic import Topic
from idemgate.worker.worker import Worker


@pytest.fixture
async def idle(url: str, clock: Clock, namespace: str) -> AsyncIterator[Gate]:
    """The gate of another process, with nothing to do yet."""
    with Gate(url, namespace=namespace, clock=clock) as made:
        yield made
        await made.aio.close()


def stuck(topic: Topic[Any], threaded: bool = False) -> asyncio.Event:
    """Gives it a handler that does not end before this is set."""
    go, loop = asyncio.Event(), asyncio.get_running_loop()

    async def wait(delivery: Any) -> None:
        await go.wait()

    topic.handler((lambda one: asyncio.run_coroutine_threadsafe(wait(one), loop).result(60)) if threaded else wait)
    return go


@pytest.mark.parametrize("threaded", [False, True])
async def test_what_waits_behind_slow_handlers_is_handled_elsewhere(
    gate: Gate, idle: Gate, clock: Clock, eventually: Any, threaded: bool
) -> None:
    # Given a worker whose places are all taken by handlers that do not end, and two deliveries that wait behind them
    topic, there = gate.topic("t"), []
    go = stuck(topic, threaded)
    idle.topic("t").handler(lambda one: there.append((one.key, one.attempt)))
    await topic.aio.trigger_many([(n, n) for n in range(10)])
    async with Worker(gate, concurrency=8) as worker:
        await eventually(lambda: gate.counters["worker.taken"] == 10)
        # When another one is idle, then it gets nothing of them, until they have waited for a second
        async with Worker(idle):
            clock.advance("999ms")
            await topic.aio.trigger("mark")
            await eventually(lambda: there == [("mark", 1)])
            clock.advance("1ms")
            await eventually(lambda: idle.counters["worker.acked"] == 3)
            # And that was no attempt, and the first worker holds nothing but what it runs
            assert sorted(there) == [("8", 1), ("9", 1), ("mark", 1)]
            assert (gate.counters["worker.returned"], worker.prefetch) == (2, 0)
            assert (await topic.aio.stats()).in_flight == 8
            go.set()
            await eventually(lambda: gate.counters["worker.acked"] == 8)
    # And everything was done once
    stats = await topic.aio.stats()
    assert (stats["acked"], stats.pending, stats["returned"]) == (11, 0, 2)


async def test_what_is_given_back_keeps_its_place_in_its_group(
    gate: Gate, idle: Gate, clock: Clock, eventually: Any
) -> None:
    # Given the first message of a group, which waits behind slow handlers, and two more of the group behind it
    topic, there = gate.topic("t"), []
    go = stuck(topic)

    @idle.topic("t").handler
    async def note(delivery: Any) -> None:
        there.append(delivery.key)
        await asyncio.sleep(0)

    await topic.aio.trigger_many([(n, n) for n in range(4)])
    for key in ("first", "second", "third"):
        await topic.aio.trigger(key, group="g")
    async with Worker(gate, concurrency=4):
        await eventually(lambda: gate.counters["worker.taken"] == 5)
        # When it is given back to a worker that is idle
        async with Worker(idle):
            clock.advance("1s")
            await eventually(lambda: len(there) == 3)
        go.set()
        await eventually(lambda: gate.counters["worker.acked"] == 4)
    # Then the group went in its order
    assert there == ["first", "second", "third"]


async def test_a_number_that_was_named_is_held_however_long_it_waits(
    gate: Gate, idle: Gate, clock: Clock, eventually: Any
) -> None:
    topic, there = gate.topic("t"), []
    go = stuck(topic)
    idle.topic("t").handler(lambda one: there.append(one.key))
    await topic.aio.trigger_many([(n, n) for n in range(4)])
    async with Worker(gate, concurrency=1, prefetch=3):
        await eventually(lambda: gate.counters["worker.taken"] == 4)
        async with Worker(idle):
            for _ in range(3):
                clock.advance("5s")
                await topic.aio.trigger("mark")
                await eventually(lambda: there and there.pop() == "mark")
        go.set()
        await eventually(lambda: gate.counters["worker.acked"] == 4)
    assert (gate.counters["worker.returned"], there) == (0, [])
