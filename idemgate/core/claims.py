"""The guard's calls: one function a script of `lua/once`, and what their replies mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal

from idemgate.core import keys
from idemgate.core.calls import Batch, Call, call, text
from idemgate.core.clock import Clock, stamp
from idemgate.core.tokens import token

__all__ = ["Claims", "Entry", "Record", "State"]

MANY = 100
"""Records of one script call: the server is blocked for the whole of it."""
State = Literal["started", "in_progress", "done", "reused", "held", "exhausted", "stale"]


class Entry:
    """What a claim was answered; which fields have a meaning depends on `state`. Times in ms, `token` the fencing
    token."""

    __slots__ = ("attempt", "checkpoint", "kind", "left_ms", "result", "state", "taken_over", "token")

    def __init__(self, state: State, *, token: int = 0, attempt: int = 0, left_ms: int = 0) -> None:
        self.state: State = state
        self.token = token
        self.attempt = attempt
        self.left_ms = left_ms
        self.taken_over = 0
        self.checkpoint = b""
        self.kind = b""
        self.result = b""


@dataclass(frozen=True, slots=True)
class Record:
    """What is remembered of a key. Seconds; None where a field has no meaning in that state.

    `state` is "absent", "in_progress", "lapsed" (its owner fell silent), "held" (lapsed, and waiting for `resolve`),
    "done", "failed" (done with a stored failure) or "released". `token` is the last fencing token granted. `owner`: who
    acts, marked or decided, as hex; "" of a key that was completed.
    """

    state: str
    token: int
    attempts: int
    taken_over: int
    lease_left: float | None
    retention_left: float | None
    since: float | None
    owner: str
    has_fingerprint: bool
    kind: str
    result: bytes = field(repr=False)
    checkpoint: bytes = field(repr=False)


def _entry(reply: list[Any]) -> Entry:
    word = reply[0]
    if word == b"started":
        entry = Entry("started", token=reply[2], attempt=reply[3])
        if len(reply) > 4:
            entry.taken_over = reply[4]
            entry.checkpoint = reply[5]
        return entry
    if word == b"done":
        entry = Entry("done", token=reply[4], attempt=reply[5], left_ms=reply[7])
        entry.kind = reply[2]
        entry.result = reply[3]
        return entry
    if word == b"busy":
        return Entry("in_progress", left_ms=reply[2], attempt=reply[3])
    if word == b"held":
        return Entry("held", attempt=reply[2])
    if word == b"exhausted":
        return Entry("exhausted", attempt=reply[2])
    return Entry("reused" if word == b"reused" else "stale")


def _started(reply: list[Any]) -> bool:
    return bool(reply[0] == b"started")


def _firsts(reply: list[Any]) -> list[bool]:
    return [word == b"first" for word in reply[2:]]


def _held(reply: list[Any]) -> bool:
    return bool(reply[0] == b"ok")


def _flag(on: bool) -> bytes:
    return b"1" if on else b"0"


def _word(reply: list[Any]) -> tuple[str, int]:
    return text(reply[0]), reply[2] if reply[0] == b"busy" else 0


_STATES = {b"p": "in_progress", b"d": "done", b"f": "failed", b"r": "released", b"absent": "absent"}


def _record(reply: list[Any]) -> Record:
    state = _STATES[reply[2]]
    if state == "in_progress" and reply[6] <= 0:
        state = "held" if reply[13] == b"1" else "lapsed"
    absent = state == "absent"
    return Record(
        state=state,
        token=reply[4],
        attempts=0 if absent else reply[5],
        taken_over=0 if absent else reply[12],
        lease_left=reply[6] / 1000 if state == "in_progress" else None,
        retention_left=reply[7] / 1000 if state in ("done", "failed", "released") else None,
        since=None if absent else reply[14] / 1000,
        owner="" if absent else reply[3].hex(),
        has_fingerprint=not absent and reply[8] != b"",
        kind=text(reply[9]),
        result=b"" if absent else reply[10],
        checkpoint=b"" if absent else reply[11],
    )


class Claims:
    """Builds the guard's calls for one namespace. Durations in ms; `owner` is the token of the one who acts."""

    __slots__ = ("clock", "namespace")

    def __init__(self, namespace: str, clock: Clock | None) -> None:
        self.namespace = namespace
        self.clock = clock

    def key(self, scope: str, key: keys.Key) -> tuple[bytes, ...]:
        return (keys.record(self.namespace, scope, key),)

    def claim(
        self,
        record: tuple[bytes, ...],
        owner: bytes,
        lease: int,
        keep: int,
        fingerprint: bytes = b"",
        max_attempts: int = 0,
        hold: bool = False,
        wait: bool = False,
    ) -> Call[Entry]:
        now = b"" if self.clock is None else stamp(self.clock)
        args = (now, owner, lease, keep, fingerprint, max_attempts, b"1" if hold else b"0", b"1" if wait else b"0")
        return call("once/claim", record, args, _entry)

    def mark(self, record: tuple[bytes, ...], owner: bytes, retention: int, fingerprint: bytes = b"") -> Call[Entry]:
        return call("once/mark", record, (stamp(self.clock), owner, retention, fingerprint), _entry)

    def first(self, record: tuple[bytes, ...], retention: int) -> Call[bool]:
        """A mark of which only is asked whether it was the first."""
        return call("once/mark", record, (stamp(self.clock), token(), retention, b""), _started)

    def mark_many(self, records: Sequence[tuple[bytes, ...]], retention: int) -> Batch[list[bool]]:
        """`first` of many records, 100 a script call: not for a cluster. Of equal ones the first is first."""
        places: dict[bytes, int] = {}
        for place, (record,) in enumerate(records):
            places.setdefault(record, place)
        different = list(places)

        def join(answers: list[list[bool]]) -> list[bool]:
            found = [False] * len(records)
            for place, first in zip(places.values(), chain.from_iterable(answers), strict=True):
                found[place] = first
            return found

        calls = [
            call("once/marks", tuple(different[i : i + MANY]), (stamp(self.clock), token(), retention), _firsts)
            for i in range(0, len(different), MANY)
        ]
        return Batch(calls, join)

    def complete(
        self, record: tuple[bytes, ...], owner: bytes, fence: int, retention: int, kind: bytes, result: bytes
    ) -> Call[bool]:
        now = b"" if self.clock is None else stamp(self.clock)
        return call("once/complete", record, (now, owner, fence, retention, kind, result), _held)

    def renew(self, record: tuple[bytes, ...], owner: bytes, lease: int, keep: int) -> Call[bool]:
        return call("once/renew", record, (stamp(self.clock), owner, lease, keep), _held)

    def release(self, record: tuple[bytes, ...], owner: bytes, keep: int, undo: bool = False) -> Call[bool]:
        return call("once/release", record, (stamp(self.clock), owner, keep, b"1" if undo else b"0"), _held)

    def checkpoint(self, record: tuple[bytes, ...], owner: bytes, data: bytes) -> Call[bool]:
        return call("once/checkpoint", record, (stamp(self.clock), owner, data), _held)

    def inspect(self, record: tuple[bytes, ...]) -> Call[Record]:
        return call("once/inspect", record, (stamp(self.clock),), _record)

    def forget(self, record: tuple[bytes, ...], request: bytes, seen: Record, force: bool) -> Call[tuple[str, int]]:
        """(word, ms left of the lease that stands in the way). `seen`: what is to be forgotten; "changed" if another
        owner has it by now, or it has ended."""
        running = seen.state in ("in_progress", "lapsed", "held")
        args = (stamp(self.clock), request, seen.token, _flag(force), _flag(running))
        return call("once/forget", record, args, _word)

    def resolve(
        self,
        record: tuple[bytes, ...],
        request: bytes,
        seen: Record,
        done: bool,
        retention: int,
        kind: bytes,
        result: bytes,
    ) -> Call[tuple[str, int]]:
        """As `forget`."""
        args = (stamp(self.clock), request, seen.token, _flag(done), retention, kind, result)
        return call("once/resolve", record, args, _word)
