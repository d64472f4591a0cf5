"""Checks of the schedule: every pending message has exactly one place, with equal times."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from math import isfinite

from idemgate.audit.findings import Finding, quote_argument
from idemgate.audit.slot.view import SlotView, StoredMessage, format_time, placements, quote_name
from idemgate.core.calls import text

__all__ = ["check_copies", "check_placements", "check_scores", "check_unplaced"]

_LARGE_BYTES = 1024 + 64
"""Bytes above which a stored message makes the slot record that it holds large ones.

Scripts read lengths only in such a slot. The 64 bytes on top exceed what a script adds to a stored message.
"""


def check_placements(view: SlotView) -> Iterator[Finding]:
    """Check that each scheduled, ready or waiting key is pending, is not in flight and has one place only."""
    for part, member, key in placements(view):
        if key not in view.contents.pending:
            yield view.finding("orphan", part, f"{quote_name(key)} stands here and is not pending", "ZREM", member)
        elif key in view.contents.in_flight:
            yield view.finding(
                "misplaced", part, f"{quote_name(key)} stands here while it is in flight", "ZREM", member
            )
    places = defaultdict[bytes, list[str]](list)
    for part, _, key in placements(view):
        places[key].append(part)
    for key, parts in places.items():
        if len(parts) > 1 and key in view.contents.pending:
            what = f"{quote_name(key)} stands in {len(parts)} places: {', '.join(parts)}"
            yield view.finding("misplaced", view.part_of(key), what)


def check_unplaced(view: SlotView) -> Iterator[Finding]:
    """Check that each pending key has a place, or waits for the delivery of its key to end."""
    placed = {key for _, _, key in placements(view)} | view.contents.in_flight
    for key in view.contents.next.keys() - view.contents.in_flight:
        what = f"{quote_name(key)} waits for a delivery in flight, and there is none: nothing schedules it"
        mend = _schedule_command(view, key) if key in view.contents.messages and key not in placed else ""
        yield Finding("orphan", view.slot.key("next"), what, mend)
    for key in view.contents.pending.keys() - placed - view.contents.next.keys():
        what = f"{quote_name(key)} is pending and stands nowhere: it will never be delivered"
        yield Finding("unplaced", view.slot.key("messages"), what, _schedule_command(view, key))


def _schedule_command(view: SlotView, key: bytes) -> str:
    due = view.pending[key].due if key in view.pending else view.contents.now_ms
    return f"ZADD {quote_argument(view.slot.key('scheduled'))} {due} {quote_argument(key)}"


def check_scores(view: SlotView) -> Iterator[Finding]:
    """Check that waiting members have score 0, so that they sort by name, and ready ones a finite score."""
    for member, score in view.contents.group_waiting.items():
        if score:
            what = f"{quote_name(member)} has the score {score:g}, not 0, and so is not taken in its turn"
            yield view.finding("disagrees", "group:waiting", what, "ZADD", 0, member)
    for member, score in view.contents.ready.items():
        if not isfinite(score):
            yield view.finding(
                "disagrees", "ready", f"{quote_name(member)} has the rank {score:g}, which no priority has"
            )


def check_copies(view: SlotView) -> Iterator[Finding]:
    """Check that values stored twice are equal."""
    places = Counter(key for _, _, key in placements(view))
    for key, score in view.contents.scheduled.items():
        one = view.pending.get(key) if places[key] == 1 and key not in view.contents.in_flight else None
        if one and score != one.due and not (score < one.due and _may_be_flushed(view, one)):
            what = (
                f"{quote_name(key)} is scheduled at {format_time(score)}, its message is due at {format_time(one.due)}"
            )
            yield Finding("disagrees", view.slot.key("scheduled"), what, _schedule_command(view, key))
    standing = [("ready", due, key, None) for due, key in view.ready.values()]
    for part, due, key, group in [
        *standing,
        *(("group:waiting", due, key, group) for group, due, key in view.group_waiting.values()),
    ]:
        one = view.pending.get(key)
        if one and (due != one.due or group not in (None, one.group)):
            yield view.finding(
                "disagrees", part, f"{quote_name(key)} stands here with another time or group than its own"
            )
    for key, in_flight in view.inflight.items():
        message = in_flight.message
        if (in_flight.triggers, in_flight.group) != (message.triggers, message.group) or in_flight.due > message.due:
            yield view.finding("disagrees", "inflight", f"the delivery of {quote_name(key)} and its message differ")
    for number, letter in view.dead_data.items():
        if number != b"%d" % letter.fence or view.contents.dead.get(number, letter.died) != letter.died:
            yield view.finding("disagrees", "dead:data", f"letter {text(number)} says another number or time")
    large = [
        name
        for part in (view.contents.messages, view.contents.next, view.contents.dead_data)
        for name in part
        if len(part[name]) > _LARGE_BYTES
    ]
    if large and b"large" not in view.contents.meta:
        what = (
            f"{quote_name(large[0])} is large, and the slot does not say that it ever held such: a call may take long"
        )
        yield view.finding("disagrees", "meta", what, "HSET", "large", 1)


def _may_be_flushed(view: SlotView, one: StoredMessage) -> bool:
    """Return True if a flush of the slot may have made the message due earlier. A flush does not rewrite messages."""
    unread = b"flushed" in view.contents.meta and b"flushed" not in view.meta
    return unread or one.serial <= view.meta.get(b"flushed", 0)
