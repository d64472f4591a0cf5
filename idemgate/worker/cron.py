"""Scheduler of a topic's recurring triggers: the next occurrence of each is always in the topic already."""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime
from itertools import islice

from idemgate.core.chunks import BATCH
from idemgate.topics.cron import RecurringTrigger
from idemgate.topics.message import moment
from idemgate.topics.messages import Trigger
from idemgate.worker.poller import Poller

__all__ = ["CronScheduler"]

log = logging.getLogger("idemgate.worker")
_NEVER = datetime.max.replace(tzinfo=UTC)


class CronScheduler:
    """A scheduler of recurring triggers: it enqueues the next occurrence once the previous time has passed.

    It continues after the last occurrence that it enqueued, not after the current time. So a late scheduler skips no
    occurrence. Several workers may enqueue the same occurrence: it is one event of the topic.
    """

    def __init__(self, poller: Poller) -> None:
        """Check the payloads.

        Raises:
            InvalidArgument: The topic cannot accept a payload.
        """
        self.topic, self.context = poller.topic, poller.context
        self.wake = asyncio.Event()
        self._poller = poller
        self._recurring = tuple(poller.topic.definition.recurring.values())
        self._enqueued: dict[str, datetime] = {}
        for recurring in self._recurring:
            poller.topic.definition.build_calls().trigger(Trigger(recurring.name, recurring.payload))

    def pause(self) -> float:
        """Return the seconds until the next occurrence passes, at most one poll interval."""
        if not self._enqueued:
            return 0.0
        return self._poller.seconds_until(min(self._enqueued.values()).timestamp() * 1000)

    async def run_once(self) -> None:
        """Enqueue all occurrences up to now that are missing, and the next one.

        The first run starts at the server's current time.
        """
        now = await self._now()
        if not self._enqueued:
            self._enqueued = dict.fromkeys((recurring.name for recurring in self._recurring), now)
        for recurring in self._recurring:
            if (last := self._enqueued[recurring.name]) <= now:
                self._enqueued[recurring.name] = await self._enqueue(recurring, last, now)

    async def _now(self) -> datetime:
        if not self._enqueued:
            await self._poller.sync_clock(await self.topic.aio.open())
        return moment(int(self._poller.now()))

    async def _enqueue(self, recurring: RecurringTrigger, last: datetime, now: datetime) -> datetime:
        """Enqueue occurrences after `last` until one lies after `now`; return the last one enqueued."""
        triggers: list[Trigger] = []
        for trigger in islice(recurring.after(last), BATCH):
            triggers.append(trigger)
            last = trigger.at or _NEVER
            if last > now:
                break
        else:
            last = last if triggers else _NEVER  # no further occurrence
        receipts = await self.topic.aio.trigger_many(triggers)
        planned = sum(receipt.accepted for receipt in receipts)  # another worker enqueued the rest
        self.context.counters.add("worker.planned", planned)
        facts = {"topic": self.topic.name, "recurring": recurring.name, "next": last.isoformat()}
        log.debug("worker.planned", extra=facts)
        return last
