"""Executor of async work with a bounded concurrency and an unbounded queue."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from idemgate.core.text import event_log
from idemgate.core.waits import wait_until_done

__all__ = ["BoundedExecutor"]

log: logging.Logger = event_log("idemgate.subscriber")
T = TypeVar("T")


class BoundedExecutor(Generic[T]):
    """An executor that starts items in the order they were added, at most `concurrency` at once.

    `waiting` holds the items that have not started. `work` must handle its errors.
    """

    def __init__(self, work: Callable[[T], Coroutine[Any, Any, None]], concurrency: int) -> None:
        self._work = work
        self._concurrency = concurrency
        self._running: set[asyncio.Task[None]] = set()
        self._hurry_event = asyncio.Event()
        self.waiting: deque[T] = deque()

    def add(self, item: T) -> None:
        self.waiting.append(item)
        self._start_waiting()

    def _start_waiting(self) -> None:
        while self.waiting and len(self._running) < self._concurrency:
            task = asyncio.get_running_loop().create_task(self._work(self.waiting.popleft()))
            self._running.add(task)
            task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("subscriber.fault", exc_info=error)
        self._start_waiting()

    def hurry(self) -> None:
        """Make `finish` stop waiting."""
        self._hurry_event.set()

    async def finish(self, seconds: float) -> int:
        """Wait for all items, at most `seconds` or until `hurry`; then cancel the running ones.

        A thread cannot be cancelled: it continues, and its result is dropped.

        Returns:
            The number of items that were cancelled or never started.
        """
        await wait_until_done(self._running, seconds, self._hurry_event)
        left = len(self.waiting) + len(self._running)
        self.waiting.clear()
        if running := tuple(self._running):
            for task in running:
                task.cancel()
            await asyncio.wait(running, timeout=1.0)
        return left
