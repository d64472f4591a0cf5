"""The recurring triggers of a topic, planned ahead: the next occurrence of each is always in the topic already."""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime
from itertools import islice

from idemgate.core.chunks import BATCH
from idemgate.topics.cron import Recurring
from idemgate.topics.messages import Trigger, moment
from idemgate.worker.poller import Due

__all__ = ["Planner"]

log = logging.getLogger("idemgate.worker")
_NEVER = datetime.max.replace(tzinfo=UTC)


class Planner:
    """Plans the next occurrence of each recurring trigger, and when that has come the one after it.

    It goes on after the last one that it planned, not after now: while it lives no occurrence is skipped, however late
    it is. Several may plan the same: an occurrence is one event of the topic.
    """

    def __init__(self, due: Due) -> None:
        """Raises InvalidArgument for a payload that the topic cannot take."""
        self.topic, self.context = due.topic, due.context
        self.wake = asyncio.Event()
        self._due = due
        self._recurring = tuple(due.topic.opening.recurring.values())
        self._planned: dict[str, datetime] = {}
        for one in self._recurring:
            due.topic.opening.provisional().trigger(Trigger(one.name, one.payload))

    def pause(self) -> float:
        """Seconds until an occurrence comes after which another one has to be planned, at most a poll."""
        if not self._planned:
            return 0.0
        return self._due.left(min(self._planned.values()).timestamp() * 1000)

    async def turn(self) -> None:
        """Plans what came since the last planned occurrence, and the next one; the first time, after the server's
        now."""
        now = await self._now()
        if not self._planned:
            self._planned = dict.fromkeys((one.name for one in self._recurring), now)
        for one in self._recurring:
            if (last := self._planned[one.name]) <= now:
                self._planned[one.name] = await self._plan(one, last, now)

    async def _now(self) -> datetime:
        if not self._planned:
            await self._due.look_at_the_clock(await self.topic.aio.open())
        return moment(int(self._due.now()))

    async def _plan(self, one: Recurring, last: datetime, now: datetime) -> datetime:
        """The last one that is planned now."""
        found: list[Trigger] = []
        for trigger in islice(one.after(last), BATCH):
            found.append(trigger)
            last = trigger.at or _NEVER
            if last > now:
                break
        else:
            last = last if found else _NEVER  # it has no occurrence any more
        receipts = await self.topic.aio.trigger_many(found)
        planned = sum(receipt.accepted for receipt in receipts)  # the others were planned by somebody else
        self.context.counters.add("worker.planned", planned)
        log.debug("worker.planned", extra={"topic": self.topic.name, "recurring": one.name, "next": last.isoformat()})
        return last
