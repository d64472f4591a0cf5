"""One topic as a worker sees it: which slots have work, what is held, and how it is kept and given up."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from time import monotonic
from typing import TYPE_CHECKING, Any

from idemgate.core.calls import Batch
from idemgate.core.messages import Delivery, Settled, Taken
from idemgate.core.topics import Settlement, TopicCalls
from idemgate.errors import StoreError
from idemgate.link.pulse import Beat

if TYPE_CHECKING:
    from idemgate.topic.faces import Topic

__all__ = ["Line"]

log = logging.getLogger("idemgate.worker")
POLL = 1.0
"""Longest sleep, seconds. Hints shorten it; none of them is needed."""
BATCH = 100


class Line:
    """Takes from one topic and settles to it. `held` are the deliveries between take and settle, by fencing token."""

    def __init__(self, topic: Topic) -> None:
        self.topic = topic
        self.gate = topic.opening.gate
        self.held: dict[tuple[int, int], Delivery[Any]] = {}
        self.wake = asyncio.Event()
        self._due: dict[int, float] = {}
        self._offset = 0.0
        self._turn = 0
        self._beat: Beat | None = None
        self._ear = self.gate.aio.link.ear()

    @property
    def calls(self) -> TopicCalls:
        calls = self.topic.opening.calls
        assert calls is not None, "opened before the first take"
        return calls

    async def open(self) -> None:
        """Checks the topic's policy; raises PolicyChanged, StoreError."""
        calls = await self.topic.aio.open()
        self._due = dict.fromkeys(range(calls.policy.slots), 0.0)

    async def listen(self) -> None:
        """Hears of messages that came to be due before everything else."""
        channels = {self.calls.keys(slot)[0]: slot for slot in self._due}

        def heard(channel: bytes, data: bytes | None) -> None:
            slot = channels[channel]
            self._due[slot] = 0.0 if data is None else min(self._due[slot], float(data))
            self.wake.set()

        await asyncio.gather(*(self._ear.add(channel, heard) for channel in channels))
        self.look_again()  # for what was not heard while the subscription was made
        self.wake.set()

    # -- time: the server's, as far as its replies told ------------------------------------------------------------

    def _now(self) -> float:
        clock = self.gate.clock
        return clock.microseconds() / 1000 if clock is not None else monotonic() * 1000 + self._offset

    def _learn(self, slot: int, answer: Taken | Settled) -> None:
        # Never later than what is known already: a hint may have been heard while this answer was under way.
        self._offset = answer.now_ms - monotonic() * 1000
        self._due[slot] = min(self._due[slot], answer.next_due_ms or float("inf"))

    def pause(self) -> float:
        """Seconds until a slot has work; 0 if one has now. After a whole `POLL` every slot is looked at anew."""
        return min(POLL, max(0.0, (min(self._due.values()) - self._now()) / 1000))

    def look_again(self) -> None:
        self._due = dict.fromkeys(self._due, 0.0)

    # -- taking ----------------------------------------------------------------------------------------------------

    async def take(self, room: int) -> list[Delivery[Any]]:
        """At most `room` deliveries from the slots that are due, each time beginning with another slot."""
        found: list[Delivery[Any]] = []
        slots = len(self._due)
        self._turn = (self._turn + 1) % slots
        for number in range(slots):
            slot = (self._turn + number) % slots
            if room > len(found) and self._due[slot] <= self._now():
                found += await self._take(slot, min(room - len(found), BATCH))
        return found

    async def _take(self, slot: int, n: int) -> list[Delivery[Any]]:
        before, self._due[slot] = self._due[slot], float("inf")  # what is heard from here on counts
        try:
            taken = await self.gate.aio.link.run(self.calls.take(slot, n))
        except BaseException:
            self._due[slot] = before
            raise
        return self._kept(slot, taken)

    def _kept(self, slot: int, taken: Taken) -> list[Delivery[Any]]:
        self._learn(slot, taken)
        if taken.lapsed:
            self.gate.counters.add("worker.lapsed", taken.lapsed)
            log.warning("worker.lapsed", extra={"topic": self.topic.name, "count": taken.lapsed})
        self.gate.counters.add("worker.taken", len(taken.deliveries))
        for delivery in taken.deliveries:
            self.held[slot, delivery.token] = delivery
        if taken.deliveries and self._beat is None:
            self._start_beat()
        return taken.deliveries

    # -- keeping ---------------------------------------------------------------------------------------------------

    def _start_beat(self) -> None:
        self._beat = Beat(self.calls.policy.lease / 1000, self._extend, self._all_lost)
        self.gate.pulse.add(self._beat)

    def _extend(self) -> Batch[None]:
        # Called from the heartbeat's thread: look at a copy.
        held = list(self.held.values())
        extending = self.calls.extend_many(held)

        def heard(answers: list[Any]) -> None:
            for delivery, outcome in zip(held, extending.join(answers), strict=True):
                delivery.cancelled = delivery.cancelled or outcome == "cancelled"
                if outcome == "lost" and (delivery.slot, delivery.token) in self.held:
                    self._lose(delivery)

        return Batch(extending.calls, heard)

    def _all_lost(self) -> None:
        self._beat = None
        for delivery in list(self.held.values()):
            self._lose(delivery)

    def _lose(self, delivery: Delivery[Any]) -> None:
        if not delivery.lost:
            delivery.lost = True
            self.gate.counters.add("worker.lease_lost")
            log.warning("worker.lease_lost", extra={"topic": self.topic.name, "token": delivery.token})

    # -- giving up -------------------------------------------------------------------------------------------------

    async def settle(self, settlements: list[Settlement]) -> None:
        """Ends deliveries; while the store is away, tries for as long as their leases may hold, then leaves them to
        lapse."""
        counters = self.gate.counters
        try:
            outcomes = await self.gate.aio.link.run_all(
                self.calls.settle_many(settlements, self._learn), within=self.calls.policy.lease / 1000
            )
            for settlement, outcome in zip(settlements, outcomes, strict=True):
                counters.add(f"worker.{'lost' if outcome == 'lost' else _COUNTED[settlement.verb]}")
                if outcome == "dead":
                    counters.add("worker.dead")
                    facts = {
                        "topic": self.topic.name,
                        "attempt": settlement.delivery.attempt,
                        "failure": settlement.failure,
                    }
                    log.error("worker.dead", extra=facts)
        except StoreError as error:
            counters.add("worker.unsettled", len(settlements))
            log.warning(
                "worker.unsettled",
                extra={"topic": self.topic.name, "count": len(settlements), "error": str(error)},
            )
        finally:
            self.drop(settlement.delivery for settlement in settlements)
            self.wake.set()

    def drop(self, deliveries: Iterable[Delivery[Any]]) -> None:
        for delivery in deliveries:
            self.held.pop((delivery.slot, delivery.token), None)

    async def close(self) -> None:
        if self._beat is not None:
            self.gate.pulse.remove(self._beat)
        await self._ear.close()


_COUNTED = {"ack": "acked", "nack": "nacked", "bury": "buried", "return": "returned", "defer": "deferred"}
