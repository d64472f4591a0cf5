"""Checks of the keys of a namespace other than slots: records, dedup sets, members, the registry, unknown keys."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import msgpack

from idemgate.audit.findings import Finding, quote_argument
from idemgate.audit.slot import LEASE_MS, TopicEntry, format_time, quote_name, token_problem
from idemgate.core import keys
from idemgate.core.calls import PROCESS_BYTES, text
from idemgate.core.codec import Codec
from idemgate.core.durations import LONGEST_MS
from idemgate.errors import DecodeError
from idemgate.guard.record import decode_record
from idemgate.presence.report import decode_report

__all__ = [
    "MAX_SLOTS",
    "check_entries",
    "check_expiring",
    "check_list",
    "check_members",
    "check_names",
    "check_page",
    "check_persistent",
    "check_processes",
    "check_record",
    "check_registered",
    "check_report",
    "check_reshard_mark",
    "check_results",
    "check_scopes",
    "check_slot_counts",
    "check_unknown_key",
    "parse_slot_counts",
]


_LEFT = b"9007199254740991 "
"""The value that marks a member as left for one minute (`membership/scripts/leave.lua`)."""
MAX_SLOTS = 16_384
"""The maximum number of slots of a topic."""
_SIZE = re.compile(rb"[1-9][0-9]{0,4}")
_DAY_MS = 86_400_000


def check_record(
    key: bytes, left_ms: int, packed: bytes, now_us: int, codec: Codec, timed: bool = True
) -> Iterator[Finding]:
    """Check the record of one guarded key.

    The record and its value can be decoded, the token is possible, and the key expires no earlier than the record says.

    Args:
        key: the key in Redis.
        left_ms: its time to live; negative for none.
        packed: its value.
        now_us: the server's time.
        codec: decodes the result.
        timed: compare the expiry with the record. False if the server's clock did not set it.
    """
    name = text(key)
    goes = now_us // 1000 + left_ms
    try:
        state, kind, data, token, ends = decode_record(packed, goes)
    except ValueError as error:
        mend = f"it may say that the work is done; to let it run again: DEL {quote_argument(key)}"
        yield Finding("undecodable", name, f"it is no record: {error}", mend)
        return
    yield from _check_value(name, kind, data, codec)
    if problem := token_problem(token, now_us):
        yield Finding("fence", name, f"its token {problem}")
    if left_ms < 0:
        lasting = "it has no expiry: its key is never free again" if state != "released" else "it has no expiry"
        yield Finding("no-expiry", name, lasting, f"PEXPIRE {quote_argument(key)} 86400000")
        return
    if timed and ends - goes > _APART_MS:
        times = f"it says that it ends at {format_time(ends)}, and its key goes at {format_time(goes)}"
        what = f"{times}: it may run once more"
        yield Finding(
            "disagrees", name, what, "" if state == "in progress" else f"PEXPIREAT {quote_argument(key)} {ends}"
        )


_APART_MS = 60_000
"""More than the time between reading the expiry and reading the clock, in ms."""
_CONTENTS = {b"v": "result", b"e": "failure", b"": "checkpoint", b"n": "reason for having no result"}
"""The content of a record, by the kind it stores."""


def _check_value(name: str, kind: bytes, data: bytes, codec: Codec) -> Iterator[Finding]:
    if not data and kind in (b"", b"n"):
        return
    try:
        if kind == b"n":
            data.decode()
        else:
            codec.decode(data)
    except (DecodeError, UnicodeDecodeError) as error:
        why = error.why if isinstance(error, DecodeError) else "it is no text"
        mend = "leave it to its retention: callers get an error; deleting the key lets the work run again"
        yield Finding("undecodable", name, f"its {_CONTENTS[kind]} cannot be decoded: {why}", mend)


def check_page(key: bytes, left_ms: int, head: bytes | None) -> Iterator[Finding]:
    """Check one page of a dedup set (`dedup/scripts/lib/pages.lua`): its head can be decoded, and it expires."""
    try:
        fields: Any = msgpack.unpackb(head or b"")
    except ValueError:
        fields = None
    numbers: list[Any] = fields if isinstance(fields, list) else []  # pyright: ignore[reportUnknownVariableType]
    whole = len(numbers) == 5 and numbers[0] == 1 and all(isinstance(one, int) and one >= 0 for one in numbers)
    if not whole:
        yield Finding("undecodable", text(key), "it is no page of a dedup set: its head cannot be read")
    yield from check_expiring(key, left_ms, _DAY_MS)


def check_results(key: bytes, left_ms: int, head: bytes | None) -> Iterator[Finding]:
    """Check one period of results (`topics/scripts/lib/slot/store_result.lua`): its number, and that it expires."""
    if not (head or b"").isdigit():
        yield Finding("undecodable", text(key), "it holds no results: its period cannot be read")
    yield from check_expiring(key, left_ms, _DAY_MS)


def check_unknown_key(owner: keys.Owner, key: bytes) -> Iterator[Finding]:
    """Report a key that `core.keys` cannot have built."""
    if owner.kind == "layout":
        yield Finding("layout", text(key), "it is of another layout than ours")
    elif owner.kind == "foreign":
        yield Finding("foreign", text(key), "nothing of idemgate is called that")


def check_registered(owner: keys.Owner, key: bytes, topics: Mapping[str, TopicEntry | None]) -> Iterator[Finding]:
    """Check that the key of a slot belongs to a registered topic with such a slot."""
    if owner.name not in topics:
        yield Finding("unregistered", text(key), f"there is no topic {owner.name!r} in the registry")
        return
    topic = topics[owner.name]
    if topic is not None and not topic.changing and (owner.slots != topic.slots or owner.number >= topic.slots):
        yield Finding("unregistered", text(key), f"topic {owner.name!r} has {topic.slots} slots, counted from 0")


def check_reshard_mark(
    registry: bytes, topic: str, change: bytes, topics: Mapping[str, TopicEntry | None]
) -> Iterator[Finding]:
    """Report a change of a topic's slots that has not ended.

    Args:
        registry: the registry's key.
        topic: the topic's name.
        change: the registry's entry: the new number of slots (0 while the topic is deleted) and the change's name.
        topics: all topics of the registry.
    """
    key, (to, named, _) = text(registry), change.partition(b" ")
    if topic not in topics:
        what = f"a change of slots is registered for topic {topic!r}, which does not exist"
        yield Finding("orphan", key, what, f"HDEL {quote_argument(registry)} {quote_argument(topic + ' to')}")
    elif not (named and (to == b"0" or parse_slot_counts(to))):
        what = f"the registered change of topic {topic!r} cannot be decoded: {quote_name(change)}"
        yield Finding("undecodable", key, what)
    else:
        slots = int(to)
        how, command = (
            (f"changed to {slots} slots", f"reshard {topic} {slots}") if slots else ("deleted", f"delete {topic}")
        )
        what = f"topic {topic!r} is being {how}; its closed slots accept no calls until that ends"
        yield Finding("changing", key, what, f"unless a command does this now: idemgate topic {command}")


def check_slot_counts(registry: bytes, name: bytes, noted: bytes) -> Iterator[Finding]:
    """Check the former slot counts of a topic. Does nothing for a field `name` of another kind."""
    if name.endswith(b" was") and parse_slot_counts(noted) is None:
        what = f"the field {quote_name(name)} holds no slot counts: {quote_name(noted)}"
        yield Finding(
            "undecodable", text(registry), what, f"HDEL {quote_argument(registry)} {quote_argument(text(name))}"
        )


def parse_slot_counts(noted: bytes) -> list[int] | None:
    """Return the slot counts in a text separated by spaces; None if it is invalid.

    Same format as in `topics/scripts/lib/validate/parse_reshard_mark.lua`.
    """
    words = noted.split()
    good = all(_SIZE.fullmatch(word) and int(word) <= MAX_SLOTS for word in words)
    return [int(word) for word in words] if good else None


def check_scopes(key: bytes, fields: Mapping[bytes, bytes]) -> Iterator[Finding]:
    """Check the longest retention of each scope (`guard/scripts/register.lua`)."""
    for scope, retention in fields.items():
        if not (retention.isdigit() and 0 < int(retention) <= LONGEST_MS):
            what = f"the retention of scope {quote_name(scope)} is no number of ms: {quote_name(retention)}"
            yield Finding("undecodable", text(key), what, f"HDEL {quote_argument(key)} {quote_argument(text(scope))}")


def check_entries(
    what: str, decode: Callable[[bytes], object], key: bytes, entries: Iterable[bytes]
) -> Iterator[Finding]:
    """Check that each entry of a list can be read: the acts (`idemgate act ls`), or a history (`idemgate key show`)."""
    for entry in entries:
        try:
            decode(entry)
        except DecodeError as error:
            mend = f"LREM {quote_argument(key)} 0 {quote_argument(entry)}"
            yield Finding("undecodable", text(key), f"{what} cannot be decoded: {error.why}", mend)


def check_processes(key: bytes, ids: Iterable[bytes]) -> Iterator[Finding]:
    """Check the index of the processes that report (`presence/scripts/beat.lua`)."""
    for one in ids:
        if not keys.is_process_id(text(one)):
            what = f"the index names {quote_name(one)}, which is no process"
            yield Finding("undecodable", text(key), what, f"ZREM {quote_argument(key)} {quote_argument(one)}")


def check_names(key: bytes, names: Iterable[bytes]) -> Iterator[Finding]:
    """Check that each name of a process has an id (`presence/scripts/beat.lua`)."""
    for name in names:
        if len(name) <= PROCESS_BYTES:
            what = f"{quote_name(name)} names no process"
            yield Finding("undecodable", text(key), what, f"ZREM {quote_argument(key)} {quote_argument(name)}")


def check_report(key: bytes, report: bytes | None) -> Iterator[Finding]:
    """Check that the report of a process can be read (`idemgate worker ls`). None: it has expired."""
    if report is not None:
        try:
            decode_report("", datetime.now(UTC), report)
        except DecodeError as error:
            yield Finding("undecodable", text(key), f"{error.why}", f"DEL {quote_argument(key)}")


def check_persistent(key: bytes, left_ms: int) -> Iterator[Finding]:
    """Check that a key has no expiry."""
    if left_ms >= 0:
        yield Finding(
            "expires", text(key), f"it will be gone in {left_ms / 1000:.0f} s", f"PERSIST {quote_argument(key)}"
        )


def check_list(name: str, leases: list[bytes], state: list[bytes], data: list[bytes]) -> Iterator[Finding]:
    """Check that each taken entry of a consumed list has a lease, a state and data.

    Args:
        name: the list.
        leases, state, data: the ids in the keys beside the list (`core.keys.LIST_PARTS`).
    """
    taken = {*leases, *state, *data}
    for part, ids in (("leases", leases), ("state", state), ("data", data)):
        if absent := taken.difference(ids):
            what = f"{len(absent)} taken entries of the list are not in {part}"
            yield Finding("orphan", name, f"{what}; the first is {quote_name(min(absent))}")


def check_expiring(key: bytes, left_ms: int, mend_ms: int = 3_600_000) -> Iterator[Finding]:
    """Check that a key has an expiry. The repair gives it `mend_ms`."""
    if left_ms == -1:
        yield Finding("no-expiry", text(key), "it has no expiry", f"PEXPIRE {quote_argument(key)} {mend_ms}")


def check_members(
    lives: Mapping[bytes, int],
    held: Mapping[bytes, bytes],
    alive: Mapping[bytes, float],
    meta: Mapping[bytes, bytes],
    now_ms: int,
) -> Iterator[Finding]:
    """Check the keys of a group of members.

    All keys expire, and each held slot has a holder that has not left. A lapsed member counts until it is removed.

    Args:
        lives: time to live in ms of each key, in the order of `keys.members`.
        held: slot -> the member that holds it.
        alive: member -> the end of its lease in ms.
        meta: the metadata of the members.
        now_ms: the server's time.
    """
    for key, left_ms in lives.items():
        yield from check_expiring(key, left_ms, _DAY_MS)
    for member, until in alive.items():
        if until > now_ms + LEASE_MS:
            key = next(iter(lives))
            what = f"{quote_name(member)} is there for more than a week without a word"
            yield Finding("lease", text(key), what, f"ZADD {quote_argument(key)} {now_ms} {quote_argument(member)}")
    key = list(lives)[-1]
    for slot, member in held.items():
        if member not in alive or meta.get(b"m:" + member, b"").startswith(_LEFT):
            what = f"slot {quote_name(slot)} is held by {quote_name(member)}, which is not there"
            yield Finding("owner", text(key), what, f"HDEL {quote_argument(key)} {quote_argument(slot)}")
