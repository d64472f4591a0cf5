"""Drain of a gate for tests. It runs everything that is due now and returns.

It takes, runs and settles with the parts of a worker: `TopicConsumer` and `DeliveryLoop`. It leaves out the waiting:
there are no hints, no polls and no pauses. It looks at each slot until a look at all of them finds nothing due. One
handler runs at a time, so each run has the same order.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from idemgate.core.validation import check_int
from idemgate.core.waits import finish_despite_cancel
from idemgate.errors import NotDrained, ServerRejected
from idemgate.store.context import Context
from idemgate.store.retry import is_out_of_memory
from idemgate.topics.deliveries import Settlement
from idemgate.topics.messages import Taken
from idemgate.topics.topic import Topic
from idemgate.worker.consumer import InFlight, TopicConsumer
from idemgate.worker.cron import CronScheduler
from idemgate.worker.dispatcher import Ended
from idemgate.worker.forwarder import Forwarder
from idemgate.worker.loop import DeliveryLoop, OfTopic, StoreOutage
from idemgate.worker.places import Places
from idemgate.worker.poller import Poller

__all__ = ["LIMIT", "Drainable", "Drained", "Ran", "drain"]

LIMIT = 10_000
CLEANUP_SECONDS = 1.0
"""Seconds for handlers to end that an error or a cancellation of the drain interrupts."""


@dataclass(frozen=True, slots=True)
class Ran:
    """The ends of the deliveries of a topic.

    Attributes:
        delivered: Acknowledged deliveries and forwarded messages. Duplicates of a guard count.
        retried: Deliveries that were not: they are due again later, or were again meanwhile.
        dead: Deliveries whose message became a dead letter.
    """

    delivered: int = 0
    retried: int = 0
    dead: int = 0


@dataclass(frozen=True, slots=True)
class Drained(Ran):
    """The work of a drain: the sums over all topics and their parts.

    Attributes:
        topics: The parts by the name of the topic, of each topic that has a handler or is forwarded.
        subscribers: Entries of streams and lists and rows of outboxes, of all subscribers together.
        skipped: What was not drained: each topic with due messages that has no handler, such as "topic 'images'", and
            the `repr` of each subscriber that cannot be drained, such as one of a Pub/Sub channel. Also each for which
            the server has no memory, such as a stream whose group does not exist; the first of them is logged.
        errors: What handlers of topics raised, in order. It does not count in a comparison.
    """

    topics: Mapping[str, Ran] = field(default_factory=dict[str, Ran])
    subscribers: int = 0
    skipped: tuple[str, ...] = ()
    errors: Sequence[BaseException] = field(default=(), compare=False)


@runtime_checkable
class Drainable(Protocol):
    """A subscriber that can be drained. One of your own may have this method, too."""

    async def drain_once(self) -> int:
        """Process and settle what is there now or a batch of it. Do not wait for more.

        Returns:
            The number of entries; 0 if there were none.
        """
        ...


async def drain(context: Context, topics: Mapping[str, Topic], subscribers: Sequence[object], limit: int) -> Drained:
    """Run all that is due; see `AioGate.drain`."""
    made = _Drain(topics, subscribers, check_int("limit", limit))
    async with context.lifespans.hold():
        try:
            await made.open()
            while await made.run_pass():
                pass
        finally:
            await finish_despite_cancel(made.close())
        return await made.result()


class _Drain:
    """One drain of a gate."""

    def __init__(self, topics: Mapping[str, Topic], subscribers: Sequence[object], limit: int) -> None:
        self._stop = asyncio.Event()
        self._loop = _Loop(self._stop)
        self._outage = StoreOutage()
        self._limit = limit
        self._topics = topics
        self._pollers = {name: Poller(topic) for name, topic in topics.items() if topic.definition.has_consumer}
        self._consumers: list[_Consumer] = []
        self._forwarders: list[Forwarder] = []
        self._schedulers: list[CronScheduler] = []
        self._subscribers = [one for one in subscribers if isinstance(one, Drainable)]
        self._skipped = [repr(one) for one in subscribers if not isinstance(one, Drainable)]
        self._processed = Counter[int]()  # by `id`: two subscribers may have one `repr`, and may not be hashable

    async def open(self) -> None:
        """Check the policies and build what serves the topics."""
        for poller in self._pollers.values():
            opened = False
            with self._skipping(_name_topic(poller.topic.name), poller):
                await poller.open()
                opened = True
            if not opened:
                continue
            definition = poller.topic.definition
            if definition.forward is None:
                consumer = _Consumer(poller, self._limit)
                self._consumers.append(consumer)
                self._loop.dispatcher.add(consumer)
            else:
                self._forwarders.append(Forwarder(poller, definition.forward))
            if definition.recurring:
                self._schedulers.append(CronScheduler(poller))

    async def run_pass(self) -> bool:
        """Run what is due of each source in turn. Return False if there was nothing."""
        before = self._count()
        for subscriber in self._subscribers:
            name = repr(subscriber)
            with self._skipping(name):
                while n := await subscriber.drain_once():
                    self._add(subscriber, name, n)
        for scheduler in self._schedulers:
            if scheduler.pause() <= 0:
                with self._skipping(_name_topic(scheduler.topic.name), scheduler):
                    await scheduler.run_once()
        for forwarder in self._forwarders:
            poller = forwarder.poller
            name = _name_topic(poller.topic.name)
            poller.mark_all_due()
            with self._skipping(name, forwarder):
                while poller.due_slots(poller.calls):
                    self._add(forwarder, name, await forwarder.run_once())
        for consumer in self._consumers:
            await self._run_topic(consumer)
        return self._count() > before

    @contextmanager
    def _skipping(self, name: str, source: OfTopic | None = None) -> Generator[None]:
        """Go on with the rest if the server has no memory for this."""
        try:
            yield
        except ServerRejected as error:
            if not is_out_of_memory(error):
                raise
            if source is not None:
                self._outage.begin(source, error)
            if name not in self._skipped:
                self._skipped.append(name)

    def _count(self) -> int:
        return self._processed.total() + sum(consumer.taken for consumer in self._consumers)

    def _add(self, source: object, name: str, n: int) -> None:
        self._processed[id(source)] += n
        if self._processed[id(source)] > self._limit:
            raise NotDrained(name, self._limit)

    async def _run_topic(self, consumer: _Consumer) -> None:
        """Run what is due of a topic, one delivery after the other."""
        consumer.poller.mark_all_due()
        taken = -1
        while consumer.taken > taken:
            taken = consumer.taken
            await self._loop.fetch(consumer)
            await self._loop.settle_all()
            if consumer.taken > self._limit:
                raise NotDrained(_name_topic(consumer.topic.name), self._limit)

    async def close(self) -> None:
        """Stop. What an error or a cancellation interrupted is returned; threads are left to their leases."""
        self._stop.set()
        dispatcher = self._loop.dispatcher
        self._loop.return_unstarted()
        self._loop.drop(dispatcher.cancel_running())
        if dispatcher.tasks:
            await asyncio.wait(dispatcher.tasks, timeout=CLEANUP_SECONDS)
            self._loop.drop(dispatcher.abandon_running())
        with suppress(TimeoutError):
            async with asyncio.timeout(CLEANUP_SECONDS):
                await self._loop.settle_all()
        dispatcher.close()
        for consumer in self._consumers:
            consumer.close()
        for poller in self._pollers.values():
            await poller.close()

    async def result(self) -> Drained:
        """Return what ran, and name the topics without a handler that have due messages."""
        unhandled = [name for name in self._topics if name not in self._pollers]
        stats = [await self._topics[name].aio.stats() for name in unhandled]
        skipped = [_name_topic(name) for name, one in zip(unhandled, stats, strict=True) if one.ready or one.blocked]
        topics = dict(self._results())
        delivered, retried, dead = (
            sum(getattr(one, name) for one in topics.values()) for name in ("delivered", "retried", "dead")
        )
        entries = sum(self._processed[id(one)] for one in self._subscribers)
        return Drained(
            delivered, retried, dead, topics=topics, subscribers=entries, skipped=(*skipped, *self._skipped),
            errors=self._loop.errors,
        )  # fmt: skip

    def _results(self) -> Iterator[tuple[str, Ran]]:
        for consumer in self._consumers:
            yield consumer.topic.name, consumer.result()
        for forwarder in self._forwarders:
            yield forwarder.topic.name, Ran(self._processed[id(forwarder)])


def _name_topic(name: str) -> str:
    return f"topic {name!r}"


class _Loop(DeliveryLoop):
    """A loop that keeps what handlers raised."""

    def __init__(self, stop: asyncio.Event) -> None:
        self.errors: list[BaseException] = []
        super().__init__(Places(1, prefetch=0), 1, stop, lambda: None)

    def _on_ended(self, ended: Sequence[Ended]) -> None:
        self.errors += [verdict.error for _, verdict in ended if verdict is not None and verdict.error is not None]
        super()._on_ended(ended)


class _Consumer(TopicConsumer):
    """A consumer that counts what it takes, and what becomes of it. It takes one more than the limit at most."""

    def __init__(self, poller: Poller, limit: int) -> None:
        self.taken = 0
        self._most = limit + 1
        self._misfired = 0
        self._ends = Counter[tuple[str, str]]()
        super().__init__(poller)

    def room(self, free: int) -> int:
        return min(super().room(free), self._most - self.taken)

    def _accept(self, taken: Taken, until: float) -> list[InFlight]:
        self.taken += len(taken.deliveries)
        return super()._accept(taken, until)

    async def _mark_misfired(self, taken: list[InFlight]) -> list[InFlight]:
        marked = await super()._mark_misfired(taken)
        self._misfired += sum(entry.misfired for entry in marked)
        return marked

    def _count_outcomes(self, settlements: list[Settlement], outcomes: list[str]) -> None:
        super()._count_outcomes(settlements, outcomes)
        self._ends.update(zip((one.verb for one in settlements), outcomes, strict=True))

    def result(self) -> Ran:
        """Return what became of the deliveries."""
        ends = self._ends
        dead = sum(n for (_, outcome), n in ends.items() if outcome == "dead")
        return Ran(ends["ack", "ok"] - self._misfired, ends["nack", "ok"] + ends["defer", "ok"], dead)
