"""Findings: what is wrong, with its likely cause and its repair; and the report of an audit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from idemgate.audit.catalogue import CATALOGUE, Severity, link_of

__all__ = ["Finding", "Report", "finding_as_facts", "quote_argument"]


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong.

    Attributes:
        kind: a name in `CATALOGUE`.
        key: the key in Redis of stored data, else the key of a message, a guarded call or a history; "" if none.
        what: what is wrong.
        mend: a command that repairs it, or "". Commands of `redis-cli` for stored data, of `idemgate` for what runs.
        of: the topic or the scope, or "".
        where: the server or the process, or "".
        since: since when, if that is known; by the server's clock.
        numbers: numbers that describe it, by name.
        lesser: the severity if it is less than that of its kind.
        of_scope: True if `of` is a scope.
    """

    kind: str
    key: str
    what: str
    mend: str = ""
    of: str = ""
    where: str = ""
    since: datetime | None = None
    numbers: Mapping[str, float] = field(default_factory=dict[str, float])
    lesser: Severity | None = None
    of_scope: bool = False

    @property
    def severity(self) -> Severity:
        """The severity: what is "critical" breaks a promise or stops work, a "warning" does not yet."""
        return self.lesser or CATALOGUE[self.kind].severity

    @property
    def cause(self) -> str:
        """The likely cause."""
        return CATALOGUE[self.kind].cause

    @property
    def remedy(self) -> str:
        """The repair: a command if there is one, else advice."""
        return self.mend or self.advice

    @property
    def advice(self) -> str:
        """The advice of the catalogue, in words."""
        return CATALOGUE[self.kind].mend

    @property
    def link(self) -> str:
        """The page and the heading that explain it."""
        return link_of(self.kind)

    def __str__(self) -> str:
        return f"{self.severity} {self.kind}: {self.key}: {self.what}"


def finding_as_facts(finding: Finding) -> dict[str, Any]:
    """Return a finding as values of JSON."""
    return {
        "id": finding.kind, "severity": finding.severity, "of": finding.of, "key": finding.key, "where": finding.where,
        "what": finding.what, "since": finding.since and finding.since.isoformat(), "numbers": dict(finding.numbers),
        "cause": finding.cause, "advice": finding.advice, "mend": finding.mend, "link": finding.link,
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Report:
    """The result of an audit.

    Attributes:
        findings: all faults found.
        counted: the number of checked entries by name, such as "slots", "records" or "pending".
    """

    findings: tuple[Finding, ...]
    counted: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def sound(self) -> bool:
        """True if there are no findings."""
        return not self.findings

    @property
    def critical(self) -> tuple[Finding, ...]:
        """The findings that break a promise."""
        return tuple(one for one in self.findings if one.severity == "critical")

    @property
    def by_kind(self) -> Counter[str]:
        """The number of findings by kind."""
        return Counter(one.kind for one in self.findings)

    def __str__(self) -> str:
        looked = ", ".join(f"{n:,} {name}" for name, n in self.counted.items()) or "nothing"
        return "\n".join([f"looked at {looked}: {'sound' if self.sound else 'NOT sound'}", *map(str, self.findings)])


def quote_argument(value: bytes | str) -> str:
    """Return a word quoted for redis-cli."""
    text = "".join(
        chr(byte) if 32 <= byte < 127 and byte not in b'"\\' else f"\\x{byte:02x}"
        for byte in (value if isinstance(value, bytes) else value.encode())
    )
    return text if text and all(one.isalnum() or one in "_.:{}-@/" for one in text) else f'"{text}"'
