"""Script calls of a group of members: a function for each script of `scripts`, and the decoding of its reply."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from idemgate.core import keys
from idemgate.core.calls import Arg, Call, call, stamp, text
from idemgate.core.clock import Clock
from idemgate.errors import ServerRejected
from idemgate.membership.ownership import HeartbeatReply, HeartbeatRequest, Slot
from idemgate.membership.rendezvous import slot_id

__all__ = ["MemberList", "heartbeat", "leave", "list_members"]


class MemberInfo(NamedTuple):
    """The topics that a member serves (none: it is leaving), and when it expires without another heartbeat, ms."""

    topics: frozenset[str]
    lapses_ms: int


class MemberList(NamedTuple):
    """The members of a group, as the store knows them at `now_ms`.

    `holders` maps each slot to the member that takes from it or still drains it.
    """

    now_ms: int
    generation: int
    members: Mapping[str, MemberInfo]
    holders: Mapping[Slot, str]


def heartbeat(
    namespace: str, group: str, clock: Clock | None, request: HeartbeatRequest, ttl_ms: int
) -> Call[HeartbeatReply]:
    """Build the call for one heartbeat of a member.

    Raises:
        ServerRejected: The store has processed a later heartbeat of this member.
    """
    requested = request.taken_over + request.wanted
    args: tuple[Arg, ...] = (
        stamp(clock), request.member, request.number, ttl_ms, " ".join(request.topics), request.generation,
        len(request.released), len(request.taken_over),
        *(slot_id(*slot) for slot in request.released + requested),
    )  # fmt: skip

    def read(reply: list[Any]) -> HeartbeatReply:
        if reply[0] == b"stale":
            raise ServerRejected(f"member {request.member!r} has left, or announced itself from elsewhere")
        generation, first_holder = int(reply[2]), 4 + 2 * reply[3]
        members = {text(member): frozenset(text(topics).split()) for member, topics in _pairs(reply[4:first_holder])}
        holders = dict(zip(requested, map(text, reply[first_holder:]), strict=True))
        return HeartbeatReply(generation, None if generation == request.generation else members, holders)

    return call("membership/heartbeat", keys.members(namespace, group), args, read)


def leave(namespace: str, group: str, clock: Clock | None, member: str) -> Call[bool]:
    """Build the call that removes a member. Its answer is False if there was no such member."""
    return call(
        "membership/leave", keys.members(namespace, group), (stamp(clock), member), lambda reply: reply[0] == b"ok"
    )


def list_members(namespace: str, group: str, clock: Clock | None) -> Call[MemberList]:
    """Build the call that reads the members and the holders of slots. It writes nothing."""

    def read(reply: list[Any]) -> MemberList:
        first_slot = 4 + 3 * reply[3]
        members = {
            text(reply[at]): MemberInfo(frozenset(text(reply[at + 1]).split()), int(reply[at + 2]))
            for at in range(4, first_slot, 3)
        }
        holders = {_parse_slot(text(slot)): text(holder) for slot, holder in _pairs(reply[first_slot:])}
        return MemberList(reply[1], int(reply[2]), members, holders)

    return call("membership/list", keys.members(namespace, group), (stamp(clock),), read)


def _pairs(flat: list[Any]) -> Iterator[tuple[Any, Any]]:
    return zip(flat[::2], flat[1::2], strict=True)


def _parse_slot(slot: str) -> Slot:
    topic, _, number = slot.rpartition(":")
    return topic, int(number)
