"""Rules for expiring keys: server settings, messages of the due set, and their interpretation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple, cast

from idemgate.core.calls import Call, call, stamp
from idemgate.core.clock import Clock
from idemgate.core.durations import LONGEST_MS, instant
from idemgate.topics.merge import Merge, Name
from idemgate.topics.messages import Delivery, Trigger, moment

__all__ = [
    "BORN",
    "ECHO_MS",
    "EXPIRED",
    "GONE",
    "MERGE",
    "WANTED",
    "Expired",
    "Look",
    "add_event_flags",
    "due",
    "expired_of",
    "is_echo",
    "look",
    "missing",
    "taken_away",
    "timed_out",
    "was_deleted",
]

EXPIRED = "expired"
BORN = ("expire", "restore", "rename_to", "copy_to", "move_to")
"""Events that may change a key's time to live; all of class `g`."""
GONE = ("del", "rename_from", "move_from")
"""Events that may remove a key without expiry; all of class `g`."""
NEEDED = "Ex"
WANTED = "Egx"
_ALL = "g$lshzxetd"
"""The flags that `A` means in `notify-keyspace-events`."""

ECHO_MS = 10_000
"""How long after a key was handled an event about it counts as a late copy, without other evidence, ms."""
MERGE: dict[str, Name | Merge] = {"until": "last", "seen": "max", "gone": "max", "heard": "last"}
"""Merge rules of a message in the due set.

- `until`: when the key expires, server's ms.
- `seen`, `gone`: when it was last seen alive, or deleted, server's ms.
- `heard`: 1 after an expired event, reset to 0 when the key is seen alive.
"""


class Look(NamedTuple):
    """The state of a key, by the clock of its server.

    `left_ms` is -1 for a key that never expires, and -2 for a missing key.
    """

    now_ms: int
    left_ms: int

    @property
    def alive(self) -> bool:
        return self.left_ms != -2

    @property
    def expires(self) -> bool:
        return self.left_ms >= 0


@dataclass(frozen=True, slots=True)
class Expired:
    """An expired key. Its value is gone.

    Attributes:
        key: The key as a string; bytes that are not UTF-8 are escaped.
        raw_key: The key as bytes.
        heard: True if the server sent an expired event. Otherwise the key was found missing when it was due.
        until: The known time of expiry; None if only the event is known.
        delivery: The delivery of this attempt, with `.attempt`, `.token` and `.lost`.
    """

    key: str
    raw_key: bytes
    heard: bool
    until: datetime | None
    delivery: Delivery[Any]


def look(key: bytes, clock: Clock | None) -> Call[Look]:
    return call("subscribers/expiry/ttl", (key,), (stamp(clock),), lambda reply: Look(reply[1], reply[2]))


# -- messages for the due set -----------------------------------------------------------------------------------------


def due(key: bytes, seen: Look) -> Trigger:
    """Build the message for a living key, due when the key expires."""
    left = min(seen.left_ms, LONGEST_MS)
    facts = {"until": seen.now_ms + left, "seen": seen.now_ms, "heard": 0}
    return Trigger(key, facts, delay=left / 1000)


def timed_out(key: bytes) -> Trigger:
    """Build the message for an expired event, due now.

    All listeners receive the event; their messages merge, and a later one is an echo. There is no event id: it could
    still be in the dedup set when a key that lived on expires later.
    """
    return Trigger(key, {"heard": 1}, delay=0)


def taken_away(key: bytes, seen: Look) -> Trigger:
    """Build the message for a deleted or renamed key, due now, so that it is dropped."""
    return Trigger(key, {"gone": seen.now_ms}, delay=0)


# -- due messages ----------------------------------------------------------------------------------------------------


def _facts(delivery: Delivery[Any]) -> Mapping[str, int]:
    return cast("Mapping[str, int]", delivery.payload)


def expired_of(delivery: Delivery[Any]) -> Expired:
    facts = _facts(delivery)
    until = moment(facts["until"]) if "until" in facts else None
    return Expired(delivery.key, delivery.raw_key, bool(facts.get("heard")), until, delivery)


def was_deleted(delivery: Delivery[Any]) -> bool:
    """Return True if a missing key was deleted after it was last seen, rather than expired."""
    facts = _facts(delivery)
    return not facts.get("heard") and facts.get("gone", 0) > facts.get("seen", 0)


def is_echo(delivery: Delivery[Any], handled_ms: int) -> bool:
    """Return True if a missing key has been missing since `handled_ms`, when it was handled.

    It was alive in between if it was seen later. An event much later than `handled_ms` concerns a later expiry.
    """
    facts = _facts(delivery)
    alive = facts.get("seen", 0) >= handled_ms
    event = bool(facts.get("heard")) and instant(delivery.last_at, "last_at") > handled_ms + ECHO_MS
    return not alive and not event


# -- the server's setting ---------------------------------------------------------------------------------------------


def missing(flags: str, of: str = NEEDED) -> str:
    """Return the needed flags that a value of `notify-keyspace-events` lacks."""
    there = flags + _ALL if "A" in flags else flags
    return "".join(flag for flag in of if flag not in there)


def add_event_flags(flags: str) -> str:
    """Return the setting, extended by all useful flags."""
    return flags + missing(flags, WANTED)
