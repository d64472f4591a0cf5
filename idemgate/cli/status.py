"""`idemgate status`: what is wrong now, with its cause and the command that mends it; then topics and processes."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import groupby
from typing import Any

from idemgate.audit.findings import Finding, finding_as_facts
from idemgate.audit.running import command_line, findings
from idemgate.audit.snapshot import Snapshot, TopicSeen, snapshot_as_facts
from idemgate.cli.arguments import add_namespace, add_url, duration, url_of
from idemgate.cli.showing import show_answer
from idemgate.core.text import one_line
from idemgate.errors import StoreError
from idemgate.gate import Gate
from idemgate.operate.snapshot import take_snapshot
from idemgate.operate.topics import describe_condition
from idemgate.operate.workers import join_failures
from idemgate.presence.report import Process

__all__ = ["add_to"]

DESCRIPTION = """\
Print what is wrong now in the topics, the processes, the guarded keys and the servers of a namespace: each finding with
its cause and the command that mends it. Then print the topics and the processes. It reads, and writes nothing. A user
with the role viewer may run it; the servers are judged only for one with the role auditor, too."""
EPILOG = """\
exit codes: 0 = nothing is wrong, 1 = the store is unavailable, 2 = invalid arguments, 3 = warnings only,
4 = something is critical"""
WARNING, CRITICAL = 3, 4
SHOWN = 5
"""Findings of one kind that are shown, and groups of failures; the other findings are counted."""


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    parser.description = DESCRIPTION
    parser.epilog = EPILOG
    add_url(parser)
    add_namespace(parser)
    parser.add_argument(
        "--only", metavar="NAME", help="only findings of this kind, or about this topic, scope, process or server"
    )
    parser.add_argument(
        "--watch", metavar="TIME", nargs="?", type=duration, const=2.0,
        help="print it again at this interval (default: 2s), until Ctrl-C; on a terminal in place",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object: the findings and the snapshot")
    parser.set_defaults(command=status)


def status(options: argparse.Namespace) -> int:
    """Return 0 if nothing is wrong, 3 for warnings, 4 for what is critical. Raises StoreError, unless it watches."""
    with Gate(url_of(options), namespace=options.namespace, presence=False) as gate:
        if options.watch is None:
            return _show_snapshot(take_snapshot(gate), options)
        code, snapshot = 0, None
        try:
            while True:
                code, snapshot = _show_again(gate, options, snapshot)
                time.sleep(options.watch)
        except KeyboardInterrupt:
            return code


def _show_snapshot(snapshot: Snapshot, options: argparse.Namespace) -> int:
    found = [one for one in findings(snapshot) if options.only in (None, one.kind, one.of, one.where, one.key)]
    complete = _completer(options)
    if options.json:
        completed = [finding_as_facts(one) | {"mend": complete(one.mend)} for one in found]
        facts = {"findings": completed, "snapshot": snapshot_as_facts(snapshot)}
        print(json.dumps(facts, indent=2))
    else:
        _show(snapshot, found, complete, options.only)
    worst = {one.severity for one in found}
    return CRITICAL if "critical" in worst else WARNING if worst else 0


def _show_again(gate: Gate, options: argparse.Namespace, before: Snapshot | None) -> tuple[int, Snapshot | None]:
    """Show it in place of what was shown before. A store that is away is shown, too: it may come back."""
    if sys.stdout.isatty() and not options.json:
        print("\x1b[H\x1b[2J", end="")
    try:
        snapshot = take_snapshot(gate, before)
    except StoreError as error:
        print(f"idemgate: {one_line(error)}", file=sys.stderr)
        return 1, before
    return _show_snapshot(snapshot, options), snapshot


def _completer(options: argparse.Namespace) -> Callable[[str], str]:
    """Return a function that adds the store and the namespace to a command, if they were given on the command line.

    A URL with a password is left out: the command may be copied to where others read it.
    """
    words = list[str]()
    if options.url and "@" not in options.url:
        words += ["--url", options.url]
    if options.namespace != (os.environ.get("IDEMGATE_NAMESPACE") or "default"):
        words += ["--namespace", options.namespace]
    more = command_line(*words)

    def complete(mend: str) -> str:
        if not words or not mend.startswith("idemgate "):
            return mend
        if "--" in shlex.split(mend):  # what is behind it is no option
            *verb, rest = mend.split(" ", 3)
            return " ".join([*verb, more, rest])
        return f"{mend} {more}"

    return complete


# -- text -------------------------------------------------------------------------------------------------------------


def _show(snapshot: Snapshot, found: Sequence[Finding], complete: Callable[[str], str], only: str | None) -> None:
    for kind, several in groupby(found, lambda one: one.kind):
        first, *others = several
        _show_finding(snapshot, first, complete)
        print(f"{'':10}cause: {first.cause}\n{'':10}mend: {first.advice}\n{'':10}see {first.link}")
        for one in others[: SHOWN - 1]:
            _show_finding(snapshot, one, complete)
        if len(others) >= SHOWN:
            print(f"{'':10}and {len(others) - SHOWN + 1:,} more of {kind}; --json has all")
        print()
    if not found:
        print(f"nothing to report{f' about {one_line(only)}' if only else ''} in namespace {snapshot.namespace}")
    if snapshot.unreadable:
        print(f"{snapshot.unreadable} entries are damaged and left out: idemgate doctor --audit says which")
    if not any(seen.info for seen in snapshot.servers.values()):
        print("servers were not judged: the user may not use INFO (role auditor)")
    named = only in {one.name for one in snapshot.topics}
    if topics := [_topic(snapshot, one) for one in snapshot.topics if (one.name == only if named else one.active)]:
        print()
        show_answer(topics, snapshot.namespace)
    if processes := [_process(one) for one in snapshot.processes if not named or only in one.topics]:
        print()
        show_answer(processes, snapshot.namespace)
    if failures := _failures(snapshot, only if named else None):
        print()
        show_answer(failures, snapshot.namespace)
    sys.stdout.flush()


def _show_finding(snapshot: Snapshot, one: Finding, complete: Callable[[str], str]) -> None:
    parts = [one_line(part) for part in dict.fromkeys((one.of, one.key, one.where)) if part]
    subject = " ".join(f"'{part}'" if " " in part else part for part in parts)
    since = f", for {_span(snapshot.taken_at - one.since)}" if one.since else ""
    print(f"{one.severity.upper():<9} {one.kind}: {subject}{': ' * bool(subject)}{one_line(one.what)}{since}")
    if one.mend:
        print(f"{'':10}$ {one_line(complete(one.mend))}")


def _topic(snapshot: Snapshot, topic: TopicSeen) -> dict[str, Any]:
    stats = topic.stats
    return {
        "topic": topic.name, "due": stats.ready + stats.waiting + stats.blocked,
        "oldest": _span(stats.lateness) if stats.oldest_due else None, "in_flight": stats.in_flight,
        "scheduled": stats.scheduled, "dead": stats.dead,
        "processes": sum(topic.name in one.topics for one in snapshot.processes),
        "condition": describe_condition(topic.changing_to, stats.paused),
    }  # fmt: skip


def _process(one: Process) -> dict[str, Any]:
    return {
        "process": one.name, "role": one.role, "program": one.program, "version": one.version,
        "started_at": one.started_at, "busy": f"{one.busy} of {one.places}" if one.places else None,
        "topics": list(one.topics),
    }  # fmt: skip


def _failures(snapshot: Snapshot, topic: str | None) -> list[dict[str, Any]]:
    """Return the most frequent failures that processes report."""
    rows = [row for row in join_failures(snapshot.processes) if topic in (None, row["of"])]
    largest = sorted(rows, key=lambda row: row["others"] or 0, reverse=True)[:SHOWN]
    return [
        {"failing": row["of"], "failures": 1 + (row["others"] or 0), "last_at": row["at"], "error": row["error"]}
        for row in largest
    ]


def _span(time: timedelta) -> str:
    return str(timedelta(seconds=round(time.total_seconds())))
