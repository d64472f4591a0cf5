"""The two faces of a topic. Each method of one is the same method of the other, awaited."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, overload

from idemgate.core.calls import Batch, Call
from idemgate.core.durations import Duration, milliseconds
from idemgate.core.keys import Key
from idemgate.core.messages import DeadLetter, Delivery, Outcome, Peek, Receipt, Stats, Trigger
from idemgate.core.policy import Policy
from idemgate.core.topics import Settlement, TopicCalls
from idemgate.errors import BadInput
from idemgate.topic.opening import Opening

if TYPE_CHECKING:
    from idemgate.gate import Gate

__all__ = ["AioDead", "AioTopic", "Dead", "Topic"]

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
Cancelled = Literal["cancelled", "in_flight", "absent"]
Rescheduled = Literal["rescheduled", "in_flight", "absent"]
Deliveries = Delivery[Any] | Sequence[Delivery[Any]]


class _Face:
    """What needs no store."""

    def __init__(self, opening: Opening) -> None:
        self.opening = opening
        self._turn = 0

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"

    @property
    def name(self) -> str:
        return self.opening.name

    @property
    def policy(self) -> Policy:
        return self.opening.declared

    def handler(self, func: F) -> F:
        """Registers the function that a worker calls with each delivery, sync or async; returns it unchanged."""
        self.opening.handle(func)
        return func

    def _slots(self) -> list[int]:
        """All slots, each time beginning with another, so that none is served last for ever."""
        slots = self.policy.slots
        self._turn = (self._turn + 1) % slots
        return [(self._turn + i) % slots for i in range(slots)]

    def _settlements(
        self, verb: str, deliveries: Deliveries, delay: Duration | None = None, reason: str = ""
    ) -> list[Settlement]:
        found = _deliveries(deliveries)
        if verb == "nack" and delay is None:
            backoff = self.policy.backoff
            return [Settlement(verb, one, backoff.ms(one.attempt), reason) for one in found]
        fixed = 0 if delay is None else milliseconds(delay, "delay", zero=True)
        return [Settlement(verb, one, fixed, reason) for one in found]


class Topic(_Face):
    """A topic, blocking; make it with `gate.topic`. `topic.aio` is the same topic, awaiting."""

    def __init__(self, gate: Gate, name: str, declared: Policy, plain: bool, redefine: bool) -> None:
        super().__init__(Opening(gate, name, declared, plain, redefine))

    @cached_property
    def aio(self) -> AioTopic:
        """The awaiting face."""
        return AioTopic(self.opening)

    @cached_property
    def dead(self) -> Dead:
        """The dead letters: list, redrive, delete."""
        return Dead(self)

    def open(self) -> TopicCalls:
        """Makes the topic or checks its policy, once; every other method does it by itself. Raises PolicyChanged."""
        opening = self.opening
        while opening.calls is None:
            opening.answered(opening.gate.link.run(opening.ask()))
        return opening.calls

    def run(self, build: Callable[[TopicCalls], Call[T]]) -> T:
        """One call, built before the topic is made, so that bad input writes nothing at all."""
        if self.opening.calls is None:
            build(self.opening.provisional())
        calls = self.open()
        return self.opening.gate.link.run(build(calls))

    def trigger(
        self,
        key: Key,
        payload: object = None,
        *,
        delay: Duration | None = None,
        at: datetime | None = None,
        version: int | None = None,
        event_id: Key | None = None,
    ) -> Receipt:
        """Puts one trigger in; see `Receipt` for what may become of it. One round trip, atomic.

        - `delay`, `at`: when, instead of what the policy says; also moves what is pending for the key. `at` must be
          aware; a time in the past means now.
        - `event_id`: a second trigger of this key with the same one is a "duplicate", within the topic's `remember`.
          One event may trigger many keys.
        - `version`: a trigger with a lower one than was seen for its key is "dropped".
        Raises BadInput before anything is written; StoreUnavailable, after which the same trigger may or may not be
        in: repeat it with an `event_id`.
        """
        trigger = Trigger(key, payload, delay=delay, at=at, version=version, event_id=event_id)
        return self.run(lambda calls: calls.trigger(trigger))

    def trigger_many(self, triggers: Iterable[Trigger | tuple[Key, object]]) -> list[Receipt]:
        """Puts many triggers in, in order; receipts in the same order. One script call per slot and 500 triggers, each
        atomic.

        All triggers are checked before the first is sent.
        """
        found = [one if isinstance(one, Trigger) else Trigger(*one) for one in triggers]
        return self._run_all(lambda calls: calls.trigger_many(found))

    def take(self, n: int = 1) -> list[Delivery[Any]]:
        """At most `n` deliveries that are due, oldest first within a slot; an empty list if none is. Their leases begin
        now:
        `extend` them, and end each with `ack`, `nack` or `bury`. One round trip per slot until `n` are found."""
        found: list[Delivery[Any]] = []
        _check_number(n)
        calls = self.open()
        for slot in self._slots():
            if len(found) < n:
                found += self.opening.gate.link.run(calls.take(slot, min(n - len(found), 1000))).deliveries
        return found

    @overload
    def ack(self, deliveries: Delivery[Any]) -> Outcome: ...
    @overload
    def ack(self, deliveries: Sequence[Delivery[Any]]) -> list[Outcome]: ...
    def ack(self, deliveries: Deliveries) -> Outcome | list[Outcome]:
        """Done. "lost" means that the lease had lapsed and somebody else has, or had, this message: nothing was
        changed."""
        return self._settle(deliveries, self._settlements("ack", deliveries))

    @overload
    def nack(self, deliveries: Delivery[Any], *, delay: Duration | None = None, reason: str = "") -> Outcome: ...
    @overload
    def nack(
        self, deliveries: Sequence[Delivery[Any]], *, delay: Duration | None = None, reason: str = ""
    ) -> list[Outcome]: ...
    def nack(
        self, deliveries: Deliveries, *, delay: Duration | None = None, reason: str = ""
    ) -> Outcome | list[Outcome]:
        """Try again after `delay` (None: the topic's backoff); "dead" after the last attempt. What was triggered
        meanwhile joins it."""
        return self._settle(deliveries, self._settlements("nack", deliveries, delay, reason))

    @overload
    def bury(self, deliveries: Delivery[Any], *, reason: str = "") -> Outcome: ...
    @overload
    def bury(self, deliveries: Sequence[Delivery[Any]], *, reason: str = "") -> list[Outcome]: ...
    def bury(self, deliveries: Deliveries, *, reason: str = "") -> Outcome | list[Outcome]:
        """Give up now: to the dead letters."""
        return self._settle(deliveries, self._settlements("bury", deliveries, reason=reason))

    @overload
    def give_back(self, deliveries: Delivery[Any]) -> Outcome: ...
    @overload
    def give_back(self, deliveries: Sequence[Delivery[Any]]) -> list[Outcome]: ...
    def give_back(self, deliveries: Deliveries) -> Outcome | list[Outcome]:
        """Never started: back as it was, its attempt undone."""
        return self._settle(deliveries, self._settlements("return", deliveries))

    @overload
    def extend(self, deliveries: Delivery[Any], lease: Duration | None = None) -> Outcome: ...
    @overload
    def extend(self, deliveries: Sequence[Delivery[Any]], lease: Duration | None = None) -> list[Outcome]: ...
    def extend(self, deliveries: Deliveries, lease: Duration | None = None) -> Outcome | list[Outcome]:
        """Heartbeat: the leases run anew from now, for `lease` (None: the topic's). "cancelled": still held, will not
        be retried."""
        length = None if lease is None else milliseconds(lease, "lease")
        found = _deliveries(deliveries)
        return _as_given(deliveries, self._run_all(lambda calls: calls.extend_many(found, length)))

    def cancel(self, key: Key) -> Cancelled:
        """ "cancelled": no delivery starts after this. "in_flight": one may be running; it is not tried again, and what
        was pending behind it is gone. "absent": there was nothing."""
        return cast(Cancelled, self.run(lambda calls: calls.cancel(key)))

    def reschedule(self, key: Key, *, at: datetime | None = None, delay: Duration | None = None) -> Rescheduled:
        """Gives the pending message of `key` another time. "in_flight": it is being delivered, and nothing is pending
        behind it."""
        return cast(Rescheduled, self.run(lambda calls: calls.reschedule(Trigger(key, at=at, delay=delay))))

    def flush(self, key: Key | None = None) -> int:
        """Makes what is pending due now: of one key, or (None) of the whole topic, 1,000 a call. How many were
        moved."""
        if key is not None:
            return self.run(lambda calls: calls.flush(key))
        moved, calls = 0, self.open()
        for slot in range(self.policy.slots):
            left = 1
            while left:
                done, left = self.opening.gate.link.run(calls.flush_slot(slot))
                moved += done
        return moved

    def peek(self, key: Key) -> Peek:
        """What is known of a key. Changes nothing."""
        return self.run(lambda calls: calls.peek(key))

    def stats(self) -> Stats:
        """How many messages are where, and the counters. One script call per slot, together one round trip."""
        return self._run_all(lambda calls: calls.stats())

    def next_due(self) -> datetime | None:
        """When the earliest pending message is due; None if none is pending (or all stand behind a delivery of their
        key)."""
        return self.stats().next_due

    def _run_all(self, build: Callable[[TopicCalls], Batch[T]]) -> T:
        if self.opening.calls is None:
            build(self.opening.provisional())
        calls = self.open()
        return self.opening.gate.link.run_all(build(calls))

    def _settle(self, deliveries: Deliveries, settlements: list[Settlement]) -> Outcome | list[Outcome]:
        return _as_given(deliveries, self._run_all(lambda calls: calls.settle_many(settlements)))


class AioTopic(_Face):
    """As `Topic`, awaiting; make it with `gate.aio.topic`."""

    @cached_property
    def dead(self) -> AioDead:
        """As `Topic.dead`."""
        return AioDead(self)

    async def open(self) -> TopicCalls:
        """As `Topic.open`."""
        opening = self.opening
        while opening.calls is None:
            opening.answered(await opening.gate.aio.link.run(opening.ask()))
        return opening.calls

    async def run(self, build: Callable[[TopicCalls], Call[T]]) -> T:
        """As `Topic.run`."""
        if self.opening.calls is None:
            build(self.opening.provisional())
        calls = await self.open()
        return await self.opening.gate.aio.link.run(build(calls))

    async def trigger(
        self,
        key: Key,
        payload: object = None,
        *,
        delay: Duration | None = None,
        at: datetime | None = None,
        version: int | None = None,
        event_id: Key | None = None,
    ) -> Receipt:
        """As `Topic.trigger`."""
        trigger = Trigger(key, payload, delay=delay, at=at, version=version, event_id=event_id)
        return await self.run(lambda calls: calls.trigger(trigger))

    async def trigger_many(self, triggers: Iterable[Trigger | tuple[Key, object]]) -> list[Receipt]:
        """As `Topic.trigger_many`."""
        found = [one if isinstance(one, Trigger) else Trigger(*one) for one in triggers]
        return await self._run_all(lambda calls: calls.trigger_many(found))

    async def take(self, n: int = 1) -> list[Delivery[Any]]:
        """As `Topic.take`. Cancelled meanwhile: what was taken lapses with its lease."""
        found: list[Delivery[Any]] = []
        _check_number(n)
        calls = await self.open()
        for slot in self._slots():
            if len(found) < n:
                found += (await self.opening.gate.aio.link.run(calls.take(slot, min(n - len(found), 1000)))).deliveries
        return found

    @overload
    async def ack(self, deliveries: Delivery[Any]) -> Outcome: ...
    @overload
    async def ack(self, deliveries: Sequence[Delivery[Any]]) -> list[Outcome]: ...
    async def ack(self, deliveries: Deliveries) -> Outcome | list[Outcome]:
        """As `Topic.ack`."""
        return await self._settle(deliveries, self._settlements("ack", deliveries))

    @overload
    async def nack(self, deliveries: Delivery[Any], *, delay: Duration | None = None, reason: str = "") -> Outcome: ...
    @overload
    async def nack(
        self, deliveries: Sequence[Delivery[Any]], *, delay: Duration | None = None, reason: str = ""
    ) -> list[Outcome]: ...
    async def nack(
        self, deliveries: Deliveries, *, delay: Duration | None = None, reason: str = ""
    ) -> Outcome | list[Outcome]:
        """As `Topic.nack`."""
        return await self._settle(deliveries, self._settlements("nack", deliveries, delay, reason))

    @overload
    async def bury(self, deliveries: Delivery[Any], *, reason: str = "") -> Outcome: ...
    @overload
    async def bury(self, deliveries: Sequence[Delivery[Any]], *, reason: str = "") -> list[Outcome]: ...
    async def bury(self, deliveries: Deliveries, *, reason: str = "") -> Outcome | list[Outcome]:
        """As `Topic.bury`."""
        return await self._settle(deliveries, self._settlements("bury", deliveries, reason=reason))

    @overload
    async def give_back(self, deliveries: Delivery[Any]) -> Outcome: ...
    @overload
    async def give_back(self, deliveries: Sequence[Delivery[Any]]) -> list[Outcome]: ...
    async def give_back(self, deliveries: Deliveries) -> Outcome | list[Outcome]:
        """As `Topic.give_back`."""
        return await self._settle(deliveries, self._settlements("return", deliveries))

    @overload
    async def extend(self, deliveries: Delivery[Any], lease: Duration | None = None) -> Outcome: ...
    @overload
    async def extend(self, deliveries: Sequence[Delivery[Any]], lease: Duration | None = None) -> list[Outcome]: ...
    async def extend(self, deliveries: Deliveries, lease: Duration | None = None) -> Outcome | list[Outcome]:
        """As `Topic.extend`."""
        length = None if lease is None else milliseconds(lease, "lease")
        found = _deliveries(deliveries)
        return _as_given(deliveries, await self._run_all(lambda calls: calls.extend_many(found, length)))

    async def cancel(self, key: Key) -> Cancelled:
        """As `Topic.cancel`."""
        return cast(Cancelled, await self.run(lambda calls: calls.cancel(key)))

    async def reschedule(self, key: Key, *, at: datetime | None = None, delay: Duration | None = None) -> Rescheduled:
        """As `Topic.reschedule`."""
        return cast(Rescheduled, await self.run(lambda calls: calls.reschedule(Trigger(key, at=at, delay=delay))))

    async def flush(self, key: Key | None = None) -> int:
        """As `Topic.flush`."""
        if key is not None:
            return await self.run(lambda calls: calls.flush(key))
        moved, calls = 0, await self.open()
        for slot in range(self.policy.slots):
            left = 1
            while left:
                done, left = await self.opening.gate.aio.link.run(calls.flush_slot(slot))
                moved += done
        return moved

    async def peek(self, key: Key) -> Peek:
        """As `Topic.peek`."""
        return await self.run(lambda calls: calls.peek(key))

    async def stats(self) -> Stats:
        """As `Topic.stats`."""
        return await self._run_all(lambda calls: calls.stats())

    async def next_due(self) -> datetime | None:
        """As `Topic.next_due`."""
        return (await self.stats()).next_due

    async def _run_all(self, build: Callable[[TopicCalls], Batch[T]]) -> T:
        if self.opening.calls is None:
            build(self.opening.provisional())
        calls = await self.open()
        return await self.opening.gate.aio.link.run_all(build(calls))

    async def _settle(self, deliveries: Deliveries, settlements: list[Settlement]) -> Outcome | list[Outcome]:
        return _as_given(deliveries, await self._run_all(lambda calls: calls.settle_many(settlements)))


class Dead:
    """The dead letters of a topic."""

    def __init__(self, topic: Topic) -> None:
        self._topic = topic

    def list(self, n: int = 50, *, skip: int = 0) -> list[DeadLetter]:
        """At most `n` dead letters, newest first, after leaving `skip` out."""
        calls = self._topic.open()
        link = self._topic.opening.gate.link
        return newest([link.run(calls.dead(slot, 0, skip + n))[1] for slot in range(calls.policy.slots)], n, skip)

    def redrive(self, ids: Iterable[str] | None = None) -> int:
        """Sends letters back, due now, attempts reset; None: all of them. How many; unknown ids are passed over."""
        return self._exhume("redrive", ids)

    def delete(self, ids: Iterable[str] | None = None) -> int:
        """Deletes letters for good; None: all of them. How many."""
        return self._exhume("delete", ids)

    def _exhume(self, verb: str, ids: Iterable[str] | None) -> int:
        calls = self._topic.open()
        link = self._topic.opening.gate.link
        moved = 0
        for slot, wanted in by_slot(ids, calls.policy.slots):
            left = 1
            while left:
                done, left = link.run(calls.exhume(slot, verb, wanted))
                moved += done
                left = 0 if wanted else left
        return moved


class AioDead:
    """As `Dead`, awaiting."""

    def __init__(self, topic: AioTopic) -> None:
        self._topic = topic

    async def list(self, n: int = 50, *, skip: int = 0) -> list[DeadLetter]:
        """As `Dead.list`."""
        calls = await self._topic.open()
        link = self._topic.opening.gate.aio.link
        return newest(
            [(await link.run(calls.dead(slot, 0, skip + n)))[1] for slot in range(calls.policy.slots)],
            n,
            skip,
        )

    async def redrive(self, ids: Iterable[str] | None = None) -> int:
        """As `Dead.redrive`."""
        return await self._exhume("redrive", ids)

    async def delete(self, ids: Iterable[str] | None = None) -> int:
        """As `Dead.delete`."""
        return await self._exhume("delete", ids)

    async def _exhume(self, verb: str, ids: Iterable[str] | None) -> int:
        calls = await self._topic.open()
        link = self._topic.opening.gate.aio.link
        moved = 0
        for slot, wanted in by_slot(ids, calls.policy.slots):
            left = 1
            while left:
                done, left = await link.run(calls.exhume(slot, verb, wanted))
                moved += done
                left = 0 if wanted else left
        return moved


def newest(by_slot: Iterable[Sequence[DeadLetter]], n: int, skip: int) -> list[DeadLetter]:
    """The letters of several slots as one list, newest first."""
    found = sorted(
        (letter for letters in by_slot for letter in letters), key=lambda letter: letter.died_at, reverse=True
    )
    return found[skip : skip + n]


def by_slot(ids: Iterable[str] | None, slots: int) -> list[tuple[int, Sequence[str]]]:
    """Which ids to ask of which slot, at most 500 a call; every slot with no ids at all for None."""
    if ids is None:
        return [(slot, ()) for slot in range(slots)]
    wanted: dict[int, list[str]] = {}
    for one in ids:
        slot, separator, number = one.partition("-")
        if not separator or not slot.isdigit() or not number.isdigit() or int(slot) >= slots:
            raise BadInput(
                "ids",
                one,
                "not the id of a dead letter of this topic",
                "Use DeadLetter.id as dead.list() gives it",
            )
        wanted.setdefault(int(slot), []).append(number)
    return [(slot, found[i : i + 500]) for slot, found in wanted.items() for i in range(0, len(found), 500)]


def _deliveries(given: Deliveries) -> list[Delivery[Any]]:
    found = [given] if isinstance(given, Delivery) else list(given)
    for one in found:
        if not isinstance(one, Delivery):
            raise BadInput("deliveries", one, "not a delivery", "Pass what take() gave, one or a list of them")
    return found


def _check_number(n: int) -> None:
    if not isinstance(n, int) or isinstance(n, bool) or n < 0:
        raise BadInput("n", n, "not a number of deliveries", "Pass an int of at least 0")


def _as_given(deliveries: Deliveries, outcomes: list[str]) -> Outcome | list[Outcome]:
    found = cast("list[Outcome]", outcomes)
    return found[0] if isinstance(deliveries, Delivery) else found
