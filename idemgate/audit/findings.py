"""What an audit found: each fault by a stable name, with where it is, what is wrong, how it may have come and what
mends it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

__all__ = ["KINDS", "Finding", "Report", "Severity", "quoted"]

Severity = Literal["error", "warning"]


class Kind(NamedTuple):
    """A sort of fault: what it costs (an error breaks a promise, a warning does not), how it may have come, and what
    mends it where the finding has nothing closer to say."""

    severity: Severity
    cause: str
    mend: str


_OTHERS = "another program, or a person, wrote to a key of ours"
_PARTLY = "a write by other hands than our scripts, or a restart that kept only a part of the data"
_BUG = "please report it with the finding: our scripts write these together"
KINDS: dict[str, Kind] = {
    "conservation": Kind(
        "error",
        f"messages were added or removed past the scripts: {_PARTLY}",
        "compare with what the sender sent; what is missing has to be triggered again",
    ),
    "orphan": Kind("error", _PARTLY, "remove what points nowhere"),
    "unplaced": Kind("error", _PARTLY, "schedule it"),
    "misplaced": Kind("error", _PARTLY, "remove it from where it does not belong"),
    "stuck": Kind(
        "error",
        f"the end of a delivery did not schedule what waited: {_PARTLY}",
        "schedule it, or end any delivery of the group",
    ),
    "room": Kind(
        "warning",
        "group_concurrency was raised while messages waited",
        "nothing: the next delivery of the group that ends lets them in",
    ),
    "held": Kind("error", f"the group holds a key that will never leave it, or one twice: {_PARTLY}", "take it out"),
    "overlap": Kind(
        "error", f"group_concurrency was lowered while these ran; or {_PARTLY}", "let the deliveries end; look again"
    ),
    "lease": Kind(
        "error",
        _OTHERS,
        "let it end now; of a delivery, if nobody handles it any more",
    ),
    "fence": Kind(
        "error",
        f"{_PARTLY}; a lossy failover; of one far ahead: {_OTHERS}, or the clock was set back by days",
        "raise the slot's fence above every token that was granted; of one far ahead: ask who wrote it",
    ),
    "undecodable": Kind(
        "error", f"{_OTHERS}, or a version that packs differently", "look at it; delete it if nobody can read it"
    ),
    "disagrees": Kind("error", _PARTLY, _BUG),
    "wrong-slot": Kind(
        "error",
        "the number of slots was changed past the library, or a key was renamed",
        "trigger it again, and delete it here",
    ),
    "changing": Kind(
        "warning",
        "a command that gives the topic other slots, or forgets it, is at it, or was killed",
        "unless one is at it now, begin it again: idemgate slots TOPIC N, or idemgate forget TOPIC",
    ),
    "closed": Kind(
        "error",
        "a change of the number of slots was cut off, and its mark in the registry was lost",
        "begin the change anew: idemgate slots TOPIC N",
    ),
    "unregistered": Kind(
        "error",
        "the registry was deleted, or lost an entry",
        "open the topic again with its policy, or delete the slot's keys",
    ),
    "no-expiry": Kind("error", f"{_OTHERS} (PERSIST, SET)", "give it an expiry"),
    "expires": Kind("error", f"{_OTHERS} (EXPIRE)", "take the expiry away"),
    "forgotten-never": Kind("warning", _PARTLY, "remove what nobody will forget"),
    "foreign": Kind("warning", _OTHERS, "give each program a namespace of its own; delete it if nobody needs it"),
    "wrong-type": Kind("error", _OTHERS, "rename or delete that key; until then every call to it is refused"),
    "layout": Kind(
        "warning",
        f"a newer or older idemgate uses this namespace; of a slot that says none: {_OTHERS}",
        "let one version at a time use it, or delete what was left behind",
    ),
    "unread": Kind(
        "warning",
        "it is too large to be read in one step, or was moving to another node",
        "audit with a higher limit, at a quiet time",
    ),
    "fence-fell": Kind(
        "error",
        "tokens were forgotten: a lossy failover, or a restart without an append-only file",
        "check what the owner of the lower token wrote: a fence may have refused it",
    ),
    "ran-again": Kind(
        "error",
        "the record of the end was lost, or retention was shorter than the duplicates are late",
        "undo the second effect",
    ),
    "overlap-key": Kind(
        "error",
        "a lease lapsed while its handler ran on, and it wrote no 'gone'; or promise P10 is broken",
        "let your database refuse stale owners: a fence, or a key stored with the effect",
    ),
    "overlap-group": Kind(
        "error",
        "a lease lapsed while its handler ran on, and it wrote no 'gone'; or promise P10 is broken",
        "let your database refuse stale owners: a fence, or a key stored with the effect",
    ),
    "owner": Kind(
        "warning", "a member vanished between two writes", "nothing: the next announcement of a member frees it"
    ),
}
"""Every fault there is a check for."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault. `kind` is one of `KINDS`, `key` the key in Redis (or the idempotency key, of a history), `mend` a
    command of redis-cli where one can mend it."""

    kind: str
    key: str
    what: str
    mend: str = ""

    @property
    def severity(self) -> Severity:
        """An "error" breaks a promise; a "warning" does not, or not yet."""
        return KINDS[self.kind].severity

    @property
    def cause(self) -> str:
        """How it may have come."""
        return KINDS[self.kind].cause

    @property
    def remedy(self) -> str:
        """What mends it."""
        return self.mend or KINDS[self.kind].mend

    def __str__(self) -> str:
        return f"{self.severity} {self.kind}: {self.key}: {self.what}"


@dataclass(frozen=True, slots=True)
class Report:
    """What was looked at (`counted`, by name: "slots", "records", "pending", ...), and what is wrong with it. Sound
    means that nothing was found."""

    findings: tuple[Finding, ...]
    counted: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def sound(self) -> bool:
        return not self.findings

    @property
    def errors(self) -> tuple[Finding, ...]:
        """Those that break a promise."""
        return tuple(one for one in self.findings if one.severity == "error")

    @property
    def by_kind(self) -> Counter[str]:
        """How many of each kind."""
        return Counter(one.kind for one in self.findings)

    def __str__(self) -> str:
        looked = ", ".join(f"{n:,} {name}" for name, n in self.counted.items()) or "nothing"
        return "\n".join([f"looked at {looked}: {'sound' if self.sound else 'NOT sound'}", *map(str, self.findings)])


def quoted(value: bytes | str) -> str:
    """A word as redis-cli reads it."""
    text = "".join(
        chr(byte) if 32 <= byte < 127 and byte not in b'"\\' else f"\\x{byte:02x}"
        for byte in (value if isinstance(value, bytes) else value.encode())
    )
    return text if text and all(one.isalnum() or one in "_.:{}-@/" for one in text) else f'"{text}"'
