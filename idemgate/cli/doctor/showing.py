"""Output of the doctor: coloured if rich is installed and the output is a terminal, else plain; or JSON."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from importlib.util import find_spec

from idemgate.audit.catalogue import link_of
from idemgate.audit.findings import Finding, Report
from idemgate.audit.server import Check
from idemgate.cli.doctor.examine import Namespace, ServerCheck
from idemgate.core.text import one_line

__all__ = ["as_json", "show"]

STYLES = {"ok": "green", "warning": "bold yellow", "critical": "bold red", "skipped": "dim"}
WORDS = {"ok": "ok", "warning": "WARNING", "critical": "CRITICAL", "skipped": "skipped"}
SHOWN = 5
"""Findings of one kind that are shown; the others are counted."""
Line = tuple[str, str]
"""A style and a text."""


def as_json(where: Namespace, checks: list[ServerCheck], report: Report | None) -> str:
    """Return one JSON object, with all findings."""
    facts: dict[str, object] = {
        "store": str(where.endpoint),
        "namespace": where.name,
        "checks": [{"server": server, **check._asdict(), "link": link_of(check.name)} for server, check in checks],
    }
    if report is not None:
        facts["audit"] = {
            "sound": report.sound,
            "counted": dict(report.counted),
            "findings": [_finding(one) for one in report.findings],
        }
    return json.dumps(facts, indent=2)


def _finding(one: Finding) -> dict[str, str]:
    names = ("severity", "kind", "key", "what", "cause", "link")
    return {name: getattr(one, name) for name in names} | {"mend": one.remedy}


def show(where: Namespace, checks: list[ServerCheck], report: Report | None) -> None:
    """Print the checks and the report on the standard output."""
    lines = [(style, _safe(text)) for style, text in _lines(where, checks, report)]
    if sys.stdout.isatty() and find_spec("rich") is not None:
        from rich.console import Console
        from rich.text import Text

        console = Console(soft_wrap=True, highlight=False)
        for style, text in lines:
            console.print(Text(text, style=style))
    else:
        print("\n".join(text for _, text in lines))


def _safe(text: str) -> str:
    """Return a line that no name in the store can change or end. Only the layout begins a line with a line end."""
    rest = text.removeprefix("\n")
    return text[: len(text) - len(rest)] + one_line(rest)


def _lines(where: Namespace, checks: list[ServerCheck], report: Report | None) -> Iterator[Line]:
    yield "bold", f"{where.endpoint}, namespace {where.name}"
    many = len({server for server, _ in checks if server}) > 1
    before = ""
    for server, check in checks:
        if many and server != before:
            yield "bold", f"\n{server or 'all of them'}"
            before = server
        yield from _check(check)
    if report is not None:
        yield from _report(report)
    yield "", ""
    yield _verdict(checks, report)


def _check(check: Check) -> Iterator[Line]:
    yield from _wrap(STYLES[check.state], f"  {WORDS[check.state]:<8} {check.name:<13}", check.what)
    if check.mend and check.state != "ok":
        yield from _wrap("cyan", f"{'':<24}mend: ", check.mend)


def _wrap(style: str, head: str, text: str) -> Iterator[Line]:
    width = max(60, min(120, shutil.get_terminal_size((100, 24)).columns))
    options = {"break_long_words": False, "break_on_hyphens": False}
    whole = textwrap.wrap(text, width, initial_indent=head, subsequent_indent=" " * len(head), **options)  # type: ignore[arg-type]
    yield from ((style, line) for line in whole or [head])


def _report(report: Report) -> Iterator[Line]:
    yield "bold", "\naudit"
    state = "ok" if report.sound else "critical" if report.critical else "warning"
    yield from _wrap(STYLES[state], f"  {WORDS[state]:<8} ", f"looked at {_format_counts(report)}")
    by_kind: defaultdict[str, list[Finding]] = defaultdict(list)
    for one in report.findings:
        by_kind[one.kind].append(one)
    for kind, found in by_kind.items():
        yield "", ""
        yield from _kind(kind, found)


def _format_counts(report: Report) -> str:
    """Format the counted objects; the states of records follow their number."""
    of = "records "
    states = [f"{n:,} {name.removeprefix(of)}" for name, n in report.counted.items() if name.startswith(of)]
    counted = {name: f"{n:,} {name.replace('_', ' ')}" for name, n in report.counted.items() if not name.startswith(of)}
    if states:
        counted["records"] += f" ({', '.join(sorted(states))})"
    return ", ".join(counted.values())


def _kind(kind: str, found: list[Finding]) -> Iterator[Line]:
    first = found[0]
    yield STYLES[first.severity], f"  {WORDS[first.severity]:<8} {kind}, {len(found):,} found"
    yield from _wrap("", f"{'':<11}may come of: ", first.cause)
    for one in found[:SHOWN]:
        yield from _wrap("", f"{'':<11}", f"{one.key}: {one.what}")
        yield "cyan", f"{'':<13}mend: {one.remedy}"
    if len(found) > SHOWN:
        yield "dim", f"{'':<11}and {len(found) - SHOWN:,} more; --json has all"


def _verdict(checks: list[ServerCheck], report: Report | None) -> Line:
    found = report.findings if report is not None else ()
    states = [check.state for _, check in checks] + [one.severity for one in found]
    critical, warnings = states.count("critical"), states.count("warning")
    if critical:
        return STYLES["critical"], f"{critical:,} critical, {warnings:,} warning{'s'[: warnings != 1]}"
    if warnings:
        return STYLES["warning"], f"nothing critical, {warnings:,} warning{'s'[: warnings != 1]}"
    return STYLES["ok"], "all is well"
