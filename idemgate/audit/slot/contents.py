"""The content of a slot, read in one step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, NamedTuple

import msgpack

from idemgate.core import keys
from idemgate.core.calls import Call, call, stamp, text
from idemgate.core.clock import Clock
from idemgate.topics.merge import Merge, merge_of_spec

__all__ = ["Contents", "Slot", "SlotTooLarge", "TopicEntry", "decode_topic_entry", "read_slot"]

_ZSETS = ("scheduled", "leases", "dead", "dedup_expiry", "ready", "group_waiting")
_HASHES = ("messages", "next", "inflight", "dead_data", "meta", "group_active", "dedup")


class Slot(NamedTuple):
    """The name of a slot."""

    namespace: str
    topic: str
    number: int
    slots: int

    def key(self, part: str) -> str:
        return text(keys.slot(*self)[keys.PARTS.index(part)])


class TopicEntry(NamedTuple):
    """The part of a topic's registry entry that the checks need."""

    slots: int
    group_limit: int
    merge: Merge
    changing: bool
    rest_us: int
    """The maximum time in us that the rate limit delays a take: the whole burst plus one message."""


@dataclass(frozen=True)
class Contents:
    """The whole content of a slot at one moment.

    Sorted sets map member to score, hashes map field to value.
    """

    now_ms: int
    lives: dict[str, int]
    scheduled: dict[bytes, float]
    leases: dict[bytes, float]
    dead: dict[bytes, float]
    dedup_expiry: dict[bytes, float]
    ready: dict[bytes, float]
    group_waiting: dict[bytes, float]
    messages: dict[bytes, bytes]
    next: dict[bytes, bytes]
    inflight: dict[bytes, bytes]
    dead_data: dict[bytes, bytes]
    meta: dict[bytes, bytes]
    group_active: dict[bytes, bytes]
    dedup: dict[bytes, bytes]

    @cached_property
    def in_flight(self) -> set[bytes]:
        """The keys in flight, also those whose lease is missing."""
        return {*self.leases, *self.inflight}

    @cached_property
    def pending(self) -> dict[bytes, bytes]:
        """The pending messages: those of keys that are not in flight, and the next ones of those that are."""
        return {key: packed for key, packed in self.messages.items() if key not in self.in_flight} | self.next

    @property
    def closed(self) -> bool:
        """True if a change of the number of slots has closed the slot."""
        return self.meta.get(b"v", b"").startswith(b"closed ")


class SlotTooLarge(NamedTuple):
    """The size of a slot that exceeds the limits of `read_slot`."""

    entries: int
    bytes: int


def decode_topic_entry(stored: bytes, changing: bool) -> TopicEntry | None:
    """Decode a topic's entry in the registry.

    Args:
        stored: the packed policy.
        changing: the number of slots is being changed.

    Returns:
        The entry, or None if it cannot be decoded.
    """
    try:
        policy = msgpack.unpackb(stored)
        slots, rate = int(policy["slots"]), Fraction(policy.get("rate", 1_000_000_000))
        rest = round((int(policy.get("burst", 1)) + 1) * slots * 1_000_000 / rate)
        limit = int(policy.get("group_concurrency", 1))
        return TopicEntry(slots, limit, merge_of_spec(policy["merge"]), changing, rest)
    except Exception:  # noqa: BLE001 - any error means that it is not a policy
        return None


def read_slot(slot: Slot, clock: Clock | None, most: int, room: int) -> Call[Contents | SlotTooLarge]:
    """Build the call that reads a whole slot. Atomic, one round trip.

    Args:
        slot: the slot to read.
        clock: the test clock; None for the server's.
        most: the maximum number of entries to read.
        room: the maximum bytes of messages to read.

    Returns:
        A call that answers `Large` without reading anything if the slot exceeds a limit.
    """
    return call("topics/audit", keys.slot(*slot), (stamp(clock), most, room), _parse_contents)


def _parse_contents(reply: list[Any]) -> Contents | SlotTooLarge:
    if reply[0] == b"large":
        return SlotTooLarge(reply[2], reply[3])
    parts: list[list[Any]] = []
    at = 2
    while at < len(reply):
        if reply[at] < 0:
            raise ValueError(f"a part of {reply[at]} entries")
        parts.append(reply[at + 1 : at + 1 + reply[at]])
        at += 1 + reply[at]
    lives, *rest = parts
    found: dict[str, Any] = {name: dict(_pairs(part)) for name, part in zip(_ZSETS + _HASHES, rest, strict=True)}
    for name in _ZSETS:
        found[name] = {member: float(score) for member, score in found[name].items()}
    return Contents(now_ms=reply[1], lives=dict(zip(keys.PARTS, lives, strict=True)), **found)


def _pairs(flat: list[Any]) -> Iterator[tuple[bytes, Any]]:
    return zip(flat[::2], flat[1::2], strict=True)
