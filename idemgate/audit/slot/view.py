"""The decoded view of a slot that the checks work on."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from typing import Any, NamedTuple

import msgpack

from idemgate.audit.findings import Finding, quote_argument
from idemgate.audit.slot.contents import Contents, Slot, TopicEntry
from idemgate.core.calls import text
from idemgate.core.codec import Codec
from idemgate.errors import IdemgateError
from idemgate.topics.merge import Merge, merge_of
from idemgate.topics.messages import Message, decode_pause

__all__ = [
    "SlotView",
    "StoredMessage",
    "expect_int",
    "format_time",
    "is_group_corrupt",
    "placements",
    "quote_name",
    "unpack_array",
]

_NOT_COUNTED = (b"", b"v", b"opened", b"gone", b"paused")
"""The fields of the metadata that are not numbers."""
_ENTRY = re.compile(rb"([0-9]+)(?: (-?[0-9]+) [01] ([0-9]+) (.*))?", re.DOTALL)
"""An entry of `inflight` (`topics/scripts/lib/slot/inflight.lua`)."""
_ANY = merge_of("last")
"""A policy for messages of an unknown topic, whose payloads are not decoded."""


class StoredMessage(NamedTuple):
    """The fields of a packed message that the checks need. Times are in ms."""

    triggers: int
    due: int
    attempts: int
    group: bytes
    serial: int


class InFlight(NamedTuple):
    """A decoded entry of a delivery in flight."""

    fence: int
    due: int
    triggers: int
    group: bytes
    message: StoredMessage


class DeadMessage(NamedTuple):
    """A decoded dead letter."""

    key: bytes
    died: int
    fence: int
    message: StoredMessage


def unpack_array(packed: bytes, *lengths: int) -> list[Any]:
    """Unpack an array of one of these lengths. Raises ValueError for anything else."""
    found = msgpack.unpackb(packed, raw=True, strict_map_key=False)
    if not isinstance(found, list) or len(found) not in lengths:  # pyright: ignore[reportUnknownArgumentType]
        raise ValueError(f"not an array of {lengths[0]}")
    return found  # pyright: ignore[reportUnknownVariableType]


def expect_int(value: Any, least: int = 0) -> int:
    """Return `value`. Raises ValueError if it is not an int of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{value!r} where a whole number belongs")
    return value


def _check_bytes(value: Any) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError(f"{value!r} where a text belongs")
    return value


def _decode_message(packed: Any, merge: Merge | None, codec: Codec) -> StoredMessage:
    message = Message(_check_bytes(packed), merge or _ANY, codec)
    if merge is not None:
        _ = message.payload
    count, attempts = expect_int(message.count, 1), expect_int(message.attempts)
    return StoredMessage(count, message.due_ms, attempts, message.raw_group, message.serial)


def _parse_entry(entry: bytes, message: StoredMessage) -> InFlight:
    found = _ENTRY.fullmatch(entry)
    if found is None:
        raise ValueError("neither a token nor the longer form of an entry")
    token, due, count, group = found.groups()
    if due is None:
        return InFlight(expect_int(int(token), 1), message.due, 1, b"", message)
    return InFlight(expect_int(int(token), 1), int(due), expect_int(int(count), 1), group, message)


def _decode_dead_letter(packed: bytes, merge: Merge | None, codec: Codec) -> DeadMessage:
    key, message, reason, died, fence = unpack_array(packed, 5)
    _check_bytes(reason)
    return DeadMessage(
        _check_bytes(key), expect_int(died), expect_int(fence, 1), _decode_message(message, merge, codec)
    )


class SlotView:
    """The decoded content of a slot. `unreadable` lists a finding for each corrupt entry."""

    def __init__(self, slot: Slot, found: Contents, topic: TopicEntry | None, codec: Codec) -> None:
        self.slot = slot
        self.contents = found
        self.topic = topic
        self.unreadable: list[Finding] = []
        merge = topic.merge if topic else None
        self.messages: dict[bytes, Any] = self._decode_all(
            "messages", found.messages, lambda packed: _decode_message(packed, merge, codec)
        )
        self.next: dict[bytes, Any] = self._decode_all(
            "next", found.next, lambda packed: _decode_message(packed, merge, codec)
        )
        self.pending: dict[bytes, StoredMessage] = {
            key: one for key, one in self.messages.items() if key not in found.in_flight
        } | self.next
        self.inflight: dict[bytes, InFlight] = self._decode_inflight(found)
        self.dead_data: dict[bytes, Any] = self._decode_all(
            "dead:data", found.dead_data, lambda packed: _decode_dead_letter(packed, merge, codec)
        )
        self.group_active: dict[bytes, Any] = self._decode_all("group:active", found.group_active, _parse_members)
        numbers = {name: value for name, value in found.meta.items() if name not in _NOT_COUNTED}
        self.meta: dict[bytes, int] = self._decode_all("meta", numbers, int)
        self._decode_all("meta", {name: found.meta[name] for name in (b"paused",) if name in found.meta}, decode_pause)
        self.ready: dict[bytes, Any] = self._decode_all(
            "ready", {member: member for member in found.ready}, _parse_ready
        )
        self.group_waiting: dict[bytes, Any] = self._decode_all(
            "group:waiting", {member: member for member in found.group_waiting}, _parse_waiting
        )

    def _decode_all(self, part: str, packed: dict[bytes, bytes], read: Callable[[bytes], Any]) -> dict[bytes, Any]:
        decoded: dict[bytes, Any] = {}
        for name, value in packed.items():
            try:
                decoded[name] = read(value)
            except (ValueError, TypeError, KeyError, IndexError, AttributeError, IdemgateError) as error:
                self.unreadable.append(self.finding("undecodable", part, f"{quote_name(name)} cannot be read: {error}"))
        return decoded

    def _decode_inflight(self, found: Contents) -> dict[bytes, InFlight]:
        decoded: dict[bytes, InFlight] = {}
        for key in found.in_flight:
            plain = key not in found.inflight
            part = "leases" if plain else "inflight"
            if key not in found.messages:
                what = f"{quote_name(key)} is in flight and has no message"
                self.unreadable.append(self.finding("orphan", part, what, "ZREM" if plain else "HDEL", key))
            elif key in self.messages:
                # The lease of a plain delivery starts at its token.
                entry = b"%.0f" % found.leases[key] if plain else found.inflight[key]
                decoded |= self._decode_all(part, {key: entry}, partial(_parse_entry, message=self.messages[key]))
        return decoded

    def part_of(self, key: bytes) -> str:
        """Return the part that holds the pending message of a key."""
        return "next" if key in self.contents.next else "messages"

    def finding(self, kind: str, part: str, what: str, *mend: str | bytes | int) -> Finding:
        """Build a finding. `mend` is the name of a redis-cli command, then its arguments after the key."""
        words = [] if not mend else [str(mend[0]), quote_argument(self.slot.key(part)), *map(_quote_argument, mend[1:])]
        return Finding(kind, self.slot.key(part), what, " ".join(words))


def _quote_argument(value: str | bytes | int) -> str:
    return str(value) if isinstance(value, int) else quote_argument(value)


def _parse_members(packed: bytes) -> list[bytes]:
    found = msgpack.unpackb(packed, raw=True)
    return [_check_bytes(one) for one in found]


def _parse_ready(member: bytes) -> tuple[int, bytes]:
    due, rest = int(member[:15]), member[15:]
    if rest[:1] == b"-":
        return due, rest[1:]
    int(rest[:15])  # the serial
    return due, rest[15:]


def _parse_waiting(member: bytes) -> tuple[bytes, int, bytes]:
    group, _, rest = member.partition(b"\0")
    place = rest.partition(b"\0")[2]
    int(place[15:30])  # the serial
    return group, int(place[:15]), place[30:]


def placements(view: SlotView) -> Iterator[tuple[str, bytes, bytes]]:
    """Return every (part, member, key) that schedules a key or lets it wait."""
    yield from (("scheduled", key, key) for key in view.contents.scheduled)
    yield from (("ready", member, key) for member, (_, key) in view.ready.items())
    yield from (("group:waiting", member, key) for member, (_, _, key) in view.group_waiting.items())


def is_group_corrupt(view: SlotView, group: bytes) -> bool:
    """Return True if the members of the group cannot be decoded."""
    return group in view.contents.group_active and group not in view.group_active


def quote_name(name: bytes) -> str:
    """Return a key or name as a quoted Python string."""
    return repr(text(name))


def format_time(ms: float) -> str:
    """Return a time in ms as ISO text in UTC, or the number if it is out of range."""
    try:
        return f"{datetime.fromtimestamp(ms / 1000, UTC):%Y-%m-%d %H:%M:%S.%f}"[:-3] + "Z"
    except (ValueError, OverflowError, OSError):
        return f"{ms}"
