"""What the scheduler's contestants share: waiting until something is due or done."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

from benchmarks.peers.speak import Answer, Tally, drained

__all__ = ["PATIENCE", "adrain", "asettled", "drain", "late", "pace", "settled"]

PATIENCE = 40.0
"""Seconds after which a drain counts as failed."""


def late(due: float) -> float:
    """Milliseconds since `due`, seconds since the epoch."""
    return (time.time() - due) * 1000


def settled(tally: Tally) -> Answer:
    """Waits, in the main thread, for workers in other threads."""
    end = time.monotonic() + PATIENCE
    while not tally.done and time.monotonic() < end:
        time.sleep(0.005)
    return drained(tally)


def drain(start: Callable[[Tally], Callable[[], object]], n: int, wait: float) -> Answer:
    """Once everything is due, a worker of threads: `start` answers what stops it."""
    time.sleep(wait)
    tally = Tally(n)
    stop = start(tally)
    try:
        return settled(tally)
    finally:
        stop()


async def adrain(work: Callable[[Tally], Coroutine[Any, Any, object]], n: int, wait: float) -> Answer:
    """The same for a worker of coroutines, which is cancelled in the end."""
    await asyncio.sleep(wait)
    tally = Tally(n)
    working = asyncio.create_task(work(tally))
    try:
        return await asettled(tally, working)
    finally:
        working.cancel()
        await asyncio.wait({working}, timeout=5)


async def asettled(tally: Tally, working: asyncio.Task[Any]) -> Answer:
    end = time.monotonic() + PATIENCE
    while not tally.done and time.monotonic() < end:
        if working.done():
            working.result()
            break
        await asyncio.sleep(0.005)
    return drained(tally)


def pace(rate: int, seconds: float) -> list[float]:
    """When to send, in seconds from now."""
    return [number / rate for number in range(int(rate * seconds))]
