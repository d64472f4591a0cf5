"""The findings of an audit: a stable name for each kind of fault, its likely cause and its repair."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

__all__ = ["KINDS", "Finding", "Report", "Severity", "quote_argument"]

Severity = Literal["critical", "warning"]


class Kind(NamedTuple):
    """A kind of fault.

    Attributes:
        severity: "critical" if it breaks a promise, else "warning".
        cause: the likely cause.
        mend: the repair, unless the finding has a more specific one.
    """

    severity: Severity
    cause: str
    mend: str


_OTHERS = "another program or a person wrote to a key of idemgate"
_PARTLY = (
    "a write that bypassed the scripts, a restart that lost a part of the data, or a call that an access list refused"
    " after a part of its writes"
)
_BUG = "please report it with the finding: the scripts write both values together"
KINDS: dict[str, Kind] = {
    "conservation": Kind(
        "critical",
        f"messages were added or removed: {_PARTLY}",
        "repair the other findings first; compare with the sender's data, and trigger the missing messages again. After"
        " a refused call only the counters may differ",
    ),
    "orphan": Kind("critical", _PARTLY, "remove the orphaned entry"),
    "unplaced": Kind("critical", _PARTLY, "schedule it"),
    "misplaced": Kind("critical", _PARTLY, "remove the wrong entry"),
    "stuck": Kind(
        "critical",
        f"the end of a delivery did not schedule the waiting message: {_PARTLY}",
        "schedule it, or end a delivery of the group",
    ),
    "room": Kind(
        "warning",
        "group_concurrency was raised while messages waited",
        "nothing: they are scheduled when the next delivery of the group ends",
    ),
    "held": Kind(
        "critical", f"the group holds a key that never leaves it, or a key twice: {_PARTLY}", "remove it from the group"
    ),
    "overlap": Kind(
        "critical",
        f"group_concurrency was lowered while these ran; or {_PARTLY}",
        "wait for the deliveries to end, and audit again",
    ),
    "lease": Kind(
        "critical",
        _OTHERS,
        "end the lease now; for a delivery only if no worker handles it",
    ),
    "fence": Kind(
        "critical",
        f"{_PARTLY}; or a lossy failover. For a token far ahead: {_OTHERS}, or the clock was set back by days",
        "raise the slot's fence above every granted token; for a token far ahead find out who wrote it",
    ),
    "undecodable": Kind(
        "critical", f"{_OTHERS}, or a version that packs differently", "inspect it; delete it if no program can read it"
    ),
    "disagrees": Kind("critical", _PARTLY, _BUG),
    "wrong-slot": Kind(
        "critical",
        "the number of slots was changed without idemgate, or a key was renamed",
        "trigger it again, and delete this entry",
    ),
    "changing": Kind(
        "warning",
        "a command that reshards or deletes the topic is running, or was killed",
        "if none is running, start it again: idemgate topic reshard TOPIC N, or idemgate topic delete TOPIC",
    ),
    "closed": Kind(
        "critical",
        "a change of the number of slots was interrupted, and its registry entry was lost",
        "start the change again: idemgate topic reshard TOPIC N",
    ),
    "unregistered": Kind(
        "critical",
        "the registry was deleted, or lost an entry",
        "open the topic again with its policy, or delete the slot's keys",
    ),
    "no-expiry": Kind("critical", f"{_OTHERS} (PERSIST, SET)", "set an expiry"),
    "expires": Kind("critical", f"{_OTHERS} (EXPIRE)", "remove the expiry"),
    "forgotten-never": Kind("warning", _PARTLY, "remove the entry that never expires"),
    "foreign": Kind(
        "warning", _OTHERS, "use a separate namespace for each program; delete the key if it is not needed"
    ),
    "wrong-type": Kind("critical", _OTHERS, "rename or delete that key; until then every call to it fails"),
    "layout": Kind(
        "warning",
        f"a newer or older idemgate uses this namespace; for a slot without a layout: {_OTHERS}",
        "run a single version, or delete the keys of the other",
    ),
    "unread": Kind(
        "warning",
        "it is too large to read in one step, or was migrating to another node",
        "audit with a higher limit when the load is low",
    ),
    "fence-fell": Kind(
        "critical",
        "tokens were lost: a lossy failover, or a restart without an append-only file",
        "check the writes of the owner with the lower token: a fence may have rejected them",
    ),
    "ran-again": Kind(
        "critical",
        "the record of the completion was lost, or retention was shorter than the delay of the duplicate",
        "undo the second effect",
    ),
    "overlap-key": Kind(
        "critical",
        "a lease lapsed while its handler ran on, and it wrote no 'gone'; or promise P10 is broken",
        "let your database refuse stale owners: a fence, or a key stored with the effect",
    ),
    "overlap-group": Kind(
        "critical",
        "a lease lapsed while its handler ran on, and it wrote no 'gone'; or promise P10 is broken",
        "let your database refuse stale owners: a fence, or a key stored with the effect",
    ),
    "owner": Kind(
        "warning", "a member died between two writes", "nothing: the next heartbeat of a member releases the slot"
    ),
}
"""All kinds of faults, by name."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault.

    Attributes:
        kind: a name in `KINDS`.
        key: the key in Redis, or the idempotency key for a history.
        what: what is wrong.
        mend: a redis-cli command that repairs it, or "".
    """

    kind: str
    key: str
    what: str
    mend: str = ""

    @property
    def severity(self) -> Severity:
        """The severity: what is "critical" breaks a promise, a "warning" does not yet."""
        return KINDS[self.kind].severity

    @property
    def cause(self) -> str:
        """The likely cause."""
        return KINDS[self.kind].cause

    @property
    def remedy(self) -> str:
        """The repair: a command if there is one, else advice."""
        return self.mend or KINDS[self.kind].mend

    def __str__(self) -> str:
        return f"{self.severity} {self.kind}: {self.key}: {self.what}"


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
