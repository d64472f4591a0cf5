"""All subscribers of a gate, inside an application."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Protocol, Self

from idemgate.core.durations import Duration, milliseconds
from idemgate.core.text import event_log
from idemgate.core.waits import finish_despite_cancel, wait_until_done
from idemgate.errors import InvalidArgument
from idemgate.store.context import Context, Runner

__all__ = ["Subscriber", "Subscribers"]

log: logging.Logger = event_log("idemgate.subscriber")
OVERTIME = 2.0
"""Seconds after the grace time for the last read of a subscriber and for its acknowledgements."""
CLEANUP_SECONDS = 10.0
"""Seconds for a cancelled subscriber to end. One that swallows its cancellation is left running after that."""


class Subscriber(Protocol):
    """A consumer loop: of `subscribe`, `stream`, `consume_list` or `on_expired` of a gate, or one of your own."""

    async def run(self, stop: asyncio.Event, *, grace: float = 30.0, ready: Callable[[], None] | None = None) -> None:
        """Listen until `stop` is set, then let running callbacks finish. It may run again, and in several event loops.

        Args:
            stop: Event that stops the subscriber. One that still runs two seconds after `grace` is cancelled. A second
                signal to `gate.run()` cancels it at once.
            grace: Seconds for running callbacks after the stop.
            ready: Callback, to call when the subscriber listens or has found the store unavailable. None: nothing
                waits for it. `async with gate.aio.subscribers()` enters when each subscriber has called it.
        """
        ...


class Subscribers:
    """The runner of a gate's subscribers: `async with gate.aio.subscribers(): ...`, or `await subscribers.run(stop)`.

    Entering returns when each subscriber listens, or has found the store unavailable and retries. Leaving stops them:
    they read no new messages, and running callbacks may finish within `grace`. One that ignores the stop is cancelled
    after that; one that swallows the cancellation is left running. A permanent error of one subscriber stops all of
    them and is raised, such as ServerRejected for a key that is no stream.
    """

    def __init__(
        self, subscribers: Sequence[Subscriber], grace: Duration = "30s", context: Context | None = None
    ) -> None:
        self._subscribers = subscribers
        self._context = context
        self._grace = milliseconds(grace, "grace", zero=True) / 1000
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
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
                "Register some with gate.subscribe(...), gate.stream(...), gate.consume_list(...), "
                "gate.on_expired(...) or gate.add_subscriber(...)",
            )
        async with nullcontext() if self._context is None else self._context.lifespans.hold():
            await self._run(subscribers, asyncio.Event() if stop is None else stop, ready)

    async def _run(self, subscribers: Sequence[Subscriber], stop: asyncio.Event, ready: asyncio.Event | None) -> None:
        waiting = set(range(len(subscribers)))

        def mark_ready(number: int) -> None:
            waiting.discard(number)
            if not waiting and ready is not None:
                ready.set()

        tasks: dict[asyncio.Task[None], Subscriber] = {}
        for number, subscriber in enumerate(subscribers):
            mark = functools.partial(mark_ready, number)
            task = asyncio.ensure_future(subscriber.run(stop, grace=self._grace, ready=mark))
            task.add_done_callback(functools.partial(_mark_ended, mark))
            tasks[task] = subscriber
        names = [repr(subscriber) for subscriber in subscribers]
        log.info("subscriber.started subscribers=%s", ", ".join(names), extra={"subscribers": names})
        runner = Runner("subscriber", _serves)
        with nullcontext() if self._context is None else self._context.runners.running(runner):
            await self._wait_for_all(tasks, stop)

    def hurry(self) -> None:
        """End the grace time: cancel the subscribers that still run after the stop."""
        self._hurry.set()

    async def _wait_for_all(self, tasks: Mapping[asyncio.Task[None], Subscriber], stop: asyncio.Event) -> None:
        """Wait for all tasks. If one fails, stop the others and raise its error."""
        running, stopped = set(tasks), asyncio.ensure_future(stop.wait())
        try:
            while running and not stop.is_set():
                await asyncio.wait({*running, stopped}, return_when=asyncio.FIRST_COMPLETED)
                for task in [task for task in running if task.done()]:
                    running.discard(task)
                    _report_end(task, tasks[task], stop)
            await self._finish(running, tasks)
        finally:
            stopped.cancel()
            for task in tasks:
                if not task.cancelling():  # a second cancellation would disturb its cleanup
                    task.cancel()
            _, left = await asyncio.wait(tasks, timeout=CLEANUP_SECONDS)
            for task in left:
                name = repr(tasks[task])
                log.error("subscriber.left_running subscriber=%s", name, extra={"subscriber": name})
        for task in tasks:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error

    async def _finish(self, running: set[asyncio.Task[None]], tasks: Mapping[asyncio.Task[None], Subscriber]) -> None:
        """Wait for tasks after the stop. Cancel those that still run after the grace time, or after `hurry`."""
        await wait_until_done(running, self._grace + OVERTIME, self._hurry)
        for task in [task for task in running if not task.done()]:
            name = repr(tasks[task])
            log.error("subscriber.cut_short subscriber=%s", name, extra={"subscriber": name})
            task.cancel()

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


def _serves(topic: str | None) -> bool:
    return topic is None


def _mark_ended(mark_ready: Callable[[], None], task: asyncio.Task[None]) -> None:
    """Count a subscriber that returned as ready. The error of one that failed is raised instead."""
    if not task.cancelled() and task.exception() is None:
        mark_ready()


def _report_end(task: asyncio.Task[None], subscriber: Subscriber, stop: asyncio.Event) -> None:
    """Log the end of a subscriber before the stop. A failure stops the others; it is raised when they have ended."""
    error = None if task.cancelled() else task.exception()
    if error is None and stop.is_set():
        return
    name = repr(subscriber)
    level = logging.WARNING if error is None else logging.ERROR
    log.log(level, "subscriber.ended subscriber=%s", name, exc_info=error, extra={"subscriber": name})
    if error is not None:
        stop.set()
