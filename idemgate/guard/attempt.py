"""One guarded call as a pure state machine: it builds the calls and judges their answers; two short drivers in `once`
perform."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any, Literal, NamedTuple, cast, get_args

from idemgate.core.calls import Call, Each
from idemgate.core.codec import Codec
from idemgate.core.codec.models import rebuild
from idemgate.core.keys import Key, record, text_of
from idemgate.core.tokens import token
from idemgate.errors import (
    AlreadyDone,
    AlreadyInProgress,
    AttemptsExhausted,
    DecodeError,
    IdemgateError,
    InvalidArgument,
    KeyReused,
    LeaseLost,
    OutcomeUnknown,
    ReplayedFailure,
    ResultUnavailable,
)
from idemgate.guard.calls import Claims, Entry

__all__ = [
    "Answer",
    "ErrorPolicy",
    "Guard",
    "Passage",
    "Seen",
    "Wait",
    "enter_each",
    "failure_of",
    "refusal",
    "release_each",
]

OnDone = Literal["replay", "skip", "raise"]
OnInProgress = Literal["raise", "skip", "wait"]
OnError = Literal["release", "keep", "store"]
OnLeaseLoss = Literal["retry", "hold"]
OnStoreError = Literal["raise", "run", "local"]
ErrorPolicy = OnError | Callable[[BaseException], OnError]


@dataclass(frozen=True, slots=True)
class Guard:
    """The checked options of one decorator. Durations in ms."""

    scope: str
    retention: int
    lease: int
    on_done: OnDone
    on_in_progress: OnInProgress
    on_error: ErrorPolicy
    on_lease_loss: OnLeaseLoss
    on_store_error: OnStoreError
    max_attempts: int
    at_most_once: bool
    wait: int
    shadow: bool
    codec: Codec
    returns: object


class Answer:
    """What a duplicate gets instead of a run: a value, or an error to raise."""

    __slots__ = ("error", "value")

    def __init__(self, value: object = None, error: IdemgateError | None = None) -> None:
        self.value = value
        self.error = error

    def give(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.value


class Wait(NamedTuple):
    """Another owner runs: enter again when woken, or after so many seconds."""

    seconds: float


class Known:
    """What is remembered of a key: `entry`, and the `answer` that duplicates get, where all may get the same."""

    __slots__ = ("answer", "entry")

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.answer: Answer | None = None


_SHARED = frozenset({str, int, float, bool, bytes, type(None)})
"""Types of results that nobody can change: they need not be made anew for each duplicate."""
_UNASKED = Entry("unasked")


class Seen:
    """Keys that this process knows to be done, the `size` last learnt, each until its retention ends. Only done keys:
    they cannot become anything else, unless somebody forgets them elsewhere, which this process then learns when the
    entry fades. `now` gives seconds."""

    __slots__ = ("__weakref__", "_entries", "_now", "_size")

    def __init__(self, size: int, now: Callable[[], float] = monotonic) -> None:
        self._size = size
        self._now = now
        self._entries: OrderedDict[bytes, tuple[float, bytes, Known]] = OrderedDict()

    def recall(self, record: bytes, fingerprint: bytes) -> Known | None:
        """What is known of the key; "reused" where the fingerprint differs, None where nothing is known."""
        found = self._entries.get(record)
        if found is None:
            return None
        until, print_, known = found
        if until <= self._now():
            self._entries.pop(record, None)
            return None
        return known if print_ == fingerprint else Known(Entry("reused"))

    def keep(self, record: bytes, fingerprint: bytes, entry: Entry, milliseconds: int) -> None:
        self._entries.pop(record, None)
        self._entries[record] = (self._now() + milliseconds / 1000, fingerprint, Known(entry))
        while len(self._entries) > self._size:
            self._entries.popitem(last=False)

    def drop(self, record: bytes) -> None:
        """Somebody of this process forgot the key, or decided about it."""
        self._entries.pop(record, None)


def refusal(entry: Entry, key: Key, scope: str) -> IdemgateError | None:
    """The error that an entry other than started, in progress or done stands for, else None."""
    if entry.state == "reused":
        return KeyReused(text_of(key))
    if entry.state == "held":
        return OutcomeUnknown(text_of(key), entry.attempt, scope)
    if entry.state == "exhausted":
        return AttemptsExhausted(text_of(key), entry.attempt, scope)
    return LeaseLost(text_of(key), entry.token) if entry.state == "stale" else None


class Passage:
    """One call through a guard. `record` is its key in Redis, `owner` the token it acts under, `entry` what its claim
    was answered, `result` kind and bytes of what it was completed with."""

    __slots__ = ("_owner", "claims", "entry", "fingerprint", "guard", "key", "record", "result", "since")

    def __init__(self, guard: Guard, claims: Claims, key: Key, fingerprint: bytes) -> None:
        self.guard = guard
        self.claims = claims
        self.key = key
        self.record = (record(claims.namespace, guard.scope, key),)
        self.fingerprint = fingerprint
        self._owner = b""
        self.entry = _UNASKED
        self.result = b"", b""
        self.since = 0.0

    @property
    def owner(self) -> bytes:
        """Drawn when it is first needed: whoever knows that the key is done needs none."""
        if not self._owner:
            self._owner = token()
        return self._owner

    def enter(self) -> Call[Entry]:
        guard, owner = self.guard, self._owner
        if not owner:
            owner = self._owner = token()
        if guard.at_most_once:
            return self.claims.mark(self.record, owner, guard.retention, self.fingerprint)
        return self.claims.claim(
            self.record,
            owner,
            guard.lease,
            guard.retention,
            self.fingerprint,
            guard.max_attempts,
            guard.on_lease_loss == "hold",
            guard.on_in_progress == "wait",
        )

    def judge(self, entry: Entry) -> Answer | Wait | None:
        """What is to be done about the answer. None: run. Wait: until woken, and enter again. An Answer: give it."""
        self.entry = entry
        if entry.state == "started":
            return None
        if entry.state == "done":
            return self._done(entry)
        if entry.state == "in_progress":
            return self._in_progress(entry)
        return Answer(error=refusal(entry, self.key, self.guard.scope))

    def recognise(self, known: Known) -> Answer:
        """As `judge`, of what is remembered."""
        if known.answer is not None:
            return known.answer
        answer = cast(Answer, self.judge(known.entry))
        if answer.error is None and type(answer.value) in _SHARED:
            known.answer = answer
        return answer

    def _done(self, entry: Entry) -> Answer:
        guard = self.guard
        if guard.on_done == "skip":
            return Answer()
        if entry.kind != b"v":
            return self._done_without_value(entry)
        try:
            value = guard.codec.decode(entry.result)
            if guard.returns is not None and guard.returns is not type(value):
                value = rebuild(value, guard.returns)
        except (DecodeError, InvalidArgument, TypeError, ValueError) as error:
            return Answer(error=ResultUnavailable(text_of(self.key), f"it cannot be read back: {error}"))
        return Answer(error=AlreadyDone(text_of(self.key), value)) if guard.on_done == "raise" else Answer(value)

    def _done_without_value(self, entry: Entry) -> Answer:
        name = text_of(self.key)
        if entry.kind == b"e":
            try:
                return Answer(error=ReplayedFailure(name, *failure_of(entry)))
            except DecodeError as error:
                return Answer(error=ResultUnavailable(name, f"it cannot be read back: {error}"))
        why = _NOT_KEPT if self.guard.at_most_once else entry.result.decode(errors="replace")
        return Answer(error=AlreadyDone(name) if self.guard.on_done == "raise" else ResultUnavailable(name, why))

    def _in_progress(self, entry: Entry) -> Answer | Wait:
        guard = self.guard
        if guard.on_in_progress == "skip" or guard.shadow:
            return Answer()
        error = AlreadyInProgress(text_of(self.key), entry.left_ms / 1000)
        if guard.on_in_progress == "raise":
            return Answer(error=error)
        now = monotonic()
        self.since = self.since or now
        left = self.since + guard.wait / 1000 - now
        if left <= 0:
            return Answer(error=error)
        # A wake-up ends the wait; this is only its safety net, and never later than the lease could end.
        return Wait(min(left, 1.0, max(entry.left_ms / 1000, 0.01)))

    def complete(self, result: object) -> Call[bool]:
        """Done, with its result; or without, when it cannot be stored: the effect happened, so it must not run
        again."""
        try:
            kind, data = b"v", self.guard.codec.encode(result, "result")
        except Exception as error:  # noqa: BLE001 - whatever is wrong with the result, the effect has happened
            kind, data = b"n", _why(error)[:500].encode(errors="replace")
        self.result = kind, data
        return self._completing(kind, data)

    def _completing(self, kind: bytes, data: bytes) -> Call[bool]:
        return self.claims.complete(self.record, self._owner, self.entry.token, self.guard.retention, kind, data)

    def finished(self) -> Entry:
        """What the next caller is answered, now that it is completed."""
        entry = Entry("done", token=self.entry.token, left_ms=self.guard.retention)
        entry.kind, entry.result = self.result
        return entry

    def fail(self, error: BaseException) -> Call[bool] | None:
        """What happens to the claim when the work raised; None: nothing, its lease runs out."""
        policy = self.guard.on_error
        if not isinstance(error, Exception):
            policy = "release"
        elif callable(policy):
            policy = policy(error)
            if policy not in get_args(OnError):
                raise InvalidArgument(
                    "on_error", policy, "no such choice, as its callable answered", _ON_ERROR
                ) from error
        if policy == "keep":
            return None
        if policy == "store":
            return self._completing(b"e", _failure(error))
        return self.release()

    def release(self, undo: bool = False) -> Call[bool]:
        return self.claims.release(self.record, self.owner, self.guard.retention, undo)

    def renew(self) -> Call[bool]:
        return self.claims.renew(self.record, self.owner, self.guard.lease, self.guard.retention)


def enter_each(passages: Sequence[Passage], most: int) -> list[Each[Entry]]:
    """`enter` of many, of one guard and without fingerprints; at most so many in a call."""
    if not passages:
        return []
    guard, claims = passages[0].guard, passages[0].claims
    hold, wait = guard.on_lease_loss == "hold", guard.on_in_progress == "wait"
    asked = [(one.record[0], one.owner) for one in passages]
    return claims.claim_each(asked, guard.lease, guard.retention, guard.max_attempts, hold, wait, most)


def release_each(passages: Sequence[Passage], most: int, undo: bool = False) -> list[Each[bool]]:
    """`release` of many; at most so many in a call."""
    if not passages:
        return []
    given = [(one.record[0], one.owner, one.guard.retention) for one in passages]
    return passages[0].claims.release_each(given, most, undo)


def _why(error: Exception) -> str:
    """Why a result was not stored, for every caller to come: where and of what type, never a value of it."""
    kind = type(error).__name__
    return f"{kind}: {error.name}: {error.problem}. {error.fix}" if isinstance(error, InvalidArgument) else kind


def _failure(error: BaseException) -> bytes:
    text = str(error).encode(errors="replace").decode()
    return _FAILURES.encode((f"{type(error).__module__}.{type(error).__qualname__}", text[:1000]))


def failure_of(entry: Entry) -> tuple[str, str]:
    """Type and text of a stored failure; DecodeError."""
    found = _FAILURES.decode(entry.result)
    if not (isinstance(found, tuple) and [*map(type, found)] == [str, str]):  # pyright: ignore[reportUnknownArgumentType]
        raise DecodeError("it is not the type and the text of a failure")
    return cast("tuple[str, str]", found)


_FAILURES = Codec()
"""Failures are short: no limit that is meant for results keeps them out."""
_ON_ERROR = f"Use one of {', '.join(map(repr, get_args(OnError)))}"
_NOT_KEPT = "with at_most_once nothing is kept but the mark; use on_done='skip' or 'raise'"
