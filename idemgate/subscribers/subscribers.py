"""All subscribers of a context, inside of an application."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol, Self

from idemgate.core.durations import Duration, milliseconds
from idemgate.errors import InvalidArgument
from idemgate.store.shielded import to_the_end

__all__ = ["Subscriber", "Subscribers"]

log = logging.getLogger("idemgate.subscriber")


class Subscriber(Protocol):
    """What `Gate.on`, `Gate.stream` and `Gate.expiry` put into `gate.subscribers`."""

    async def run(self, stop: asyncio.Event, *, grace: float = 30.0, ready: Callable[[], None] | None = None) -> None:
        """Listens until `stop` is set, then lets running callbacks finish for `grace` seconds. Calls `ready` once, when
        it listens, or when it found that it cannot yet. May be run again, and in several event loops."""
        ...


class Subscribers:
    """Runs the subscribers of a gate: `async with gate.aio.subscribers(): ...`, or `await subscribers.run(stop)`.

    Entering returns when all of them listen, or have found that the store is away: they begin when it is back. Leaving
    stops them: no new messages, and callbacks that run may finish within `grace`. A subscriber that can never work
    (ServerRejected: the key is no stream, no permission) ends all of them and raises.
    """

    def __init__(self, subscribers: Sequence[Subscriber], grace: Duration = "30s") -> None:
        self._subscribers = subscribers
        self._grace = milliseconds(grace, "grace", zero=True) / 1000
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def run(self, stop: asyncio.Event | None = None, *, ready: asyncio.Event | None = None) -> None:
        """Until `stop` is set; None: until cancelled, which leaves running callbacks no grace."""
        subscribers = tuple(self._subscribers)
        if not subscribers:
            raise InvalidArgument(
                "subscribers",
                [],
                "there are none",
                "Register some with gate.on(...), gate.stream(...) or gate.expiry(...)",
            )
        stop = asyncio.Event() if stop is None else stop
        waiting = len(subscribers)

        def one_ready() -> None:
            nonlocal waiting
            waiting -= 1
            if waiting == 0 and ready is not None:
                ready.set()

        await _all(
            [asyncio.ensure_future(one.run(stop, grace=self._grace, ready=one_ready)) for one in subscribers], stop
        )

    async def __aenter__(self) -> Self:
        if self._task is not None:
            raise InvalidArgument("subscribers", self, "entered already", "Make another with gate.aio.subscribers()")
        ready = asyncio.Event()
        self._task = asyncio.create_task(self.run(self._stop, ready=ready))
        until = asyncio.create_task(ready.wait())
        try:
            await asyncio.wait([self._task, until], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._task.cancel()
            await to_the_end(asyncio.wait({self._task}))
            raise
        finally:
            until.cancel()
        if self._task.done():
            await self._task
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stop.set()
        if self._task is not None:
            await self._task


async def _all(tasks: Sequence[asyncio.Task[None]], stop: asyncio.Event) -> None:
    """All of them; if one fails the others are stopped, and its error is raised."""
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            if not task.cancelled() and task.exception() is not None:
                log.error(
                    "subscriber.ended", exc_info=task.exception()
                )  # said now; raised when the others have stopped
        stop.set()
        await asyncio.wait(tasks)
    finally:
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
    for end in ends:
        if isinstance(end, BaseException):
            raise end
