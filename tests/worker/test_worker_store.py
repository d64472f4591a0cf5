"""The worker and its store: sleeping until there is work, being woken, and going on without help after the store was
away."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from idemgate import Gate
from idemgate.store.pubsub import Subscription
from idemgate.testing import Clock


def noting(gate: Gate, name: str = "t", **policy: Any) -> tuple[Any, list[Any]]:
    """A topic and what its handler saw: (key, seconds after it was due, by this machine's clock)."""
    topic, seen = gate.topic(name, **policy), []

    @topic.handler
    async def handle(delivery: Any) -> None:
        seen.append((delivery.key, time.time() - delivery.due_ms / 1000))

    return topic, seen


@pytest.mark.usefixtures("no_polls")
async def test_nothing_is_taken_before_it_is_due_and_all_right_after(
    gate: Gate, clock: Clock, eventually: Any, listening: Any
) -> None:
    # Given a worker and a window of a minute
    topic, seen = noting(gate, window="60s", slots=4)
    async with gate.aio.worker():
        await listening(topic)
        await topic.aio.trigger_many([(n, n) for n in range(20)])
        # When it is over but for a millisecond
        clock.advance("59999ms")
        assert (await topic.aio.stats()).scheduled == 20
        assert seen == []
        # Then one millisecond more delivers all, without a poll
        clock.advance("1ms")
        await eventually(lambda: len(seen) == 20)


@pytest.mark.usefixtures("no_polls")
async def test_it_sleeps_until_the_next_due_time(live: Gate, eventually: Any, listening: Any) -> None:
    # Given deliveries due at odd moments of the next half second
    topic, seen = noting(live, slots=4)
    async with live.aio.worker():
        await listening(topic)
        for n in range(10):
            await topic.aio.trigger(n, delay=0.05 * (n + 1))
        # Then all come, without a poll, and none comes early
        await eventually(lambda: len(seen) == 10)
    assert min(after for _, after in seen) >= 0


@pytest.mark.usefixtures("no_polls")
async def test_a_trigger_wakes_a_worker_that_sleeps(live: Gate, eventually: Any, listening: Any) -> None:
    # Given a worker that sleeps, with a message far in the future
    topic, seen = noting(live, slots=8)
    await topic.aio.trigger("later", delay="1h")
    async with live.aio.worker():
        await listening(topic)
        for n in range(8):
            # When something is due now
            await topic.aio.trigger(n)
            # Then it is delivered, without a poll
            await eventually(lambda n=n: len(seen) == n + 1)


async def test_hints_may_all_be_lost(live: Gate, monkeypatch: pytest.MonkeyPatch, eventually: Any) -> None:
    # Given a worker that hears nothing
    async def deaf(*_: Any, **__: Any) -> None: ...

    monkeypatch.setattr(Subscription, "add", deaf)
    topic, seen = noting(live)
    async with live.aio.worker():
        await topic.aio.trigger("a")
        # Then its polls find the message
        await eventually(lambda: seen)


@pytest.mark.usefixtures("no_polls")
async def test_what_is_no_hint_does_no_harm(live: Gate, raw: Any, eventually: Any, listening: Any) -> None:
    topic, seen = noting(live)
    async with live.aio.worker():
        await listening(topic)
        for data in ("", "soon", "nan", "-inf", b"\xff"):
            assert raw.publish(b"ig2:{%s:topic:t:0/1}:scheduled" % live.namespace.encode(), data) == 1
        # Hints are heard as before
        for n in range(3):
            await topic.aio.trigger(n)
            await eventually(lambda n=n: len(seen) == n + 1)


async def test_it_goes_on_while_its_connections_are_killed_again_and_again(
    live: Gate, raw: Any, eventually: Any
) -> None:
    # Given a worker at work
    topic, seen = noting(live, slots=2, lease="5s")
    total = 0
    async with live.aio.worker(concurrency=4):
        # When every connection to the server is cut, and cut again
        for _ in range(15):
            batch = [(n, n) for n in range(total, total + 10)]
            total += 10
            await topic.aio.trigger_many(batch)
            raw.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            raw.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
            await asyncio.sleep(0.02)
        # Then everything is handled, and once
        await eventually(lambda: live.counters["worker.acked"] == total)
    stats = await topic.aio.stats()
    assert (stats.pending, stats.in_flight, stats["acked"], stats["taken"]) == (0, 0, total, total)
    assert len(seen) == total


async def test_it_goes_on_after_the_server_stood_still(live: Gate, raw: Any, eventually: Any) -> None:
    # Given a server that answers nobody for half a second
    topic, seen = noting(live)
    async with live.aio.worker():
        await topic.aio.trigger("a")
        raw.execute_command("CLIENT", "PAUSE", "500", "ALL")
        await topic.aio.trigger("b")
        await eventually(lambda: len(seen) == 2)
    assert (await topic.aio.stats())["acked"] == 2


async def test_a_slot_that_holds_something_foreign_does_not_stop_the_others(
    gate: Gate, raw: Any, eventually: Any, clock: Clock
) -> None:
    # Given two topics, one of them with a key of another type where its schedule should be
    topic, seen = noting(gate)
    spoilt, never = noting(gate, "spoilt")
    await spoilt.aio.open()
    raw.set(b"ig2:{%s:topic:spoilt:0/1}:scheduled" % gate.namespace.encode(), "text")
    async with gate.aio.worker():
        await topic.aio.trigger("a")
        await eventually(lambda: len(seen) == 1)
        await eventually(lambda: gate.counters["worker.store_unavailable"] >= 2)
        await topic.aio.trigger("b")
        await eventually(lambda: len(seen) == 2)
        # When that is mended, its work is done too
        raw.delete(b"ig2:{%s:topic:spoilt:0/1}:scheduled" % gate.namespace.encode())
        await spoilt.aio.trigger("c")
        await eventually(lambda: len(never) == 1)
