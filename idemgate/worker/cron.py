"""Recurring triggers of a worker: their scheduler, and the policy for occurrences that it missed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from itertools import islice
from typing import Any

from idemgate.core.calls import MAX_ENTRIES
from idemgate.core.clock import monotonic
from idemgate.errors import DecodeError, InvalidArgument, StoreError
from idemgate.store.context import Context
from idemgate.topics.messages import Delivery, Trigger, moment, replace_payload
from idemgate.topics.recurring import RecurringTrigger
from idemgate.topics.topic import Topic
from idemgate.worker.poller import Poller

__all__ = ["CronScheduler", "Occurrences"]

log: logging.Logger = logging.getLogger("idemgate.worker")
VERIFY = 30.0
"""Seconds within which the scheduler notices that the store lost the next occurrence."""
_NEVER = datetime.max.replace(tzinfo=UTC)


class CronScheduler:
    """A scheduler of recurring triggers: it enqueues the next occurrence once the previous time has passed.

    It continues after the last occurrence that it enqueued, not after the current time. So a late scheduler can make up
    for the occurrences that it missed. Several workers may enqueue the same occurrence: it is one event of the topic.
    """

    def __init__(self, poller: Poller) -> None:
        """Check the payloads.

        Raises:
            InvalidArgument: The topic cannot accept a payload.
        """
        self.topic: Topic[Any, Any] = poller.topic
        self.context: Context = poller.context
        self.wake: asyncio.Event = asyncio.Event()
        self._poller = poller
        self._recurring = tuple(poller.topic.definition.recurring.values())
        self._enqueued: dict[str, datetime] = {}
        self._verified_at = monotonic()
        self._cancelled: dict[str, datetime] = {}
        for recurring in self._recurring:
            poller.calls.trigger(Trigger(recurring.name, recurring.payload))

    def pause(self) -> float:
        """Return the seconds until the next occurrence passes, at most one poll interval."""
        if not self._enqueued:
            return 0.0
        return self._poller.seconds_until(min(self._enqueued.values()).timestamp() * 1000)

    async def run_once(self) -> None:
        """Enqueue the missed occurrences that the policy wants, and the next one.

        The first run starts at the server's current time.
        """
        now = await self._now()
        if not self._enqueued:
            self._enqueued = dict.fromkeys((recurring.name for recurring in self._recurring), now)
        for recurring in self._recurring:
            if (last := self._enqueued[recurring.name]) <= now:
                self._enqueued[recurring.name] = await self._enqueue(recurring, last, now)
        if monotonic() - self._verified_at >= VERIFY:
            await self._verify(now)
            self._verified_at = monotonic()

    async def _now(self) -> datetime:
        if not self._enqueued:
            await self._poller.sync_clock()
        return moment(int(self._poller.now()))

    async def _enqueue(self, recurring: RecurringTrigger, last: datetime, now: datetime) -> datetime:
        """Enqueue occurrences after `last` until one lies after `now`; return the last one enqueued."""
        missed = recurring.find_missed(last, now)
        first = missed or recurring.next_after(now)
        triggers = [] if first is None else [recurring.trigger(first), *self._until(recurring, first, now)]
        self._report_misfires(recurring, last, missed or now)
        # No trigger: there is no further occurrence.
        last = triggers[-1].at or _NEVER if triggers else _NEVER
        receipts = await self.context.aio_link.run_all(self._poller.calls.trigger_many(triggers))
        planned = sum(receipt.accepted for receipt in receipts)  # another worker enqueued the rest
        self.context.counters.add("worker.planned", planned)
        facts = {"topic": self.topic.name, "recurring": recurring.name, "next": last.isoformat()}
        log.debug("worker.planned", extra=facts)
        return last

    def _until(self, recurring: RecurringTrigger, first: datetime, now: datetime) -> Iterable[Trigger]:
        """Yield the occurrences behind `first` up to the next one after `now`, at most a batch."""
        if first <= now:
            for trigger in islice(recurring.after(first), MAX_ENTRIES):
                yield trigger
                if trigger.at is not None and trigger.at > now:
                    return

    def _report_misfires(self, recurring: RecurringTrigger, last: datetime, until: datetime) -> None:
        """Log that the occurrences after `last` and before `until` are left out, if there are any."""
        first = recurring.next_after(last)
        if first is not None and first < until:
            _log_misfire(self.topic.name, recurring, first, until)

    async def _verify(self, now: datetime) -> None:
        """Enqueue the next occurrences that are no longer stored once more, except those that were cancelled."""
        for recurring in self._recurring:
            at = self._enqueued[recurring.name]
            if at <= now or at == _NEVER or at == self._cancelled.get(recurring.name):
                continue
            trigger = recurring.trigger(at)
            stored = await self.context.aio_link.run(self._poller.calls.peek(trigger.key, None))
            if stored.pending is None and stored.in_flight is None:
                await self.context.aio_link.run(self._poller.calls.lookup())  # the store may have lost the policy, too
                receipt = await self.context.aio_link.run(self._poller.calls.trigger(trigger))
                if receipt.accepted:
                    self.context.counters.add("worker.planned")
                    facts = {"topic": self.topic.name, "key": trigger.key}
                    log.warning("worker.planned_again topic=%r key=%r", *facts.values(), extra=facts)
                else:
                    self._cancelled[recurring.name] = at


class Occurrences:
    """The taken occurrences of a topic's recurring triggers: which of them run, and with which payload."""

    def __init__(self, poller: Poller) -> None:
        self._topic = poller.topic
        self._context = poller.context
        self._poller = poller
        self._enqueued: dict[str, datetime] = {}

    async def find_misfired(self, deliveries: Iterable[Delivery[Any]]) -> list[Delivery[Any]]:
        """Return the deliveries that must not run, because they are too late or a newer occurrence replaces them.

        A newer occurrence is stored first. If the store is unavailable, the older one runs. All others get the payload
        that this program declares.
        """
        misfired = list[Delivery[Any]]()
        for delivery in deliveries:
            recurring = self._topic.definition.recurring.get(delivery.key.rpartition("@")[0])
            at = None if recurring is None else recurring.time_of(delivery.key)
            if recurring is not None and at is not None:
                with suppress(DecodeError):  # a corrupt message: the handler meets the error
                    if await self._is_misfired(recurring, at, delivery):
                        misfired.append(delivery)
                    else:
                        self._replace_payload(recurring, delivery)
        return misfired

    async def _is_misfired(self, recurring: RecurringTrigger, at: datetime, delivery: Delivery[Any]) -> bool:
        if delivery.attempt > 1 or delivery.reason != "time":  # it began in time, or a caller wants it now
            return False
        now = moment(int(self._poller.now(delivery.slot)))
        newer = recurring.find_missed(at, now)
        if newer is not None and newer != self._enqueued.get(recurring.name):
            try:
                await self._context.aio_link.run(self._poller.calls.trigger(recurring.trigger(newer)))
            except StoreError:
                return False
            self._enqueued[recurring.name] = newer
        if not recurring.is_late(at, now) and (newer is None or recurring.misfire == "all"):
            return False
        self._context.counters.add("worker.misfired")
        _log_misfire(self._topic.name, recurring, at, newer or now)
        return True

    def _replace_payload(self, recurring: RecurringTrigger, delivery: Delivery[Any]) -> None:
        calls = self._poller.calls
        with suppress(InvalidArgument):  # the topic cannot accept it: the stored one remains
            replace_payload(delivery, calls.pack_trigger(Trigger(delivery.key, recurring.payload))[2])


def _log_misfire(topic: str, recurring: RecurringTrigger, first: datetime, until: datetime) -> None:
    facts = {"topic": topic, "recurring": recurring.name, "first": first.isoformat(), "until": until.isoformat()}
    log.warning("worker.misfired topic=%r recurring=%r first=%s until=%s", *facts.values(), extra=facts)
