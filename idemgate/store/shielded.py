"""Cleaning up that is not left half-way, however often who waits for it is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

__all__ = ["to_the_end"]


async def to_the_end(
    work: Coroutine[Any, Any, object] | asyncio.Task[Any], hurry: Callable[[], object] = lambda: None
) -> None:
    """Waits until the work has ended, and raises what it raises. Being cancelled meanwhile only makes it `hurry`, each
    time, and is passed on when it has ended: so it has to be bounded."""
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
