"""A topic whose due messages are sent on, as a worker sees it."""

from __future__ import annotations

import asyncio
import logging

from idemgate.core.chunks import BATCH
from idemgate.topics.calls import TopicCalls
from idemgate.topics.messages import Forward, Forwarded
from idemgate.worker.poller import Due

__all__ = ["Forwarding"]

log = logging.getLogger("idemgate.worker")


class Forwarding:
    """Sends on what is due. Several may do so for the same topic: each message is sent by one of them."""

    def __init__(self, due: Due, to: Forward) -> None:
        self.due = due
        self.topic, self.wake = due.topic, due.wake
        self._to = to

    def pause(self) -> float:
        """Seconds until a slot has work, at most a poll; 0 if one has now."""
        return self.due.pause()

    async def turn(self) -> None:
        """Sends on at most 500 messages of each slot that has some. A slot that fails does not keep the others from
        it; then raises StoreError."""
        await self.due.inquire()
        calls = await self.topic.aio.open()
        sending = (self._send(calls, slot) for slot in self.due.slots(calls))
        answers = await asyncio.gather(*sending, return_exceptions=True)
        for answer in answers:
            if answer is not None:
                raise answer

    async def _send(self, calls: TopicCalls, slot: int) -> None:
        counters = self.due.context.counters
        answer: Forwarded = await self.due.ask(slot, calls.forward(slot, self._to, BATCH))
        counters.add("worker.forwarded", answer.sent)
        if not answer.sent and 0 < answer.next_due_ms <= answer.now_ms:
            # The lease of a delivery ended, from when the topic had a handler: its message has to come back first.
            swept = await self.due.ask(slot, calls.take(slot, 0))
            counters.add("worker.lapsed", swept.lapsed)
            log.warning("worker.lapsed", extra={"topic": self.topic.name, "count": swept.lapsed})
