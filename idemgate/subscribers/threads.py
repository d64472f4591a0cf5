"""Threads for handlers that block."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar, cast

__all__ = ["Threads", "called"]

T = TypeVar("T")
_Job = tuple[Callable[[], Any], "asyncio.Future[Any]"]


def called(func: Callable[[Any], Any], argument: object) -> tuple[Any, BaseException | None]:
    """What a function returned, and what it raised: values, because exceptions do not all survive the way back."""
    try:
        return func(argument), None
    except BaseException as error:  # noqa: BLE001 - whatever it is; and nobody's Ctrl-C arrives in such a thread
        return None, error


class Threads:
    """As many threads as were ever busy at once, for one event loop.

    Daemons, unlike those of a ThreadPoolExecutor: a handler that nothing can end must not keep the process from
    ending. What they run must not raise: a StopIteration, for one, cannot be passed on through a future.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._threads = 0
        self._idle = 0

    async def run(self, work: Callable[[], T]) -> T:
        """What `work` returns. Cancelled meanwhile: the thread goes on."""
        future = asyncio.get_running_loop().create_future()
        if self._idle:
            self._idle -= 1
        else:
            self._threads += 1
            threading.Thread(target=self._work, name=f"{self._name}-{self._threads}", daemon=True).start()
        self._jobs.put((work, future))
        return cast(T, await future)

    def close(self) -> None:
        """The threads end, each with what it is doing."""
        for _ in range(self._threads):
            self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            work, future = job
            result = work()
            try:
                future.get_loop().call_soon_threadsafe(self._done, future, result)
            except RuntimeError:  # the loop is closed: nobody waits for this any more
                return

    def _done(self, future: asyncio.Future[Any], result: object) -> None:
        self._idle += 1
        if not future.done():
            future.set_result(result)
