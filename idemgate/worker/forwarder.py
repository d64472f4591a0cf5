"""Forwarder of a topic whose due messages go to a Redis list or stream."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from idemgate.core.calls import MAX_ENTRIES, run_plan_async
from idemgate.errors import ServerRejected
from idemgate.topics.deliveries import plan_trim
from idemgate.topics.messages import Forward, Forwarded
from idemgate.topics.topic import Topic
from idemgate.topics.topic_calls import TopicCalls
from idemgate.worker.poller import Poller

__all__ = ["Forwarder"]

log: logging.Logger = logging.getLogger("idemgate.worker")
TRIM_INTERVAL = 10.0
"""Shortest time between two trims of a topic's streams, seconds."""


class Forwarder:
    """A forwarder of the due messages of one topic.

    Several workers may forward the same topic: each message is forwarded by one of them.
    """

    def __init__(self, poller: Poller, target: Forward) -> None:
        self.poller = poller
        self.topic: Topic[Any, Any] = poller.topic
        self.wake: asyncio.Event = poller.wake
        self._target = target
        self._trims_at = 0.0 if target.trim else float("inf")

    def pause(self) -> float:
        """Return the seconds until a slot has work, at most one poll interval; 0 if one has work now."""
        return self.poller.pause()

    async def run_once(self) -> int:
        """Forward at most 100 messages of each due slot, and trim the streams from time to time.

        Returns:
            The number of messages that it forwarded.

        Raises:
            StoreError: A slot failed. The other slots were still processed.
        """
        await self.poller.refresh_layout()
        calls = self.poller.calls
        sends = (self._forward_slot(calls, slot) for slot in self.poller.due_slots(calls))
        ends = await asyncio.gather(*sends, self._trim(), return_exceptions=True)
        for end in ends:
            if isinstance(end, BaseException):
                raise end
        return sum(sent for sent in ends if isinstance(sent, int))

    async def _trim(self) -> None:
        """Remove what every consumer group has acknowledged."""
        context = self.poller.context
        if (now := context.now()) < self._trims_at:
            return
        self._trims_at = now + TRIM_INTERVAL
        try:
            context.counters.add("worker.trimmed", await self._trim_streams())
        except ServerRejected as error:  # an access list without these commands must not stop the forwarding
            self._trims_at = float("inf")
            facts = {"topic": self.topic.name, "error": str(error)}
            log.warning("worker.not_trimmed topic=%r error=%r", *facts.values(), extra=facts)

    async def _trim_streams(self) -> int:
        """Trim the target streams; return the number of removed entries."""
        command, target, removed = self.poller.context.aio_link.command, self._target.target, 0
        for stream in self.poller.calls.outboxes() if target is None else [target]:
            removed += await run_plan_async(plan_trim(stream), lambda words: command(*words))
        return removed

    async def _forward_slot(self, calls: TopicCalls, slot: int) -> int:
        counters = self.poller.context.counters
        reply: Forwarded = await self.poller.execute(slot, calls.forward(slot, self._target, MAX_ENTRIES))
        counters.add("worker.forwarded", reply.sent)
        if not reply.sent and 0 < reply.next_due_ms <= reply.now_ms:
            # The topic once had a handler, and the lease of a delivery expired. An empty take requeues its message.
            swept = await self.poller.execute(slot, calls.take(slot, 0))
            counters.add("worker.lapsed", swept.lapsed)
            log.warning("worker.lapsed", extra={"topic": self.topic.name, "count": swept.lapsed})
        return reply.sent
