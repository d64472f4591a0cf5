"""Script calls of presence: a function for each script of `scripts`."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from idemgate.core import keys
from idemgate.core.calls import (
    MAX_ENTRIES,
    PROCESS_BYTES,
    Call,
    Plan,
    call,
    process_bytes,
    run_call,
    run_calls,
    stamp,
    text,
)
from idemgate.core.clock import Clock
from idemgate.core.process import process_name
from idemgate.errors import DecodeError
from idemgate.presence.report import Process, decode_report

__all__ = ["EXPIRES", "INTERVAL", "beat", "leave", "list_ids", "list_names", "read_processes", "read_reports"]

INTERVAL = 10.0
"""Seconds between two reports of a process."""
EXPIRES = 30.0
"""Seconds after which the report of a process that was killed is gone."""
MAX_PROCESSES = 10_000
"""The most processes that a reader gets: those whose reports are the newest."""


def beat(namespace: str, clock: Clock | None, process: str, report: bytes, *, named: bool = False) -> Call[None]:
    """Build the call that stores a report. `named`: it also stores the name of this process for 30 days."""
    names, args = keys.presence(namespace, process), (stamp(clock), process, report, round(EXPIRES * 1000))
    if named:
        names = (*names, keys.process_names(namespace))
        return call("presence/beat", names, (*args, process_bytes() + process_name().encode()), lambda _: None)
    return call("presence/beat", names, args, lambda _: None)


def list_names(namespace: str, clock: Clock | None) -> Call[dict[str, tuple[str, datetime]]]:
    """Build the call that returns the names of processes by the ids with which histories refer to them.

    Each has the time when it was stored: that of the last report or up to a minute before, by the server's clock.
    """

    def read(reply: list[Any]) -> dict[str, tuple[str, datetime]]:
        return {
            one[:PROCESS_BYTES].hex(): (text(one[PROCESS_BYTES:]), _moment(time))
            for one, time in zip(reply[2::2], reply[3::2], strict=True)
        }

    return call("presence/names", (keys.process_names(namespace),), (stamp(clock),), read)


def leave(namespace: str, clock: Clock | None, process: str) -> Call[None]:
    """Build the call that removes a process."""
    return call("presence/leave", keys.presence(namespace, process), (stamp(clock), process), lambda _: None)


def list_ids(namespace: str, clock: Clock | None) -> Call[dict[str, datetime]]:
    """Build the call that returns the ids of processes, each with the time of its last report by the server's clock.

    The last report comes first. Some may have ended: they have no report any more.
    """

    def read(reply: list[Any]) -> dict[str, datetime]:
        return {text(one): _moment(time) for one, time in zip(reply[2::2], reply[3::2], strict=True)}

    return call("presence/list", keys.presence(namespace), (stamp(clock), MAX_PROCESSES), read)


def _moment(ms: bytes) -> datetime:
    return datetime.fromtimestamp(float(ms) / 1000, UTC)


def read_reports(namespace: str, clock: Clock | None, ids: list[str]) -> Call[list[tuple[datetime, bytes] | None]]:
    """Build the call that returns the reports of at most 100 processes, each with its time by the server's clock.

    It returns None for each process that has none.
    """

    def read(reply: list[Any]) -> list[tuple[datetime, bytes] | None]:
        return [
            (_moment(time), bytes(report)) if report else None
            for report, time in zip(reply[2::2], reply[3::2], strict=True)
        ]

    return call("presence/read", keys.presence(namespace, *ids), (stamp(clock),), read)


def read_processes(
    namespace: str, clock: Clock | None, known: Iterable[Process] = ()
) -> Plan[tuple[list[Process], int]]:
    """Return the processes that report, the last report first, and how many reports cannot be decoded.

    Of `known` those are returned whose report is still the last one. They are not read again. Pass none whose report
    may have expired.
    """
    seen = yield from run_call(list_ids(namespace, clock))
    found = {one.id: one for one in known if seen.get(one.id) == one.seen_at}
    ids = [one for one in seen if keys.is_process_id(one)]
    unread = [one for one in ids if one not in found]
    parts = [unread[start : start + MAX_ENTRIES] for start in range(0, len(unread), MAX_ENTRIES)]
    answers = yield from run_calls(read_reports(namespace, clock, part) for part in parts)
    damaged = len(seen) - len(ids)
    for part, reports in zip(parts, answers, strict=True):
        for one, report in zip(part, reports, strict=True):
            if report is not None:
                try:
                    found[one] = decode_report(one, *report)
                except DecodeError:
                    damaged += 1
    return [found[one] for one in ids if one in found], damaged
