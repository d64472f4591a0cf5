"""The two faces of a topic. Each method of one is the same method of the other, awaited."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, overload

from idemgate.core.calls import Batch, Call
from idemgate.core.chunks import BATCH
from idemgate.core.durations import Duration, milliseconds
from idemgate.core.keys import Key, outbox, raw
from idemgate.errors import DecodeError, InvalidArgument, StoreError
from idemgate.store.context import Context
from idemgate.topics.calls import Settlement, TopicCalls, failed
from idemgate.topics.cron import recurring
from idemgate.topics.dead import AioDead, Dead
from idemgate.topics.definition import Opening
from idemgate.topics.messages import Delivery, Forward, Outcome, Peek, Receipt, Stats, Trigger, listed
from idemgate.topics.plans import awaited, performed
from idemgate.topics.policy import Policy
from idemgate.topics.registry import registered
from idemgate.topics.reshard import DeletedTopic, ReshardProgress, ReshardResult, forgetting, resizing

if TYPE_CHECKING:
    from zoneinfo import ZoneInfo


__all__ = ["AioTopic", "Topic"]

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

    def forward(self, to: Literal["list", "stream"], target: Key | None = None, *, keep: int = 0) -> None:
        """Lets a worker send due messages on instead of handling them, out of the topic and into a Redis list (its
        right end) or stream (field `message`) in one step. Consumers block on that (BLPOP, XREADGROUP) and read
        entries with `received`; a consumer guarded by `once` on `delivery.token` drops what its own crashes repeat.

        - `target`: the key; it must live on the topic's own server, so on a cluster leave it out. None: each slot's
          own outbox, `outboxes()`.
        - `keep`: about how many entries the target keeps, the oldest dropped first; 0 = all.
        """
        if to not in ("list", "stream"):
            raise InvalidArgument("to", to, "neither a list nor a stream", 'Use "list" or "stream"')
        if not isinstance(keep, int) or isinstance(keep, bool) or keep < 0:
            raise InvalidArgument("keep", keep, "not a number of entries", "Use 0 for all of them, or an int above it")
        self.opening.send_on(Forward(to, None if target is None else raw(target), keep))

    def outboxes(self) -> list[str]:
        """The keys into which `forward` without a target sends, one a slot."""
        slots, namespace = self.policy.slots, self.opening.context.namespace
        return [outbox(namespace, self.name, slot, slots).decode() for slot in range(slots)]

    def received(self, entry: bytes | Mapping[Any, bytes]) -> Delivery[Any]:
        """A forwarded message as a delivery without a lease, from a list's element or a stream's fields;
        DecodeError."""
        packed = entry.get(b"message", entry.get("message")) if isinstance(entry, Mapping) else entry
        if packed is None:
            raise DecodeError("the fields hold no `message`")
        return self.opening.provisional().received(packed)

    def every(self, cron: str, *, name: str, tz: str | ZoneInfo = "UTC", payload: object = None) -> None:
        """Triggers at each occurrence of a cron expression, read in the time zone `tz`. Every worker may plan it: each
        occurrence is one message, whose key is `name`, "@" and its time (UTC): `cancel` that to leave one out.

        Occurrences are planned while a worker of the topic runs, each when the one before it has come; those of a time
        without any worker are not made up for, but for the first. A worker that was cut off from the store plans what
        it missed; what others planned meanwhile is repeated only if that took longer than the topic's `remember`.
        Needs the extra `cron`; InvalidArgument for an expression or a zone that is none.
        """
        self.opening.recur(recurring(name, cron, tz, payload))

    def _slots(self, calls: TopicCalls) -> list[int]:
        """All slots, each time beginning with another, so that none is served last for ever."""
        slots = calls.policy.slots
        self._turn = (self._turn + 1) % slots
        return [(self._turn + i) % slots for i in range(slots)]

    def _nacks(self, deliveries: Deliveries, items: object, delay: Duration | None, reason: str) -> list[Settlement]:
        found = self._settlements("nack", deliveries, delay, reason)
        if items is None:
            return found
        if not isinstance(deliveries, Delivery):
            raise InvalidArgument(
                "items", items, "are those of one delivery", "Nack a delivery of which only some failed alone"
            )
        return [failed(deliveries, items, found[0].delay, reason)]

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

    def __init__(self, context: Context, name: str, declared: Policy, plain: bool, redefine: bool) -> None:
        super().__init__(Opening(context, name, declared, plain, redefine))

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
            opening.answered(opening.context.link.run(opening.ask()))
        return opening.calls

    def run(self, build: Callable[[TopicCalls], Call[T]]) -> T:
        """One call, built before the topic is made, so that bad input writes nothing at all."""
        if self.opening.calls is None:
            build(self.opening.provisional())
        calls = self.open()
        return self.opening.context.link.run(build(calls))

    def trigger(
        self,
        key: Key,
        payload: object = None,
        *,
        priority: int | None = None,
        group: Key | None = None,
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
        Raises InvalidArgument before anything is written; StoreUnavailable, after which the same trigger may or may not be
        in: repeat it with an `event_id`.
        """
        trigger = Trigger(
            key, payload, priority=priority, group=group, delay=delay, at=at, version=version, event_id=event_id
        )
        return self.run(lambda calls: calls.trigger(trigger))

    def trigger_many(self, triggers: Iterable[Trigger | tuple[Key, object]]) -> list[Receipt]:
        """Puts many triggers in, in order; receipts in the same order. One script call per slot and 128 triggers
        (40, if some ask for more than a time), or 128 KiB of them, each atomic; and more of them where what they join
        has more than 128 KiB.

        All triggers are checked before the first is sent; what is neither a Trigger nor a (key, payload) tuple is
        InvalidArgument.
        """
        found = listed(triggers)
        return self._run_all(lambda calls: calls.trigger_many(found))

    def take(self, n: int = 1) -> list[Delivery[Any]]:
        """At most `n` deliveries that are due, oldest first within a slot; an empty list if none is. Their leases begin
        now: `extend` them, and end each with `ack`, `nack` or `bury`. One round trip per slot, and 100 deliveries or
        128 KiB of them, until `n` are found; where one fails, those that were found before are returned."""
        found: list[Delivery[Any]] = []
        _check_number(n)
        calls = self.open()
        try:
            for slot in self._slots(calls):
                more = True
                while more and len(found) < n:
                    taken = self.opening.context.link.run(calls.take(slot, min(n - len(found), BATCH)))
                    found, more = found + taken.deliveries, taken.more
        except StoreError:
            if not found:
                raise
        return found

    def forward_due(self, n: int = 1000) -> int:
        """Sends on what is due, at most `n` messages, and returns how many: what a worker does by itself, for those who
        own their loop. One round trip per slot and 100 messages, or 128 KiB of them, each atomic; where one fails, the
        number of those that were sent before is returned. InvalidArgument unless `forward` said where to."""
        to, calls, sent = self.opening.destination(), self.open(), 0
        try:
            for slot in self._slots(calls):
                more = True
                while more and n > sent:
                    done = self.opening.context.link.run(calls.forward(slot, to, min(n - sent, BATCH)))
                    sent, more = sent + done.sent, done.more
        except StoreError:
            if not sent:
                raise
        return sent

    @overload
    def ack(self, deliveries: Delivery[Any]) -> Outcome: ...
    @overload
    def ack(self, deliveries: Sequence[Delivery[Any]]) -> list[Outcome]: ...
    def ack(self, deliveries: Deliveries) -> Outcome | list[Outcome]:
        """Done. "lost" means that the lease had lapsed and somebody else has, or had, this message: nothing was
        changed."""
        return self._settle(deliveries, self._settlements("ack", deliveries))

    @overload
    def nack(
        self, deliveries: Delivery[Any], *, items: object = None, delay: Duration | None = None, reason: str = ""
    ) -> Outcome: ...
    @overload
    def nack(
        self, deliveries: Sequence[Delivery[Any]], *, delay: Duration | None = None, reason: str = ""
    ) -> list[Outcome]: ...
    def nack(
        self, deliveries: Deliveries, *, items: object = None, delay: Duration | None = None, reason: str = ""
    ) -> Outcome | list[Outcome]:
        """Try again after `delay` (None: the topic's backoff); "dead" after the last attempt. What was triggered
        meanwhile joins it.

        `items`, of one delivery: only these failed, as `PartialFailure` describes them; the rest is done, in the same step.
        Also what becomes dead or cancelled is then these items only. InvalidArgument, and nothing is written, for what is not
        an item of the payload, and where the merge policy keeps none."""
        return self._settle(deliveries, self._nacks(deliveries, items, delay, reason))

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

    def cancel(self, key: Key, *, group: Key | None = None) -> Cancelled:
        """ "cancelled": no delivery starts after this. "in_flight": one may be running; it is not tried again, and what
        was pending behind it is gone. "absent": there was nothing."""
        return cast(Cancelled, self.run(lambda calls: calls.cancel(key, group)))

    def reschedule(
        self, key: Key, *, at: datetime | None = None, delay: Duration | None = None, group: Key | None = None
    ) -> Rescheduled:
        """Gives the pending message of `key` another time. "in_flight": it is being delivered, and nothing is pending
        behind it."""
        return cast(
            Rescheduled, self.run(lambda calls: calls.reschedule(Trigger(key, at=at, delay=delay, group=group)))
        )

    def flush(self, key: Key | None = None, *, group: Key | None = None) -> int:
        """Makes what is pending due now: of one key, or (None) of the whole topic, in several calls: 500 of the
        schedule a call, then what stands behind deliveries, then what these put into the schedule meanwhile. How many
        were moved (or fewer, where the topic is given other slots meanwhile)."""
        if key is not None:
            return self.run(lambda calls: calls.flush(key, group))
        moved, calls = 0, self.open()
        waiting = [calls.flush_slot(slot) for slot in range(calls.policy.slots)]
        while waiting:
            flushed = self.opening.context.link.run(waiting.pop())
            moved += flushed.moved
            waiting += flushed.more
        return moved

    def pause(self) -> bool:
        """Hands out nothing more, anywhere, until `resume`; what is in flight goes on. False if it was paused."""
        return self._run_all(lambda calls: calls.pause(True))

    def resume(self) -> bool:
        """Goes on after `pause`, and wakes the workers. False if it was not paused."""
        return self._run_all(lambda calls: calls.pause(False))

    def peek(self, key: Key, *, group: Key | None = None) -> Peek:
        """What is known of a key. Changes nothing."""
        return self.run(lambda calls: calls.peek(key, group))

    def stats(self) -> Stats:
        """How many messages are where, and the counters. One script call per slot, together one round trip."""
        return self._run_all(lambda calls: calls.stats())

    def reslot(self, slots: int, told: Callable[[ReshardProgress], object] = lambda _: None) -> ReshardResult:
        """Gives the topic another number of slots, a power of two, while it is in use; nothing is lost or repeated.

        Its slots are moved part by part: nobody can put into or take from a part while it is moved (a few seconds for
        100,000 messages; calls wait for as long as the gate's `timeout`). If it is killed, call it again: it goes on
        where it was, and the topic's other parts are not touched by that. `told` hears how far it is. Raises
        InvalidArgument, TopicInUse if it is being given another number or forgotten, StoreError.
        """
        done = performed(resizing(self.open(), slots, told), self.opening.context.link.run_all)
        self.opening.lay_out(done.after)
        return done

    def forget(self, *, discard: bool = False) -> DeletedTopic:
        """Removes the topic from the store, with its policy, counters and what it remembers of event ids and versions.
        Whoever uses it afterwards makes it anew.

        Raises TopicInUse if it holds messages or dead letters, unless `discard` is said: then says how many there
        were. A refused call has written nothing, unless a message came just while the topic was being closed: then it
        is opened again. If it is killed, call it again. What it sent on into outboxes stays there.
        """
        context = self.opening.context
        known = context.link.run(registered(context.namespace, context.clock, self.name))
        done = performed(forgetting(self.opening.provisional(), known, discard), context.link.run_all)
        self.opening.forget()
        return done

    def next_due(self) -> datetime | None:
        """When the earliest pending message is due; None if none is pending (or all stand behind a delivery of their
        key)."""
        return self.stats().next_due

    def _run_all(self, build: Callable[[TopicCalls], Batch[T]]) -> T:
        if self.opening.calls is None:
            build(self.opening.provisional())
        calls = self.open()
        return self.opening.context.link.run_all(build(calls))

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
            opening.answered(await opening.context.aio_link.run(opening.ask()))
        return opening.calls

    async def run(self, build: Callable[[TopicCalls], Call[T]]) -> T:
        """As `Topic.run`."""
        if self.opening.calls is None:
            build(self.opening.provisional())
        calls = await self.open()
        return await self.opening.context.aio_link.run(build(calls))

    async def trigger(
        self,
        key: Key,
        payload: object = None,
        *,
        priority: int | None = None,
        group: Key | None = None,
        delay: Duration | None = None,
        at: datetime | None = None,
        version: int | None = None,
        event_id: Key | None = None,
    ) -> Receipt:
        """As `Topic.trigger`; the triggers of one tick of the event loop share a script call, and so its outcome."""
        trigger = Trigger(
            key, payload, priority=priority, group=group, delay=delay, at=at, version=version, event_id=event_id
        )
        if self.opening.calls is None:
            self.opening.provisional().checked(trigger)
        calls = await self.open()
        return await self.opening.gathering().add(calls, calls.checked(trigger))

    async def trigger_many(self, triggers: Iterable[Trigger | tuple[Key, object]]) -> list[Receipt]:
        """As `Topic.trigger_many`."""
        found = listed(triggers)
        return await self._run_all(lambda calls: calls.trigger_many(found))

    async def take(self, n: int = 1) -> list[Delivery[Any]]:
        """As `Topic.take`. Cancelled meanwhile: what was taken lapses with its lease."""
        found: list[Delivery[Any]] = []
        _check_number(n)
        calls = await self.open()
        try:
            for slot in self._slots(calls):
                more = True
                while more and len(found) < n:
                    taken = await self.opening.context.aio_link.run(calls.take(slot, min(n - len(found), BATCH)))
                    found, more = found + taken.deliveries, taken.more
        except StoreError:
            if not found:
                raise
        return found

    async def forward_due(self, n: int = 1000) -> int:
        """As `Topic.forward_due`."""
        to, calls, sent = self.opening.destination(), await self.open(), 0
        try:
            for slot in self._slots(calls):
                more = True
                while more and n > sent:
                    done = await self.opening.context.aio_link.run(calls.forward(slot, to, min(n - sent, BATCH)))
                    sent, more = sent + done.sent, done.more
        except StoreError:
            if not sent:
                raise
        return sent

    @overload
    async def ack(self, deliveries: Delivery[Any]) -> Outcome: ...
    @overload
    async def ack(self, deliveries: Sequence[Delivery[Any]]) -> list[Outcome]: ...
    async def ack(self, deliveries: Deliveries) -> Outcome | list[Outcome]:
        """As `Topic.ack`."""
        return await self._settle(deliveries, self._settlements("ack", deliveries))

    @overload
    async def nack(
        self, deliveries: Delivery[Any], *, items: object = None, delay: Duration | None = None, reason: str = ""
    ) -> Outcome: ...
    @overload
    async def nack(
        self, deliveries: Sequence[Delivery[Any]], *, delay: Duration | None = None, reason: str = ""
    ) -> list[Outcome]: ...
    async def nack(
        self, deliveries: Deliveries, *, items: object = None, delay: Duration | None = None, reason: str = ""
    ) -> Outcome | list[Outcome]:
        """As `Topic.nack`."""
        return await self._settle(deliveries, self._nacks(deliveries, items, delay, reason))

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

    async def cancel(self, key: Key, *, group: Key | None = None) -> Cancelled:
        """As `Topic.cancel`."""
        return cast(Cancelled, await self.run(lambda calls: calls.cancel(key, group)))

    async def reschedule(
        self, key: Key, *, at: datetime | None = None, delay: Duration | None = None, group: Key | None = None
    ) -> Rescheduled:
        """As `Topic.reschedule`."""
        return cast(
            Rescheduled, await self.run(lambda calls: calls.reschedule(Trigger(key, at=at, delay=delay, group=group)))
        )

    async def flush(self, key: Key | None = None, *, group: Key | None = None) -> int:
        """As `Topic.flush`."""
        if key is not None:
            return await self.run(lambda calls: calls.flush(key, group))
        moved, calls = 0, await self.open()
        waiting = [calls.flush_slot(slot) for slot in range(calls.policy.slots)]
        while waiting:
            flushed = await self.opening.context.aio_link.run(waiting.pop())
            moved += flushed.moved
            waiting += flushed.more
        return moved

    async def pause(self) -> bool:
        """As `Topic.pause`."""
        return await self._run_all(lambda calls: calls.pause(True))

    async def resume(self) -> bool:
        """As `Topic.resume`."""
        return await self._run_all(lambda calls: calls.pause(False))

    async def peek(self, key: Key, *, group: Key | None = None) -> Peek:
        """As `Topic.peek`."""
        return await self.run(lambda calls: calls.peek(key, group))

    async def stats(self) -> Stats:
        """As `Topic.stats`."""
        return await self._run_all(lambda calls: calls.stats())

    async def reslot(self, slots: int, told: Callable[[ReshardProgress], object] = lambda _: None) -> ReshardResult:
        """As `Topic.reslot`."""
        done = await awaited(resizing(await self.open(), slots, told), self.opening.context.aio_link.run_all)
        self.opening.lay_out(done.after)
        return done

    async def forget(self, *, discard: bool = False) -> DeletedTopic:
        """As `Topic.forget`."""
        context = self.opening.context
        known = await context.aio_link.run(registered(context.namespace, context.clock, self.name))
        done = await awaited(forgetting(self.opening.provisional(), known, discard), context.aio_link.run_all)
        self.opening.forget()
        return done

    async def next_due(self) -> datetime | None:
        """As `Topic.next_due`."""
        return (await self.stats()).next_due

    async def _run_all(self, build: Callable[[TopicCalls], Batch[T]]) -> T:
        if self.opening.calls is None:
            build(self.opening.provisional())
        calls = await self.open()
        return await self.opening.context.aio_link.run_all(build(calls))

    async def _settle(self, deliveries: Deliveries, settlements: list[Settlement]) -> Outcome | list[Outcome]:
        return _as_given(deliveries, await self._run_all(lambda calls: calls.settle_many(settlements)))


def _deliveries(given: Deliveries) -> list[Delivery[Any]]:
    found = [given] if isinstance(given, Delivery) else list(given)
    for one in found:
        if not isinstance(one, Delivery):
            raise InvalidArgument("deliveries", one, "not a delivery", "Pass what take() gave, one or a list of them")
    return found


def _check_number(n: int) -> None:
    if not isinstance(n, int) or isinstance(n, bool) or n < 0:
        raise InvalidArgument("n", n, "not a number of deliveries", "Pass an int of at least 0")


def _as_given(deliveries: Deliveries, outcomes: list[str]) -> Outcome | list[Outcome]:
    found = cast("list[Outcome]", outcomes)
    return found[0] if isinstance(deliveries, Delivery) else found
