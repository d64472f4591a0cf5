"""The topic's calls: one function a script of `lua/topic`, and what their replies mean."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

from idemgate.core import keys
from idemgate.core.calls import Arg, Batch, Call, call, text
from idemgate.core.clock import Clock, stamp
from idemgate.core.codec import Codec
from idemgate.core.durations import instant, milliseconds
from idemgate.core.keys import Key
from idemgate.core.letters import PAGE, Place
from idemgate.core.messages import (
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
    forwarded,
    letter_of,
    moment,
)
from idemgate.core.partial import Part
from idemgate.core.policy import Policy
from idemgate.core.tokens import token
from idemgate.errors import BadInput

__all__ = ["Settlement", "TopicCalls", "failed", "open_topic", "stored_policy"]

BATCH = 500
"""Most triggers of one script call: the server is blocked for the whole of it."""


class Settlement(NamedTuple):
    """How one delivery ends. `verb`: ack, nack, bury, return (never started) or defer (not possible yet, no attempt);
    `delay` ms before the next attempt; `part`, of a nack, what of it is tried again (None: all)."""

    verb: str
    delivery: Delivery[Any]
    delay: int = 0
    failure: str = ""
    part: Part | None = None

    def words(self) -> tuple[Arg, ...]:
        """As the script takes it."""
        verb, said = (self.verb, self.failure) if self.part is None else ("part", self.part.packed(self.failure))
        return (verb, self.delivery.raw_key, self.delivery.token, self.delay, said)


def failed(delivery: Delivery[Any], items: object, delay: int, failure: str) -> Settlement:
    """Only these items are tried again. None of them: acknowledged; all of them: a plain nack. BadInput for what is
    not an item of the delivery."""
    part = delivery.part(items)
    if not part.items:
        return Settlement("ack", delivery)
    return Settlement("nack", delivery, delay, failure, part if part.items < part.of else None)


def open_topic(
    namespace: str, clock: Clock | None, name: str, policy: Policy, redefine: bool
) -> Call[tuple[str, bytes]]:
    """(word, stored policy): "made", "same", "changed" (with the former one) or "differs" (with the stored one)."""
    args = (stamp(clock), name, policy.stored(), b"1" if redefine else b"0")
    return call(
        "topic/open",
        (keys.topics(namespace),),
        args,
        lambda reply: (text(reply[0]), reply[2] if len(reply) > 2 else b""),
    )


def stored_policy(namespace: str, clock: Clock | None, name: str) -> Call[bytes | None]:
    return call(
        "topic/policy",
        (keys.topics(namespace),),
        (stamp(clock), name),
        lambda reply: reply[2] if reply[0] == b"ok" else None,
    )


class TopicCalls:
    """Builds the calls of one topic. What concerns one key or one slot is a Call; what spreads over slots is a Batch
    of them."""

    __slots__ = ("_policy", "clock", "codec", "name", "namespace", "policy")

    def __init__(self, namespace: str, name: str, policy: Policy, codec: Codec, clock: Clock | None) -> None:
        self.namespace = namespace
        self.name = name
        self.policy = policy
        self.codec = codec
        self.clock = clock
        self._policy = policy.for_scripts()

    def keys(self, slot: int) -> tuple[bytes, ...]:
        return keys.slot(self.namespace, self.name, slot)

    def slot_of(self, key: Key, group: Key | None = None) -> int:
        return keys.slot_of(keys.raw(key if group is None else group), self.policy.slots)

    def _call(self, script: str, slot: int, args: Sequence[Arg], read: Callable[[list[Any]], Any]) -> Call[Any]:
        return call(f"topic/{script}", self.keys(slot), (stamp(self.clock), *args), read)

    # -- putting in ---------------------------------------------------------------------------------------------------

    def trigger(self, trigger: Trigger) -> Call[Receipt]:
        fields = self._fields(trigger)
        return self._call(
            "trigger",
            keys.slot_of(fields[3] or fields[0], self.policy.slots),
            (token(), self._policy, *fields),
            lambda reply: _receipts(reply)[0],
        )

    def trigger_many(self, triggers: Iterable[Trigger]) -> Batch[list[Receipt]]:
        """One script call per slot and 500 triggers. All are checked before the first call is made."""
        by_slot: dict[int, list[tuple[int, tuple[bytes, ...]]]] = defaultdict(list)
        total = 0
        for place, trigger in enumerate(triggers):
            fields = self._fields(trigger)
            by_slot[keys.slot_of(fields[3] or fields[0], self.policy.slots)].append((place, fields))
            total += 1
        calls: list[Call[list[Receipt]]] = []
        places: list[list[int]] = []
        for slot, entries in by_slot.items():
            for start in range(0, len(entries), BATCH):
                part = entries[start : start + BATCH]
                args = (token(), self._policy, *(value for _, fields in part for value in fields))
                calls.append(self._call("trigger", slot, args, _receipts))
                places.append([place for place, _ in part])

        def join(answers: list[list[Receipt]]) -> list[Receipt]:
            receipts: list[Any] = [None] * total
            for where, answer in zip(places, answers, strict=True):
                for place, receipt in zip(where, answer, strict=True):
                    receipts[place] = receipt
            return receipts

        return Batch(calls, join)

    def _fields(self, trigger: Trigger) -> tuple[bytes, ...]:
        version = b"" if trigger.version is None else _version(trigger.version)
        event = b"" if trigger.event_id is None else keys.digest(trigger.event_id, "event_id")
        return (
            keys.raw(trigger.key),
            _when(trigger),
            self._priority(trigger.priority),
            b"" if trigger.group is None else _group(trigger.group),
            version,
            event,
            self.policy.merge.lift(trigger.payload, self.codec),
        )

    def _priority(self, priority: int | None) -> bytes:
        if priority is None:
            return b""
        boost = self.policy.priority_boost or 1
        if not isinstance(priority, int) or isinstance(priority, bool) or abs(priority) * boost > 2**52:
            raise BadInput("priority", priority, "not an integer that ranks exactly", f"Use at most 2**52 / {boost} ms")
        if not self.policy.priority:
            raise BadInput("priority", priority, f"topic {self.name!r} has none", "Make it with priority=True")
        return b"%d" % priority

    # -- taking out ---------------------------------------------------------------------------------------------------

    def take(self, slot: int, n: int) -> Call[Taken]:
        """With `n` 0 it only puts back what lapsed."""
        policy = self.policy
        args = (token(), self._policy, n, policy.lease, *policy.limits(slot))

        def read(reply: list[Any]) -> Taken:
            found = [
                Delivery[Any](
                    self.name,
                    slot,
                    reply[i],
                    reply[i + 1],
                    reply[i + 2],
                    Message(reply[i + 3], policy.merge, self.codec),
                )
                for i in range(4, len(reply), 4)
            ]
            return Taken(found, lapsed=reply[3], next_due_ms=reply[2], now_ms=reply[1])

        return self._call("take", slot, args, read)

    def settle(self, slot: int, settlements: Sequence[Settlement]) -> Call[Settled]:
        args: list[Arg] = [token(), self._policy]
        for settlement in settlements:
            args += settlement.words()
        return self._call(
            "settle",
            slot,
            args,
            lambda reply: Settled([text(word) for word in reply[3:]], reply[2], reply[1]),
        )

    def settle_many(
        self,
        settlements: Iterable[Settlement],
        told: Callable[[int, Settled], None] = lambda _slot, _settled: None,
    ) -> Batch[list[str]]:
        """One script call per slot and 500 deliveries; the outcomes in the order of the settlements. `told` hears each
        answer."""

        def read(slot: int, answer: Settled) -> list[str]:
            told(slot, answer)
            return answer.outcomes

        return self._spread(settlements, lambda entry: entry.delivery.slot, self.settle, read)

    def extend(self, slot: int, deliveries: Sequence[Delivery[Any]], lease: int | None = None) -> Call[list[str]]:
        args: list[Arg] = [self.policy.lease if lease is None else lease]
        for delivery in deliveries:
            args += (delivery.raw_key, delivery.token)
        return self._call("extend", slot, args, lambda reply: [text(word) for word in reply[2:]])

    def extend_many(self, deliveries: Iterable[Delivery[Any]], lease: int | None = None) -> Batch[list[str]]:
        return self._spread(
            deliveries,
            lambda entry: entry.slot,
            lambda slot, part: self.extend(slot, part, lease),
            lambda _, answer: answer,
        )

    def _spread(
        self,
        entries: Iterable[Any],
        slot_of: Callable[[Any], int],
        build: Callable[[int, list[Any]], Call[Any]],
        read: Callable[[int, Any], list[str]],
    ) -> Batch[list[str]]:
        by_slot: dict[int, list[tuple[int, Any]]] = defaultdict(list)
        for place, entry in enumerate(entries):
            by_slot[slot_of(entry)].append((place, entry))
        parts = [(slot, found[i : i + BATCH]) for slot, found in by_slot.items() for i in range(0, len(found), BATCH)]
        order = [place for _, part in parts for place, _ in part]

        def join(answers: list[Any]) -> list[str]:
            outcomes = [
                outcome for (slot, _), answer in zip(parts, answers, strict=True) for outcome in read(slot, answer)
            ]
            return [outcome for _, outcome in sorted(zip(order, outcomes, strict=True))]

        return Batch([build(slot, [entry for _, entry in part]) for slot, part in parts], join)

    def forward(self, slot: int, to: Forward, n: int) -> Call[Forwarded]:
        target = to.target or keys.outbox(self.namespace, self.name, slot)
        args = (stamp(self.clock), token(), self._policy, n, to.kind, to.keep)
        return call(
            "topic/forward",
            (*self.keys(slot), target),
            args,
            lambda reply: Forwarded(reply[3], next_due_ms=reply[2], now_ms=reply[1]),
        )

    def received(self, packed: bytes) -> Delivery[Any]:
        """A forwarded message, as its target holds it."""
        return forwarded(self.name, packed, self.policy.merge, self.codec)

    # -- changing -----------------------------------------------------------------------------------------------------

    def cancel(self, key: Key, group: Key | None = None) -> Call[str]:
        args = (token(), self._policy, keys.raw(key))
        return self._call("cancel", self.slot_of(key, group), args, lambda reply: text(reply[0]))

    def reschedule(self, trigger: Trigger) -> Call[str]:
        when = _when(trigger)
        if not when:
            raise BadInput("at", None, "no time named", "Pass at= (an aware datetime) or delay=")
        return self._call(
            "reschedule",
            self.slot_of(trigger.key, trigger.group),
            (token(), self._policy, keys.raw(trigger.key), when),
            lambda reply: text(reply[0]),
        )

    def flush(self, key: Key, group: Key | None = None) -> Call[int]:
        args = (token(), keys.raw(key))
        return self._call("flush", self.slot_of(key, group), args, lambda reply: int(reply[2]))

    def flush_slot(self, slot: int) -> Call[tuple[int, int]]:
        """(moved, still due later): one call moves at most 1,000."""
        return self._call("flush", slot, (token(), b""), lambda reply: (reply[2], reply[3]))

    # -- looking ------------------------------------------------------------------------------------------------------

    def pause(self, pause: bool) -> Batch[bool]:
        """Whether any slot was changed."""
        verb = b"1" if pause else b"0"
        calls = [
            self._call("pause", slot, (token(), verb), lambda reply: reply[2] == 1) for slot in range(self.policy.slots)
        ]
        return Batch(calls, any)

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

        return self._call("peek", self.slot_of(key, group), (keys.raw(key),), read)

    def time(self) -> Call[int]:
        """The server's time, ms, as every reply tells it."""
        return self._call("stats", 0, (), lambda reply: reply[1])

    def stats(self) -> Batch[Stats]:
        return Batch([self._call("stats", slot, (), lambda reply: reply) for slot in range(self.policy.slots)], _stats)

    def dead(self, slot: int, since: int, n: int, before: Place | None = None) -> Call[tuple[int, list[DeadLetter]]]:
        """(dead letters in the slot, the wanted ones, newest first): at most `n` that died at `since` ms or later, and
        before a place (None: any time). Fewer where they are large."""
        before = before or Place()

        def read(reply: list[Any]) -> tuple[int, list[DeadLetter]]:
            letters = [
                letter_of(slot, reply[i], reply[i + 1], self.policy.merge, self.codec) for i in range(3, len(reply), 2)
            ]
            return reply[2], letters

        return self._call("dead", slot, (since, before.ms, before.number, n), read)

    def exhume(self, slot: int, verb: str, numbers: Sequence[str], most: int = PAGE) -> Call[tuple[int, int]]:
        """(taken out, left) for `verb` "redrive" or "delete"; with no numbers the oldest `most`."""
        args: tuple[Arg, ...] = (token(), self._policy, verb, most, *numbers)
        return self._call("exhume", slot, args, lambda reply: (reply[2], reply[3]))


def _receipts(reply: list[Any]) -> list[Receipt]:
    pairs = zip(reply[2::2], reply[3::2], strict=True)
    return [Receipt(cast(ReceiptStatus, text(status)), moment(due) if due else None) for status, due in pairs]


def _stats(replies: list[list[Any]]) -> Stats:
    counters: dict[str, int] = defaultdict(int)
    for reply in replies:
        for name, value in zip(reply[9::2], reply[10::2], strict=True):
            if name not in _FACTS:
                counters[text(name)] += int(value)
    sums = [sum(reply[i] for reply in replies) for i in range(2, 8)]
    soonest = min((reply[8] for reply in replies if reply[8]), default=0)
    scheduled, ready, waiting, blocked, in_flight, dead = sums
    paused = any(b"paused" in reply[9::2] for reply in replies)
    next_due = moment(soonest) if soonest else None
    return Stats(scheduled, ready, waiting, blocked, in_flight, dead, next_due, paused, dict(counters))


_FACTS = (b"v", b"fence", b"paused", b"rate")
"""What a slot's facts hold beside counters."""


def _group(group: Key) -> bytes:
    found = keys.raw(group)
    if b"\0" in found:
        raise BadInput("group", group, "holds a NUL", "Use a text without one")
    return found


def _version(version: int) -> bytes:
    if not isinstance(version, int) or isinstance(version, bool) or abs(version) > 2**53:
        raise BadInput("version", version, "not an integer up to 2**53", "Use a revision number, or a time in ms")
    return b"%d" % version


def _when(trigger: Trigger) -> bytes:
    if trigger.delay is not None and trigger.at is not None:
        raise BadInput("delay", trigger.delay, "at= was given too", "Pass one of delay and at")
    if trigger.at is not None:
        return b"a%d" % instant(trigger.at, "at")
    if trigger.delay is not None:
        return b"d%d" % milliseconds(trigger.delay, "delay", zero=True)
    return b""
