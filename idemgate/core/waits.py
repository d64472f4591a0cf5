"""Waits of an event loop that end with an event, with tasks, or after some seconds."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from contextlib import suppress
from typing import Any

from idemgate.core.clock import monotonic

__all__ = ["wait_for_wakeup", "wait_until_done", "wait_within"]


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
