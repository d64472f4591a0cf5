"""The topic's calls: one function a script of `lua/topics`, and what their replies mean."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from random import randrange
from typing import Any, NamedTuple, TypeVar

from idemgate.core import keys
from idemgate.core.calls import Arg, Batch, Call, Unfinished, call, text
from idemgate.core.chunks import BATCH, portions
from idemgate.core.clock import Clock, stamp
from idemgate.core.codec import Codec
from idemgate.core.codec.decoding import as_ours
from idemgate.core.durations import instant, milliseconds
from idemgate.core.keys import Key
from idemgate.core.tokens import token
from idemgate.errors import DecodeError, InvalidArgument
from idemgate.topics import batching as parts
from idemgate.topics.batching import in_order
from idemgate.topics.dead_letters import PAGE, Place
from idemgate.topics.merge import wrapped
from idemgate.topics.messages import (
    DeadLetter,
    Delivery,
    Forward,
    Forwarded,
    Message,
    Peek,
    Receipt,
    ReceiptStatus,
    Settled,
    Stats,
    Taken,
    Trigger,
    Turned,
    forwarded,
    letter_of,
    moment,
)
from idemgate.topics.partial import Part
from idemgate.topics.policy import Policy, slots_of

__all__ = ["Opened", "Settlement", "TopicCalls", "failed", "most_of", "open_topic", "stored_policy"]

T = TypeVar("T")
Asked = tuple[bytes, bytes, bytes, bytes]
"""A trigger that was checked: its key, what it asks for (`lua/lib/asked.lua`), its accumulator; and its route."""
MANY = 128
"""Most triggers of one script call."""
SOME = 40
"""Most triggers of one, if some ask for more than a time: those take two to four times as long."""
FEW = 32
"""Most deliveries that end at once, if some are not just done: those take several times as long."""


class Settlement(NamedTuple):
    """How one delivery ends. `verb`: ack, nack, bury, return (never started) or defer (not possible yet, no attempt);
    `delay` ms before the next attempt; `part`, of a nack, what of it is tried again (None: all)."""

    verb: str
    delivery: Delivery[Any]
    delay: int = 0
    failure: str = ""
    part: Part | None = None

    @property
    def size(self) -> int:
        """About how many bytes a script goes through to end it."""
        return self.delivery.size

    def words(self, place: int) -> tuple[Arg, ...]:
        """As scripts take one that is not just done; `place` from 1."""
        verb, said = (self.verb, self.failure) if self.part is None else ("part", self.part.packed(self.failure))
        return (place, verb, self.delay, said)


def failed(delivery: Delivery[Any], items: object, delay: int, failure: str) -> Settlement:
    """Only these items are tried again. None of them: acknowledged; all of them: a plain nack. InvalidArgument for what is
    not an item of the delivery."""
    part = delivery.part(items)
    if not part.items:
        return Settlement("ack", delivery)
    return Settlement("nack", delivery, delay, failure, part if part.items < part.of else None)


class Opened(NamedTuple):
    """`word`: "made", "same", "changed", "differs", or "resized": it had the asked number of slots once. `policy` is
    the stored one, of "changed" the former. `to`: how many slots it is being given, 0 = it is being forgotten, -1 =
    neither."""

    word: str
    policy: bytes
    to: int


class Flushed(NamedTuple):
    """How many messages one call made due now, and the calls that go on with the others."""

    moved: int
    more: list[Call[Flushed]]


class Exhumed(NamedTuple):
    """Dead letters that one call took out, those that are left in the slot, and the first so many of the ones that were
    named which it went through: an absent one is passed over."""

    taken: int
    left: int
    seen: int


def open_topic(namespace: str, clock: Clock | None, name: str, policy: Policy, redefine: bool) -> Call[Opened]:
    args = (stamp(clock), name, policy.stored(), b"1" if redefine else b"0")
    return call(
        "topics/open",
        (keys.topics(namespace),),
        args,
        lambda reply: Opened(text(reply[0]), reply[2], reply[3]),
    )


def stored_policy(namespace: str, clock: Clock | None, name: str) -> Call[bytes | None]:
    return call(
        "topics/policy",
        (keys.topics(namespace),),
        (stamp(clock), name),
        lambda reply: reply[2] if reply[0] == b"ok" else None,
    )


class _Elsewhere:
    """For a call of one slot: what to ask, by another layout of the topic's slots, once that slot is closed."""

    __slots__ = ("again", "calls", "slot")

    def __init__(self, calls: TopicCalls, slot: int, again: Again) -> None:
        self.calls = calls
        self.slot = slot
        self.again = again

    def ask(self) -> Call[Opened]:
        """What the registry says; a topic that was forgotten is made anew."""
        calls = self.calls
        return open_topic(calls.namespace, calls.clock, calls.name, calls.policy, redefine=False)

    def there(self, found: Opened, by: bytes) -> Batch[Any]:
        calls = self.calls.following(found)
        batch = self.again(calls, self.slot)
        if calls is not self.calls or found.to >= 0:
            return batch
        # Nothing changes, and yet the slot is closed: it was forgotten with its topic, and is needed again.
        return Batch([calls.reopen(self.slot, by), *batch.calls], lambda answers: batch.join(answers[1:]))


class TopicCalls:
    """Builds the calls of one topic. What concerns one key or one slot is a Call; what spreads over slots is a Batch
    of them. A call whose slot has moved to another layout, meanwhile, is answered there, with the same request id."""

    __slots__ = ("_policy", "_rules", "adopt", "clock", "codec", "name", "namespace", "policy")

    def __init__(
        self,
        namespace: str,
        name: str,
        policy: Policy,
        codec: Codec,
        clock: Clock | None,
        adopt: Callable[[int], None] = lambda _slots: None,
    ) -> None:
        """`adopt` is told the number of slots whenever the registry was asked for it, and it does not change."""
        self.namespace = namespace
        self.name = name
        self.policy = policy
        self.codec = codec
        self.clock = clock
        self.adopt = adopt
        self._policy = policy.for_scripts()
        self._rules = policy.for_triggers()

    def keys(self, slot: int) -> tuple[bytes, ...]:
        return keys.slot(self.namespace, self.name, slot, self.policy.slots)

    def at(self, route: bytes) -> int:
        """The slot of what has this route: a group, or a key without one."""
        return keys.slot_of(route, self.policy.slots)

    def home(self, delivery: Delivery[Any]) -> int:
        """The slot of a delivery, which may have been taken when there were more or fewer."""
        try:
            return self.at(delivery.route)
        except DecodeError:
            return delivery.slot % self.policy.slots

    def _call(
        self,
        script: str,
        slot: int,
        args: Sequence[Arg],
        read: Callable[[list[Any]], Any],
        again: Again | None = None,
        *more: bytes,
    ) -> Call[Any]:
        made = call(f"topics/{script}", (*self.keys(slot), *more), (stamp(self.clock), *args), read)
        if again is not None:
            made.elsewhere = _Elsewhere(self, slot, again)
        return made

    # -- other layouts ------------------------------------------------------------------------------------------------

    def laid_out(self, slots: int) -> TopicCalls:
        """The same topic with that many slots."""
        return self.laid_as(self.policy, slots)

    def laid_as(self, policy: Policy, slots: int) -> TopicCalls:
        """The same topic with another policy, and that many slots."""
        policy = replace(policy, slots=slots)
        return TopicCalls(self.namespace, self.name, policy, self.codec, self.clock, self.adopt)

    def following(self, found: Opened) -> TopicCalls:
        """The layout to try after this one found a slot closed: the stored one, or that to which its slots are being
        moved, and then that one only, until the slot is open."""
        stored, mine = slots_of(found.policy), self.policy.slots
        if found.to < 0:
            self.adopt(stored)
        wanted = found.to if found.to > 0 and mine in (stored, found.to) else stored
        return self if wanted == mine else self.laid_out(wanted)

    def heirs(self, slot: int, before: TopicCalls) -> range:
        """The slots that have, by this layout, what is in a slot of another one; see `keys.heirs`."""
        return keys.heirs(slot, before.policy.slots, self.policy.slots)

    def reopen(self, slot: int, change: bytes) -> Call[bool]:
        """Opens a slot that this change closed."""
        return self._call("reopen", slot, (change,), lambda _: True)

    # -- putting in ---------------------------------------------------------------------------------------------------

    def trigger(self, trigger: Trigger) -> Call[Receipt]:
        return self._trigger(token(), self.checked(trigger))

    def _trigger(self, request: bytes, asked: Asked) -> Call[Receipt]:
        return self._call(
            "trigger",
            self.at(asked[3]),
            (request, self._rules, b"", *asked[:3]),
            lambda reply: _receipts(reply[1], reply[2:])[0],
            lambda calls, _: _only(calls._trigger(request, asked)),
        )

    def trigger_many(self, triggers: Iterable[Trigger]) -> Batch[list[Receipt]]:
        """One script call per slot and 128 triggers, 40 if some ask for more than a time, or 128 KiB of them; and more
        where they join large messages. All are checked before the first call is made."""
        return self.put_many([self.checked(trigger) for trigger in triggers])

    def put_many(self, triggers: list[Asked]) -> Batch[list[Receipt]]:
        """As `trigger_many`, of triggers that were `checked`."""
        most = SOME if any(asked[1].startswith(_MORE) for asked in triggers) else MANY
        if self.policy.slots == 1:
            return Batch(self._puts(0, portions(triggers, _size, most)), _flat)
        by_slot: defaultdict[int, list[int]] = defaultdict(list)
        for place, asked in enumerate(triggers):
            by_slot[self.at(asked[3])].append(place)
        sizes = list(map(_size, triggers))
        placed = {slot: portions(found, sizes.__getitem__, most) for slot, found in by_slot.items()}
        calls = [
            one
            for slot, found in placed.items()
            for one in self._puts(slot, [[triggers[place] for place in part] for part in found])
        ]
        return Batch(calls, lambda answers: in_order(_flat(placed.values()), answers))

    def _puts(self, slot: int, portioned: Iterable[Sequence[Asked]]) -> list[Call[list[Receipt]]]:
        """Each names the one in front of it: where that leaves some for another call, those behind wait for it."""
        made, before = list[Call[list[Receipt]]](), b""
        for some in portioned:
            part = parts.Part(token(), some)
            made.append(self._put(slot, part, before))
            before = part.request
        return made

    def _put(self, slot: int, part: parts.Part[Asked], before: bytes = b"") -> Call[list[Receipt]]:
        args: list[Arg] = [part.request, self._rules, before]
        for key, wish, acc, _ in part.entries:
            args += (key, wish, acc)
        return self._call(
            "trigger",
            slot,
            args,
            lambda reply: self._received(slot, part.entries, reply[1], part.own(reply[2:])),
            lambda calls, _: part.again(lambda asked: calls.at(asked[3]), calls._put, in_order),
        )

    def _received(self, slot: int, triggers: Sequence[Asked], now_ms: int, codes: list[int]) -> list[Receipt]:
        done = codes.index(_LEFT) if _LEFT in codes[-1:] else len(codes)
        receipts = _receipts(now_ms, codes[:done])
        if done == len(codes):
            return receipts
        rest = portions(list(triggers[done:]), _size, _next(done))
        calls = [self._put(slot, parts.Part(token(), some)) for some in rest]
        raise Unfinished(Batch(calls, lambda answers: receipts + _flat(answers)))

    def checked(self, trigger: Trigger) -> Asked:
        """A trigger as scripts get it, or InvalidArgument."""
        key, group, wish = keys.raw(trigger.key), trigger.group, _when(trigger)
        if not (trigger.priority is group is trigger.version is trigger.event_id is None):
            wish = self._wish(trigger, wish)
        acc = self.policy.merge.lift(trigger.payload, self.codec)
        return key, wish, acc, key if group is None else keys.raw(group)

    def _wish(self, trigger: Trigger, when: bytes) -> bytes:
        """All that a trigger asks for, as `lua/lib/asked.lua` reads it."""
        version = b"" if trigger.version is None else _version(trigger.version)
        group = b"" if trigger.group is None else _group(trigger.group)
        key = keys.raw(trigger.key)
        event = b"" if trigger.event_id is None else keys.event(trigger.event_id, key, group or key)
        return wrapped([when, self._priority(trigger.priority), group, version, event])

    def _priority(self, priority: int | None) -> int | bytes:
        if priority is None:
            return b""
        boost = self.policy.priority_boost or 1
        if not isinstance(priority, int) or isinstance(priority, bool) or abs(priority) * boost > 2**52:
            raise InvalidArgument(
                "priority", priority, "not an integer that ranks exactly", f"Use at most 2**52 / {boost} ms"
            )
        if not self.policy.priority:
            raise InvalidArgument("priority", priority, f"topic {self.name!r} has none", "Make it with priority=True")
        return priority

    # -- taking out ---------------------------------------------------------------------------------------------------

    def take(self, slot: int, n: int) -> Call[Taken]:
        """With `n` 0 it only puts back what lapsed."""
        return self._take(token(), slot, n)

    def _take(self, request: bytes, slot: int, n: int) -> Call[Taken]:
        policy = self.policy
        args = (request, self._policy, n, policy.lease, *policy.limits(slot))

        return self._call(
            "take", slot, args, lambda reply: self._found(slot, reply, len(reply)), self._retaken(request, n)
        )

    def _retaken(self, request: bytes, n: int) -> Again:
        def again(calls: TopicCalls, slot: int) -> Batch[Taken]:
            # Where several slots became one, each of them asks it: whoever takes needs to know its next due time.
            slots = calls.heirs(slot, self) or (slot % calls.policy.slots,)
            own = _own_requests(request, len(slots))
            shares = zip(own, slots, _shares(n, len(slots)), strict=True)
            return Batch([calls._take(*share) for share in shares], _taken)

        return again

    def _found(self, slot: int, reply: list[Any], end: int) -> Taken:
        """What a reply says was taken, its deliveries in front of place `end`."""
        name, merge, codec = self.name, self.policy.merge, self.codec
        found: list[Delivery[Any]] = [
            # Not Delivery[Any](...): that alone would cost as much as all the rest.
            Delivery(name, slot, key, fence, due_ms, None, (packed, merge, codec))
            for key, fence, due_ms, packed in zip(*(reply[at:end:4] for at in range(4, 8)), strict=True)
        ]
        return Taken(found, lapsed=reply[3], next_due_ms=reply[2], now_ms=reply[1])

    def settle(self, slot: int, settlements: Sequence[Settlement]) -> Call[Settled]:
        return self._settle(slot, parts.Part(token(), settlements))

    def _settle(self, slot: int, part: parts.Part[Settlement]) -> Call[Settled]:
        return self._call(
            "settle",
            slot,
            (part.request, self._policy, _ended(part.entries), *_others(part.entries)),
            lambda reply: self._whole(
                slot, part.entries, Settled(part.own(_outcomes(reply[3:])), reply[2], reply[1]), lambda found: found
            ),
            _resettled(part),
        )

    def _whole(self, slot: int, settlements: Sequence[Settlement], found: Settled, made: Callable[[Settled], T]) -> T:
        """What is `made` of how these ended, once all have."""
        outcomes = found.outcomes
        if "left" not in outcomes[-1:]:
            return made(found)
        done = outcomes.index("left")
        rest = portions(list(settlements[done:]), lambda entry: entry.size, _next(done))
        calls = [self._settle(slot, parts.Part(token(), some)) for some in rest]

        def whole(answers: list[Settled]) -> T:
            ended = outcomes[:done] + _flat(one.outcomes for one in answers)
            return made(Settled(ended, answers[-1].next_due_ms, answers[-1].now_ms))

        raise Unfinished(Batch(calls, whole))

    def turn(self, slot: int, settlements: Sequence[Settlement], n: int) -> Call[Turned]:
        """`settle`, then `take`, in one step."""
        part, request, policy = parts.Part(token(), settlements), token(), self.policy
        limits = (n, policy.lease, *policy.limits(slot))
        args = (part.request, self._policy, _ended(settlements), request, *limits, *_others(settlements))

        def read(reply: list[Any]) -> Turned:
            end = len(reply) - len(settlements)
            taken = self._found(slot, reply, end)
            settled = Settled(_outcomes(reply[end:]), taken.next_due_ms, taken.now_ms)
            return self._whole(slot, settlements, settled, lambda found: Turned(found, taken))

        def again(calls: TopicCalls, slot: int) -> Batch[Turned]:
            # Each half by itself, as a copy of it that had been asked for alone.
            ending, taking = _resettled(part)(calls, slot), self._retaken(request, n)(calls, slot)
            ends = len(ending.calls)
            return Batch(
                [*ending.calls, *taking.calls],
                lambda answers: Turned(ending.join(answers[:ends]), taking.join(answers[ends:])),
            )

        return self._call("turn", slot, args, read, again)

    def settle_many(self, settlements: Iterable[Settlement]) -> Batch[list[str]]:
        """One script call per slot and 100 deliveries, 32 if not all are just done, or 128 KiB of them; and more where
        large messages wait behind them. The outcomes are in the order of the settlements."""
        found = list(settlements)
        return self._spread(
            found,
            lambda entry: self.home(entry.delivery),
            self.settle,
            lambda answer: answer.outcomes,
            lambda entry: entry.size,
            most_of(found),
        )

    def extend(self, slot: int, deliveries: Sequence[Delivery[Any]], lease: int | None = None) -> Call[list[str]]:
        return self._extend(slot, parts.Part(b"", deliveries), self.policy.lease if lease is None else lease)

    def _extend(self, slot: int, part: parts.Part[Delivery[Any]], lease: int) -> Call[list[str]]:
        args: list[Arg] = [lease]
        for delivery in part.entries:
            args += (delivery.raw_key, delivery.token)
        return self._call(
            "extend",
            slot,
            args,
            lambda reply: _outcomes(reply[2:]),
            lambda calls, _: part.again(calls.home, lambda at, some: calls._extend(at, some, lease), in_order),
        )

    def extend_many(self, deliveries: Iterable[Delivery[Any]], lease: int | None = None) -> Batch[list[str]]:
        return self._spread(
            deliveries,
            self.home,
            lambda slot, part: self.extend(slot, part, lease),
            lambda answer: answer,
            lambda delivery: delivery.size,
        )

    def _spread(
        self,
        entries: Iterable[Any],
        slot_of: Callable[[Any], int],
        build: Callable[[int, list[Any]], Call[Any]],
        read: Callable[[Any], list[str]],
        size_of: Callable[[Any], int],
        most: int = BATCH,
    ) -> Batch[list[str]]:
        found = list(entries)
        if self.policy.slots == 1:
            return Batch(
                [build(0, part) for part in portions(found, size_of, most)],
                lambda answers: _flat(read(one) for one in answers),
            )
        by_slot: defaultdict[int, list[int]] = defaultdict(list)
        for place, entry in enumerate(found):
            by_slot[slot_of(entry)].append(place)
        sizes = list(map(size_of, found))
        placed = [
            (slot, part) for slot, places in by_slot.items() for part in portions(places, sizes.__getitem__, most)
        ]
        calls = [build(slot, [found[place] for place in part]) for slot, part in placed]
        return Batch(calls, lambda answers: in_order([part for _, part in placed], [read(one) for one in answers]))

    def forward(self, slot: int, to: Forward, n: int) -> Call[Forwarded]:
        return self._forward(token(), slot, to, n)

    def _forward(self, request: bytes, slot: int, to: Forward, n: int) -> Call[Forwarded]:
        def again(calls: TopicCalls, slot: int) -> Batch[Forwarded]:
            slots = calls.heirs(slot, self) or (slot % calls.policy.slots,)
            own = _own_requests(request, len(slots))
            shares = zip(own, slots, _shares(n, len(slots)), strict=True)
            return Batch([calls._forward(one, slot, to, share) for one, slot, share in shares], _forwarded)

        return self._call(
            "forward",
            slot,
            (request, self._policy, n, to.kind, to.keep),
            lambda reply: Forwarded(reply[3], next_due_ms=reply[2], now_ms=reply[1]),
            again,
            to.target or keys.outbox(self.namespace, self.name, slot, self.policy.slots),
        )

    def received(self, packed: bytes) -> Delivery[Any]:
        """A forwarded message, as its target holds it."""
        return forwarded(self.name, packed, self.policy.merge, self.codec)

    # -- changing -----------------------------------------------------------------------------------------------------

    def cancel(self, key: Key, group: Key | None = None) -> Call[str]:
        args = (token(), self._policy, keys.raw(key))
        return self._of_key("cancel", _route(key, group), args, lambda reply: text(reply[0]))

    def _of_key(self, script: str, route: bytes, args: Sequence[Arg], read: Callable[[list[Any]], Any]) -> Call[Any]:
        """A call of one key, which is the same in every layout."""
        return self._call(
            script, self.at(route), args, read, lambda calls, _: _only(calls._of_key(script, route, args, read))
        )

    def reschedule(self, trigger: Trigger) -> Call[str]:
        when = _when(trigger)
        if not when:
            raise InvalidArgument("at", None, "no time named", "Pass at= (an aware datetime) or delay=")
        return self._of_key(
            "reschedule",
            _route(trigger.key, trigger.group),
            (token(), self._policy, keys.raw(trigger.key), when),
            lambda reply: text(reply[0]),
        )

    def flush(self, key: Key, group: Key | None = None) -> Call[int]:
        args = (token(), keys.raw(key), b"")
        return self._of_key("flush", _route(key, group), args, lambda reply: int(reply[2]))

    def flush_slot(self, slot: int, rest: Sequence[bytes] = (b"",)) -> Call[Flushed]:
        """All of a slot, or the `rest` of what stands behind deliveries: as much as goes in one call."""

        def read(reply: list[Any]) -> Flushed:
            moved, left, rest = reply[2], reply[3], reply[4:]
            return Flushed(moved, [self.flush_slot(slot, rest)] if left or rest[0] else [])

        return self._call(
            "flush",
            slot,
            (token(), b"", *rest),
            read,
            lambda calls, slot: Batch([calls.flush_slot(one) for one in calls.heirs(slot, self)], _together),
        )

    # -- looking ------------------------------------------------------------------------------------------------------

    def pause(self, pause: bool) -> Batch[bool]:
        """Whether any slot was changed."""
        return Batch([self._pause(slot, b"1" if pause else b"0") for slot in range(self.policy.slots)], any)

    def _pause(self, slot: int, verb: bytes) -> Call[bool]:
        return self._call(
            "pause",
            slot,
            (token(), verb),
            lambda reply: reply[2] == 1,
            lambda calls, slot: Batch([calls._pause(one, verb) for one in calls.heirs(slot, self)], any),
        )

    def peek(self, key: Key, group: Key | None = None) -> Call[Peek]:
        merge, codec = self.policy.merge, self.codec

        def read(reply: list[Any]) -> Peek:
            pending, due, fence, lease_end, flying = reply[2:]
            return Peek(
                pending=Message(pending, merge, codec) if pending else None,
                due_at=moment(due) if pending else None,
                in_flight=Message(flying, merge, codec) if flying else None,
                token=fence if flying else None,
                lease_until=moment(lease_end) if flying else None,
            )

        return self._of_key("peek", _route(key, group), (keys.raw(key),), read)

    def time(self) -> Call[int]:
        """The server's time, ms, as every reply tells it."""
        return self._call("stats", 0, (0,), lambda reply: reply[1], lambda calls, _: _only(calls.time()))

    def stats(self) -> Batch[Stats]:
        return Batch([self._stats(slot) for slot in range(self.policy.slots)], _stats)

    def _stats(self, slot: int) -> Call[list[Any]]:
        """The replies: one, or those of the slots that this one has become."""
        return self._call(
            "stats",
            slot,
            (0,),
            lambda reply: [reply],
            lambda calls, slot: Batch([calls._stats(one) for one in calls.heirs(slot, self)], _flat),
        )

    def depth(self, to: int) -> Batch[Stats]:
        """As `stats`, of a topic that may be changing `to` another number of slots: of both layouts, open or closed."""
        layouts = [self] if to <= 0 else [self, self.laid_out(to)]
        calls = [
            one._call("stats", slot, (1,), lambda reply: [reply]) for one in layouts for slot in range(one.policy.slots)
        ]
        return Batch(calls, _stats)

    def dead(self, slot: int, since: int, n: int, before: Place | None = None) -> Call[tuple[int, list[DeadLetter]]]:
        """(dead letters in the slot, the wanted ones, newest first): at most `n` that died at `since` ms or later, and
        before a place (None: any time). Fewer where they are large."""
        before = before or Place()

        def read(reply: list[Any]) -> tuple[int, list[DeadLetter]]:
            letters = [
                letter_of(slot, reply[i], reply[i + 1], self.policy.merge, self.codec) for i in range(3, len(reply), 2)
            ]
            return reply[2], letters

        def newest(answers: list[tuple[int, list[DeadLetter]]]) -> tuple[int, list[DeadLetter]]:
            found = sorted(_flat([letters for _, letters in answers]), key=lambda one: one.died_at, reverse=True)
            return sum(total for total, _ in answers), found[:n]

        def again(calls: TopicCalls, slot: int) -> Batch[tuple[int, list[DeadLetter]]]:
            return Batch([calls.dead(one, since, n, before) for one in calls.heirs(slot, self)], newest)

        return self._call("dead", slot, (since, before.ms, before.number, n), read, again)

    def exhume(self, slot: int, verb: str, numbers: Sequence[str], most: int = PAGE) -> Call[Exhumed]:
        """For `verb` "redrive" or "delete"; with no numbers the oldest `most`. Fewer where they are large."""

        def all_of(answers: list[Exhumed]) -> Exhumed:
            taken, left = sum(one.taken for one in answers), sum(one.left for one in answers)
            return Exhumed(taken, left, min((one.seen for one in answers), default=len(numbers)))

        def again(calls: TopicCalls, slot: int) -> Batch[Exhumed]:
            return Batch([calls.exhume(one, verb, numbers, most) for one in calls.heirs(slot, self)], all_of)

        args: list[Arg] = [token(), self._policy, verb, most, *numbers]
        return self._call("exhume", slot, args, lambda reply: Exhumed(*reply[2:]), again)


Again = Callable[[TopicCalls, int], Batch[Any]]
"""What to ask instead of a call of a slot, by the calls of another layout."""


def _only(made: Call[T]) -> Batch[T]:
    return Batch([made], lambda answers: answers[0])


def _flat(lists: Iterable[Iterable[Any]]) -> list[Any]:
    return [one for some in lists for one in some]


def _together(flushed: list[Flushed]) -> Flushed:
    return Flushed(sum(one.moved for one in flushed), [call for one in flushed for call in one.more])


def _route(key: Key, group: Key | None) -> bytes:
    """What decides the slot."""
    found = keys.raw(key)
    return found if group is None else keys.raw(group)


def _own_requests(request: bytes, n: int) -> list[bytes]:
    """The ids of the requests into which one is split, as in `Part`: of two that meet in one slot again, neither gets
    the answer of the other."""
    return [request] if n == 1 else [token() + request for _ in range(n)]


def _shares(n: int, slots: int) -> list[int]:
    """`n` shared out; what is left over goes to any of them, so that none is the last for ever."""
    first = randrange(slots)
    return [n // slots + ((slot - first) % slots < n % slots) for slot in range(slots)]


def _soonest(times: Iterable[int]) -> int:
    """0 = never."""
    return min(filter(None, times), default=0)


def _taken(answers: list[Taken]) -> Taken:
    return Taken(
        _flat(one.deliveries for one in answers),
        lapsed=sum(one.lapsed for one in answers),
        next_due_ms=_soonest(one.next_due_ms for one in answers),
        now_ms=answers[-1].now_ms,
    )


def _forwarded(answers: list[Forwarded]) -> Forwarded:
    soonest = _soonest(one.next_due_ms for one in answers)
    return Forwarded(sum(one.sent for one in answers), next_due_ms=soonest, now_ms=answers[-1].now_ms)


def _settled(places: list[list[int]], answers: list[Settled]) -> Settled:
    outcomes = in_order(places, [one.outcomes for one in answers])
    return Settled(outcomes, _soonest(one.next_due_ms for one in answers), max(one.now_ms for one in answers))


def most_of(settlements: Sequence[Settlement]) -> int:
    """How many of these may end in one script call."""
    verbs = [one.verb for one in settlements]
    return BATCH if verbs.count("ack") == len(verbs) else FEW


def _resettled(part: parts.Part[Settlement]) -> Again:
    return lambda calls, _: part.again(lambda one: calls.home(one.delivery), calls._settle, _settled)


def _ended(settlements: Sequence[Settlement]) -> bytes:
    """Which deliveries end, as scripts take it: in one word, since every word costs both sides."""
    flat: list[object] = []
    for settlement in settlements:
        delivery = settlement.delivery
        flat += (delivery.raw_key, delivery.token)
    return wrapped(flat)


def _others(settlements: Sequence[Settlement]) -> list[Arg]:
    """What is said of those that are not just done."""
    words: list[Arg] = []
    for place, settlement in enumerate(settlements, 1):
        if settlement.verb != "ack":
            words += settlement.words(place)
    return words


_OUTCOMES = {word.encode(): word for word in ("ok", "dead", "cancelled", "lost", "left")}


def _outcomes(words: list[bytes]) -> list[str]:
    return [_OUTCOMES[word] for word in words]


_ACCEPTED: tuple[ReceiptStatus, ...] = ("scheduled", "merged", "replaced")
_REFUSED: dict[int, ReceiptStatus] = {3: "dropped", 4: "duplicate"}


_LEFT = 5
"""What is said of a trigger that is left for another call."""
_MORE = b"\x95"
"""With which begins what a trigger asks for that is more than a time."""


def _next(done: int) -> int:
    """How many to carry at once where a call did so many of its own: not all that are left, again and again."""
    return 2 * done or BATCH


def _receipts(now_ms: int, codes: list[int]) -> list[Receipt]:
    return [
        Receipt(_REFUSED[one], None) if one in _REFUSED else Receipt(_ACCEPTED[one & 7], now_ms + (one >> 3))
        for one in codes
    ]


def _stats(answers: list[list[list[Any]]]) -> Stats:
    replies: list[list[Any]] = _flat(answers)
    counters: dict[str, int] = defaultdict(int)
    with as_ours("counters"):
        for reply in replies:
            for name, value in zip(reply[9::2], reply[10::2], strict=True):
                if name not in _FACTS and not name.startswith(b"from:"):
                    counters[text(name)] += int(value)
    sums = [sum(reply[i] for reply in replies) for i in range(2, 8)]
    soonest = min((reply[8] for reply in replies if reply[8]), default=0)
    scheduled, ready, waiting, blocked, in_flight, dead = sums
    paused = any(b"paused" in reply[9::2] for reply in replies)
    next_due = moment(soonest) if soonest else None
    return Stats(scheduled, ready, waiting, blocked, in_flight, dead, next_due, paused, dict(counters))


_FACTS = (b"v", b"fence", b"paused", b"rate", b"lease", b"flushed", b"large", b"opened", b"batch", b"gone")
"""What a slot's facts hold beside counters."""


def _size(asked: Asked) -> int:
    return sum(map(len, asked))  # the route is the key or the group: counted twice, for it is stored twice


def _group(group: Key) -> bytes:
    found = keys.raw(group)
    if b"\0" in found:
        raise InvalidArgument("group", group, "holds a NUL", "Use a text without one")
    return found


def _version(version: int) -> bytes:
    if not isinstance(version, int) or isinstance(version, bool) or abs(version) > 2**53:
        raise InvalidArgument(
            "version", version, "not an integer up to 2**53", "Use a revision number, or a time in ms"
        )
    return b"%d" % version


def _when(trigger: Trigger) -> bytes:
    if trigger.delay is not None and trigger.at is not None:
        raise InvalidArgument("delay", trigger.delay, "at= was given too", "Pass one of delay and at")
    if trigger.at is not None:
        return b"a%d" % instant(trigger.at, "at")
    if trigger.delay is not None:
        return b"d%d" % milliseconds(trigger.delay, "delay", zero=True)
    return b""
