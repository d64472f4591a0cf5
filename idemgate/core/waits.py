"""Waits of an event loop: for an event, for tasks, for some seconds; and for cleanup in spite of a cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine
from contextlib import suppress
from typing import Any

from idemgate.core.clock import monotonic

__all__ = ["finish_despite_cancel", "is_cancelled", "wait_for_wakeup", "wait_until_done", "wait_within", "watch_moves"]


def is_cancelled() -> bool:
    """Return True if this task is cancelled. Else a CancelledError in it was raised by what it called."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def wait_within(event: asyncio.Event, seconds: float) -> None:
    """Wait until the event is set, or for this many seconds.

    `wait_for` of Python 3.11 loses a cancellation that arrives together with the event.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


async def wait_for_wakeup(wake: asyncio.Event, seconds: float) -> None:
    """Wait until the event is set, or for this many seconds; then clear it."""
    await wait_within(wake, seconds)
    wake.clear()


def watch_moves(clock: object, wake: Callable[[], object]) -> Callable[[], object]:
    """Call `wake` in this event loop after each move of a test clock. Return a function that ends this."""
    watch = getattr(clock, "on_move", None)
    if watch is None:
        return lambda: None
    loop = asyncio.get_running_loop()

    def on_move() -> None:
        with suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(wake)

    unwatch: Callable[[], object] = watch(on_move)
    return unwatch


async def wait_until_done(tasks: Collection[asyncio.Task[Any]], seconds: float, hurry: asyncio.Event) -> None:
    """Wait until the tasks end, the seconds pass, or `hurry` is set.

    A collection that changes meanwhile is waited for until it has no running task left.
    """
    end, hurried = monotonic() + seconds, asyncio.create_task(hurry.wait())
    try:
        while (left := end - monotonic()) > 0 and not hurry.is_set():
            await asyncio.sleep(0)  # the callbacks of a done task may start another one
            if not (running := {task for task in tasks if not task.done()}):
                return
            await asyncio.wait({*running, hurried}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
    finally:
        hurried.cancel()


async def finish_despite_cancel(
    work: Coroutine[Any, Any, object] | asyncio.Task[Any], hurry: Callable[[], object] = lambda: None
) -> None:
    """Wait until `work` has ended, and raise its error. `work` must be bounded in time.

    A cancellation does not stop the work. Each one calls `hurry`, and is raised again when the work has ended.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            hurry()
            cancelled = error
    if cancelled is not None:
        raise cancelled from (None if task.cancelled() else task.exception())
    task.result()
