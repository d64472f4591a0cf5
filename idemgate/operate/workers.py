"""Verbs of the processes that use a namespace."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from idemgate.core.activity import BOUNDS
from idemgate.core.calls import run_plan
from idemgate.core.text import common_error, one_line
from idemgate.errors import InvalidArgument
from idemgate.gate import Gate
from idemgate.operate.verb import Facts, Given, Parameter, Verb
from idemgate.presence.calls import list_names, read_processes
from idemgate.presence.report import Process, WorkFailure

__all__ = ["WORKER_VERBS", "join_failures"]

_FAILURES = 10


def list_workers(gate: Gate, given: Given) -> Facts:
    """Return the processes, what they run, and what failed in them lately."""
    processes, damaged = _read(gate)
    of, key = given["of"], given["key"]
    if of is not None:
        processes = [one for one in processes if of in one.topics or of in one.scopes or _runs(one, of)]
    running = [
        {"of": work.of, "key": work.key, "since": work.since, "process": one.name, "location": work.location}
        for one in processes for work in one.running if of in (None, work.of) and key in (None, work.key)
    ]  # fmt: skip
    if key is not None:
        processes = [one for one in processes if any(row["process"] == one.name for row in running)]
    failures = [row for row in join_failures(processes, key) if of in (None, row["of"])]
    return {
        "state": "" if processes else "no process reports here",
        "processes": [_row(one) for one in processes],
        "running": sorted(running, key=lambda row: row["since"]),
        "failures": failures[:_FAILURES],
        "unreadable": damaged or None,
    }


def _read(gate: Gate) -> tuple[list[Process], int]:
    return run_plan(read_processes(gate.namespace, gate.context.clock), gate.context.link.run_all)


def _runs(process: Process, of: str) -> bool:
    return any(work.of == of for work in process.running)


def join_failures(processes: Iterable[Process], key: str | None = None) -> list[dict[str, Any]]:
    """Return the newest failure of each error of a topic or scope, and how many others there are, the newest first.

    A failure whose next attempt began before the report is left out: its end is another failure, or a success.
    `key`: only those of this key.
    """
    rows = [
        row
        for one in processes for row in _failure_rows(one.failures, one.name)
        if key in (None, row["key"]) and (row["next_at"] is None or row["next_at"] >= one.seen_at)
    ]  # fmt: skip
    found = dict[tuple[str, str], dict[str, Any]]()
    for row in sorted(rows, key=lambda row: row["at"], reverse=True):
        same = row["of"], common_error(row["error"])
        if same in found:
            found[same]["others"] = (found[same]["others"] or 0) + 1
        else:
            found[same] = row | {"others": None}
    return [*found.values()]


def _row(one: Process) -> dict[str, Any]:
    return {
        "process": one.name, "role": one.role, "program": one.program, "version": one.version,
        "started_at": one.started_at, "seen_at": one.seen_at,
        "busy": f"{one.busy} of {one.places}" if one.places else None, "topics": list(one.topics),
        "scopes": list(one.scopes),
    }  # fmt: skip


def _failure_rows(failures: Sequence[WorkFailure], process: str) -> list[dict[str, Any]]:
    return [
        {
            "of": one.of, "key": one.key, "at": one.at, "attempt": one.attempt,
            "next_at": one.next_at if one.next_at != one.at else None, "process": process, "error": one.error,
        }
        for one in failures
    ]  # fmt: skip


def show_worker(gate: Gate, given: Given) -> Facts:
    """Return all that a process reports, for each gate that it uses."""
    processes, _ = _read(gate)
    found = [one for one in processes if given["process"] in (one.name, one.id)]
    if not found:
        names = ", ".join(one_line(one.name) for one in processes) or "none"
        seen_at = _last_seen(gate, given["process"])
        ended = f"it has ended: its last report was at about {seen_at:%Y-%m-%d %H:%M}Z" if seen_at else ""
        problem = ended or "it does not report here"
        raise InvalidArgument("process", given["process"], problem, f"Those that report: {names}")
    if len(found) > 1:
        ids = ", ".join(one.id for one in found)
        raise InvalidArgument("process", given["process"], "it uses several gates", f"Name the report: {ids}")
    return _facts(found[0])


def _last_seen(gate: Gate, name: str) -> datetime | None:
    """Return when a process of this name that has ended reported last, to a minute; None if none is known."""
    host, _, pid = name.rpartition(":")
    known = gate.context.link.run(list_names(gate.namespace, gate.context.clock))
    return max((at for one, at in known.values() if one.endswith(f", pid {pid} on {host}")), default=None)


def _facts(one: Process) -> Facts:
    return _row(one) | {
        "id": one.id, "clock_ahead": None if one.ahead is None else round(one.ahead, 1) + 0.0,  # no "-0"
        "dropped": dict(one.dropped),
        "counters": [
            {"name": name, "total": n.total, "last_minute": n.last_minute, "last_10_minutes": n.last_10_minutes}
            for name, n in sorted(one.counters.items())
        ],
        "durations": [
            _durations(of, what, buckets)
            for of, what, buckets in (
                ("store", "calls", one.calls),
                *((topic, "lateness", times.lateness) for topic, times in one.times.items()),
                *((topic, "handling", times.handling) for topic, times in one.times.items()),
            )
            if any(buckets)
        ],
        "running": [
            {"of": work.of, "key": work.key, "since": work.since, "location": work.location} for work in one.running
        ],
        "failures": _failure_rows(one.failures, one.name),
        "refused_triggers": [{"of": row.of, "key": row.key, "at": row.at, "error": row.error} for row in one.refused],
    }  # fmt: skip


def _durations(of: str, what: str, buckets: Sequence[int]) -> dict[str, Any]:
    """Return the number of durations of the last ten minutes in each bucket."""
    names = [*(f"<={bound:g}s" for bound in BOUNDS), f">{BOUNDS[-1]:g}s"]
    return {"of": of, "what": what, "number": sum(buckets)} | dict(zip(names, buckets, strict=True))


_OF = Parameter("of", "only this topic or scope")
WORKER_VERBS = (
    Verb(
        "worker", "ls", "show who runs what, since when and where in the code, and what failed lately", list_workers,
        (_OF, Parameter("key", "only processes that run this key")),
    ),
    Verb(
        "worker", "show", "show counters, durations and all else that a process reports", show_worker,
        (Parameter("process", "HOST:PID as `worker ls` prints it, or the id of a report", required=True),),
    ),
)  # fmt: skip
