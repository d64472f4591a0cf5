"""One topic as a worker sees it: what is taken and held, and how it is kept and given up."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from time import monotonic
from typing import Any

from idemgate.core.calls import Batch
from idemgate.core.functions import awaited
from idemgate.core.messages import Delivery, Taken
from idemgate.core.topics import Settlement, TopicCalls
from idemgate.errors import NotDurable, StoreError
from idemgate.link.pulse import Beat
from idemgate.work.due import Due
from idemgate.work.handling import Handler
from idemgate.work.limiter import Limiter

__all__ = ["Line"]

log = logging.getLogger("idemgate.worker")
BATCH = 100


class _Held:
    """A delivery between take and settle. `until` is how long its lease certainly holds (monotonic seconds); `ending`
    is set while it is being settled, when the store may rightly say that it is ours no more."""

    __slots__ = ("delivery", "ending", "until")

    def __init__(self, delivery: Delivery[Any], until: float) -> None:
        self.delivery = delivery
        self.until = until
        self.ending = False


class Line:
    """Takes from one topic and settles to it. `held` are the deliveries between take and settle, by fencing token."""

    def __init__(self, due: Due) -> None:
        self.due = due
        self.topic, self.gate, self.wake = due.topic, due.gate, due.wake
        self.held: dict[tuple[int, int], _Held] = {}
        self._beat: Beat | None = None
        handler = self.topic.opening.handler
        assert handler is not None, "chosen for having one"
        self.handler: Handler = handler
        self.awaits = awaited(handler)
        adaptive = self.calls.policy.adaptive
        self.limiter = None if adaptive is None else Limiter(self.gate, self.topic.name, adaptive)

    @property
    def calls(self) -> TopicCalls:
        calls = self.topic.opening.calls
        assert calls is not None, "opened before the first take"
        return calls

    @property
    def lease(self) -> float:
        return self.calls.policy.lease / 1000

    def pause(self) -> float:
        return self.due.pause()

    # -- limiting --------------------------------------------------------------------------------------------------

    def room(self, free: int) -> int:
        """How many of `free` places this topic may have: all of them, unless it adapts to its downstream."""
        return free if self.limiter is None else min(free, self.limiter.limit - len(self.held))

    def began(self, delivery: Delivery[Any]) -> None:
        """Its handler starts now."""
        if self.limiter is not None:
            self.limiter.began(delivery)

    def ended(self, delivery: Delivery[Any], error: BaseException | None) -> None:
        """Its handler ended; it is held until it is settled."""
        if self.limiter is not None:
            self.limiter.ended(delivery, error)

    # -- taking ----------------------------------------------------------------------------------------------------

    async def take(self, room: int) -> list[Delivery[Any]]:
        """At most `room` deliveries from the slots that are due, each time beginning with another slot."""
        found: list[Delivery[Any]] = []
        calls = self.calls
        for slot in self.due.slots(calls):
            if room > len(found) and self.due.is_mine(slot):
                try:
                    found += await self._take(calls, slot, min(room - len(found), BATCH))
                except StoreError:
                    if not found:
                        raise
                    break  # what was taken before has to run; the error will be met again
        return found

    async def _take(self, calls: TopicCalls, slot: int, n: int) -> list[Delivery[Any]]:
        until = monotonic() + self.lease
        return self._kept(slot, await self.due.ask(slot, calls.take(slot, n)), until)

    def _kept(self, slot: int, taken: Taken, until: float) -> list[Delivery[Any]]:
        if taken.lapsed:
            self.gate.counters.add("worker.lapsed", taken.lapsed)
            log.warning("worker.lapsed", extra={"topic": self.topic.name, "count": taken.lapsed})
        self.gate.counters.add("worker.taken", len(taken.deliveries))
        for delivery in taken.deliveries:
            self.held[slot, delivery.token] = _Held(delivery, until)
            if delivery.dropped:
                self.gate.counters.add("worker.items_dropped", delivery.dropped)
        if taken.deliveries and self._beat is None:
            self._beat = Beat(self.lease, self._extend, self._overdue)
            self.gate.pulse.add(self._beat)
        return taken.deliveries

    # -- keeping: called from the heartbeat's thread, so it looks at copies ------------------------------------------

    def _extend(self) -> Batch[None]:
        held = [one for one in tuple(self.held.values()) if not one.delivery.lost]
        until = monotonic() + self.lease
        extending = self.calls.extend_many([one.delivery for one in held])

        def heard(answers: list[Any]) -> None:
            for one, outcome in zip(held, extending.join(answers), strict=True):
                if outcome == "lost":
                    self._lose(one)
                else:
                    one.until = until
                    one.delivery.cancelled = outcome == "cancelled"

        return Batch(extending.calls, heard)

    def _overdue(self) -> None:
        """No heartbeat came through for long: those whose lease may end before the next try are lost."""
        soon = monotonic() + self.lease / 6
        for one in tuple(self.held.values()):
            if one.until <= soon:
                self._lose(one)

    def _lose(self, one: _Held) -> None:
        delivery = one.delivery
        if not one.ending and not delivery.lost:
            delivery.lost = True
            self.gate.counters.add("worker.lease_lost")
            log.warning("worker.lease_lost", extra={"topic": self.topic.name, "token": delivery.token})

    # -- giving up -------------------------------------------------------------------------------------------------

    async def settle(self, settlements: list[Settlement]) -> None:
        """Ends deliveries; while the store is away, tries for as long as their leases may hold, then leaves them to
        lapse."""
        for settlement in settlements:
            if (one := self.held.get((settlement.delivery.slot, settlement.delivery.token))) is not None:
                one.ending = True
        try:
            outcomes = await self.gate.aio.link.run_all(
                self.calls.settle_many(settlements, self.due.learn), within=self.lease
            )
            self._count(settlements, outcomes)
        except StoreError as error:
            name = "worker.not_durable" if isinstance(error, NotDurable) else "worker.unsettled"
            self.gate.counters.add(name, len(settlements))
            facts = {"topic": self.topic.name, "count": len(settlements), "error": str(error)}
            log.error(name, extra=facts)  # noqa: TRY400 - the store is away: its traceback tells nothing
        finally:
            self.drop(settlement.delivery for settlement in settlements)

    def _count(self, settlements: list[Settlement], outcomes: list[str]) -> None:
        counted = Counter(
            "lost" if outcome == "lost" else _COUNTED[settlement.verb]
            for settlement, outcome in zip(settlements, outcomes, strict=True)
        )
        for name, n in counted.items():
            self.gate.counters.add(f"worker.{name}", n)
        if "dead" in outcomes:
            for settlement, outcome in zip(settlements, outcomes, strict=True):
                if outcome == "dead":
                    self._tell_dead(settlement)

    def _tell_dead(self, settlement: Settlement) -> None:
        self.gate.counters.add("worker.dead")
        attempt, failure = settlement.delivery.attempt, settlement.failure
        log.error("worker.dead", extra={"topic": self.topic.name, "attempt": attempt, "failure": failure})

    def drop(self, deliveries: Iterable[Delivery[Any]]) -> None:
        """Holds these no more: their leases run out, unless they were settled."""
        for delivery in deliveries:
            self.held.pop((delivery.slot, delivery.token), None)
        self.wake.set()

    def close(self) -> None:
        """Keeps nothing alive any more."""
        self.held.clear()
        if self._beat is not None:
            self.gate.pulse.remove(self._beat)


_COUNTED = {"ack": "acked", "nack": "nacked", "bury": "buried", "return": "returned", "defer": "deferred"}
