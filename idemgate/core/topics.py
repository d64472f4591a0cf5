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
from idemgate.core.messages import (
    DeadLetter,
    Delivery,
    Message,
    Peek,
    Receipt,
    ReceiptStatus,
    Settled,
    Stats,
    Taken,
    Trigger,
    letter_of,
    moment,
)
from idemgate.core.policy import Policy
from idemgate.core.tokens import token
from idemgate.errors import BadInput

__all__ = ["Settlement", "TopicCalls", "open_topic", "stored_policy"]

BATCH = 500
"""Most triggers of one script call: the server is blocked for the whole of it."""


class Settlement(NamedTuple):
    """How one delivery ends. `verb`: ack, nack, bury, return (never started) or defer (not possible yet, no attempt);
    `delay` ms before the next attempt."""

    verb: str
    delivery: Delivery[Any]
    delay: int = 0
    failure: str = ""


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

    __slots__ = ("_merge", "_trigger", "clock", "codec", "name", "namespace", "policy")

    def __init__(self, namespace: str, name: str, policy: Policy, codec: Codec, clock: Clock | None) -> None:
        self.namespace = namespace
        self.name = name
        self.policy = policy
        self.codec = codec
        self.clock = clock
        self._trigger = policy.for_trigger()
        self._merge = policy.for_merge()

    def keys(self, slot: int) -> tuple[bytes, ...]:
        return keys.slot(self.namespace, self.name, slot)

    def slot_of(self, key: Key) -> int:
        return keys.slot_of(keys.raw(key), self.policy.slots)

    def _call(self, script: str, slot: int, args: Sequence[Arg], read: Callable[[list[Any]], Any]) -> Call[Any]:
        return call(f"topic/{script}", self.keys(slot), (stamp(self.clock), *args), read)

    # -- putting in ---------------------------------------------------------------------------------------------------

    def trigger(self, trigger: Trigger) -> Call[Receipt]:
        fields = self._fields(trigger)
        return self._call(
            "trigger",
            keys.slot_of(fields[0], self.policy.slots),
            (token(), self._trigger, *fields),
            lambda reply: _receipts(reply)[0],
        )

    def trigger_many(self, triggers: Iterable[Trigger]) -> Batch[list[Receipt]]:
        """One script call per slot and 500 triggers. All are checked before the first call is made."""
        by_slot: dict[int, list[tuple[int, tuple[bytes, ...]]]] = defaultdict(list)
        total = 0
        for place, trigger in enumerate(triggers):
            fields = self._fields(trigger)
            by_slot[keys.slot_of(fields[0], self.policy.slots)].append((place, fields))
            total += 1
        calls: list[Call[list[Receipt]]] = []
        places: list[list[int]] = []
        for slot, entries in by_slot.items():
            for start in range(0, len(entries), BATCH):
                part = entries[start : start + BATCH]
                args = (token(), self._trigger, *(value for _, fields in part for value in fields))
                calls.append(self._call("trigger", slot, args, _receipts))
                places.append([place for place, _ in part])

        def join(answers: list[list[Receipt]]) -> list[Receipt]:
            receipts: list[Any] = [None] * total
            for where, answer in zip(places, answers, strict=True):
                for place, receipt in zip(where, answer, strict=True):
                    receipts[place] = receipt
            return receipts

        return Batch(calls, join)

    def _fields(self, trigger: Trigger) -> tuple[bytes, bytes, bytes, bytes, bytes]:
        version = b"" if trigger.version is None else _version(trigger.version)
        event = b"" if trigger.event_id is None else keys.digest(trigger.event_id, "event_id")
        return (
            keys.raw(trigger.key),
            _when(trigger),
            version,
            event,
            self.policy.merge.lift(trigger.payload, self.codec),
        )

    # -- taking out ---------------------------------------------------------------------------------------------------

    def take(self, slot: int, n: int) -> Call[Taken]:
        policy = self.policy
        args = (token(), n, policy.lease, policy.max_attempts, self._merge, policy.retention, policy.max_dead)

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
        policy = self.policy
        args: list[Arg] = [token(), policy.max_attempts, self._merge, policy.retention, policy.max_dead]
        for verb, delivery, delay, failure in settlements:
            args += (verb, delivery.raw_key, delivery.token, delay, failure)
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

    # -- changing -----------------------------------------------------------------------------------------------------

    def cancel(self, key: Key) -> Call[str]:
        return self._call("cancel", self.slot_of(key), (token(), keys.raw(key)), lambda reply: text(reply[0]))

    def reschedule(self, trigger: Trigger) -> Call[str]:
        when = _when(trigger)
        if not when:
            raise BadInput("at", None, "no time named", "Pass at= (an aware datetime) or delay=")
        return self._call(
            "reschedule",
            self.slot_of(trigger.key),
            (token(), keys.raw(trigger.key), when),
            lambda reply: text(reply[0]),
        )

    def flush(self, key: Key) -> Call[int]:
        return self._call("flush", self.slot_of(key), (token(), keys.raw(key)), lambda reply: int(reply[2]))

    def flush_slot(self, slot: int) -> Call[tuple[int, int]]:
        """(moved, still due later): one call moves at most 1,000."""
        return self._call("flush", slot, (token(), b""), lambda reply: (reply[2], reply[3]))

    # -- looking ------------------------------------------------------------------------------------------------------

    def peek(self, key: Key) -> Call[Peek]:
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

        return self._call("peek", self.slot_of(key), (keys.raw(key),), read)

    def stats(self) -> Batch[Stats]:
        return Batch([self._call("stats", slot, (), lambda reply: reply) for slot in range(self.policy.slots)], _stats)

    def dead(self, slot: int, skip: int, n: int) -> Call[tuple[int, list[DeadLetter]]]:
        """(dead letters in the slot, the wanted ones, newest first)."""

        def read(reply: list[Any]) -> tuple[int, list[DeadLetter]]:
            letters = [
                letter_of(slot, reply[i], reply[i + 1], self.policy.merge, self.codec) for i in range(3, len(reply), 2)
            ]
            return reply[2], letters

        return self._call("dead", slot, (skip, n), read)

    def exhume(self, slot: int, verb: str, ids: Sequence[str], most: int = 500) -> Call[tuple[int, int]]:
        """(taken out, left) for `verb` "redrive" or "delete"; with no ids the oldest `most`."""
        return self._call("exhume", slot, (token(), verb, self._merge, most, *ids), lambda reply: (reply[2], reply[3]))


def _receipts(reply: list[Any]) -> list[Receipt]:
    pairs = zip(reply[2::2], reply[3::2], strict=True)
    return [Receipt(cast(ReceiptStatus, text(status)), moment(due) if due else None) for status, due in pairs]


def _stats(replies: list[list[Any]]) -> Stats:
    counters: dict[str, int] = defaultdict(int)
    for reply in replies:
        for name, value in zip(reply[8::2], reply[9::2], strict=True):
            if name not in (b"v", b"fence"):
                counters[text(name)] += int(value)
    sums = [sum(reply[i] for reply in replies) for i in range(2, 7)]
    soonest = min((reply[7] for reply in replies if reply[7]), default=0)
    scheduled, ready, waiting, in_flight, dead = sums
    next_due = moment(soonest) if soonest else None
    return Stats(scheduled, ready, waiting, in_flight, dead, next_due, dict(counters))


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
