"""Checks of dead letters, event ids, versions and closed windows."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgpack

from idemgate.audit.findings import Finding, quote_argument
from idemgate.audit.slot.view import SlotView, expect_int, format_time, quote_name, unpack_array
from idemgate.core import keys
from idemgate.core.calls import text
from idemgate.core.durations import LATEST_MS

__all__ = ["check_dead_letters", "check_dedup_expiry", "check_event_ids", "check_versions"]

_VERSION = re.compile(rb"\d+(?: .*)?", re.DOTALL)
_EVENT_BYTES = 24
"""Bytes of an entry: the digest, the routing hash and the expiry."""


def check_dead_letters(view: SlotView) -> Iterator[Finding]:
    for number in view.contents.dead.keys() - view.contents.dead_data.keys():
        yield view.finding("orphan", "dead", f"letter {text(number)} has no body", "ZREM", number)
    for number in view.contents.dead_data.keys() - view.contents.dead.keys():
        what = f"letter {text(number)} has no time of death: it is neither listed nor ever discarded"
        mend = f"ZADD {quote_argument(view.slot.key('dead'))} {view.contents.now_ms} {quote_argument(number)}"
        yield Finding("orphan", view.slot.key("dead:data"), what, mend)


def check_dedup_expiry(view: SlotView) -> Iterator[Finding]:
    for name in (
        view.contents.dedup.keys() - view.contents.dedup_expiry.keys() - _event_fields(view.contents.dedup).keys()
    ):
        yield view.finding("forgotten-never", "dedup", f"{quote_name(name)} has no time to be forgotten", "HDEL", name)
    # The hash expires a second before the sorted set does (extend_lifetime in topics/scripts/lib/events.lua).
    ends = not view.contents.dedup and 0 <= view.contents.lives.get("dedup:expiry", -1) <= 1000
    for name in view.contents.dedup_expiry.keys() - view.contents.dedup.keys():
        if ends:
            break
        yield view.finding(
            "forgotten-never", "dedup:expiry", f"{quote_name(name)} names nothing remembered", "ZREM", name
        )
    for name, score in view.contents.dedup_expiry.items():
        if score > LATEST_MS:
            what = f"{quote_name(name)} is to be forgotten at {format_time(score)}"
            yield view.finding("forgotten-never", "dedup:expiry", what, "ZADD", view.contents.now_ms, name)


def check_versions(view: SlotView) -> Iterator[Finding]:
    for name, value in view.contents.dedup.items():
        if name[:1] == b"v" and not _VERSION.fullmatch(value):
            what = f"what is remembered as {quote_name(name)} is no version: {quote_name(value[:40])}"
            yield view.finding("undecodable", "dedup", what, "HDEL", name)


def _event_fields(dedup: dict[bytes, bytes]) -> dict[bytes, bytes]:
    """Return the fields of `dedup` that belong to the table of event ids (`topics/scripts/lib/events.lua`)."""
    return {name: value for name, value in dedup.items() if name == b"e" or (name[:1] == b"e" and name[1:].isdigit())}


def check_event_ids(view: SlotView) -> Iterator[Finding]:
    """Check that each event id is in its bucket once, is counted, and belongs to this slot."""
    tabled = _event_fields(view.contents.dedup)
    if not tabled:
        return
    try:
        layout, many, count = unpack_array(tabled.pop(b"e", b""), 3)
        if layout != 1:
            raise ValueError(f"layout {layout!r}, this program knows layout 1")  # noqa: TRY301 - handled as corrupt data
        many, count = expect_int(many, 1), expect_int(count)
    except (ValueError, TypeError) as error:
        yield view.finding("undecodable", "dedup", f"the table of event ids cannot be read: {error}")
        return
    short = sorted(name for name, bucket in tabled.items() if len(bucket) % _EVENT_BYTES)
    if short:
        what = f"bucket {text(short[0])} of event ids is cut short"
        yield view.finding("undecodable", "dedup", what, "HDEL", short[0])
        return
    marks: list[bytes] = []
    for name, bucket in sorted(tabled.items()):
        held = [bucket[at : at + _EVENT_BYTES] for at in range(0, len(bucket), _EVENT_BYTES)]
        marks += held
        if any(b"%d" % _bucket_of(mark, many) != name[1:] for mark in held):
            yield view.finding("disagrees", "dedup", f"bucket {text(name)} holds event ids of another one")
    names = len({mark[:16] for mark in marks})
    if not len(marks) == names == count:
        what = f"{len(marks)} event ids are remembered, {names} different ones, and {count} are counted"
        mend = ("HSET", b"e", msgpack.packb([1, many, names])) if len(marks) == names else ()
        yield view.finding("disagrees", "dedup", what, *mend)
    if any(keys.slot_of_event(mark, view.slot.slots) != view.slot.number for mark in marks):
        yield view.finding(
            "wrong-slot", "dedup", "event ids of another slot are remembered: nobody will find them here"
        )


def _bucket_of(mark: bytes, many: int) -> int:
    """Return the bucket of an event id by linear hashing, as in `lua/lib/buckets.lua`."""
    hashed, base = int.from_bytes(mark[:4]), 1 << (many.bit_length() - 1)
    at = hashed % base
    return hashed % (2 * base) if at < many - base else at
