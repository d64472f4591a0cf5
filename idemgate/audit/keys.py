"""What there is in a namespace beside slots: records of guarded keys, members, the registry, and what is nobody's."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgpack

from idemgate.audit.findings import Finding, quoted
from idemgate.audit.slot import LEASE_MS, Declared, far_token, moment, shown
from idemgate.core import keys
from idemgate.core.calls import text
from idemgate.core.codec import Codec
from idemgate.errors import DecodeError
from idemgate.guard.record import stored

__all__ = [
    "MOST_SLOTS",
    "check_brief",
    "check_change",
    "check_crew",
    "check_lasting",
    "check_page",
    "check_record",
    "check_registered",
    "check_sizes",
    "check_stranger",
    "sizes",
]


_LEFT = b"9007199254740991 "
"""What the facts say, for a minute, of a member that has left (`lua/members/leave.lua`)."""
MOST_SLOTS = 16_384
"""More no topic has."""
_SIZE = re.compile(rb"[1-9][0-9]{0,4}")


def check_record(
    key: bytes, left_ms: int, packed: bytes, now_us: int, codec: Codec, timed: bool = True
) -> Iterator[Finding]:
    """One guarded key: it can be read, with what it keeps, has a token that may have been granted by now, and goes by
    itself, not before it says; that is not asked where it is not `timed` by the server's clock."""
    name = text(key)
    try:
        state, kind, data, token, ends = stored(packed)
    except ValueError as error:
        mend = f"it may say that the work is done; to let it run again: DEL {quoted(key)}"
        yield Finding("undecodable", name, f"it is no record: {error}", mend)
        return
    yield from _check_kept(name, kind, data, codec)
    if problem := far_token(token, now_us):
        yield Finding("fence", name, f"its token {problem}")
    if left_ms < 0:
        lasting = "it has no expiry: its key is never free again" if state != "released" else "it has no expiry"
        yield Finding("no-expiry", name, lasting, f"PEXPIRE {quoted(key)} 86400000")
        return
    goes = now_us // 1000 + left_ms
    if timed and ends - goes > _APART_MS:
        what = f"it says that it ends at {moment(ends)}, and its key goes at {moment(goes)}: it may run once more"
        yield Finding("disagrees", name, what, "" if state == "in progress" else f"PEXPIREAT {quoted(key)} {ends}")


_APART_MS = 60_000
"""What lies between asking for an expiry and for the time is less."""
_KEPT = {b"v": "result", b"e": "failure", b"": "checkpoint", b"n": "reason for having no result"}
"""What a record keeps, by its kind."""


def _check_kept(name: str, kind: bytes, data: bytes, codec: Codec) -> Iterator[Finding]:
    if not data and kind in (b"", b"n"):
        return
    try:
        if kind == b"n":
            data.decode()
        else:
            codec.decode(data)
    except (DecodeError, UnicodeDecodeError) as error:
        why = error.why if isinstance(error, DecodeError) else "it is no text"
        mend = "leave it to its retention: who asks for it is told so; deleting the key lets the work run again"
        yield Finding("undecodable", name, f"its {_KEPT[kind]} cannot be decoded: {why}", mend)


def check_page(key: bytes, left_ms: int, head: bytes | None) -> Iterator[Finding]:
    """One page of a dedup set (`lua/lib/page.lua`): its head can be read, and it goes by itself."""
    try:
        fields: Any = msgpack.unpackb(head or b"")
    except ValueError:
        fields = None
    numbers: list[Any] = fields if isinstance(fields, list) else []  # pyright: ignore[reportUnknownVariableType]
    whole = len(numbers) == 5 and numbers[0] == 1 and all(isinstance(one, int) and one >= 0 for one in numbers)
    if not whole:
        yield Finding("undecodable", text(key), "it is no page of a dedup set: its head cannot be read")
    if left_ms < 0:
        yield Finding("no-expiry", text(key), "it has no expiry", f"PEXPIRE {quoted(key)} 86400000")


def check_stranger(owner: keys.Owner, key: bytes) -> Iterator[Finding]:
    """A key that no function of ours makes."""
    if owner.kind == "layout":
        yield Finding("layout", text(key), "it is of another layout than ours")
    elif owner.kind == "foreign":
        yield Finding("foreign", text(key), "nothing of idemgate is called that")


def check_registered(owner: keys.Owner, key: bytes, topics: Mapping[str, Declared | None]) -> Iterator[Finding]:
    """A key of a slot belongs to a topic that exists and has such a slot."""
    if owner.name not in topics:
        yield Finding("unregistered", text(key), f"there is no topic {owner.name!r} in the registry")
        return
    topic = topics[owner.name]
    if topic is not None and not topic.changing and (owner.slots != topic.slots or owner.number >= topic.slots):
        yield Finding("unregistered", text(key), f"topic {owner.name!r} has {topic.slots} slots, counted from 0")


def check_change(
    registry: bytes, topic: str, change: bytes, topics: Mapping[str, Declared | None]
) -> Iterator[Finding]:
    """A change of a topic's slots that has begun and not ended. `change`: as the registry has it, the number of slots
    (0: it is being forgotten) and a name."""
    key, (to, named, _) = text(registry), change.partition(b" ")
    if topic not in topics:
        what = f"a change of slots is noted of topic {topic!r}, which is not there"
        yield Finding("orphan", key, what, f"HDEL {quoted(registry)} {quoted(topic + ' to')}")
    elif not (named and (to == b"0" or sizes(to))):
        what = f"what is noted of topic {topic!r} is no change of its slots: {shown(change)}"
        yield Finding("undecodable", key, what)
    else:
        slots = int(to)
        how, command = (f"given {slots} slots", f"slots {topic} {slots}") if slots else ("forgotten", f"forget {topic}")
        what = f"topic {topic!r} is being {how}, and what of it is closed stands still"
        yield Finding("changing", key, what, f"unless a command is at it now: idemgate {command}")


def check_sizes(registry: bytes, name: bytes, noted: bytes) -> Iterator[Finding]:
    """The numbers of slots that a topic had. `name`: of the field; one of another kind is looked at elsewhere."""
    if name.endswith(b" was") and sizes(noted) is None:
        what = f"what is noted as {shown(name)} is no numbers of slots: {shown(noted)}"
        yield Finding("undecodable", text(registry), what, f"HDEL {quoted(registry)} {quoted(text(name))}")


def sizes(noted: bytes) -> list[int] | None:
    """The numbers of slots that are noted by spaces; None for what is none (`lua/lib/noted.lua`)."""
    words = noted.split()
    good = all(_SIZE.fullmatch(word) and int(word) <= MOST_SLOTS for word in words)
    return [int(word) for word in words] if good else None


def check_lasting(key: bytes, left_ms: int) -> Iterator[Finding]:
    """A key that must stay."""
    if left_ms >= 0:
        yield Finding("expires", text(key), f"it will be gone in {left_ms / 1000:.0f} s", f"PERSIST {quoted(key)}")


def check_brief(key: bytes, left_ms: int) -> Iterator[Finding]:
    """A key that must go by itself, within the hour."""
    if left_ms == -1:
        yield Finding("no-expiry", text(key), "it has no expiry", f"PEXPIRE {quoted(key)} 3600000")


def check_crew(
    lives: Mapping[bytes, int],
    held: Mapping[bytes, bytes],
    alive: Mapping[bytes, float],
    facts: Mapping[bytes, bytes],
    now_ms: int,
) -> Iterator[Finding]:
    """The keys of a group of members go when nobody announces itself any more; what is `held`, somebody holds: one that
    is `alive`, or lapsed and nobody has noticed yet, but none that has left. `lives`: ms, in the order of
    `keys.members`; `alive`: until when, ms."""
    for key, left_ms in lives.items():
        if left_ms == -1:
            yield Finding("no-expiry", text(key), "it has no expiry", f"PEXPIRE {quoted(key)} 86400000")
    for member, until in alive.items():
        if until > now_ms + LEASE_MS:
            key = next(iter(lives))
            what = f"{shown(member)} is there for more than a week without a word"
            yield Finding("lease", text(key), what, f"ZADD {quoted(key)} {now_ms} {quoted(member)}")
    key = list(lives)[-1]
    for slot, member in held.items():
        if member not in alive or facts.get(b"m:" + member, b"").startswith(_LEFT):
            what = f"slot {shown(slot)} is held by {shown(member)}, which is not there"
            yield Finding("owner", text(key), what, f"HDEL {quoted(key)} {quoted(slot)}")
