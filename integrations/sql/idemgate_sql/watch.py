"""The watch of a relay: it learns of new rows, and decides which of several relays works."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from typing import Protocol, Self

__all__ = ["Polling", "Wakeups", "Watch", "wait_for_stop"]

FIRST_LOOK = 0.005
"""Seconds from a trigger of this process to the first look. Its transaction may still be open, so others follow."""


class Wakeups:
    """The relays of this process that look for rows after a trigger of this process. Threads share it."""

    def __init__(self) -> None:
        self._listeners: set[Callable[[], None]] = set()

    def wake(self) -> None:
        """Wake the relays."""
        for listener in tuple(self._listeners):
            listener()

    @contextmanager
    def listen(self) -> Generator[asyncio.Event]:
        """Yield an event of the running loop that `wake` sets."""
        loop, woken = asyncio.get_running_loop(), asyncio.Event()

        def listener() -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(woken.set)

        self._listeners.add(listener)
        try:
            yield woken
        finally:
            self._listeners.discard(listener)


class Watch(Protocol):
    """A connection of a relay, open while the relay runs."""

    async def try_lock(self, name: str) -> bool:
        """Return True if this relay is the one of this name that works. The lock ends with the connection."""
        ...

    async def wait(self, stop: asyncio.Event, woken: asyncio.Event, seconds: float) -> None:
        """Wait until a row is committed, `stop` is set, or the time has passed. It may return early.

        Args:
            stop: the event that ends the relay.
            woken: the event of a trigger in this process, whose transaction may be open. A watch without NOTIFY uses
                and clears it.
            seconds: the time.
        """
        ...


class Polling(AbstractAsyncContextManager["Polling"]):
    """A watch without a connection: every relay works, and looks for rows at intervals.

    After a trigger of this process it looks sooner, at intervals that double.
    """

    def __init__(self) -> None:
        self._next_look: float | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Do nothing."""

    async def try_lock(self, name: str) -> bool:  # noqa: ARG002 - see `Watch.try_lock`
        """Return True."""
        return True

    async def wait(self, stop: asyncio.Event, woken: asyncio.Event, seconds: float) -> None:
        """Wait until `stop` is set, the time has passed, or it is time for a look after a trigger."""
        if self._next_look is None:
            await _wait_for_one(stop, woken, seconds)
        if woken.is_set():
            woken.clear()
            self._next_look = FIRST_LOOK
        if self._next_look is not None:
            await wait_for_stop(stop, min(seconds, self._next_look))
            self._next_look = 2 * self._next_look if self._next_look < seconds else None


async def _wait_for_one(first: asyncio.Event, second: asyncio.Event, seconds: float) -> None:
    """Wait until one of the events is set, at most this long."""
    tasks = [asyncio.ensure_future(one.wait()) for one in (first, second)]
    try:
        await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


async def wait_for_stop(stop: asyncio.Event, seconds: float) -> None:
    """Wait until `stop` is set, at most this long."""
    with suppress(TimeoutError):
        await asyncio.wait_for(stop.wait(), seconds)
