"""Build the script calls of `guard/scripts` and decode their replies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from struct import Struct
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, cast

from idemgate.core import keys
from idemgate.core.calls import (
    Arg,
    Call,
    PerKeyCall,
    PlainAnswers,
    Redirect,
    Reply,
    bulk,
    call,
    constant,
    new_id,
    split_batches,
    stamp,
    template,
    text,
)
from idemgate.core.clock import Clock, monotonic
from idemgate.core.codec import Codec
from idemgate.errors import StoreError
from idemgate.lua import Script, script
from idemgate.store.context import Context

if TYPE_CHECKING:
    from idemgate.guard.options import OnceOptions

__all__ = ["ClaimReply", "Claims", "Completion", "MarkMany", "Record", "Renewal", "ReplyState", "register_retention"]

T = TypeVar("T")
Completion = tuple[bytes, bytes, int, int, bytes]
"""One completion: record, owner, fencing token, retention in ms, and encoded result."""
Release = tuple[bytes, bytes, int, bytes]
"""One release: record, owner, retention of its tombstone in ms, and the failure to share, or nothing."""
TEN_YEARS = 315_360_000_000
"""The time to live (ms) of a held claim, which waits for a decision (`guard/scripts/renew.lua`)."""
_OWNER = 16
_FENCES = 10**15
"""Microseconds since 1970 have 16 digits from 2001 to 2286."""
_EMPTY, _ANY, _ID, _FENCE = b"$0\r\n\r\n", b"$%d\r\n%b\r\n", b"$16\r\n%b\r\n", b"$16\r\n%d\r\n"
"""Words of a template: an empty one, one of any length, an owner of 16 bytes, and a fencing token."""
Renewal = Literal["ok", "cancelled", "lost"]
"""The reply to a renewal. "cancelled": the lease was renewed, and the owner is asked to stop."""
ReplyState = Literal[
    "unasked", "started", "in_progress", "done", "reused", "held", "exhausted", "stale", "shared_failure"
]


STORED_SCOPES = 1000
"""The most scopes whose retention a namespace stores. Programs may make up scopes without end."""


def register_retention(context: Context, scope: str, retention: int) -> Call[int]:
    """Build the call that stores the retention of a scope, in ms. The reply is the longest one; 0 if unknown.

    A retention of 0 only asks.
    """
    args = (stamp(context.clock), scope, retention, STORED_SCOPES)
    return call("guard/register", (keys.scopes(context.namespace),), args, lambda reply: int(reply[2]))


class ClaimReply:
    """The reply to a claim.

    Which fields have a meaning depends on `state`. Times are in ms. `token` is the fencing token. `stored` is the
    record of a claim that was made by plain commands.
    """

    __slots__ = ("attempt", "checkpoint", "kind", "left_ms", "result", "state", "stored", "taken_over", "token")

    def __init__(
        self,
        state: ReplyState,
        token: int = 0,
        attempt: int = 0,
        left_ms: int = 0,
        taken_over: int = 0,
        checkpoint: bytes = b"",
        kind: bytes = b"",
        result: bytes = b"",
        stored: bytes = b"",
    ) -> None:
        self.state: ReplyState = state
        self.token: int = token
        self.attempt: int = attempt
        self.left_ms: int = left_ms
        self.taken_over: int = taken_over
        self.checkpoint: bytes = checkpoint
        self.kind: bytes = kind
        self.result: bytes = result
        self.stored: bytes = stored


@dataclass(frozen=True, slots=True, repr=False)
class Record:
    """The stored record of a key. Durations are in seconds. A field that has no meaning in a state is None.

    `state` is one of "absent", "in_progress", "lapsed", "held", "done", "failed" and "released". A "lapsed" owner
    lost its lease. A "held" key also waits for `resolve`. A "failed" key is done with a stored failure. `token` is
    the last fencing token. `owner` is the hex id of the last actor, or "" for a completed key. `since` is the
    time of the last change of the state, in UTC. `other_scopes` are the scopes of this gate that know an absent key.
    """

    state: str
    token: int
    attempts: int
    taken_over: int
    lease_left: float | None
    retention_left: float | None
    since: datetime | None
    owner: str
    has_fingerprint: bool
    kind: str
    result: bytes = field(repr=False)
    checkpoint: bytes = field(repr=False)
    other_scopes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """Return the facts that mean something in this state. Stored data is not shown."""
        since = self.since and self.since.isoformat(timespec="milliseconds")
        facts = {
            "attempts": self.attempts, "token": self.token, "since": since, "taken_over": self.taken_over or None,
            "lease_left": self.lease_left, "retention_left": self.retention_left, "unstored": self.unstored_reason,
            "other_scopes": ", ".join(self.other_scopes) or None,
        }  # fmt: skip
        shown = "".join(f" {name}={fact}" for name, fact in facts.items() if fact is not None)
        return f"<Record {self.state}{'' if self.state == 'absent' and not self.other_scopes else shown}>"

    @property
    def value(self) -> Any:
        """The stored result, decoded. None while there is none.

        A stored failure is a dict {"failed": type, "text": text}. Models are dicts.

        Raises:
            DecodeError: the stored bytes are damaged.
        """
        if self.state == "failed":
            kind, text = _READER.decode(self.result)
            return {"failed": kind, "text": text}
        return _READER.decode(self.result) if self.state == "done" and self.kind == "v" else None

    @property
    def unstored_reason(self) -> str | None:
        """The reason why a done key has no result, or None."""
        return self.result.decode(errors="replace") or "nothing was stored" if self.kind == "n" else None

    @property
    def recovered(self) -> Any:
        """The checkpoint of the last attempt, decoded, or None."""
        return _READER.decode(self.checkpoint) if self.checkpoint else None


_READER = Codec(max_bytes=2**31)
"""A codec without a limit of bytes: what it decodes was already read."""
_STARTED = Struct(">xQII")
_DONE = Struct(">xcQIQ")
_STARTED_ENDS, _DONE_ENDS = _STARTED.size, _DONE.size
_S = b"s"[0]
"""The first byte of the packed reply to a claim that started. A done key has "d"."""


def _decode_claim(reply: Any) -> ClaimReply:
    """Decode the reply to a claim. The frequent replies are packed (`guard/scripts/claim.lua`)."""
    if type(reply) is not bytes:
        return _decode_claim_list(reply)
    if reply[0] == _S:
        token, attempt, taken_over = _STARTED.unpack_from(reply)
        return ClaimReply("started", token, attempt, 0, taken_over, reply[_STARTED_ENDS:])
    kind, token, attempt, left_ms = _DONE.unpack_from(reply)
    return ClaimReply("done", token, attempt, left_ms, 0, b"", kind, reply[_DONE_ENDS:])


def _decode_claim_list(reply: list[Any]) -> ClaimReply:
    """Decode a reply that is a list."""
    word = reply[0]
    if word == b"started":
        return ClaimReply("started", token=reply[2], attempt=reply[3])
    if word == b"done":
        return ClaimReply("done", reply[4], reply[5], reply[7], kind=reply[2], result=reply[3])
    if word == b"busy":
        return ClaimReply("in_progress", left_ms=reply[2], attempt=reply[3])
    if word == b"held":
        return ClaimReply("held", attempt=reply[2])
    if word == b"exhausted":
        return ClaimReply("exhausted", attempt=reply[2])
    if word == b"shared":
        return ClaimReply("shared_failure", attempt=reply[2], result=reply[3])
    return ClaimReply("reused" if word == b"reused" else "stale")


def _is_started(reply: list[Any]) -> bool:
    return bool(reply[0] == b"started")


def _decode_marks(reply: list[Any]) -> list[bool]:
    return [word == b"first" for word in reply[2:]]


def _decode_renewal(reply: list[Any]) -> Renewal:
    return cast(Renewal, reply[0].decode())


def _is_ok(reply: list[Any]) -> bool:
    return bool(reply[0] == b"ok")


def _is_completed(reply: Any) -> bool:
    """Return True if the completion was stored; the reply is then one byte."""
    return bool(reply == b"k")


@lru_cache(1024)
def _claim_terms(
    claim: Script, lease: int, keep: int, max_attempts: int, hold: bool, wait: int
) -> tuple[bytes, bytes, bytes]:
    """Return what all claims with the same options share.

    It is the time to live of the record, the packed options, and the template of a request.
    """
    stays = b"%d" % (TEN_YEARS if hold else lease + keep)
    terms = lease.to_bytes(6) + min(max_attempts, 0xFFFF_FFFF).to_bytes(4) + bytes((hold, wait))
    return stays, terms, template(claim, _EMPTY, _EMPTY, constant(stays), constant(terms), _ID)


@lru_cache(1024)
def _completion_template(complete: Script, retention: int, kind: bytes) -> bytes:
    """Return the template of a request, which all completions with the same retention and kind share."""
    return template(complete, _EMPTY, constant(kind), _ID, _FENCE, constant(b"%d" % retention), _ANY)


def _pack_flag(on: bool) -> bytes:
    return b"1" if on else b"0"


def _decode_decision(reply: list[Any]) -> tuple[str, int]:
    return text(reply[0]), reply[2] if reply[0] == b"busy" else 0


def _build_each(
    name: str,
    common: tuple[Arg, ...],
    part: Sequence[tuple[Any, ...]],
    one: Callable[[Any], T],
    kind: type[PerKeyCall[T]] = PerKeyCall,
) -> PerKeyCall[T]:
    """Build one call for many records: their keys, the common arguments, then the arguments of each record."""
    args = [word for _, *own in part for word in own]
    return kind(script(name), tuple([key for key, *_ in part]), [*common, *args], one, len(common))


_STATES = {b"p": "in_progress", b"d": "done", b"f": "failed", b"r": "released", b"absent": "absent"}


def _decode_record(reply: list[Any]) -> Record:
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
        since=None if absent else datetime.fromtimestamp(reply[14] / 1000, UTC),
        owner="" if absent else reply[3].hex(),
        has_fingerprint=not absent and reply[8] != b"",
        kind="" if absent else text(reply[9]),
        result=b"" if absent else reply[10],
        checkpoint=b"" if absent else reply[11],
    )


class PlainTerms(NamedTuple):
    """The parts that all plain claims with the same options share.

    `start`, `head` and `rest` are the parts of the request around the key and the owner. `record` is the start of the
    record, before the owner, and `lifetime` the time until it expires, in ms. `scripted` are those of a claim by the
    script (`_claim_terms`).
    """

    start: bytes
    head: bytes
    rest: bytes
    record: bytes
    lifetime: int
    scripted: tuple[bytes, bytes, bytes]


class PlainClaim(Call[ClaimReply]):
    """A claim that may be sent as SET NX GET, and PEXPIRETIME, which gives the time of the claim by the server's clock.

    The two are no transaction. So a reply counts for `PAIR_SECONDS` only, and for longer no other client gives the
    record's key another expiry (`guard/scripts/lib/plain_record.lua`). A claim is sent in one of two forms, so each is
    built when it is asked for.
    """

    __slots__ = ("owner", "terms")
    pair = True
    read: Callable[[Reply], ClaimReply] = staticmethod(_decode_claim)
    redirect: Redirect | None = None

    def __init__(  # pyright: ignore[reportMissingSuperCall]
        self, keys: tuple[bytes, ...], owner: bytes, terms: PlainTerms
    ) -> None:
        self.keys = keys
        self.owner: bytes = owner
        self.terms: PlainTerms = terms

    def _frame_plain(self) -> bytes:
        """Return the plain commands. Servers without them never ask for these."""
        start, head, rest, _, _, _ = self.terms
        name = self.keys[0]
        size = _size_of(name)
        return b"".join((start, size, name, head, self.owner, rest, size, name, b"\r\n"))

    plain: bytes = property(_frame_plain)  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]

    @property
    def script(self) -> Script:  # type: ignore[override]
        return script("guard/claim")

    @property
    def args(self) -> Sequence[Arg]:  # type: ignore[override]
        stays, terms, _ = self.terms.scripted
        return b"", b"", stays, terms, self.owner

    def _frame(self) -> bytes:
        """Return the request for the script. Servers without the plain commands get each claim in this form."""
        name = self.keys[0]
        return self.terms.scripted[2] % (len(name), name, self.owner)

    framed: bytes = property(_frame)  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]

    def _frame_undo(self) -> bytes:
        """Return the command that deletes the record of this claim, and no other: its time has passed."""
        name, stored = self.keys[0], self.terms.record + self.owner
        return b"*7\r\n" + b"".join(map(bulk, (b"SET", name, stored, b"IFEQ", stored, b"PXAT", b"1")))

    undo_plain: bytes = property(_frame_undo)  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]

    def answer_plain(self, reply: Any, asked: float) -> ClaimReply | None:
        """Return the reply for an absent key, and for one that was done at the first attempt. The script knows all."""
        old, expires = reply
        if old is None:
            terms = self.terms
            if type(expires) is not int or expires < terms.lifetime or monotonic() - asked > PAIR_SECONDS:
                return None
            stored = terms.record + self.owner
            return ClaimReply("started", (expires - terms.lifetime) * 1000, 1, 0, 0, b"", b"", b"", stored)
        if type(old) is bytes and old and (found := _DONE_KINDS.get(old[0])) is not None:
            kind, at = found
            if len(old) < at or type(expires) is not int or expires <= 0:
                return None  # the script tells what is wrong
            return ClaimReply("done", _TOKEN.unpack_from(old)[0] & _TOKEN_BITS, 1, 0, 0, b"", kind, old[at:])
        return None


class PlainMark(Call[bool]):
    """A mark that may be sent as SET NX GET. Its answer is whether it was the first one."""

    __slots__ = ()

    def _frame_plain(self) -> bytes:
        """Return the plain command. A test clock needs the script."""
        stamped, owner, retention, _ = self.args
        return b"" if stamped else _frame_marks(retention, owner, self.keys)

    plain: bytes = property(_frame_plain)  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]

    def answer_plain(self, reply: Any, asked: float) -> bool | None:  # noqa: ARG002 - no time matters here
        """Return the answer for an absent key, and for one that another caller has marked or completed."""
        return True if reply is None else _is_known(reply, self.args[1])


def _frame_marks(retention: Any, owner: Any, names: Sequence[bytes]) -> bytes:
    start, head, rest = _mark_terms(retention)
    rest = b"".join((head, owner, rest))
    return b"".join([part for name in names for part in (start, _size_of(name), name, rest)])


def _is_known(reply: Any, owner: Any) -> bool | None:
    """Return False for the record of a key that another caller has marked or completed. None: the script knows."""
    if type(reply) is not bytes or not reply or owner in reply:
        return None
    code = reply[0]
    known = len(reply) >= _DONE_SIZES[code - 245] if code >= 245 else code == _PLAIN and len(reply) == _MARK_SIZE
    return False if known else None


class MarkMany(PerKeyCall[bool]):
    """A call of `guard/mark_many`, whose reply holds a word for each key, or one error about them."""

    def frame_plain(self) -> bytes:
        return _frame_marks(self.plain_terms, self.args[1], self.keys)

    def read_plain(self, replies: Sequence[Any], asked: float) -> PlainAnswers[bool]:  # noqa: ARG002 - as `PlainMark`
        owner = self.args[1]
        return [True if old is None else _is_known(old, owner) for old in replies], []

    def answer(self, reply: Any) -> list[bool | StoreError]:
        answers: list[bool | StoreError] = super(PerKeyCall, self).answer(reply)
        return answers


class ClaimMany(PerKeyCall[ClaimReply]):
    """A call of `guard/claim` for many keys."""

    pair = True
    _singles: Sequence[PlainClaim] = ()

    def frame_plain(self) -> bytes:
        owned: Any = zip(self.keys, self.args[self.common :], strict=True)
        self._singles = [PlainClaim((key,), owner, self.plain_terms) for key, owner in owned]
        return b"".join([one.plain for one in self._singles])

    def read_plain(self, replies: Sequence[Any], asked: float) -> PlainAnswers[ClaimReply]:
        pairs = list(zip(self._singles, zip(replies[::2], replies[1::2], strict=True), strict=True))
        refused = [one for one, (_, second) in pairs if isinstance(second, Exception)]
        undo = [Call(one.script, one.keys, one.args, one.read, None, one.undo_plain) for one in refused]
        return [one.answer_plain(pair, asked) for one, pair in pairs], list[Call[Any]](undo)


class PlainCompletion(Call[bool]):
    """A completion that may be sent as SET IFEQ: the record must still be that of the claim.

    A copy of the claim that arrives when the key is gone makes the same record, under a later token. The script refuses
    the completion of that, and this does not: the owner ends the copy of its own claim. No caller has read the later
    token. A key is gone a minute after it was forgotten, or after its retention. The first heartbeat of a run changes
    the record long before.
    """

    __slots__ = ("plain",)

    def answer_plain(self, reply: Any, asked: float) -> bool | None:  # noqa: ARG002 - no time matters here
        """Return True if it was stored. None: the record is another one."""
        return True if reply == b"OK" else None


_PLAIN_CODES = {b"v": b"\xf5", b"n": b"\xf6", b"e": b"\xf7"}
_DONE_KINDS = {
    245: (b"v", 10), 246: (b"n", 10), 247: (b"e", 10), 248: (b"v", 12), 250: (b"n", 12), 252: (b"e", 12)
}  # fmt: skip
"""The kind of a done key without a fingerprint and where its result starts, by the record's first byte
(`guard/scripts/lib`)."""
_DONE_SIZES = 10, 10, 10, 12, 28, 12, 28, 12, 28, 28, 44
"""The shortest records of done keys, by their first byte from 245 on."""
_PLAIN, _MARK_SIZE = 192, 23
"""The first byte of the record of a plain claim or mark, and the size of that of a mark."""
_TOKEN, _TOKEN_BITS = Struct(">Q"), 2**56 - 1
"""The first byte of these records, then the fencing token."""
PAIR_SECONDS = 1.0
"""The time in seconds between a plain claim and its reply after which the reply is not relied on."""
LOOK_SECONDS = 1.2
"""The time in seconds for which a client has seen a young claim before it forgets it by force. It is longer than
`PAIR_SECONDS`, so the owner has read its token by then, or asks the script."""
_SHORTEST_LEASE = 6000
"""The shortest lease of a plain claim, in ms: no other caller takes the key over within `PAIR_SECONDS`."""
_MINUTE = 60_000
_MAX_MINUTES = 0xFFFF
"""The longest retention in a record of plain commands."""
_SIZES = tuple(b"$%d\r\n" % size for size in range(512))
"""The sizes of words. One look costs a tenth of formatting a number, and joining half of formatting a request."""


def _size_of(name: bytes) -> bytes:
    return _SIZES[len(name)] if len(name) < 512 else b"$%d\r\n" % len(name)


def _set_new(record: bytes, lifetime: int) -> tuple[bytes, bytes, bytes]:
    """Return the parts around the key and the owner of a command that stores a record unless there is one."""
    words = b"NX", b"GET", b"PX", b"%d" % lifetime
    head = b"\r\n$%d\r\n" % (len(record) + _OWNER) + record
    return b"*7\r\n" + bulk(b"SET"), head, b"\r\n" + b"".join(map(bulk, words))


@lru_cache(1024)
def _mark_terms(retention: int) -> tuple[bytes, bytes, bytes]:
    """Return what plain marks with this retention share."""
    return _set_new(b"\xc0" + retention.to_bytes(6), retention)


@lru_cache(1024)
def _plain_terms(claim: Script, lease: int, keep: int, max_attempts: int, hold: bool, wait: int) -> PlainTerms | None:
    """Return what plain claims with these options share.

    None: the lease is too short, or the retention is not in whole minutes.
    """
    if lease < _SHORTEST_LEASE or keep % _MINUTE or not 0 < keep <= _MAX_MINUTES * _MINUTE:
        return None
    lifetime = TEN_YEARS if hold else lease + keep
    record = b"\xc0" + bytes((hold,)) + lease.to_bytes(6) + lifetime.to_bytes(6)
    start, head, rest = _set_new(record, lifetime)
    rest += b"*2\r\n" + bulk(b"PEXPIRETIME")
    return PlainTerms(start, head, rest, record, lifetime, _claim_terms(claim, lease, keep, max_attempts, hold, wait))


@lru_cache(1024)
def _plain_completion(retention: int, kind: bytes) -> tuple[bytes, bytes, bytes] | None:
    """Return what plain completions with this retention and kind share, or None if that is not in whole minutes.

    It is the first byte of the record, its retention, and the end of the request.
    """
    minutes, odd = divmod(retention, _MINUTE)
    if odd or not 0 < minutes <= _MAX_MINUTES:
        return None
    return _PLAIN_CODES[kind], minutes.to_bytes(2), b"\r\n" + bulk(b"PX") + bulk(b"%d" % retention)


class Claims:
    """Build the calls of the guard in one namespace. Durations are in ms. `owner` identifies the actor.

    `plain` is False if plain commands are not enough: with a test clock, and for a cache, which needs the retention
    that a done key has left.
    """

    __slots__ = ("_last_terms", "clock", "namespace", "plain")

    def __init__(self, namespace: str, clock: Clock | None, plain: bool = True) -> None:
        self.namespace: str = namespace
        self.clock: Clock | None = clock
        self.plain: bool = plain and clock is None
        self._last_terms: tuple[OnceOptions | None, int, PlainTerms | None] = None, 0, None

    def key(self, scope: str, key: keys.Key) -> tuple[bytes, ...]:
        """Return the record of a key."""
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
        wait: int = 0,
    ) -> Call[ClaimReply]:
        """Build a claim. `wait` is 1 if the caller will wait for another owner, and 2 if it has waited."""
        claim = script("guard/claim")
        stays, terms, request = _claim_terms(claim, lease, keep, max_attempts, hold, wait)
        if self.clock is not None or fingerprint or len(owner) != _OWNER:
            return Call(claim, record, (stamp(self.clock), fingerprint, stays, terms, owner), _decode_claim)
        name = record[0]
        framed = request % (len(name), name, owner)
        return Call(claim, record, (b"", b"", stays, terms, owner), _decode_claim, None, framed)

    def plain_claim(
        self, record: tuple[bytes, ...], owner: bytes, options: OnceOptions, wait: int
    ) -> PlainClaim | None:
        """Build a claim without a fingerprint that may be sent as plain commands, or return None. See `claim`."""
        known, waits, terms = self._last_terms
        if known is not options or waits != wait:
            hold = options.on_lease_loss == "hold"
            lease, keep = options.lease, options.retention
            terms = _plain_terms(script("guard/claim"), lease, keep, options.max_attempts, hold, wait)
            self._last_terms = options, wait, terms
        return None if terms is None else PlainClaim(record, owner, terms)

    def claim_each(
        self,
        owned: list[tuple[bytes, bytes]],
        lease: int,
        keep: int,
        max_attempts: int,
        hold: bool,
        wait: bool,
        most: int,
        fingerprint: bytes = b"",
    ) -> list[PerKeyCall[ClaimReply]]:
        """Build the claims of many records with one fingerprint, with at most `most` records in a call."""
        options = script("guard/claim"), lease, keep, max_attempts, hold, wait
        stays, terms, _ = _claim_terms(*options)
        common = (stamp(self.clock), fingerprint, stays, terms)
        parts = split_batches(owned, lambda _: 0, most)
        calls = [_build_each("guard/claim", common, part, _decode_claim, ClaimMany) for part in parts]
        for made in calls:
            made.plain_terms = _plain_terms(*options) if self.plain and not fingerprint else None
        return calls

    def mark(
        self, record: tuple[bytes, ...], owner: bytes, retention: int, fingerprint: bytes = b""
    ) -> Call[ClaimReply]:
        """Build a mark."""
        return call("guard/mark", record, (stamp(self.clock), owner, retention, fingerprint), _decode_claim_list)

    def first(self, record: tuple[bytes, ...], retention: int) -> Call[bool]:
        """Build a mark whose reply is only whether it was the first."""
        return PlainMark(script("guard/mark"), record, (stamp(self.clock), new_id(), retention, b""), _is_started)

    def mark_many(self, records: tuple[bytes, ...], retention: int, most: int) -> list[MarkMany]:
        """Build the marks of many different records, with at most `most` records in a call."""
        name, time, read = script("guard/mark_many"), stamp(self.clock), cast("Any", _decode_marks)
        calls = [
            MarkMany(name, records[start : start + most], (time, new_id(), retention), read, 3)
            for start in range(0, len(records), most)
        ]
        for made in calls:
            made.plain_terms = retention if self.clock is None else None
        return calls

    def complete(
        self,
        record: tuple[bytes, ...],
        owner: bytes,
        fence: int,
        retention: int,
        kind: bytes,
        result: bytes,
        stored: bytes = b"",
    ) -> Call[bool]:
        """Build a completion. `stored` is that of the reply to the claim."""
        complete = script("guard/complete")
        if stored and (plain := _plain_completion(retention, kind)) is not None:
            (code, minutes, end), token, name = plain, fence.to_bytes(7), record[0]
            size = b"*7\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(name), name, 10 + len(result))
            framed = b"".join((size, code, token, minutes, result, b"\r\n$4\r\nIFEQ\r\n$30\r\n", stored, end))
            args = b"", kind, owner, fence, retention, result
            completion = PlainCompletion(complete, record, args, _is_completed)
            completion.plain = framed
            return completion
        if self.clock is not None or len(owner) != _OWNER or not _FENCES <= fence < 10 * _FENCES:
            return Call(complete, record, (stamp(self.clock), kind, owner, fence, retention, result), _is_completed)
        name = record[0]
        request = _completion_template(complete, retention, kind)
        framed = request % (len(name), name, owner, fence, len(result), result)
        return Call(complete, record, (b"", kind, owner, fence, retention, result), _is_completed, None, framed)

    def complete_each(self, endings: list[Completion], most: int, kind: bytes = b"v") -> list[PerKeyCall[bool]]:
        """Build the completions of many records with results of one kind, limited by count (`most`) and by bytes."""
        common = (stamp(self.clock), kind)
        return [
            _build_each("guard/complete", common, part, _is_completed)
            for part in split_batches(endings, lambda ending: len(ending[4]), most)
        ]

    def renew(self, record: tuple[bytes, ...], owner: bytes, lease: int, keep: int) -> Call[Renewal]:
        """Build a renewal of a lease."""
        return call("guard/renew", record, (stamp(self.clock), owner, lease, keep), _decode_renewal)

    def cancel(self, record: tuple[bytes, ...], fence: int) -> Call[bool]:
        """Build the call that asks the owner of a key, with this fencing token, to stop."""
        return call("guard/cancel", record, (stamp(self.clock), fence), _is_ok)

    def release(
        self, record: tuple[bytes, ...], owner: bytes, keep: int, undo: bool = False, failure: bytes = b""
    ) -> Call[bool]:
        """Build a release. `undo` counts no attempt. Callers that waited get the `failure`."""
        return call("guard/release", record, (stamp(self.clock), _pack_flag(undo), owner, keep, failure), _is_ok)

    def release_each(self, releases: list[Release], most: int, undo: bool) -> list[PerKeyCall[bool]]:
        """Build the releases of many records, limited by count (`most`) and by bytes."""
        common = (stamp(self.clock), _pack_flag(undo))
        return [
            _build_each("guard/release", common, part, _is_ok)
            for part in split_batches(releases, lambda release: len(release[3]), most)
        ]

    def checkpoint(self, record: tuple[bytes, ...], owner: bytes, data: bytes) -> Call[bool]:
        """Build the call that stores a checkpoint."""
        return call("guard/checkpoint", record, (stamp(self.clock), owner, data), _is_ok)

    def inspect(self, record: tuple[bytes, ...]) -> Call[Record]:
        """Build the call that reads a record."""
        return call("guard/inspect", record, (stamp(self.clock),), _decode_record)

    def forget(
        self, record: tuple[bytes, ...], request_id: bytes, seen: Record, force: bool, early: bool = False
    ) -> Call[tuple[str, int]]:
        """Build the call that deletes a record. The reply is a status word and the ms left of a live lease.

        `seen` is the record to delete. The word is "changed" if another owner has it now, or if it has ended. It is
        "early" if the owner may not have read its token: send the call again after `LOOK_SECONDS`, with `early`. With a
        test clock no claim is plain, if all gates of the store have one.
        """
        running = seen.state in ("in_progress", "lapsed", "held")
        forced = b"0" if not force else b"2" if early or self.clock is not None else b"1"
        args = (stamp(self.clock), request_id, seen.token, forced, _pack_flag(running))
        return call("guard/forget", record, args, _decode_decision)

    def resolve(
        self,
        record: tuple[bytes, ...],
        request_id: bytes,
        seen: Record,
        done: bool,
        retention: int,
        kind: bytes,
        result: bytes,
    ) -> Call[tuple[str, int]]:
        """Build the call that decides about a held key. The reply is that of `forget`."""
        args = (stamp(self.clock), request_id, seen.token, _pack_flag(done), retention, kind, result)
        return call("guard/resolve", record, args, _decode_decision)
