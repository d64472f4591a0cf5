"""The user's resources of a worker: made before the first message is taken, and cleaned up after the last handler."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from idemgate import Gate, InvalidArgument
from idemgate.worker.worker import Worker

Events = list[str]
Declare = Callable[[Gate, Events, str], None]


def declare_blocking(gate: Gate, events: Events, name: str) -> None:
    @gate.lifespan
    def resources() -> Iterator[None]:
        events.append(f"{name} in")
        yield
        events.append(f"{name} out")


def declare_async(gate: Gate, events: Events, name: str) -> None:
    @gate.lifespan
    async def resources() -> AsyncIterator[None]:
        await asyncio.sleep(0)
        events.append(f"{name} in")
        yield
        await asyncio.sleep(0)
        events.append(f"{name} out")


BOTH = pytest.mark.parametrize("declare", [declare_blocking, declare_async])


@pytest.mark.parametrize("awaiting", [False, True])
@BOTH
async def test_resources_are_there_from_the_first_take_to_the_end_of_the_last_handler(
    gate: Gate, eventually: Any, declare: Declare, awaiting: bool
) -> None:
    events, go, go_thread, topic = Events(), asyncio.Event(), threading.Event(), gate.topic("t")

    async def wait(delivery: Any) -> None:
        events.append("began")
        await go.wait()
        events.append("ended")

    def block(delivery: Any) -> None:
        events.append("began")
        assert go_thread.wait(60)
        events.append("ended")

    topic.handler(wait if awaiting else block)
    for name in ("first", "second"):
        declare(gate, events, name)
    topic.trigger("k", 1)
    async with Worker(gate) as worker:
        await eventually(lambda: "began" in events)
        worker.stop()
        await asyncio.sleep(0)
        go.set()
        go_thread.set()
    assert events == ["first in", "second in", "began", "ended", "second out", "first out"]


@BOTH
async def test_a_failure_at_the_start_ends_the_worker_before_a_message_is_taken(gate: Gate, declare: Declare) -> None:
    events, topic = Events(), gate.topic("t")
    topic.handler(lambda delivery: None)
    declare(gate, events, "first")

    @gate.lifespan
    def fails() -> Iterator[None]:
        raise OSError("no database")
        yield

    topic.trigger("k", 1)
    for _ in range(2):  # the next worker tries again
        with pytest.raises(OSError, match="no database"):
            async with Worker(gate):
                pass
    assert events == ["first in", "first out"] * 2
    assert gate.counters["worker.taken"] == 0


@BOTH
async def test_a_failure_at_the_end_is_raised_after_the_others_are_left(gate: Gate, declare: Declare) -> None:
    events, topic = Events(), gate.topic("t")
    topic.handler(lambda delivery: None)
    declare(gate, events, "first")

    @gate.lifespan
    async def fails() -> AsyncIterator[None]:
        yield
        raise OSError("no flush")

    with pytest.raises(OSError, match="no flush"):
        async with Worker(gate):
            pass
    assert events == ["first in", "first out"]


@BOTH
async def test_workers_and_subscribers_of_one_event_loop_share_them(gate: Gate, declare: Declare) -> None:
    events = Events()
    gate.topic("t").handler(lambda delivery: None)
    gate.subscribe("c")(lambda message: None)
    declare(gate, events, "first")
    async with Worker(gate):
        async with gate.aio.subscribers(), gate.aio.worker():
            assert events == ["first in"]
        assert events == ["first in"]
    assert events == ["first in", "first out"]
    async with gate.aio.subscribers():
        assert events[2:] == ["first in"]
    assert events[2:] == ["first in", "first out"]


@BOTH
async def test_a_cancelled_worker_cleans_up(gate: Gate, eventually: Any, declare: Declare) -> None:
    events = Events()
    gate.topic("t").handler(lambda delivery: None)
    declare(gate, events, "first")
    task = asyncio.create_task(Worker(gate).run(asyncio.Event()))
    await eventually(lambda: events == ["first in"])
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert events == ["first in", "first out"]


@BOTH
async def test_a_worker_that_fails_cleans_up(
    gate: Gate, declare: Declare, monkeypatch: pytest.MonkeyPatch, eventually: Any
) -> None:
    events = Events()
    gate.topic("t").handler(lambda delivery: None)
    declare(gate, events, "first")

    async def fail(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(Worker, "_join_members", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        async with Worker(gate):
            pass
    assert events == ["first in", "first out"]


@pytest.mark.parametrize(("times", "problem"), [(0, "did not yield"), (2, "yielded twice")])
@pytest.mark.parametrize("awaiting", [False, True])
async def test_it_yields_once(gate: Gate, times: int, problem: str, awaiting: bool) -> None:
    def plain() -> Iterator[None]:
        yield from [None] * times

    async def waiting() -> AsyncIterator[None]:
        for _ in range(times):
            yield

    gate.topic("t").handler(lambda delivery: None)
    gate.lifespan(waiting if awaiting else plain)
    with pytest.raises(InvalidArgument, match=problem):
        async with Worker(gate):
            pass


async def test_one_that_is_declared_late_is_logged(gate: Gate, caplog: pytest.LogCaptureFixture) -> None:
    gate.topic("t").handler(lambda delivery: None)
    async with Worker(gate):
        declare_async(gate, [], "late")
    [record] = [one for one in caplog.records if one.getMessage().startswith("worker.declared_late")]
    assert "declared=lifespan" in record.getMessage()


def no_generator() -> None: ...


@contextmanager
def wrapped() -> Iterator[None]:
    yield


def with_parameter(gate: Gate) -> Iterator[None]:
    yield


@pytest.mark.parametrize("function", [no_generator, wrapped, with_parameter, 7])
def test_another_function_is_refused(gate: Gate, function: Any) -> None:
    with pytest.raises(InvalidArgument, match="lifespan"):
        gate.lifespan(function)
