"""The guard's calls: one function a script of `lua/guard`, and what their replies mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from struct import Struct
from typing import Any, Literal, TypeVar

from idemgate.core import keys
from idemgate.core.calls import Arg, Batch, Call, Each, call, text
from idemgate.core.chunks import portions
from idemgate.core.clock import Clock, stamp
from idemgate.core.framing import bulk, head
from idemgate.core.tokens import token
from idemgate.lua import script

__all__ = ["MANY", "Claims", "Ending", "Entry", "Record", "State"]

T = TypeVar("T")
MANY = 100
"""Records of one script call: the server is blocked for the whole of it."""
Ending = tuple[bytes, bytes, int, int, bytes]
"""Of a claim: its record, owner, fencing token, for how long it is done, ms, and its result."""
TEN_YEARS = 315_360_000_000
"""How long the record of a claim stays that is held, ms: until somebody decides (`lua/lib/outlives.lua`)."""
_OWNER = 16
_FENCES = 10**15
"""Microseconds since 1970 have 16 digits from 2001 to 2286."""
_CLAIM = b"%b$%d\r\n%b\r\n$0\r\n\r\n%b$16\r\n%b\r\n"
_COMPLETE = b"%b$%d\r\n%b\r\n$0\r\n\r\n$1\r\n%b\r\n$16\r\n%b\r\n$16\r\n%d\r\n%b$%d\r\n%b\r\n"
"""Both framed, by the server's time and with tokens as they are drawn."""
State = Literal["unasked", "started", "in_progress", "done", "reused", "held", "exhausted", "stale"]


class Entry:
    """What a claim was answered; which fields have a meaning depends on `state`. Times in ms, `token` the fencing
    token."""

    __slots__ = ("attempt", "checkpoint", "kind", "left_ms", "result", "state", "taken_over", "token")

    def __init__(
        self,
        state: State,
        token: int = 0,
        attempt: int = 0,
        left_ms: int = 0,
        taken_over: int = 0,
        checkpoint: bytes = b"",
        kind: bytes = b"",
        result: bytes = b"",
    ) -> None:
        self.state: State = state
        self.token = token
        self.attempt = attempt
        self.left_ms = left_ms
        self.taken_over = taken_over
        self.checkpoint = checkpoint
        self.kind = kind
        self.result = result


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


_STARTED = Struct(">xQII")
_DONE = Struct(">xcQIQ")
_STARTED_ENDS, _DONE_ENDS = _STARTED.size, _DONE.size
_S = b"s"[0]
"""What begins the packed reply of a claim that started; that of one that is done begins with a "d"."""


def _entry(reply: Any) -> Entry:
    """Of a claim: what happens most is packed (`lua/guard/claim.lua`)."""
    if type(reply) is not bytes:
        return _told(reply)
    if reply[0] == _S:
        token, attempt, taken_over = _STARTED.unpack_from(reply)
        return Entry("started", token, attempt, 0, taken_over, reply[_STARTED_ENDS:])
    kind, token, attempt, left_ms = _DONE.unpack_from(reply)
    return Entry("done", token, attempt, left_ms, 0, b"", kind, reply[_DONE_ENDS:])


def _told(reply: list[Any]) -> Entry:
    word = reply[0]
    if word == b"started":
        return Entry("started", token=reply[2], attempt=reply[3])
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


def _kept(reply: Any) -> bool:
    """Of a completion; one that is kept is told in one byte."""
    return bool(reply == b"k")


@lru_cache(1024)
def _terms(lease: int, keep: int, max_attempts: int, hold: bool, wait: bool) -> tuple[bytes, bytes, bytes]:
    """What a guard's claims have in common: how long their record stays, the rest of it, and both framed behind no
    fingerprint."""
    stays = b"%d" % (TEN_YEARS if hold else lease + keep)
    terms = lease.to_bytes(6) + min(max_attempts, 0xFFFF_FFFF).to_bytes(4) + bytes((hold, wait))
    return stays, terms, b"$0\r\n\r\n" + bulk(stays) + bulk(terms)


@lru_cache(1024)
def _stays(retention: int) -> bytes:
    """What a guard's completions have in common, framed."""
    return bulk(b"%d" % retention)


def _flag(on: bool) -> bytes:
    return b"1" if on else b"0"


def _word(reply: list[Any]) -> tuple[str, int]:
    return text(reply[0]), reply[2] if reply[0] == b"busy" else 0


def _each(name: str, common: tuple[Arg, ...], part: Sequence[tuple[Any, ...]], one: Callable[[Any], T]) -> Each[T]:
    """A call for many records: of each the key, then what is said of it."""
    args = [word for _, *own in part for word in own]
    return Each(script(name), tuple([key for key, *_ in part]), [*common, *args], one, len(common))


def _nothing(_: object) -> int:
    return 0


def _size(ending: Ending) -> int:
    return len(ending[4])


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
        kind="" if absent else text(reply[9]),
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
        claim = script("guard/claim")
        stays, terms, common = _terms(lease, keep, max_attempts, hold, wait)
        if self.clock is not None:
            return Call(claim, record, (stamp(self.clock), fingerprint, stays, terms, owner), _entry)
        [name], framed = record, b""
        if len(owner) == _OWNER and not fingerprint:
            framed = _CLAIM % (head(claim.sha, 5), len(name), name, common, owner)
        return Call(claim, record, (b"", fingerprint, stays, terms, owner), _entry, None, framed)

    def claim_each(
        self,
        asked: list[tuple[bytes, bytes]],
        lease: int,
        keep: int,
        max_attempts: int,
        hold: bool,
        wait: bool,
        most: int,
    ) -> list[Each[Entry]]:
        """`claim` of many records, each by its owner, without fingerprints; at most so many in a call."""
        stays, terms, _ = _terms(lease, keep, max_attempts, hold, wait)
        common = (stamp(self.clock), b"", stays, terms)
        return [_each("guard/claim", common, part, _entry) for part in portions(asked, _nothing, most)]

    def mark(self, record: tuple[bytes, ...], owner: bytes, retention: int, fingerprint: bytes = b"") -> Call[Entry]:
        return call("guard/mark", record, (stamp(self.clock), owner, retention, fingerprint), _told)

    def first(self, record: tuple[bytes, ...], retention: int) -> Call[bool]:
        """A mark of which only is asked whether it was the first."""
        return call("guard/mark", record, (stamp(self.clock), token(), retention, b""), _started)

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
            call("guard/mark_many", tuple(different[i : i + MANY]), (stamp(self.clock), token(), retention), _firsts)
            for i in range(0, len(different), MANY)
        ]
        return Batch(calls, join)

    def complete(
        self, record: tuple[bytes, ...], owner: bytes, fence: int, retention: int, kind: bytes, result: bytes
    ) -> Call[bool]:
        done = script("guard/complete")
        if self.clock is not None:
            return Call(done, record, (stamp(self.clock), kind, owner, fence, retention, result), _kept)
        [name], framed = record, b""
        if len(owner) == _OWNER and _FENCES <= fence < 10 * _FENCES:
            kept = _stays(retention)
            framed = _COMPLETE % (head(done.sha, 6), len(name), name, kind, owner, fence, kept, len(result), result)
        return Call(done, record, (b"", kind, owner, fence, retention, result), _kept, None, framed)

    def complete_each(self, endings: list[Ending], most: int) -> list[Each[bool]]:
        """`complete` of many records, each with a value; at most so many in a call, and so many bytes."""
        common = (stamp(self.clock), b"v")
        return [_each("guard/complete", common, part, _kept) for part in portions(endings, _size, most)]

    def renew(self, record: tuple[bytes, ...], owner: bytes, lease: int, keep: int) -> Call[bool]:
        return call("guard/renew", record, (stamp(self.clock), owner, lease, keep), _held)

    def release(self, record: tuple[bytes, ...], owner: bytes, keep: int, undo: bool = False) -> Call[bool]:
        return call("guard/release", record, (stamp(self.clock), _flag(undo), owner, keep), _held)

    def release_each(self, given: list[tuple[bytes, bytes, int]], most: int, undo: bool) -> list[Each[bool]]:
        """`release` of many records, each with its owner and how long its tombstone stays; at most so many in a
        call."""
        common = (stamp(self.clock), _flag(undo))
        return [_each("guard/release", common, part, _held) for part in portions(given, _nothing, most)]

    def checkpoint(self, record: tuple[bytes, ...], owner: bytes, data: bytes) -> Call[bool]:
        return call("guard/checkpoint", record, (stamp(self.clock), owner, data), _held)

    def inspect(self, record: tuple[bytes, ...]) -> Call[Record]:
        return call("guard/inspect", record, (stamp(self.clock),), _record)

    def forget(self, record: tuple[bytes, ...], request: bytes, seen: Record, force: bool) -> Call[tuple[str, int]]:
        """(word, ms left of the lease that stands in the way). `seen`: what is to be forgotten; "changed" if another
        owner has it by now, or it has ended."""
        running = seen.state in ("in_progress", "lapsed", "held")
        args = (stamp(self.clock), request, seen.token, _flag(force), _flag(running))
        return call("guard/forget", record, args, _word)

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
        return call("guard/resolve", record, args, _word)
