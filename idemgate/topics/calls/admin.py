"""Calls that change messages from outside: cancel, reschedule, flush, pause, and move dead letters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from idemgate.core import keys
from idemgate.core.calls import Arg, Batch, Call, text
from idemgate.core.keys import Key
from idemgate.core.tokens import token
from idemgate.errors import InvalidArgument
from idemgate.topics.calls.base import BaseCalls, SlotsChanged, route_of
from idemgate.topics.calls.trigger import pack_time
from idemgate.topics.dead_letters import PAGE
from idemgate.topics.messages import Trigger

__all__ = ["AdminCalls", "DeadTaken", "FlushReply"]


class FlushReply(NamedTuple):
    """The number of messages that one call made due, and the calls that continue with the rest."""

    moved: int
    more: list[Call[FlushReply]]


class DeadTaken(NamedTuple):
    """The result of one `take_dead` call.

    `taken` dead letters were removed and `left` remain in the slot. `seen` of the requested ids were processed; an
    absent id counts as processed. `outdated` of those to redrive were deleted.
    """

    taken: int
    left: int
    seen: int
    outdated: int = 0

    @property
    def moved(self) -> int:
        return self.taken - self.outdated


class AdminCalls(BaseCalls):
    """The calls that change messages from outside."""

    __slots__ = ()

    def cancel(self, key: Key, group: Key | None = None) -> Call[str]:
        """Build the call that cancels a key. It returns "cancelled", "in_flight" or "absent"."""
        args = (token(), self._policy, keys.raw(key))
        return self._call_for_key("cancel", route_of(key, group), args, lambda reply: text(reply[0]))

    def reschedule(self, trigger: Trigger) -> Call[str]:
        """Build the call that moves a pending message to the time of `trigger`. Raises InvalidArgument."""
        time = pack_time(trigger)
        if not time:
            raise InvalidArgument("at", None, "no time named", "Pass at= (an aware datetime) or delay=")
        return self._call_for_key(
            "reschedule",
            route_of(trigger.key, trigger.group),
            (token(), self._policy, keys.raw(trigger.key), time),
            lambda reply: text(reply[0]),
        )

    def flush(self, key: Key, group: Key | None = None) -> Call[int]:
        """Build the call that makes the pending message of a key due now. It returns 1 or 0."""
        args = (token(), keys.raw(key), b"")
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
            (token(), b"", *rest),
            read,
            lambda calls, slot: Batch(
                [calls.flush_slot(target) for target in calls.merged_successors(slot, self)], _join_flushes
            ),
        )

    def pause(self, pause: bool) -> Batch[bool]:
        """Build the calls that pause or resume all slots. The result is true if any slot changed."""
        return Batch([self._pause(slot, b"1" if pause else b"0") for slot in range(self.policy.slots)], any)

    def _pause(self, slot: int, verb: bytes) -> Call[bool]:
        return self._call(
            "pause",
            slot,
            (token(), verb),
            lambda reply: reply[2] == 1,
            lambda calls, slot: Batch(
                [calls._pause(target, verb) for target in calls.merged_successors(slot, self)], any
            ),
        )

    def take_dead(
        self, slot: int, verb: str, numbers: Sequence[str], most: int = PAGE
    ) -> Call[DeadTaken | SlotsChanged]:
        """Build the call that moves dead letters out of a slot; `verb` is "redrive" or "delete".

        Without `numbers` it moves the oldest `most`. It moves fewer if they are large. If the slot has moved, it
        answers SlotsChanged: its letters have other numbers now.
        """
        args: list[Arg] = [token(), self._policy, verb, most, *numbers]
        rebuild = self._answer_change(lambda slot: self.take_dead(slot, verb, numbers, most))
        return self._call("take_dead", slot, args, lambda reply: DeadTaken(*reply[2:]), rebuild)


def _join_flushes(answers: list[FlushReply]) -> FlushReply:
    return FlushReply(sum(answer.moved for answer in answers), [call for answer in answers for call in answer.more])
