"""Cleanup that finishes although its caller is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

__all__ = ["finish_despite_cancel"]


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
