"""The calls of a group of members: one function a script of `lua/members`, and what their replies mean."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from idemgate.core import keys
from idemgate.core.calls import Arg, Call, call, text
from idemgate.core.clock import Clock, stamp
from idemgate.errors import ServerRejected
from idemgate.membership.ownership import Announcement, Roll, Slot
from idemgate.membership.rendezvous import slot_id

__all__ = ["Attendance", "Present", "announce", "attendance", "leave"]


class Present(NamedTuple):
    """A member that is there: the topics it serves (none: it is leaving), and when it lapses unless it announces
    itself again, ms."""

    topics: frozenset[str]
    lapses_ms: int


class Attendance(NamedTuple):
    """Who is there, as the store sees it at `now_ms`; `holders` are those who take from a slot or still drain it."""

    now_ms: int
    generation: int
    members: Mapping[str, Present]
    holders: Mapping[Slot, str]


def announce(namespace: str, group: str, clock: Clock | None, said: Announcement, ttl_ms: int) -> Call[Roll]:
    """Raises ServerRejected if a later announcement of this member was heard before."""
    asked = said.seized + said.wanted
    args: tuple[Arg, ...] = (
        stamp(clock), said.member, said.number, ttl_ms, " ".join(said.topics), said.generation,
        len(said.released), len(said.seized), *(slot_id(*slot) for slot in said.released + asked),
    )  # fmt: skip

    def read(reply: list[Any]) -> Roll:
        if reply[0] == b"stale":
            raise ServerRejected(f"member {said.member!r} has left, or announced itself from elsewhere")
        generation, first_holder = int(reply[2]), 4 + 2 * reply[3]
        members = {text(one): frozenset(text(topics).split()) for one, topics in _pairs(reply[4:first_holder])}
        holders = dict(zip(asked, map(text, reply[first_holder:]), strict=True))
        return Roll(generation, None if generation == said.generation else members, holders)

    return call("members/announce", keys.members(namespace, group), args, read)


def leave(namespace: str, group: str, clock: Clock | None, member: str) -> Call[bool]:
    """Takes a member away; whether it was there."""
    return call(
        "members/leave", keys.members(namespace, group), (stamp(clock), member), lambda reply: reply[0] == b"ok"
    )


def attendance(namespace: str, group: str, clock: Clock | None) -> Call[Attendance]:
    """Who is there and holds what. Writes nothing."""

    def read(reply: list[Any]) -> Attendance:
        first_slot = 4 + 3 * reply[3]
        members = {
            text(reply[at]): Present(frozenset(text(reply[at + 1]).split()), int(reply[at + 2]))
            for at in range(4, first_slot, 3)
        }
        holders = {_slot(text(slot)): text(holder) for slot, holder in _pairs(reply[first_slot:])}
        return Attendance(reply[1], int(reply[2]), members, holders)

    return call("members/roll", keys.members(namespace, group), (stamp(clock),), read)


def _pairs(flat: list[Any]) -> Iterator[tuple[Any, Any]]:
    return zip(flat[::2], flat[1::2], strict=True)


def _slot(named: str) -> Slot:
    topic, _, number = named.rpartition(":")
    return topic, int(number)
