"""The script calls of a topic: one builder per script of `topics/scripts`, and the meaning of its reply."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from idemgate.core import keys
from idemgate.core.calls import Batch, Call, new_id, text
from idemgate.core.codec.decoding import wrap_decode_errors
from idemgate.core.keys import Key
from idemgate.core.process import actor_name
from idemgate.errors import InvalidArgument
from idemgate.topics.dead_letters import DeadLetterCalls
from idemgate.topics.deliveries import DeliveryCalls
from idemgate.topics.messages import (
    BlockedGroup,
    Message,
    Pause,
    Peek,
    PendingMessage,
    PendingPage,
    Position,
    Stats,
    StoredVersion,
    Ticket,
    Trigger,
    decode_pause,
    moment,
    pack_pause,
)
from idemgate.topics.results import find_result
from idemgate.topics.slots import SlotsChanged, flatten, route_of, single
from idemgate.topics.triggers import TriggerCalls, pack_time

__all__ = ["TopicCalls"]

_NOT_COUNTERS = (
    b"v", b"fence", b"paused", b"rate", b"lease", b"term", b"flushed", b"large", b"opened", b"batch", b"gone",
)  # fmt: skip
"""Fields of a slot's metadata that are not counters."""


class _SlotReply(NamedTuple):
    """The reply of one slot of the layout with `slots` slots."""

    slots: int
    slot: int
    reply: list[Any]


class FlushReply(NamedTuple):
    """The number of messages that one call made due, and the calls that continue with the rest."""

    moved: int
    more: list[Call[FlushReply]]


class TopicCalls(TriggerCalls, DeliveryCalls, DeadLetterCalls):
    """Builds the calls of one topic.

    A call about one key or one slot is a `Call`; a call about many slots is a `Batch` of them. If a slot has moved to
    another layout, the link sends the same request there with the same request id.
    """

    __slots__ = ()

    # -- change messages ----------------------------------------------------------------------------------------------

    def cancel(self, key: Key, group: Key | None = None) -> Call[str]:
        """Build the call that cancels a key. It returns "cancelled", "in_flight" or "absent"."""
        args = (new_id(), self._policy, keys.raw(key), actor_name())
        return self._call_for_key("cancel", route_of(key, group), args, lambda reply: text(reply[0]))

    def bury(self, key: Key, group: Key | None = None, failure: str = "") -> Call[str]:
        """Build the call that makes the pending message of a key a dead letter: "buried", "in_flight" or "absent"."""
        args = (new_id(), self._policy, keys.raw(key), actor_name(), failure.encode(errors="backslashreplace"))
        return self._call_for_key("cancel", route_of(key, group), args, lambda reply: text(reply[0]))

    def reschedule(self, trigger: Trigger) -> Call[str]:
        """Build the call that moves a pending message to the time of `trigger`. Raises InvalidArgument."""
        time = pack_time(trigger)
        if not time:
            raise InvalidArgument("at", None, "no time named", "Pass at= (an aware datetime) or delay=")
        return self._call_for_key(
            "reschedule",
            route_of(trigger.key, trigger.group),
            (new_id(), self._policy, keys.raw(trigger.key), time),
            lambda reply: text(reply[0]),
        )

    def reset_version(self, key: Key, group: Key | None = None) -> Call[bool]:
        """Build the call that deletes the stored version of a key. It returns True if there was one."""
        args = (new_id(), keys.raw(key))
        return self._call_for_key("versions/reset", route_of(key, group), args, lambda reply: reply[0] == b"reset")

    def count_refused(self, counter: str, opened: bool) -> Call[bool]:
        """Build the call that counts a refused trigger. `opened` says whether this process has opened the topic."""
        args = (new_id(), counter, b"1" if opened else b"")
        return self._call("count_refused", 0, args, lambda reply: reply[0] == b"counted")

    def flush(self, key: Key, group: Key | None = None) -> Call[int]:
        """Build the call that makes the pending message of a key due now. It returns 1 or 0."""
        args = (new_id(), keys.raw(key), b"")
        return self._call_for_key("flush", route_of(key, group), args, lambda reply: int(reply[2]))

    def flush_slot(self, slot: int, rest: Sequence[bytes] = (b"",)) -> Call[FlushReply]:
        """Build the call that flushes as many messages of a slot as one call may.

        `rest` is the position from which a continuation goes on.
        """

        def read(reply: list[Any]) -> FlushReply:
            moved, left, rest = reply[2], reply[3], reply[4:]
            return FlushReply(moved, [self.flush_slot(slot, rest)] if left or rest[0] else [])

        return self._call(
            "flush",
            slot,
            (new_id(), b"", *rest),
            read,
            self._for_each_successor(lambda calls, slot: calls.flush_slot(slot), _join_flushes),
        )

    def pause(self, reason: str | None = None) -> Batch[bool]:
        """Build the calls that pause all slots. The result is true if any slot changed. Raises InvalidArgument."""
        return self._pause_slots(pack_pause(reason))

    def resume(self) -> Batch[bool]:
        """Build the calls that resume all slots. The result is true if any slot changed."""
        return self._pause_slots(b"")

    def _pause_slots(self, record: bytes) -> Batch[bool]:
        return Batch([self._pause(slot, record) for slot in range(self.policy.slots)], any)

    def _pause(self, slot: int, record: bytes) -> Call[bool]:
        return self._call(
            "pause",
            slot,
            (new_id(), record),
            lambda reply: reply[2] == 1,
            self._for_each_successor(lambda calls, slot: calls._pause(slot, record), any),
        )

    # -- read ---------------------------------------------------------------------------------------------------------

    def peek(self, key: Key, group: Key | None = None) -> Call[Peek]:
        """Build the call that returns the state of one key."""
        return self._call_for_key("peek", route_of(key, group), (keys.raw(key),), self._read_peek)

    def find(self, key: Key, slots: Iterable[int] | None = None) -> Batch[list[Peek]]:
        """Build the calls that look for a key in these slots; None: in every slot, since its group may be unknown."""
        asked = range(self.policy.slots) if slots is None else slots
        return Batch([self._find(slot, keys.raw(key)) for slot in asked], flatten)

    def _find(self, slot: int, raw_key: bytes) -> Call[list[Peek]]:
        def read(reply: list[Any]) -> list[Peek]:
            seen = self._read_peek(reply)
            return [seen] if seen.pending or seen.in_flight else []

        return self._call(
            "peek",
            slot,
            (raw_key,),
            read,
            self._for_each_successor(lambda calls, slot: calls._find(slot, raw_key), flatten),
        )

    def _read_peek(self, reply: list[Any]) -> Peek:
        merge, codec = self.policy.merge, self.codec
        pending, due, token, lease_end, in_flight, in_flight_due = reply[2:]
        return Peek(
            pending=Message(pending, merge, codec, due_ms=due) if pending else None,
            due_at=moment(due) if pending else None,
            in_flight=Message(in_flight, merge, codec, due_ms=in_flight_due, running=True) if in_flight else None,
            token=token if in_flight else None,
            lease_until=moment(lease_end) if in_flight else None,
        )

    def messages(self, slot: int, after: Position, n: int) -> Call[PendingPage | SlotsChanged]:
        """Build the call that returns at most `n` pending messages of a slot after a position; fewer if they are large.

        If the slot has moved, it answers SlotsChanged. The position then holds for the other layout, too.
        """

        def read(reply: list[Any]) -> PendingPage:
            found = [self._read_pending(reply[1], *reply[i : i + 5]) for i in range(5, len(reply), 5)]
            return PendingPage(found, Position(reply[2], float(reply[3]), reply[4]) if reply[2] else None, reply[1])

        score = repr(after.score) if after.member else ""
        args = (after.part, score, after.member, n)
        return self._call(
            "messages/list", slot, args, read, self._answer_change(lambda slot: self.messages(slot, after, n))
        )

    def _read_pending(self, now_ms: int, part: int, score: bytes, member: bytes, key: bytes, packed: bytes) -> Any:
        due_ms = int(float(score)) if part == 1 else None
        message = Message(packed, self.policy.merge, self.codec, due_ms=due_ms)
        state = ("", "scheduled", "ready", "blocked", "waiting")[part]
        if part == 1 and message.due_ms <= now_ms:
            state = "ready"
        return PendingMessage(Position(part, float(score), member), key, state, moment(message.due_ms), message)

    def versions(self, key: Key, group: Key | None = None) -> Call[StoredVersion | None]:
        """Build the call that returns the version that is stored for a key, or None."""
        return self._call_for_key(
            "versions/read",
            route_of(key, group),
            (keys.raw(key),),
            lambda reply: StoredVersion(int(reply[2]), moment(reply[3])) if reply[2] else None,
        )

    def result(self, ticket: Ticket) -> Call[bytes | None]:
        """Build the call that returns the newest stored result that covers a trigger, or None if there is none yet."""
        return self._call(
            "results",
            self.slot_of(ticket.route),
            (ticket.key, self.policy.result_retention or 1),
            lambda reply: find_result(reply, ticket, self.policy.slots),
            lambda calls, _: single(calls.result(ticket)),
        )

    def result_channel(self, ticket: Ticket) -> bytes:
        """Return the channel on which the end of a delivery of this key is published, for each number of slots."""
        return keys.result_channel(self.namespace, self.name, ticket.key)

    def time(self) -> Call[int]:
        """Build the call that returns the server's time in ms."""
        return self._call("stats", 0, ("time",), lambda reply: reply[1], lambda calls, _: single(calls.time()))

    def stats(self) -> Batch[Stats]:
        """Build the calls that count the topic's messages: one script call per slot."""
        return Batch(
            [self._stats(slot) for slot in range(self.policy.slots)],
            lambda answers: _join_stats(_select_current(flatten(answers), self.policy.slots)),
        )

    def _stats(self, slot: int) -> Call[list[_SlotReply]]:
        """Build the call that returns a list of replies: one, or one per successor of a slot that has moved."""
        return self._call(
            "stats",
            slot,
            (0,),
            lambda reply: [_SlotReply(self.policy.slots, slot, reply)],
            self._for_each_successor(lambda calls, slot: calls._stats(slot), flatten),
        )

    def depth(self, to: int) -> Batch[Stats]:
        """Build the calls of `stats` for a topic that may be resharding to `to` slots.

        They count both layouts and also read closed slots. `to` is 0 or less if no reshard is running.
        """
        layouts = [self] if to <= 0 else [self, self.for_slots(to)]
        calls = [
            layout._call("stats", slot, (1,), lambda reply: reply)
            for layout in layouts
            for slot in range(layout.policy.slots)
        ]
        return Batch(calls, _join_stats)


def _join_flushes(answers: list[FlushReply]) -> FlushReply:
    return FlushReply(sum(answer.moved for answer in answers), [call for answer in answers for call in answer.more])


def _select_current(replies: list[_SlotReply], slots: int) -> list[list[Any]]:
    """Return one reply for each slot. Leave out slots of the layout `slots` that moved after they had replied."""
    moved = [one for one in replies if one.slots != slots]
    parts = {(min(slots, one.slots), one.slot % min(slots, one.slots)) for one in moved}
    kept = {(one.slots, one.slot): one.reply for one in moved}
    for one in replies:
        if one.slots == slots and not any(one.slot % size == part for size, part in parts):
            kept[one.slots, one.slot] = one.reply
    return list(kept.values())


def _join_stats(replies: list[list[Any]]) -> Stats:
    counters: dict[str, int] = defaultdict(int)
    pauses = list[Pause]()
    with wrap_decode_errors("counters"):
        for reply in replies:
            facts = reply[12 + 3 * reply[11] :]
            for name, value in zip(facts[::2], facts[1::2], strict=True):
                if name == b"paused":
                    pauses.append(decode_pause(value))
                elif name not in _NOT_COUNTERS and not name.startswith(b"from:"):
                    counters[text(name)] += int(value)
    next_due_ms = min((reply[8] for reply in replies if reply[8]), default=0)
    # The nodes of a cluster have different clocks, so a due time is compared with the time of the same server.
    late_ms, oldest_ms = max(((reply[1] - reply[9], reply[9]) for reply in replies if reply[9]), default=(0, 0))
    groups = _join_groups(replies)
    scheduled, ready, waiting, blocked, in_flight, dead = (sum(reply[i] for reply in replies) for i in range(2, 8))
    return Stats(
        scheduled, ready, waiting, blocked, in_flight, dead,
        next_due=moment(next_due_ms) if next_due_ms else None,
        oldest_due=moment(oldest_ms) if oldest_ms else None,
        lateness=timedelta(milliseconds=late_ms),
        oldest_blocked=min(groups, key=lambda one: one.oldest_due, default=None),
        blocked_groups=tuple(groups[:5]),
        sampled=any(reply[10] for reply in replies),
        paused=min(pauses, key=lambda one: one.since, default=None),
        counters=dict(counters),
    )  # fmt: skip


def _join_groups(replies: list[list[Any]]) -> list[BlockedGroup]:
    """Return the blocked groups in these replies, the largest first. A change of slots may have divided one of them."""
    found: dict[bytes, tuple[int, int]] = {}
    for reply in replies:
        end = 12 + 3 * reply[11]
        for name, n, due_ms in zip(reply[12:end:3], reply[13:end:3], reply[14:end:3], strict=True):
            count, oldest_ms = found.get(name, (0, due_ms))
            found[name] = count + n, min(oldest_ms, due_ms)
    groups = [
        BlockedGroup(name.decode(errors="backslashreplace"), count, moment(due_ms))
        for name, (count, due_ms) in found.items()
    ]
    return sorted(groups, key=lambda one: (-one.count, one.group))
