"""Bounded concurrency: at most so many at once, the rest waits its turn."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from time import monotonic
from typing import Any, Generic, TypeVar

__all__ = ["Lanes"]

log = logging.getLogger("idemgate.subscriber")
T = TypeVar("T")


class Lanes(Generic[T]):
    """Works on items in the order they were added, `width` at a time. `work` handles its own errors."""

    def __init__(self, work: Callable[[T], Coroutine[Any, Any, None]], width: int) -> None:
        self._work = work
        self._width = width
        self._running: set[asyncio.Task[None]] = set()
        self._hurried = asyncio.Event()
        self.waiting: deque[T] = deque()

    def add(self, item: T) -> None:
        self.waiting.append(item)
        self._fill()

    def _fill(self) -> None:
        while self.waiting and len(self._running) < self._width:
            task = asyncio.get_running_loop().create_task(self._work(self.waiting.popleft()))
            self._running.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("subscriber.fault", exc_info=error)
        self._fill()

    def hurry(self) -> None:
        """Nothing is waited for any more."""
        self._hurried.set()

    async def finish(self, seconds: float) -> int:
        """Waits until all is done, for at most `seconds`, or until told to hurry; then cancels what runs, and says how
        many items that cut short or left out. A thread cannot be cancelled: it goes on, unobserved."""
        hurried = asyncio.create_task(self._hurried.wait())
        end = monotonic() + seconds
        while self._running and not hurried.done() and (left := end - monotonic()) > 0:
            await asyncio.wait({hurried, *self._running}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        left = len(self.waiting) + len(self._running)
        self.waiting.clear()
        if running := tuple(self._running):
            for task in running:
                task.cancel()
            await asyncio.wait(running, timeout=1.0)
        return left
