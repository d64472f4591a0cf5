"""One topic as a worker sees it: what is taken and held, and how it is kept and given up."""

from __future__ import annotations

import logging
from asyncio import gather
from collections import Counter, defaultdict
from collections.abc import Coroutine, Iterable
from time import monotonic
from typing import Any

from idemgate.core.calls import Batch
from idemgate.core.chunks import portions
from idemgate.core.functions import awaited
from idemgate.errors import NotDurable, StoreError
from idemgate.store.heartbeat import Beat
from idemgate.topics.calls import Settlement, TopicCalls, most_of
from idemgate.topics.messages import Delivery, Taken
from idemgate.worker.handler import Handler
from idemgate.worker.limiter import Limiter
from idemgate.worker.outcome import attempt_of
from idemgate.worker.poller import Due

__all__ = ["BATCH", "Ending", "Held", "Line"]

log = logging.getLogger("idemgate.worker")
BATCH = 80


class Held:
    """A delivery of a line between take and settle. `until` is how long its lease certainly holds (monotonic seconds),
    `since` when it was taken (seconds of the gate's clock); `ending` is set while it is being settled, when the store
    may rightly say that it is ours no more."""

    __slots__ = ("delivery", "ending", "line", "since", "until")

    def __init__(self, line: Line, delivery: Delivery[Any], until: float, since: float) -> None:
        self.line = line
        self.delivery = delivery
        self.until = until
        self.since = since
        self.ending = False

    def mine(self) -> bool:
        """Whether it is of a slot that this worker serves."""
        return self.line.due.is_mine(self.delivery.slot)


Ending = tuple[Held, Settlement]


class Line:
    """Takes from one topic and settles to it. `held` are the deliveries between take and settle."""

    def __init__(self, due: Due) -> None:
        self.due = due
        self.topic, self.context, self.wake = due.topic, due.context, due.wake
        self.held: set[Held] = set()
        self._beat: Beat | None = None
        handler = self.topic.opening.handler
        assert handler is not None, "chosen for having one"
        self.handler: Handler = handler
        self.awaits = awaited(handler)
        adaptive = self.calls.policy.adaptive
        self.limiter = None if adaptive is None else Limiter(self.context, self.topic.name, adaptive)
        # Where ending a delivery waits for copies of it, taking the next must not, nor fail with it.
        self._turns = self.context.durability is None

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

    async def take(self, room: int) -> list[Held]:
        """At most `room` deliveries from the slots that are due, each time beginning with another slot."""
        found: list[Held] = []
        await self.due.inquire()
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

    async def _take(self, calls: TopicCalls, slot: int, n: int) -> list[Held]:
        until = monotonic() + self.lease
        return self._kept(await self.due.ask(slot, calls.take(slot, n)), until)

    def _kept(self, taken: Taken, until: float) -> list[Held]:
        if taken.lapsed:
            self.context.counters.add("worker.lapsed", taken.lapsed)
            log.warning("worker.lapsed", extra={"topic": self.topic.name, "count": taken.lapsed})
        if not taken.deliveries:
            return []
        self.context.counters.add("worker.taken", len(taken.deliveries))
        if self.calls.policy.merge.drops and (dropped := sum(one.dropped for one in taken.deliveries)):
            self.context.counters.add("worker.items_dropped", dropped)
        since = self.context.now()
        found = [Held(self, delivery, until, since) for delivery in taken.deliveries]
        self.held.update(found)
        if self._beat is None:
            self._beat = Beat(self.lease, self._extend, self._overdue)
            self.context.heartbeat.add(self._beat)
        return found

    # -- keeping: called from the heartbeat's thread, so it looks at copies ------------------------------------------

    def _extend(self) -> Batch[None]:
        held = [one for one in tuple(self.held) if not one.delivery.lost]
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
        for one in tuple(self.held):
            if one.until <= soon:
                self._lose(one)

    def _lose(self, one: Held) -> None:
        delivery = one.delivery
        if not one.ending and not delivery.lost:
            delivery.lost = True
            self.context.counters.add("worker.lease_lost")
            log.warning("worker.lease_lost", extra={"topic": self.topic.name, "token": delivery.token})

    # -- giving up -------------------------------------------------------------------------------------------------

    async def settle(self, endings: list[Ending], room: int) -> list[Held]:
        """Ends deliveries, and takes at most `room` in the same step, from those of their slots that have work.

        While the store is away, tries for as long as their leases may hold, then leaves them to lapse.
        """
        for held, _ in endings:
            held.ending = True
        calls, turns = self.calls, list[Coroutine[Any, Any, list[Held]]]()
        most = min(BATCH, most_of([settlement for _, settlement in endings]))
        for slot, some in _parts(calls, endings, most):
            n = min(room, most) if self._turns and self.due.has_work(slot) else 0
            room -= n
            turns.append(self._turn(calls, slot, some, n))
        return await turns[0] if len(turns) == 1 else [held for found in await gather(*turns) for held in found]

    async def _turn(self, calls: TopicCalls, slot: int, endings: list[Ending], n: int) -> list[Held]:
        settlements = [settlement for _, settlement in endings]
        found, asked = list[Held](), monotonic()
        until = asked + self.lease
        try:
            if n > 0:
                turned = await self.due.ask(slot, calls.turn(slot, settlements, n), self.lease)
                settled, found = turned.settled, self._kept(turned.taken, until)
            else:
                settled = await self.context.aio_link.run(calls.settle(slot, settlements), self.lease)
                self.due.learn(slot, settled, asked)
            self._count(settlements, settled.outcomes)
        except StoreError as error:
            name = "worker.not_durable" if isinstance(error, NotDurable) else "worker.unsettled"
            self.context.counters.add(name, len(settlements))
            facts = {"topic": self.topic.name, "count": len(settlements), "error": str(error)}
            log.error(name, extra=facts)  # noqa: TRY400 - the store is away: its traceback tells nothing
        finally:
            self.drop([held for held, _ in endings])
        return found

    def _count(self, settlements: list[Settlement], outcomes: list[str]) -> None:
        verbs = [settlement.verb for settlement in settlements]
        for (verb, outcome), n in Counter(zip(verbs, outcomes, strict=True)).items():
            self.context.counters.add("worker.lost" if outcome == "lost" else f"worker.{_COUNTED[verb]}", n)
        if "dead" in outcomes:
            for settlement, outcome in zip(settlements, outcomes, strict=True):
                if outcome == "dead":
                    self._tell_dead(settlement)

    def _tell_dead(self, settlement: Settlement) -> None:
        self.context.counters.add("worker.dead")
        attempt, failure = attempt_of(settlement.delivery), settlement.failure
        log.error("worker.dead", extra={"topic": self.topic.name, "attempt": attempt, "failure": failure})

    def rehome(self) -> None:
        """What it holds is in other slots by now: those of the topic's new layout."""
        for one in self.held:
            one.delivery.slot = self.calls.home(one.delivery)

    def drop(self, held: Iterable[Held]) -> None:
        """Holds these no more: their leases run out, unless they were settled."""
        self.held.difference_update(held)
        self.wake.set()

    def close(self) -> None:
        """Keeps nothing alive any more."""
        self.held.clear()
        if self._beat is not None:
            self.context.heartbeat.remove(self._beat)


def _parts(calls: TopicCalls, endings: list[Ending], most: int) -> Iterable[tuple[int, list[Ending]]]:
    """One script call each: by slot, at most so many, and 128 KiB or one."""
    by_slot: dict[int, list[Ending]] = {0: endings}
    if calls.policy.slots > 1:
        by_slot = defaultdict(list)
        for ending in endings:
            by_slot[calls.home(ending[1].delivery)].append(ending)
    for slot, some in by_slot.items():
        for part in portions(some, lambda ending: ending[1].size, most):
            yield slot, part


_COUNTED = {"ack": "acked", "nack": "nacked", "bury": "buried", "return": "returned", "defer": "deferred"}
