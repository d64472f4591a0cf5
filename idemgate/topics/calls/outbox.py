"""Trimming of the streams that a topic forwards into: entries that every consumer group has acknowledged."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

__all__ = ["plan_trim"]


def plan_trim(stream: bytes) -> Generator[tuple[Any, ...], Any, int]:
    """Plan the trimming of a stream: yield commands, receive their replies, return the number of removed entries.

    Without a group nothing is removed, because readers without a group acknowledge nothing. What a group has
    acknowledged only grows, so the commands need no transaction. The server removes whole nodes of its tree. So up to
    about a hundred acknowledged entries stay.
    """
    if not (yield ("EXISTS", stream)):
        return 0  # XINFO would raise
    groups = yield ("XINFO", "GROUPS", stream)
    done: list[tuple[int, int]] = []
    for fields in groups:
        group: dict[bytes, Any] = dict(zip(fields[::2], fields[1::2], strict=True))
        # Read before the pending entries: those that are delivered in between have higher ids.
        last_delivered = _entry_id(group[b"last-delivered-id"])
        count, oldest, *_ = yield ("XPENDING", stream, group[b"name"])
        done.append(min(last_delivered, _entry_id(oldest)) if count else last_delivered)
    if not done or min(done) == (0, 0):
        return 0
    milliseconds, number = min(done)
    return int((yield ("XTRIM", stream, "MINID", "~", f"{milliseconds}-{number}")))


def _entry_id(text: bytes) -> tuple[int, int]:
    milliseconds, _, number = text.partition(b"-")
    return int(milliseconds), int(number)
