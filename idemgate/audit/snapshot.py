"""A namespace at one moment: its servers, its topics, the processes that report, and some keys.

`take_snapshot` (`idemgate/operate/snapshot.py`) reads it. Nothing here sends anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any

from idemgate.audit.server import Seen
from idemgate.presence.report import Process
from idemgate.topics.messages import Stats
from idemgate.topics.registry import is_active

__all__ = [
    "VERSION",
    "DeadSeen",
    "FailingCall",
    "FailingMessage",
    "HeldKey",
    "KnownVersion",
    "Snapshot",
    "TopicSeen",
    "snapshot_as_facts",
]

VERSION = 1
"""The version of the form of a snapshot. It rises if a field is removed, or means something else."""


@dataclass(frozen=True, slots=True)
class DeadSeen:
    """A dead letter."""

    key: str
    reason: str
    died_at: datetime
    attempts: int


@dataclass(frozen=True, slots=True)
class TopicSeen:
    """A topic: its numbers, its limits and its newest dead letters.

    Attributes:
        changing_to: the number of slots that it gets, 0 while it is being deleted, else None.
        concurrency: the deliveries that may be in flight; None without a limit.
        rate: the deliveries a second; None without a limit.
        letters: dead letters of the last ten minutes: of each slot the newest.
    """

    name: str
    slots: int
    changing_to: int | None
    stats: Stats
    concurrency: int | None
    rate: float | None
    letters: tuple[DeadSeen, ...] = ()

    @property
    def active(self) -> bool:
        """True if it holds a message or a dead letter, is paused, or is being changed."""
        return is_active(self.stats, self.changing_to)


@dataclass(frozen=True, slots=True)
class FailingMessage:
    """A pending message whose delivery failed lately. `group` is "" for none. `error` is the last failure."""

    topic: str
    key: str
    group: str
    attempts: int
    due_at: datetime | None
    error: str


@dataclass(frozen=True, slots=True)
class FailingCall:
    """A guarded key that is not done, and may be claimed again. Its attempt of this number failed at `at`."""

    scope: str
    key: str
    attempt: int
    at: datetime
    error: str


@dataclass(frozen=True, slots=True)
class HeldKey:
    """A guarded key that waits for a decision."""

    scope: str
    key: str
    since: datetime | None
    attempts: int


@dataclass(frozen=True, slots=True)
class KnownVersion:
    """The newest version of a key with which triggers were dropped lately. `group` is "" for none."""

    topic: str
    key: str
    group: str
    version: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A namespace at a moment.

    Attributes:
        namespace: its name.
        taken_at: the time by the server's clock.
        servers: what each primary says of itself, by its name. It says nothing to a user who may not ask.
        topics: the topics, by name.
        processes: the processes that report.
        held: keys that processes found held and that still are.
        failing: messages that failed several times and are tried again.
        versions: versions with which triggers were dropped.
        unreadable: how many reports could not be decoded.
        version: the version of this form.
        failing_calls: guarded keys that failed several times.
    """

    namespace: str
    taken_at: datetime
    servers: Mapping[str, Seen]
    topics: tuple[TopicSeen, ...]
    processes: tuple[Process, ...]
    held: tuple[HeldKey, ...] = ()
    failing: tuple[FailingMessage, ...] = ()
    versions: tuple[KnownVersion, ...] = ()
    unreadable: int = 0
    version: int = VERSION
    failing_calls: tuple[FailingCall, ...] = ()


def snapshot_as_facts(snapshot: Snapshot) -> dict[str, Any]:
    """Return a snapshot as values of JSON: times in UTC as text, durations in seconds."""
    servers = {name: seen._asdict() for name, seen in snapshot.servers.items()}
    facts: dict[str, Any] = _plain(asdict(snapshot) | {"servers": servers})
    return facts


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]  # pyright: ignore[reportUnknownVariableType]
    return value
