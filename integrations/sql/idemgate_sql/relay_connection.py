"""The connection of a relay: it executes statements, waits for rows, and decides which of several relays works."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import copy_context
from typing import Any, Protocol, TypeVar

__all__ = ["RelayConnection", "RelayThread", "Wakeups", "wait_for_stop"]

T = TypeVar("T")


class Wakeups:
    """The relays of this process that look for rows after a trigger of this process. Threads share it."""

    def __init__(self) -> None:
        self._listeners: set[Callable[[str], None]] = set()

    def wake(self, topic: str) -> None:
        """Wake the relays that serve a topic, given with its namespace."""
        for listener in tuple(self._listeners):
            listener(topic)

    @contextmanager
    def listen(self, serves: Callable[[str], bool]) -> Generator[asyncio.Event]:
        """Yield an event of the running loop that `wake` sets for a topic that `serves` accepts."""
        loop, woken = asyncio.get_running_loop(), asyncio.Event()

        def listener(topic: str) -> None:
            if not serves(topic):
                return
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(woken.set)

        self._listeners.add(listener)
        try:
            yield woken
        finally:
            self._listeners.discard(listener)


class RelayThread:
    """A thread of a blocking relay. The pool of `asyncio.to_thread` may be full of slow calls of the application."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "idemgate-relay")

    async def run(self, func: Callable[..., T], *args: object) -> T:
        """Call a function in the thread, in a copy of the caller's context. Return its result."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, copy_context().run, func, *args)

    def close(self) -> None:
        """Let the thread end after the call under way."""
        self._executor.shutdown(wait=False)


class RelayConnection(Protocol):
    """A connection of a relay, open while the relay runs."""

    async def lock(self, names: Collection[str]) -> set[str]:
        """Return the names that this relay serves: those whose lock it has. One round trip.

        A lock ends with the connection. So it ends when the process dies, and soon after the process stops responding.
        """
        ...

    async def unlock(self, name: str) -> None:
        """Release a lock, so that another relay may serve the name."""
        ...

    async def execute(self, sql: str, params: Mapping[str, object]) -> Sequence[Sequence[Any]]:
        """Execute a statement in a transaction of its own. Return its rows, or nothing if it has none."""
        ...

    async def wait(
        self, stop: asyncio.Event, woken: asyncio.Event, seconds: float, serves: Callable[[str], bool]
    ) -> None:
        """Wait until a row of a served topic is committed, `stop` is set, or the time has passed. It may return early.

        Args:
            stop: the event that ends the relay.
            woken: the event of a trigger in this process, whose transaction may be open. A connection without NOTIFY
                uses and clears it.
            seconds: the time.
            serves: returns whether the relay serves a topic, given with its namespace.
        """
        ...


async def wait_for_stop(stop: asyncio.Event, seconds: float) -> None:
    """Wait until `stop` is set, at most this long."""
    with suppress(TimeoutError):
        await asyncio.wait_for(stop.wait(), seconds)
