"""Keys of others that expire: what is asked of them, what is remembered, and what a due key means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple, cast

from idemgate.core.calls import Call, call
from idemgate.core.clock import Clock, stamp
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
    "added",
    "deleted",
    "due",
    "expired_of",
    "is_echo",
    "look",
    "missing",
    "taken_away",
    "timed_out",
]

EXPIRED = "expired"
BORN = ("expire", "restore", "rename_to", "copy_to", "move_to")
"""Events after which a key may have another time to live; all of class `g`."""
GONE = ("del", "rename_from", "move_from")
"""Events after which a key may be gone without having expired; all of class `g`."""
NEEDED = "Ex"
WANTED = "Egx"
_ALL = "g$lshzxetd"
"""What `A` stands for in `notify-keyspace-events`."""

ECHO_MS = 10_000
"""How long after a key was handled an event of it, of which nothing else is known, is a late copy."""
MERGE: dict[str, Name | Merge] = {"until": "last", "seen": "max", "gone": "max", "heard": "last"}
"""Of a key in the due set: when it was to expire, when it was seen alive, when it was seen deleted (server's ms), and
whether the server said (1) that it expired since it was last seen (0)."""


class Look(NamedTuple):
    """What `look` saw, by the clock of the server that has the key. `left_ms` is -1 for a key that never expires."""

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
    """A key that is gone. What it held is gone with it.

    - `key` is its text, `raw_key` its bytes (text that is not UTF-8 is escaped).
    - `heard`: the server said that it expired. If not, it was found gone when its time had come.
    - `until`: when it was to expire, as far as that was known; None if only its event was heard.
    - `delivery`: the attempt: `.attempt`, `.token`, `.lost` ...
    """

    key: str
    raw_key: bytes
    heard: bool
    until: datetime | None
    delivery: Delivery[Any]


def look(key: bytes, clock: Clock | None) -> Call[Look]:
    return call("expiry/look", (key,), (stamp(clock),), lambda reply: Look(reply[1], reply[2]))


# -- what goes into the due set ---------------------------------------------------------------------------------------


def due(key: bytes, seen: Look) -> Trigger:
    """It lives: due when it expires."""
    left = min(seen.left_ms, LONGEST_MS)
    facts = {"until": seen.now_ms + left, "seen": seen.now_ms, "heard": 0}
    return Trigger(key, facts, delay=left / 1000)


def timed_out(key: bytes) -> Trigger:
    """Its event was heard: due now. All listeners hear it; their copies merge, and one that comes later is an echo.
    No event id: it would still be remembered when the key, having lived on, expires after all."""
    return Trigger(key, {"heard": 1}, delay=0)


def taken_away(key: bytes, seen: Look) -> Trigger:
    """Somebody deleted it, or gave it another name: due now, to be dropped."""
    return Trigger(key, {"gone": seen.now_ms}, delay=0)


# -- what comes out of it ---------------------------------------------------------------------------------------------


def _facts(delivery: Delivery[Any]) -> Mapping[str, int]:
    return cast("Mapping[str, int]", delivery.payload)


def expired_of(delivery: Delivery[Any]) -> Expired:
    facts = _facts(delivery)
    until = moment(facts["until"]) if "until" in facts else None
    return Expired(delivery.key, delivery.raw_key, bool(facts.get("heard")), until, delivery)


def deleted(delivery: Delivery[Any]) -> bool:
    """Whether a key that is gone was deleted after it was last seen, rather than expired."""
    facts = _facts(delivery)
    return not facts.get("heard") and facts.get("gone", 0) > facts.get("seen", 0)


def is_echo(delivery: Delivery[Any], told_ms: int) -> bool:
    """Whether a key that is gone, and was handled when it was found gone at `told_ms`, is gone since then: nothing new
    has happened. It was alive in between if it was seen later; and an event that comes much later was not of that
    time."""
    facts = _facts(delivery)
    alive = facts.get("seen", 0) >= told_ms
    event = bool(facts.get("heard")) and instant(delivery.last_at, "last_at") > told_ms + ECHO_MS
    return not alive and not event


# -- the server's setting ---------------------------------------------------------------------------------------------


def missing(flags: str, of: str = NEEDED) -> str:
    """Those flags of `notify-keyspace-events` that are needed and not there."""
    there = flags + _ALL if "A" in flags else flags
    return "".join(flag for flag in of if flag not in there)


def added(flags: str) -> str:
    """The setting with all that is of use, and with what it had."""
    return flags + missing(flags, WANTED)
