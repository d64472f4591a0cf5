"""The loop of a worker: fetch due deliveries, run their handlers, settle them.

A delivery passes these steps of `DeliveryLoop`:

1. `fetch` waits for places of its topic and takes due deliveries.
2. `_run` queues them, and the dispatcher starts as many handlers as there are places.
3. `_on_ended` chooses the settlement of a delivery whose handler ended, and frees its place.
4. `_settle` sends the settlements. The same call takes the next deliveries, which go on at step 2.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from idemgate.core.clock import monotonic
from idemgate.core.verdict import HANDLED
from idemgate.core.waits import wait_for_wakeup
from idemgate.errors import StoreError
from idemgate.store.retry import lacks_cluster_url
from idemgate.topics.deliveries import Settlement, defer_oversize
from idemgate.worker.consumer import MAX_SETTLED, FinishedDelivery, InFlight, TopicConsumer
from idemgate.worker.dispatcher import Dispatcher, Ended
from idemgate.worker.places import Places
from idemgate.worker.settlements import choose_settlement

if TYPE_CHECKING:
    from idemgate.topics.topic import Topic

__all__ = ["DeliveryLoop", "StoreOutage", "repeat"]

log: logging.Logger = logging.getLogger("idemgate.worker")


class DeliveryLoop:
    """One run of the topics with handlers. One task for each topic fetches, one task for all topics settles.

    Args:
        places: The worker's places.
        concurrency: Number of handlers that run at once.
        stop: Event that stops fetching.
        on_slots_changed: Callback after each take and settlement: either may bring deliveries of slots that other
            workers serve now, or end the last delivery of such a slot.
    """

    def __init__(
        self, places: Places, concurrency: int, stop: asyncio.Event, on_slots_changed: Callable[[], None]
    ) -> None:
        self.dispatcher: Dispatcher = Dispatcher(concurrency, places, stop, self._on_ended)
        self._places = places
        self._stop = stop
        self._on_slots_changed = on_slots_changed
        self._ended: list[FinishedDelivery] = []
        self._to_settle = asyncio.Event()
        self._settlements: set[asyncio.Task[None]] = set()
        self._drained = False

    # -- fetch --------------------------------------------------------------------------------------------------------

    async def fetch(self, consumer: TopicConsumer) -> None:
        """Wait for places, take due deliveries of one topic and run their handlers."""
        room = await self._wait_for_room(consumer)
        try:
            if room > 0:
                with self._places.fetch(consumer.places, room):
                    self._run(consumer, await consumer.take(room))
        finally:
            self._on_slots_changed()
            self.dispatcher.start_ready()

    async def _wait_for_room(self, consumer: TopicConsumer) -> int:
        """Wait for room for the topic and return how many deliveries to fetch; 0 if the caller has to look again.

        It also waits if settlements under way will fetch more before any handler idles.
        """
        if consumer.room(1) <= 0:
            if not consumer.backpressure.pause:
                consumer.wake.clear()
                await consumer.wake.wait()  # until a delivery of this topic is settled
            return 0
        with self._places.wait_in_line(consumer.places):
            while not self._stop.is_set() and consumer.room(1) > 0:
                enough = self._settlements and len(consumer.ready) > self.dispatcher.free
                if not enough and (room := self._places.share(consumer.places)) > 0:
                    return room
                self._places.freed.clear()
                await self._places.freed.wait()
        return 0

    # -- run ----------------------------------------------------------------------------------------------------------

    def _run(self, consumer: TopicConsumer, taken: Sequence[InFlight]) -> None:
        """Queue taken deliveries for their handlers. The dispatcher starts them as soon as there are places."""
        self._places.take(consumer.places, len(taken))
        most = consumer.context.codec.max_bytes  # no value is larger than its message
        unusual = [entry for entry in taken if entry.misfired or entry.delivery.size > most]
        if unusual:
            taken = [entry for entry in taken if not self._settle_unstarted(entry)]
        consumer.ready.extend(taken)

    def _settle_unstarted(self, entry: InFlight) -> bool:
        """Acknowledge a misfired occurrence, and defer a payload that is too large. Return False for any other."""
        delivery = entry.delivery
        settlement = Settlement("ack", delivery) if entry.misfired else defer_oversize(entry.consumer.context, delivery)
        if settlement is not None:
            self._finish(entry, settlement)
        return settlement is not None

    def _on_ended(self, ended: Sequence[Ended]) -> None:
        """Choose how to settle deliveries that ended, and free their places."""
        self._to_settle.set()  # before a place is freed: so a settlement, not the line, fetches the next delivery
        self._places.freed.set()
        now = monotonic()
        for entry, verdict in ended:
            consumer = entry.consumer
            if now > consumer.times.handling.due and entry.started and consumer.times.handling.begin(now):
                consumer.times.handling.add(now - entry.started)
            if verdict is HANDLED and not consumer.backpressure.applies:  # the most frequent case
                self._ended.append((entry, Settlement("ack", entry.delivery)))
                self._places.free(consumer.places, handled=1)
            elif verdict is not None:
                settlement = choose_settlement(entry, verdict, self._stop.is_set())
                self._finish(entry, settlement, handled=1)
                if consumer.backpressure.pause and consumer.ready:
                    self._return_ready(consumer)
            else:
                self._skip(entry)

    def _skip(self, entry: InFlight) -> None:
        """Do not run a delivery whose lease is lost or has nearly ended."""
        entry.consumer.context.counters.add("worker.not_started")
        facts = entry.log_facts()
        log.warning(
            "worker.not_started topic=%r key=%r", *facts.values(), extra=facts | {"token": entry.delivery.token}
        )
        if entry.delivery.lost:
            self.drop([entry])
        else:  # the server may still hold the lease: then this is no attempt
            self._finish(entry, Settlement("return", entry.delivery))

    def _finish(self, entry: InFlight, settlement: Settlement, handled: int = 0) -> None:
        self._ended.append((entry, settlement))
        self._to_settle.set()
        self._places.freed.set()
        self._places.free(entry.consumer.places, handled)

    # -- settle -------------------------------------------------------------------------------------------------------

    async def settle_until_drained(self) -> None:
        """Settle ended deliveries: at once if no settlement is under way, else once a whole batch is ready."""
        while not self._drained or self._ended or self._settlements:
            await self._settle_ready()

    async def settle_all(self) -> None:
        """Settle until the worker holds no delivery, also none that the settlements brought."""
        while not self._places.is_empty or self._ended or self._settlements:
            await self._settle_ready()

    async def _settle_ready(self) -> None:
        await self._to_settle.wait()
        self._to_settle.clear()
        for task in [task for task in self._settlements if task.done()]:
            self._settlements.discard(task)
            self._places.freed.set()
            task.result()
        if not self._settlements or len(self._ended) >= MAX_SETTLED:
            self._start_settlements()

    def _start_settlements(self) -> None:
        by_consumer: defaultdict[TopicConsumer, list[FinishedDelivery]] = defaultdict(list)
        for pair in self._ended:
            by_consumer[pair[0].consumer].append(pair)
        self._ended = []
        for consumer, ended in by_consumer.items():
            room = 0 if self._stop.is_set() else max(0, self._places.share(consumer.places))
            self._places.reserve(consumer.places, room)
            task = asyncio.create_task(self._settle(consumer, ended, room))
            self._settlements.add(task)
            task.add_done_callback(lambda _: self._to_settle.set())

    async def _settle(self, consumer: TopicConsumer, ended: list[FinishedDelivery], room: int) -> None:
        """Settle deliveries of one topic, take at most `room` in the same call, and run their handlers."""
        try:
            self._run(consumer, await consumer.settle(ended, room))
        finally:
            self._places.release(consumer.places, room)
            if consumer.backpressure.applies:
                consumer.wake.set()  # its fetch may wait for what was requested in vain
        if self._stop.is_set():
            self.return_unstarted()
        self._on_slots_changed()
        self.dispatcher.start_ready()

    # -- deliveries that are not run ----------------------------------------------------------------------------------

    def return_unstarted(self, keep: Callable[[InFlight], bool] = lambda _: False) -> None:
        """Return unstarted deliveries to their topics, except those for which `keep` is true."""
        for entry in self.dispatcher.remove_unstarted(keep):
            self._finish(entry, Settlement("return", entry.delivery))
        self.dispatcher.start_ready()  # a thread may have looked while a kept entry was out of the queue

    def _return_ready(self, consumer: TopicConsumer) -> None:
        self.return_unstarted(lambda entry: entry.consumer is not consumer)

    def return_stale(self, since: float) -> None:
        """Return unstarted deliveries taken at `since` or before, and prefetch nothing until handlers are faster."""
        if self.dispatcher.has_stale(since):
            self._places.slow_down()
            self.return_unstarted(lambda entry: entry.since > since)

    def drop(self, entries: Sequence[InFlight]) -> None:
        """Leave deliveries to the expiry of their leases."""
        for entry in entries:
            entry.consumer.drop([entry])
            self._places.freed.set()
            self._places.free(entry.consumer.places)

    def drain(self) -> None:
        """Let `settle_until_drained` end once everything is settled."""
        self._drained = True
        self._to_settle.set()


class OfTopic(Protocol):
    """A part of a worker that serves one topic."""

    @property
    def topic(self) -> Topic: ...


class WorkSource(OfTopic, Protocol):
    """A source of work for one topic, to be polled."""

    @property
    def wake(self) -> asyncio.Event: ...
    def pause(self) -> float:
        """Return how many seconds to sleep before the next step; setting `wake` ends the sleep early."""
        ...


class StoreOutage:
    """The outage of the store as the loops of one worker see it. Its begin and its end are logged once each."""

    def __init__(self) -> None:
        self._failing: set[OfTopic] = set()
        self._began = 0.0

    def begin(self, source: OfTopic, error: StoreError) -> None:
        """Record that a step of this source failed."""
        if not self._failing:
            self._began = monotonic()
            topic, text = source.topic.name, str(error)
            log.warning(
                "worker.store_unavailable topic=%r error=%r", topic, text, extra={"topic": topic, "error": text}
            )
        self._failing.add(source)

    def end(self, source: OfTopic) -> None:
        """Record that a step of this source succeeded. The outage ends when no source fails any more."""
        if source in self._failing:
            self._failing.remove(source)
            if not self._failing:
                seconds = round(monotonic() - self._began, 3)
                log.warning("worker.store_back seconds=%g", seconds, extra={"seconds": seconds})


async def repeat(
    source: WorkSource, step: Callable[[], Awaitable[None]], stop: asyncio.Event, outage: StoreOutage
) -> None:
    """Run `step` each time the source has work, until `stop` is set.

    A sleeping source sees `stop` only when its `wake` is set or the pause ends. A StoreError is reported, counted and
    retried with a growing pause of at most one second. That of a URL that names one node of a cluster is raised.
    """
    failures, topic = 0, source.topic
    while not stop.is_set():
        try:
            if (pause := source.pause()) > 0:
                await wait_for_wakeup(source.wake, pause)
            if not stop.is_set():
                await step()
                if failures:
                    outage.end(source)
            failures = 0
        except StoreError as error:
            if lacks_cluster_url(error):
                raise
            outage.begin(source, error)
            failures += 1
            topic.definition.context.counters.add("worker.store_unavailable")
            await wait_for_wakeup(source.wake, min(1.0, 0.02 * 2 ** min(failures, 6)))
