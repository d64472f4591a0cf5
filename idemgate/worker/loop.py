"""Loop of a worker around one source of work: sleep until there is work, do it, retry after a store error."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from idemgate.core.clock import monotonic
from idemgate.errors import StoreError

if TYPE_CHECKING:
    from idemgate.topics.topic import Topic

__all__ = ["StoreOutage", "WorkSource", "run_loop"]

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


class StoreOutage:
    """The outage of the store as the loops of one worker see it. Its begin and its end are logged once each."""

    def __init__(self) -> None:
        self._failing: set[WorkSource] = set()
        self._began = 0.0

    def begin(self, source: WorkSource, error: StoreError) -> None:
        """Record that a step of this source failed."""
        if not self._failing:
            self._began = monotonic()
            topic, text = source.topic.name, str(error)
            log.warning(
                "worker.store_unavailable topic=%r error=%r", topic, text, extra={"topic": topic, "error": text}
            )
        self._failing.add(source)

    def end(self, source: WorkSource) -> None:
        """Record that a step of this source succeeded. The outage ends when no source fails any more."""
        if source in self._failing:
            self._failing.remove(source)
            if not self._failing:
                seconds = round(monotonic() - self._began, 3)
                log.warning("worker.store_back seconds=%g", seconds, extra={"seconds": seconds})


async def run_loop(
    source: WorkSource, step: Callable[[], Awaitable[None]], stop: asyncio.Event, outage: StoreOutage
) -> None:
    """Run `step` each time the source has work, until `stop` is set.

    A sleeping loop sees `stop` only when `source.wake` is set or the pause ends. A StoreError is reported, counted and
    retried with a growing pause of at most one second.
    """
    failures, topic = 0, source.topic
    while not stop.is_set():
        try:
            if (pause := source.pause()) > 0:
                await _sleep(source.wake, pause)
            if not stop.is_set():
                await step()
                outage.end(source)
            failures = 0
        except StoreError as error:
            outage.begin(source, error)
            failures += 1
            topic.definition.context.counters.add("worker.store_unavailable")
            await _sleep(source.wake, min(1.0, 0.02 * 2 ** min(failures, 6)))


async def _sleep(wake: asyncio.Event, seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await wake.wait()
    wake.clear()
