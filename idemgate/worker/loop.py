"""Loop of a worker around one source of work: sleep until there is work, do it, retry after a store error."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from idemgate.errors import StoreError

if TYPE_CHECKING:
    from idemgate.topics.topic import Topic

__all__ = ["WorkSource", "run_loop"]

log = logging.getLogger("idemgate.worker")


class WorkSource(Protocol):
    """A source of work for one topic, to be polled."""

    @property
    def topic(self) -> Topic: ...
    @property
    def wake(self) -> asyncio.Event: ...
    def pause(self) -> float:
        """Return how many seconds to sleep before the next step; setting `wake` ends the sleep early."""
        ...


async def run_loop(source: WorkSource, step: Callable[[], Awaitable[None]], stop: asyncio.Event) -> None:
    """Run `step` each time the source has work, until `stop` is set.

    A sleeping loop sees `stop` only when `source.wake` is set or the pause ends. A StoreError is logged, counted and
    retried with a growing pause of at most one second.
    """
    failures, topic = 0, source.topic
    while not stop.is_set():
        try:
            if (pause := source.pause()) > 0:
                await _sleep(source.wake, pause)
            if not stop.is_set():
                await step()
            failures = 0
        except StoreError as error:
            if failures == 0:
                log.warning("worker.store_unavailable", extra={"topic": topic.name, "error": str(error)})
            failures += 1
            topic.definition.context.counters.add("worker.store_unavailable")
            await _sleep(source.wake, min(1.0, 0.02 * 2 ** min(failures, 6)))


async def _sleep(wake: asyncio.Event, seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await wake.wait()
    wake.clear()
