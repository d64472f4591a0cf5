"""A broker in this process: the smallest transport of the consumer contract, with faults to plant."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Literal

from idemgate import Gate
from idemgate.testing import Transport
from idemgate.testing.contract import LEASE, MAX_ATTEMPTS, SCOPE, Handler

__all__ = ["FAULTS", "Fault", "MemoryTransport", "OrderedTransport"]

Fault = Literal["none", "no guard", "no fingerprint", "hot loop", "no retry", "endless retry", "lost at kill",
                "cancelled at stop", "serial", "waiting counts as failing", "passed by a retry"]  # fmt: skip
FAULTS: dict[Fault, set[str]] = {
    "no guard": {
        "test_copies_run_once",
        "test_a_completed_message_is_not_run_again_after_a_crash",
        "test_a_message_in_progress_elsewhere_returns_later",
        "test_a_conflict_becomes_a_dead_letter",
    },
    "waiting counts as failing": {"test_a_message_in_progress_elsewhere_is_no_failure"},
    "no fingerprint": {"test_a_conflict_becomes_a_dead_letter"},
    "hot loop": {"test_a_message_in_progress_elsewhere_returns_later"},
    "no retry": {
        "test_a_failed_message_is_retried",
        "test_a_message_that_always_fails_becomes_a_dead_letter",
    },
    "endless retry": {"test_a_message_that_always_fails_becomes_a_dead_letter"},
    "lost at kill": {
        "test_a_message_of_a_killed_consumer_runs_again",
        "test_a_completed_message_is_not_run_again_after_a_crash",
    },
    "cancelled at stop": {"test_a_graceful_stop_leaves_no_message_half_done"},
    "serial": {"test_two_messages_run_at_once"},
    "passed by a retry": {"test_messages_stay_in_order"},
}
"""Faults of a consumer, and the tests of the contract that must find each of them."""


@dataclass
class Message:
    id: str
    body: bytes
    attempts: int = 0


class MemoryTransport(Transport):
    def __init__(self, gate: Gate, fault: Fault = "none") -> None:
        super().__init__(gate)
        self.fault = fault
        self.waiting: deque[Message] = deque()
        self.delayed: set[asyncio.TimerHandle] = set()
        self.dead: list[bytes] = []

    async def publish(self, message_id: str, body: bytes) -> None:
        self.waiting.append(Message(message_id, body))

    async def start(self, handler: Handler, *, acknowledges: bool = True) -> MemoryConsumer:
        return MemoryConsumer(self, handler, acknowledges)

    async def is_empty(self) -> bool:
        return not self.waiting and not any(timer.when() > timer._loop.time() for timer in self.delayed)

    async def list_dead_letters(self) -> list[bytes]:
        return self.dead

    async def requeue(self, message: Message, seconds: float) -> None:
        self.delayed.add(asyncio.get_running_loop().call_later(seconds, self.waiting.append, message))


class OrderedTransport(MemoryTransport):
    """A broker whose messages are of one partition. A message that is retried holds up the others."""

    is_concurrent = False
    is_ordered = True

    async def requeue(self, message: Message, seconds: float) -> None:
        if self.fault == "passed by a retry":
            return await super().requeue(message, seconds)
        await asyncio.sleep(seconds)
        return self.waiting.appendleft(message)


class MemoryConsumer:
    def __init__(self, transport: MemoryTransport, handler: Handler, acknowledges: bool) -> None:
        self.transport, self.handler, self.acknowledges = transport, handler, acknowledges
        self.guard = transport.gate.guard(SCOPE, lease=LEASE)
        self.concurrency = 1 if transport.fault == "serial" or transport.is_ordered else 4
        self.running: dict[asyncio.Task[None], Message] = {}
        self.unacknowledged: list[Message] = []
        self.loop = asyncio.create_task(self._consume())

    async def _consume(self) -> None:
        while True:
            while self.transport.waiting and len(self.running) < self.concurrency:
                message = self.transport.waiting.popleft()
                task = asyncio.create_task(self._handle(message))
                self.running[task] = message
                task.add_done_callback(self.running.pop)
            await asyncio.sleep(0.002)

    async def _handle(self, message: Message) -> None:
        fault = self.transport.fault
        message_id = self.transport.count(message.id)
        key = f"{message_id} {self.transport.deliveries[message_id]}" if fault == "no guard" else message_id
        fingerprint = None if fault == "no fingerprint" else message.body
        verdict = await self.guard.aio.run(key, self.handler, message.id, message.body, fingerprint=fingerprint)
        if verdict.outcome in ("handled", "duplicate"):
            if not self.acknowledges:
                self.unacknowledged.append(message)
        elif verdict.outcome == "in_progress" and fault != "waiting counts as failing":
            await self.transport.requeue(message, 0 if fault == "hot loop" else verdict.retry_after or 0.01)
        elif verdict.outcome == "rejected":
            self.transport.dead.append(message.body)
        elif fault != "no retry":
            message.attempts += 1
            if message.attempts == MAX_ATTEMPTS and fault != "endless retry":
                self.transport.dead.append(message.body)
            else:
                await self.transport.requeue(message, 0.01)

    async def stop(self) -> None:
        self.loop.cancel()
        if self.transport.fault == "cancelled at stop":
            await self._cancel()
        while self.running:
            await asyncio.wait(self.running)

    async def kill(self) -> None:
        self.loop.cancel()
        left = [*self.unacknowledged, *self.running.values()]
        await self._cancel()
        if self.transport.fault != "lost at kill":
            self.transport.waiting.extend(left)

    async def _cancel(self) -> None:
        for task in self.running:
            task.cancel()
        while self.running:
            await asyncio.wait(self.running)
