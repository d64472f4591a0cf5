"""Thread pool for blocking callbacks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar, cast

__all__ = ["CallbackThreads", "call_catching"]

T = TypeVar("T")
_Job = tuple[Callable[[], Any], "asyncio.Future[Any]"]


def call_catching(func: Callable[[Any], Any], argument: object) -> tuple[Any, BaseException | None]:
    """Call a function; return its result and its exception.

    Both are values, since not every exception survives a future.
    """
    try:
        return func(argument), None
    except BaseException as error:  # noqa: BLE001 - any exception is a result; a Ctrl-C only reaches the main thread
        return None, error


class CallbackThreads:
    """A thread pool for one event loop, with as many threads as were ever busy at once.

    The threads are daemons, unlike those of a ThreadPoolExecutor: a callback that never ends must not keep the process
    alive. Work must not raise: a future cannot carry a StopIteration, for example.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._threads = 0
        self._idle = 0

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` in a thread and return its result. If cancelled, the thread continues."""
        future = asyncio.get_running_loop().create_future()
        if self._idle:
            self._idle -= 1
        else:
            self._threads += 1
            threading.Thread(target=self._work, name=f"{self._name}-{self._threads}", daemon=True).start()
        self._jobs.put((work, future))
        return cast(T, await future)

    def close(self) -> None:
        """Make each thread end after its current work."""
        for _ in range(self._threads):
            self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            work, future = job
            result = work()
            try:
                future.get_loop().call_soon_threadsafe(self._set_result, future, result)
            except RuntimeError:  # the event loop is closed
                return

    def _set_result(self, future: asyncio.Future[Any], result: object) -> None:
        self._idle += 1
        if not future.done():
            future.set_result(result)
