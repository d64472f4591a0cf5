"""All subscribers of a gate, inside an application."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol, Self

from idemgate.core.durations import Duration, milliseconds
from idemgate.errors import InvalidArgument
from idemgate.store.shielded import finish_despite_cancel

__all__ = ["Subscriber", "Subscribers"]

log = logging.getLogger("idemgate.subscriber")


class Subscriber(Protocol):
    """A subscriber, as created by `Gate.subscribe`, `Gate.stream`, `Gate.list` and `Gate.on_expired`."""

    async def run(self, stop: asyncio.Event, *, grace: float = 30.0, ready: Callable[[], None] | None = None) -> None:
        """Listen until `stop` is set, then let running callbacks finish. It may run again, and in several event loops.

        Args:
            stop: Event that stops the subscriber.
            grace: Seconds for running callbacks after the stop.
            ready: Callback, called once when the subscriber listens or has found the store unavailable.
        """
        ...


class Subscribers:
    """The runner of a gate's subscribers: `async with gate.aio.subscribers(): ...`, or `await subscribers.run(stop)`.

    Entering returns when each subscriber listens, or has found the store unavailable and retries. Leaving stops them:
    they read no new messages, and running callbacks may finish within `grace`. A permanent error of one subscriber
    stops all of them and is raised, such as ServerRejected for a key that is no stream.
    """

    def __init__(self, subscribers: Sequence[Subscriber], grace: Duration = "30s") -> None:
        self._subscribers = subscribers
        self._grace = milliseconds(grace, "grace", zero=True) / 1000
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def run(self, stop: asyncio.Event | None = None, *, ready: asyncio.Event | None = None) -> None:
        """Run all subscribers until `stop` is set.

        Args:
            stop: None means until cancelled, which leaves running callbacks no grace time.
            ready: Event to set when all subscribers are ready.
        """
        subscribers = tuple(self._subscribers)
        if not subscribers:
            raise InvalidArgument(
                "subscribers",
                [],
                "there are none",
                "Register some with gate.subscribe(...), gate.stream(...), gate.list(...) or gate.on_expired(...)",
            )
        stop = asyncio.Event() if stop is None else stop
        waiting = len(subscribers)

        def count_ready() -> None:
            nonlocal waiting
            waiting -= 1
            if waiting == 0 and ready is not None:
                ready.set()

        await _wait_for_all(
            [
                asyncio.ensure_future(subscriber.run(stop, grace=self._grace, ready=count_ready))
                for subscriber in subscribers
            ],
            stop,
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
            await finish_despite_cancel(asyncio.wait({self._task}))
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


async def _wait_for_all(tasks: Sequence[asyncio.Task[None]], stop: asyncio.Event) -> None:
    """Wait for all tasks. If one fails, stop the others and raise its error."""
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            if not task.cancelled() and task.exception() is not None:
                # Logged now; raised only after the others have stopped.
                log.error("subscriber.ended", exc_info=task.exception())
        stop.set()
        await asyncio.wait(tasks)
    finally:
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
    for end in ends:
        if isinstance(end, BaseException):
            raise end
