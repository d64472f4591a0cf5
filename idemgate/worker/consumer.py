"""Consumer of one topic: takes deliveries, renews their leases and settles them."""

from __future__ import annotations

import logging
from asyncio import Event, gather
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from idemgate.core.activity import TopicTimes
from idemgate.core.calls import Batch, split_batches
from idemgate.core.clock import monotonic
from idemgate.core.validation import is_async
from idemgate.errors import DecodeError, NotDurable, StoreError
from idemgate.store.context import Context
from idemgate.store.held import HeldRenewal
from idemgate.topics.deliveries import Settlement
from idemgate.topics.messages import Delivery, Taken
from idemgate.topics.topic import Topic
from idemgate.topics.topic_calls import TopicCalls
from idemgate.worker.backpressure import Backpressure
from idemgate.worker.cron import Occurrences
from idemgate.worker.handler import build_run, build_run_async
from idemgate.worker.places import TopicPlaces
from idemgate.worker.poller import POLL, Poller

__all__ = ["MAX_SETTLED", "FinishedDelivery", "InFlight", "TopicConsumer", "attempt_number"]

log: logging.Logger = logging.getLogger("idemgate.worker")
MAX_SETTLED = 80


class InFlight:
    """A delivery between take and settlement.

    Attributes:
        until: The lease holds at least until then; see `Held`.
        since: When the delivery was taken, seconds of the gate's clock.
        margin: Seconds of the lease that must be left to start the handler: a renewal interval. A lease with less left
            may end before a renewal reaches the server.
        started: When its handler started, seconds of `monotonic`; 0 before.
        misfired: True for an occurrence of a recurring trigger that must not run.
        settling: True while it is being settled.
    """

    __slots__ = ("consumer", "delivery", "margin", "misfired", "settling", "since", "started", "until")

    def __init__(
        self, consumer: TopicConsumer, delivery: Delivery[Any], until: float, since: float, margin: float
    ) -> None:
        self.consumer: TopicConsumer = consumer
        self.delivery: Delivery[Any] = delivery
        self.until: float = until
        self.since: float = since
        self.margin: float = margin
        self.started: float = 0.0
        self.misfired: bool = False
        self.settling: bool = False

    def is_assigned(self) -> bool:
        """Return True if this worker polls the slot of the delivery."""
        return self.consumer.poller.is_assigned(self.delivery.slot)

    def log_facts(self) -> dict[str, object]:
        """Return the topic and the key for a log record, in this order."""
        return {"topic": self.delivery.topic, "key": self.delivery.key}

    @property
    def is_renewable(self) -> bool:
        """Return False once the lease is known to be lost."""
        return not self.delivery.lost

    def start(self) -> bool:
        """Note that the handler starts now. Return False if too little of the lease is left: then it must not."""
        now = monotonic()
        if self.delivery.lost or self.until <= now + self.margin:
            return False
        self.started = now
        if self.consumer.backpressure.applies:
            self.consumer.backpressure.on_handler_start(self.delivery)
        return True


FinishedDelivery = tuple[InFlight, Settlement]


class TopicConsumer:
    """A consumer of one topic: it takes deliveries and settles them.

    Attributes:
        in_flight: The deliveries between take and settlement.
        ready: Those among them that wait for their handler.
        turn: Number of the last delivery of the topic that started, among those of the worker. The dispatcher sets it.
        places: The topic's places in the worker.
        times: The durations of the topic.
    """

    def __init__(self, poller: Poller) -> None:
        self.poller = poller
        self.topic: Topic[Any, Any] = poller.topic
        self.context: Context = poller.context
        self.wake: Event = poller.wake
        self.in_flight: set[InFlight] = set()
        self.ready: deque[InFlight] = deque()
        self.turn = 0
        self._occurrences = Occurrences(poller)
        self.places: TopicPlaces = TopicPlaces(self.room)
        self.times: TopicTimes = self.context.activity.times_of(self.topic.name)
        self._renewal: HeldRenewal[InFlight] | None = None
        handler = self.topic.definition.handler
        assert handler is not None, "the worker selects topics with a handler only"
        self.is_async: bool = is_async(handler)
        build = build_run_async if self.is_async else build_run
        self.run: Callable[[Delivery[Any]], Any] = build(handler, self.context)
        self.backpressure: Backpressure = Backpressure(self.context, self.topic.name, self.poller.calls.policy.adaptive)
        # With durability, a settlement waits for replicas. A take must neither wait for them nor fail with them.
        self._takes_while_settling = self.context.durability is None

    @property
    def lease(self) -> float:
        """The lease of a delivery, seconds."""
        return self.poller.calls.policy.lease / 1000

    def pause(self) -> float:
        """Return the seconds until the topic may take messages and a slot has work, at most one poll interval."""
        pause = self.poller.pause()
        return min(POLL, max(pause, self.backpressure.pause)) if self.backpressure.applies else pause

    def room(self, free: int) -> int:
        """Return how many of `free` places this topic may use: all, or what its backpressure leaves."""
        if not self.backpressure.applies:
            return free
        return self.backpressure.room(free, len(self.in_flight) + self.places.requested)

    # -- taking ----------------------------------------------------------------------------------------------------

    async def take(self, room: int) -> list[InFlight]:
        """Take at most `room` deliveries from the due slots; each call begins with another slot."""
        taken: list[InFlight] = []
        await self.poller.refresh_layout()
        calls = self.poller.calls
        for slot in self.poller.due_slots(calls):
            if room > len(taken) and self.poller.is_assigned(slot):
                until, take = monotonic() + self.lease, calls.take(slot, min(room - len(taken), MAX_SETTLED))
                try:
                    taken += self._accept(await self.poller.execute(slot, take), until)
                except StoreError:
                    if not taken:
                        raise
                    break  # run what was taken first; the next call meets the error again
        return taken if not self.topic.definition.recurring else await self._mark_misfired(taken)

    async def _mark_misfired(self, taken: list[InFlight]) -> list[InFlight]:
        misfired = await self._occurrences.find_misfired([entry.delivery for entry in taken])
        for entry in taken:
            entry.misfired = entry.delivery in misfired
        return taken

    def _accept(self, taken: Taken, until: float) -> list[InFlight]:
        """Register taken deliveries as in flight and renew their leases from now on."""
        if taken.lapsed:
            self.context.counters.add("worker.lapsed", taken.lapsed)
            log.warning("worker.lapsed", extra={"topic": self.topic.name, "count": taken.lapsed})
        if not taken.deliveries:
            return []
        self.context.counters.add("worker.taken", len(taken.deliveries))
        if self.times.lateness.begin(monotonic()):
            for delivery in taken.deliveries:
                self.times.lateness.add((taken.now_ms - delivery.due_ms) / 1000)
        since, margin = self.context.now(), self.lease / 6
        accepted = [InFlight(self, delivery, until, since, margin) for delivery in taken.deliveries]
        self.in_flight.update(accepted)
        if self._renewal is None:
            self._renewal = HeldRenewal(self.lease, self, expires=True)
            self.context.heartbeat.add(self._renewal)
        self._renewal.last = min(self._renewal.last, until - self.lease)  # so that `overdue` is not called too late
        if until < monotonic() + self.lease / 2:  # the reply was late, or the process stalled
            self.context.heartbeat.hasten(self._renewal)
        return accepted

    # -- lease renewal: the `Holder` of `HeldRenewal`, in the heartbeat's thread --------------------------------------

    def copy_held(self) -> set[InFlight]:
        """Return the deliveries in flight."""
        return self.in_flight.copy()

    def split_renewal(self, held: Iterable[InFlight], alone: bool) -> Iterable[list[InFlight]]:
        """Split deliveries by slot. After an error about data, each has its own renewal: one of them is corrupt."""
        parts = defaultdict[object, list[InFlight]](list)
        for entry in held:
            parts[entry if alone else self.poller.calls.slot_of_delivery(entry.delivery)].append(entry)
        return parts.values()

    def build_renewal(self, part: Sequence[InFlight]) -> Batch[list[bool]]:
        """Build the calls that extend leases. Their answer also tells which deliveries are cancelled."""
        extending = self.poller.calls.extend_many([entry.delivery for entry in part])

        def join(answers: list[Any]) -> list[bool]:
            outcomes = extending.join(answers)
            for entry, outcome in zip(part, outcomes, strict=True):
                if outcome != "lost":
                    entry.delivery.cancelled = outcome == "cancelled"
            return [outcome != "lost" for outcome in outcomes]

        return Batch(extending.calls, join)

    def mark_lost(self, entry: InFlight) -> None:
        """Mark a delivery as lost, which its handler sees; count and log it."""
        self.context.counters.add("worker.lease_lost")
        entry.delivery.lost = True
        facts = entry.log_facts()
        log.warning("worker.lease_lost topic=%r key=%r", *facts.values(), extra=facts | {"token": entry.delivery.token})

    # -- settling --------------------------------------------------------------------------------------------------

    async def settle(self, finished: list[FinishedDelivery], room: int) -> list[InFlight]:
        """Settle deliveries, and take at most `room` from their slots in the same script calls.

        If the store is unavailable, retry for as long as the leases may hold, then let them expire.

        Returns:
            The deliveries taken.
        """
        for entry, _ in finished:
            entry.settling = True
        calls, parts = self.poller.calls, list[Coroutine[Any, Any, list[InFlight]]]()
        most = min(MAX_SETTLED, calls.max_settlements([settlement for _, settlement in finished]))
        for slot, part in _split_into_calls(calls, finished, most):
            n = min(room, most) if self._takes_while_settling and self.poller.has_work(slot) else 0
            room -= n
            parts.append(self._settle_part(calls, slot, part, n))
        if len(parts) == 1:
            taken = await parts[0]
        else:
            taken = [entry for part in await gather(*parts) for entry in part]
        return taken if not self.topic.definition.recurring else await self._mark_misfired(taken)

    async def _settle_part(
        self, calls: TopicCalls, slot: int, finished: list[FinishedDelivery], n: int
    ) -> list[InFlight]:
        settlements = [settlement for _, settlement in finished]
        taken, sent = list[InFlight](), monotonic()
        until = sent + self.lease
        try:
            if n > 0:
                turned = await self.poller.execute(slot, calls.settle_and_take(slot, settlements, n), self.lease)
                settled, taken = turned.settled, self._accept(turned.taken, until)
            else:
                settled = await self.context.aio_link.run(calls.settle(slot, settlements), self.lease)
                self.poller.record_reply(slot, settled, sent)
            self._count_outcomes(settlements, settled.outcomes)
            if (tracer := self.context.tracer) is not None:
                tracer.record_settlements(self.topic.name, settlements, settled.outcomes, monotonic() - sent)
        except StoreError as error:
            if (tracer := self.context.tracer) is not None:
                tracer.record_settlements(
                    self.topic.name, settlements, ["unknown"] * len(settlements), monotonic() - sent
                )
            name = "worker.not_durable" if isinstance(error, NotDurable) else "worker.unsettled"
            self.context.counters.add(name, len(settlements))
            facts = {"topic": self.topic.name, "count": len(settlements), "error": str(error)}
            log.error(name, extra=facts)  # noqa: TRY400 - the traceback of a store error adds nothing
        finally:
            self.drop([entry for entry, _ in finished])
        return taken

    def _count_outcomes(self, settlements: list[Settlement], outcomes: list[str]) -> None:
        verbs, total = [settlement.verb for settlement in settlements], len(settlements)
        if verbs.count("ack") == outcomes.count("ok") == total:  # the most frequent case
            counted = {("ack", "ok"): total}
        else:
            counted = Counter(zip(verbs, outcomes, strict=True))
        for (verb, outcome), n in counted.items():
            self.context.counters.add("worker.lost" if outcome == "lost" else f"worker.{_COUNTER_OF_VERB[verb]}", n)
        if self.poller.calls.policy.merge.drops:
            self._count_dropped(settlements, outcomes)
        if "dead" in outcomes:
            for settlement, outcome in zip(settlements, outcomes, strict=True):
                if outcome == "dead":
                    self._report_dead(settlement)

    def _count_dropped(self, settlements: list[Settlement], outcomes: list[str]) -> None:
        """Count the dropped items of deliveries that end. A retry still holds them, and a partial one does not."""
        dropped = sum(
            _dropped_items(settlement.delivery)
            for settlement, outcome in zip(settlements, outcomes, strict=True)
            if outcome == "dead" or (outcome == "ok" and (settlement.verb == "ack" or settlement.part is not None))
        )
        if dropped:
            self.context.counters.add("worker.items_dropped", dropped)

    def _report_dead(self, settlement: Settlement) -> None:
        self.context.counters.add("worker.dead")
        key, failure = settlement.delivery.key, settlement.failure
        log.error(
            "worker.dead topic=%r key=%r failure=%r", self.topic.name, key, failure,
            extra={
                "topic": self.topic.name, "key": key, "attempt": attempt_number(settlement.delivery), "failure": failure
            },
        )  # fmt: skip

    def update_slots(self) -> None:
        """Move the in-flight deliveries to their slots in the topic's new layout."""
        for entry in self.in_flight:
            entry.delivery.slot = self.poller.calls.slot_of_delivery(entry.delivery)

    def drop(self, entries: Iterable[InFlight]) -> None:
        """Forget deliveries. Their leases expire, unless the deliveries were settled."""
        self.in_flight.difference_update(entries)
        self.wake.set()

    def close(self) -> None:
        """Stop renewing leases."""
        self.in_flight.clear()
        if self._renewal is not None:
            self.context.heartbeat.remove(self._renewal)


def _split_into_calls(
    calls: TopicCalls, finished: list[FinishedDelivery], most: int
) -> Iterable[tuple[int, list[FinishedDelivery]]]:
    """Split settlements into script calls: one slot each, at most `most`, and at most 128 KiB or a single one."""
    by_slot: dict[int, list[FinishedDelivery]] = {0: finished}
    if calls.policy.slots > 1:
        by_slot = defaultdict(list)
        for pair in finished:
            by_slot[calls.slot_of_delivery(pair[1].delivery)].append(pair)
    for slot, pairs in by_slot.items():
        for part in split_batches(pairs, lambda pair: pair[1].size, most):
            yield slot, part


_COUNTER_OF_VERB = {"ack": "acked", "nack": "nacked", "bury": "buried", "return": "returned", "defer": "deferred"}


def attempt_number(delivery: Delivery[Any]) -> int | None:
    """Return the number of the attempt; None if the message cannot be decoded."""
    try:
        return delivery.attempt
    except DecodeError:
        return None


def _dropped_items(delivery: Delivery[Any]) -> int:
    """Return the number of dropped items; 0 if the message cannot be decoded."""
    try:
        return delivery.dropped
    except DecodeError:
        return 0
