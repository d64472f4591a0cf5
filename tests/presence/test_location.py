"""The line at which a thread or a task is: of the user's program, and not of what it calls."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator
from typing import Any

import anyio

from idemgate.guard.guard import _call_in_thread
from idemgate.presence.location import find_location

HERE = "tests/presence/test_location.py"


def where(runs_in: object) -> str:
    return find_location(runs_in, sys._current_frames())


def line_of(function: Any, after: int) -> int:
    return function.__code__.co_firstlineno + after


def wait_inside(started: threading.Event, end: threading.Event) -> None:
    started.set()
    end.wait(60)


def test_a_thread_is_at_the_innermost_line_of_the_program() -> None:
    started, end = threading.Event(), threading.Event()
    thread = threading.Thread(target=wait_inside, args=(started, end))
    thread.start()
    assert started.wait(60)
    try:
        found = where(thread.ident)
        assert found in (f"{HERE}:{line_of(wait_inside, n)} wait_inside" for n in (1, 2))
    finally:
        end.set()
        thread.join()
    # And one that has ended is nowhere
    assert where(thread.ident) == ""


async def _sleep_inside() -> None:
    await asyncio.sleep(60)


async def _generate() -> AsyncIterator[int]:
    await _sleep_inside()
    yield 1


async def _iterate() -> None:
    async for _ in _generate():
        pass


async def test_a_task_is_at_the_innermost_line_that_awaits() -> None:
    tasks = [asyncio.create_task(_sleep_inside()), asyncio.create_task(asyncio.wait_for(_sleep_inside(), 60))]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    try:
        assert where(tasks[0]) == f"{HERE}:{line_of(_sleep_inside, 1)} _sleep_inside"
        assert "_sleep_inside" in where(tasks[1]) or "tasks.py" in where(tasks[1])
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert where(tasks[0]) == ""


async def test_a_task_that_awaits_an_async_generator_is_at_its_loop_at_least() -> None:
    task = asyncio.create_task(_iterate())
    await asyncio.sleep(0)
    assert where(task).startswith(HERE)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_task_that_waits_for_a_plain_function_is_at_its_line() -> None:
    for run in (lambda *work: _call_in_thread(work[0], work[1:]), anyio.to_thread.run_sync):
        started, end = threading.Event(), threading.Event()
        task = asyncio.create_task(run(wait_inside, started, end))  # type: ignore[no-untyped-call, operator]
        await asyncio.to_thread(started.wait, 60)
        try:
            assert where(task) in (f"{HERE}:{line_of(wait_inside, n)} wait_inside" for n in (1, 2))
        finally:
            end.set()
            await task


async def test_a_task_that_blocks_its_loop_is_at_its_line() -> None:
    async def block(found: list[str], blocked: threading.Event) -> None:
        task = asyncio.current_task()
        looker = threading.Thread(target=look, args=(task, found, blocked))
        looker.start()
        blocked.set()
        while looker.is_alive():
            looker.join(0.001)

    def look(task: object, found: list[str], blocked: threading.Event) -> None:
        blocked.wait(60)
        found.append(where(task))

    found: list[str] = []
    await block(found, threading.Event())
    # The thread of the loop stands inside `block`
    assert found[0].startswith(HERE)
    assert found[0].endswith(" block")
