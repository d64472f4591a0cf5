"""Calls of a consumer's `keep` while a handler runs: they extend the visibility of its message at the broker."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from threading import Event, Thread

from idemgate.core.counters import Counters
from idemgate.core.text import message_of, one_line
from idemgate.core.validation import call_blocking, is_async

__all__ = ["Keep", "keep_message", "keep_message_async"]

log = logging.getLogger("idemgate.once")
Keep = Callable[[float], Awaitable[object] | object]
"""A function that gets the seconds for which the message must stay invisible from now on."""


@contextmanager
def keep_message(keep: Callable[[float], object], lease: float, counters: Counters) -> Generator[None]:
    """Call `keep` every third of the lease (seconds) until the block ends, in its own thread."""
    stop = Event()

    def loop() -> None:
        while not stop.wait(lease / 3):
            try:
                call_blocking(keep, (lease,), {})
            except Exception as error:  # noqa: BLE001 - the handler goes on; its lease is renewed all the same
                if not stop.is_set():
                    _report(counters, error)

    thread = Thread(target=loop, name="idemgate-keep", daemon=True)
    try:  # from here on: a signal handler may raise while the thread starts
        thread.start()
        yield
    finally:
        stop.set()  # without a join: a slow call of `keep` must not delay the completion


@asynccontextmanager
async def keep_message_async(keep: Keep, lease: float, counters: Counters) -> AsyncGenerator[None]:
    """Call `keep` every third of the lease until the block ends: a coroutine function in a task, others in a thread."""

    async def loop() -> None:
        while True:
            await asyncio.sleep(lease / 3)
            try:
                called = keep(lease) if is_async(keep) else await asyncio.to_thread(keep, lease)
                if isinstance(called, Awaitable):  # also of a lambda around a coroutine function
                    await called
            except Exception as error:  # noqa: BLE001 - the handler goes on; its lease is renewed all the same
                _report(counters, error)

    task = asyncio.create_task(loop(), name="idemgate-keep")
    try:
        yield
    finally:
        task.cancel()


def _report(counters: Counters, error: Exception) -> None:
    counters.add("once.keep_failed")
    text = message_of(error)
    log.warning("once.keep_failed: %s: %s", type(error).__name__, one_line(text), extra={"error": text})
