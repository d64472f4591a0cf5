"""Trimming of the streams that a topic forwards into: entries that every consumer group has acknowledged."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from typing import Any

from idemgate.errors import ServerRejected, StoreError

__all__ = ["Commands", "plan_trim", "run_commands", "run_commands_async"]

Commands = Generator[tuple[Any, ...], Any, int]
"""Yields commands, receives their replies, and returns the number of removed entries."""


def plan_trim(stream: bytes) -> Commands:
    """Plan the trimming of a stream.

    Without a group nothing is removed, because readers without a group acknowledge nothing. What a group has
    acknowledged only grows, so the commands need no transaction. The server removes whole nodes of its tree. So up to
    about a hundred acknowledged entries stay.
    """
    try:
        groups = yield ("XINFO", "GROUPS", stream)
    except ServerRejected as error:
        if "no such key" in str(error):
            return 0
        raise
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


def run_commands(plan: Commands, command: Callable[..., Any]) -> int:
    """Run the commands of a plan, and return its result."""
    try:
        words = next(plan)
        while True:
            try:
                reply = command(*words)
            except StoreError as error:
                words = plan.throw(error)
            else:
                words = plan.send(reply)
    except StopIteration as end:
        return int(end.value)


async def run_commands_async(plan: Commands, command: Callable[..., Awaitable[Any]]) -> int:
    """Run the commands of a plan, and return its result."""
    try:
        words = next(plan)
        while True:
            try:
                reply = await command(*words)
            except StoreError as error:
                words = plan.throw(error)
            else:
                words = plan.send(reply)
    except StopIteration as end:
        return int(end.value)


def _entry_id(text: bytes) -> tuple[int, int]:
    milliseconds, _, number = text.partition(b"-")
    return int(milliseconds), int(number)
