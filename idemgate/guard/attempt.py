"""One guarded call as a pure state machine: it builds requests and interprets replies.

`driver`, `claim`, `batch` and `run_many` send the requests.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast, get_args

from idemgate.core.calls import Call, PerKeyCall, new_id
from idemgate.core.clock import monotonic
from idemgate.core.codec import Codec
from idemgate.core.codec.restoring import restore
from idemgate.core.codec.state import holds_fields
from idemgate.core.codec.storable import describe_unstored
from idemgate.core.keys import Key, record, text_of
from idemgate.core.text import message_of
from idemgate.core.verdict import Verdict
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
    SharedFailure,
    StoreError,
)
from idemgate.guard.claims import ClaimReply, Claims, Completion, Renewal
from idemgate.guard.sink.protocol import AioSink, Sink

__all__ = [
    "ClaimAttempt", "DoneCache", "DuplicateResult", "ErrorPolicy", "OnError", "OnLost", "OnMissingKey", "OnReplay",
    "OnceOptions", "WaitForOwner", "build_claim_calls", "build_release_calls", "decode_failure", "rejection_error",
]  # fmt: skip

OnDone = Literal["replay", "skip", "raise"]
OnInProgress = Literal["raise", "skip", "wait"]
OnError = Literal["release", "keep", "store", "share"]
OnLeaseLoss = Literal["retry", "hold"]
OnStoreError = Literal["raise", "run", "local"]
OnLost = Literal["return", "raise"]
OnMissingKey = Literal["raise", "run", "skip"]
OnReplay = Callable[[str, "Verdict[Any]"], object]
"""A function that gets the key and the verdict on each duplicate of a done key."""
ErrorPolicy = OnError | Callable[[BaseException], OnError]


@dataclass(frozen=True, slots=True)
class OnceOptions:
    """The validated options of one decorator: ms, `max_run` 0 for no limit, `returns` if it may lead to a model."""

    scope: str
    retention: int
    lease: int
    on_done: OnDone
    on_in_progress: OnInProgress
    on_error: ErrorPolicy
    on_lease_loss: OnLeaseLoss
    on_lost: OnLost
    on_store_error: OnStoreError
    on_missing_key: OnMissingKey
    on_replay: OnReplay | None
    max_attempts: int
    at_most_once: bool
    max_run: int
    wait: int
    shadow: bool
    codec: Codec
    returns: object
    sink: Sink | AioSink | None


class DuplicateResult:
    """The value or error that a duplicate call gets instead of a run."""

    __slots__ = ("error", "value")

    def __init__(self, value: object = None, error: IdemgateError | None = None) -> None:
        self.value = value
        self.error = error

    def unwrap(self) -> Any:
        """Return the value, or raise the error."""
        if self.error is not None:
            raise self.error
        return self.value


class WaitForOwner(NamedTuple):
    """The decision to wait: another owner runs. Claim again on a wake-up, or after `seconds`."""

    seconds: float


class CacheEntry:
    """The cached reply to a claim of a done key.

    `shared_result` is the result that all duplicates share, or None until it can be shared.
    """

    __slots__ = ("entry", "shared_result")

    def __init__(self, entry: ClaimReply) -> None:
        self.entry = entry
        self.shared_result: DuplicateResult | None = None


_IMMUTABLE_TYPES = frozenset({str, int, float, bool, bytes, type(None)})
"""Types of results that all duplicates can share, because no caller can change them."""
_PLAIN_TYPES = _IMMUTABLE_TYPES | {dict, list, tuple}
"""Types of most results, none of which is a model."""
_NOT_SENT = ClaimReply("unasked")
INFINITE = float("inf")


class DoneCache:
    """An LRU cache of keys that this process knows to be done.

    It holds the last `size` keys, each until its retention ends. Only done keys are cached, because a done key changes
    only if another process forgets it. This process then notices when the entry expires. `now` returns seconds.

    `evictions` counts the decisions of this process about keys. A reply to a claim that was sent before the last one
    is not cached: it may be older than the decision.
    """

    __slots__ = ("__weakref__", "_entries", "_now", "_size", "evictions")

    def __init__(self, size: int, now: Callable[[], float] = monotonic) -> None:
        self.evictions = 0
        self._size = size
        self._now = now
        self._entries: OrderedDict[bytes, tuple[float, bytes, CacheEntry]] = OrderedDict()

    def lookup(self, record: bytes, fingerprint: bytes) -> CacheEntry | None:
        """Return the entry of a record, "reused" if the fingerprint differs, or None if it is not cached."""
        stored = self._entries.get(record)
        if stored is None:
            return None
        expiry, stored_fingerprint, cached = stored
        if expiry <= self._now():
            self._entries.pop(record, None)
            return None
        return cached if stored_fingerprint == fingerprint else CacheEntry(ClaimReply("reused"))

    def store(self, record: bytes, fingerprint: bytes, entry: ClaimReply, milliseconds: int, evictions: int) -> None:
        """Cache a done record for this many milliseconds, if `evictions` is the count before its claim was sent.

        Evict the oldest entries beyond the size.
        """
        if evictions != self.evictions:
            return
        self._entries.pop(record, None)
        self._entries[record] = (self._now() + milliseconds / 1000, fingerprint, CacheEntry(entry))
        if evictions != self.evictions:  # another thread decided meanwhile, and may have evicted before the store
            self._entries.pop(record, None)
        while len(self._entries) > self._size:
            self._entries.popitem(last=False)

    def evict(self, record: bytes) -> None:
        """Remove a record that this process forgets or resolves. Call it before the decision and after it."""
        self.evictions += 1
        self._entries.pop(record, None)


def rejection_error(entry: ClaimReply, key: Key, scope: str) -> IdemgateError | None:
    """Return the error of an entry that is not "started", "in_progress" or "done", else None."""
    if entry.state == "reused":
        return KeyReused(text_of(key), scope)
    if entry.state == "held":
        return OutcomeUnknown(text_of(key), entry.attempt, scope)
    if entry.state == "exhausted":
        return AttemptsExhausted(text_of(key), entry.attempt, scope)
    return LeaseLost(text_of(key), entry.token, scope) if entry.state == "stale" else None


class ClaimAttempt:
    """One guarded call.

    `record` is its key in Redis. `owner` is the token of its claim. `entry` is the reply to the claim. `result` holds
    the kind and the bytes of the stored result. `wait` is how long to wait for another owner, in ms, or None. `ran` is
    True once the work was called. `lost` is True if the end of the claim found no lease, `kept` if a failure left the
    claim. `unended` is the error that kept the end of the claim from being stored. `ended` is True once the reply
    to the end was recorded. `interruption` is what a signal handler raised while the result was encoded.
    `loses_model` is True if the result is a model that duplicates get as a dict.
    `leased_at` is the process's time of the request that started or renewed the lease: the lease counts from then on.
    `evictions` is the count of the cache before the claim was sent. `extended_until` is the process's time at which the
    lease ends that the owner asked for last.
    """

    __slots__ = (
        "__weakref__", "_owner", "claims", "ended", "entry", "evictions", "extended_until", "fingerprint",
        "interruption", "kept", "key", "leased_at", "loses_model", "lost", "options", "ran", "record", "result",
        "unended", "wait", "waiting_since",
    )  # fmt: skip

    def __init__(self, options: OnceOptions, claims: Claims, key: Key, fingerprint: bytes) -> None:
        self.options = options
        self.claims = claims
        self.key = key
        self.record = (record(claims.namespace, options.scope, key),)
        self.fingerprint = fingerprint
        self._owner = b""
        self.entry = _NOT_SENT
        self.result = b"", b""
        self.wait = options.wait if options.on_in_progress == "wait" else None
        self.waiting_since = 0.0
        self.ran = self.lost = self.kept = self.ended = self.loses_model = False
        self.interruption: BaseException | None = None
        self.leased_at = INFINITE
        self.evictions = 0
        self.extended_until = 0.0
        self.unended: StoreError | None = None

    def log_facts(self) -> dict[str, object]:
        """Return the scope and the key for a log record, in this order."""
        return {"scope": self.options.scope, "key": text_of(self.key)}

    @property
    def owner(self) -> bytes:
        """The owner token. It is generated on first use, because a cache hit needs none."""
        if not self._owner:
            self._owner = new_id()
        return self._owner

    def give_up(self) -> ClaimAttempt:
        """Return a copy of this attempt to release its claim with. The next claim of this attempt has another owner.

        With the same owner, the release could follow that claim, and free the key while its work runs.
        """
        given_up = copy(self)
        self._owner, self.leased_at = b"", INFINITE
        return given_up

    def build_claim(self) -> Call[ClaimReply]:
        """Build the call that claims the key, or marks it with `at_most_once`."""
        options, owner = self.options, self._owner
        if not owner:
            owner = self._owner = new_id()
        if options.at_most_once:
            return self.claims.mark(self.record, owner, options.retention, self.fingerprint)
        # A late copy of an earlier request of this attempt may have started the lease.
        now = monotonic()
        self.leased_at = min(self.leased_at, now)
        return self.claims.claim(
            self.record,
            owner,
            options.lease,
            options.retention,
            self.fingerprint,
            options.max_attempts,
            options.on_lease_loss == "hold",
            0 if self.wait is None else 2 if self.waiting_since else 1,
        )

    def interpret_reply(self, entry: ClaimReply) -> DuplicateResult | WaitForOwner | None:
        """Decide what follows from the reply to a claim.

        Return None to run the work, WaitForOwner to wait and claim again, or the result of a duplicate.
        """
        self.entry = entry
        if entry.state == "started":
            return None
        if entry.state == "done":
            return self._answer_done(entry)
        if entry.state == "in_progress":
            return self._answer_in_progress(entry)
        if entry.state == "shared_failure":
            return self._answer_shared_failure(entry)
        return DuplicateResult(error=rejection_error(entry, self.key, self.options.scope))

    def answer_from_cache(self, cached: CacheEntry) -> DuplicateResult:
        """Return the result of a duplicate from a cached entry."""
        self.entry = cached.entry
        if cached.shared_result is not None:
            return cached.shared_result
        result = cast(DuplicateResult, self.interpret_reply(cached.entry))
        if result.error is None and type(result.value) in _IMMUTABLE_TYPES:
            cached.shared_result = result
        return result

    def _answer_done(self, entry: ClaimReply) -> DuplicateResult:
        """Return the result of a duplicate of a done key."""
        options = self.options
        if options.on_done == "skip":
            return DuplicateResult()
        if entry.kind != b"v":
            return self._answer_without_value(entry)
        try:
            stored, read, returns = entry.result, options.codec, options.returns
            value = read.decode(stored) if returns is None else restore(read.decode_stored(stored), returns)
        except (DecodeError, InvalidArgument, TypeError, ValueError) as error:
            why = f"it cannot be decoded: {error}"
            return DuplicateResult(error=ResultUnavailable(text_of(self.key), why, options.scope))
        return (
            DuplicateResult(error=AlreadyDone(text_of(self.key), value, options.scope))
            if options.on_done == "raise"
            else DuplicateResult(value)
        )

    def _answer_without_value(self, entry: ClaimReply) -> DuplicateResult:
        """Return the result of a duplicate of a key that is done without a stored value."""
        name, scope = text_of(self.key), self.options.scope
        if entry.kind == b"e":
            try:
                return DuplicateResult(error=ReplayedFailure(name, *decode_failure(entry), scope))
            except DecodeError as error:
                return DuplicateResult(error=ResultUnavailable(name, f"it cannot be decoded: {error}", scope))
        why = _NOT_STORED if self.options.at_most_once else entry.result.decode(errors="replace")
        return DuplicateResult(
            error=AlreadyDone(name, None, scope)
            if self.options.on_done == "raise"
            else ResultUnavailable(name, why, scope)
        )

    def _answer_in_progress(self, entry: ClaimReply) -> DuplicateResult | WaitForOwner:
        """Apply `on_in_progress` while another owner runs."""
        options = self.options
        if options.shadow or (options.on_in_progress == "skip" and self.wait is None):
            return DuplicateResult()
        error = AlreadyInProgress(text_of(self.key), entry.left_ms / 1000, options.scope)
        if self.wait is None:
            return DuplicateResult(error=error)
        now = monotonic()
        self.waiting_since = self.waiting_since or now
        left = self.waiting_since + self.wait / 1000 - now
        if left <= 0:
            return DuplicateResult(error=error)
        # A wake-up ends the wait. The poll covers a lost wake-up, at the latest when the lease may end.
        return WaitForOwner(min(left, 1.0, max(entry.left_ms / 1000, 0.01)))

    def _answer_shared_failure(self, entry: ClaimReply) -> DuplicateResult:
        """Return the failure of the run that this call waited for. A damaged one is a failure, too."""
        try:
            kind, text = decode_failure(entry)
        except DecodeError as error:
            kind, text = "unknown", f"it cannot be decoded: {error}"
        return DuplicateResult(error=SharedFailure(text_of(self.key), kind, text, self.options.scope))

    def build_completion(self, result: object) -> Call[bool]:
        """Build the call that marks the key done with its result, which a sink has encoded before."""
        options = self.options
        if options.sink is None:
            self.encode_result(result)
        return self.claims.complete(self.record, self._owner, self.entry.token, options.retention, *self.result)

    def encode_result(self, result: object, failure: Exception | None = None) -> None:
        """Encode the result for the completion.

        If the result cannot be stored, the key is done without one. The effect has happened and must not run again.
        `failure` is what a first try raised. If the second succeeds, a signal handler had raised it: keep the error.
        """
        try:
            self.result = b"v", self.options.codec.encode(result, "result")
            kind = type(result)
            if kind not in _PLAIN_TYPES and kind.__module__ != "builtins" and holds_fields(kind):
                self.loses_model = self.options.returns is None
            if failure is not None:
                self.interruption = failure.__cause__ or failure
        except Exception as error:  # noqa: BLE001 - the effect has happened, so the key must become done
            if failure is None:
                self.encode_result(result, error)
            else:
                self.result = b"n", describe_unstored(error)[:500].encode(errors="replace")

    def completion(self) -> Completion:
        """Return the parts of the completion of an encoded result, for a batch."""
        return self.record[0], self._owner, self.entry.token, self.options.retention, self.result[1]

    def build_done_entry(self) -> ClaimReply:
        """Return the entry that the next caller would get, for the cache."""
        entry = ClaimReply("done", token=self.entry.token, left_ms=self.options.retention)
        entry.kind, entry.result = self.result
        return entry

    def build_failure(self, policy: OnError) -> Call[bool]:
        """Build the call that follows a failure of the work: store it, or release the claim."""
        if policy != "store":
            return self.build_release()
        return self.claims.complete(self.record, self._owner, self.entry.token, self.options.retention, *self.result)

    def decide_failure(self, error: BaseException) -> OnError:
        """Apply `on_error` to an exception of the work, and encode the failure if it is to be stored.

        If `on_error` raises or returns an unknown choice, raise that. The caller then releases the claim.
        """
        policy = self.options.on_error
        if not isinstance(error, Exception):
            policy = "keep" if self.must_hold(error) else "release"
        elif callable(policy):
            policy = policy(error)
            if policy not in get_args(OnError):
                raise InvalidArgument("on_error", policy, "the callable returned an unknown choice", _ON_ERROR)
        self.kept = policy == "keep"
        if policy in ("store", "share"):
            self.result = b"e" if policy == "store" else _SHARED, _encode_failure(error)
        return policy

    @property
    def holds_interrupted(self) -> bool:
        """True if an interruption of the work leaves the key to `gate.resolve`. With a sink the transaction decides."""
        return self.options.on_lease_loss == "hold" and self.options.sink is None

    def must_hold(self, error: BaseException) -> bool:
        """Return True if this error of the work is an interruption that leaves the key to `gate.resolve`."""
        return self.holds_interrupted and not isinstance(error, Exception)

    def build_release(self, undo: bool = False) -> Call[bool]:
        """Build the call that releases the claim. `undo` takes back a claim that never ran."""
        return self.claims.release(self.record, self.owner, self.options.retention, undo, self.shared_failure)

    @property
    def shared_failure(self) -> bytes:
        """The encoded failure for the callers that waited, or nothing."""
        kind, data = self.result
        return data if kind == _SHARED else b""

    def raise_after_end(self) -> None:
        """Raise what the caller must learn after the work has returned: an interruption, or a lost lease."""
        if self.interruption is not None:
            raise self.interruption
        if self.lost and self.options.on_lost == "raise":
            raise self.build_lease_lost()

    def build_lease_lost(self) -> LeaseLost:
        """Return the error of this attempt's lost lease."""
        return LeaseLost(text_of(self.key), self.entry.token, self.options.scope)

    @property
    def needs_renewal(self) -> bool:
        """True if less than half of the lease is left by this process's clock, because the reply came late."""
        return monotonic() - self.leased_at > self.options.lease / 2000

    def build_checkpoint(self, codec: Codec, data: object) -> Call[bool]:
        """Build the call that stores a checkpoint. Pass the codec of the gate: that of the options limits results."""
        return self.claims.checkpoint(self.record, self.owner, codec.encode(data, "checkpoint"))

    def build_renewal(self) -> Call[Renewal]:
        """Build the call that renews the lease. It does not shorten a lease that the owner has extended."""
        lease = max(self.options.lease, round((self.extended_until - monotonic()) * 1000))
        return self.claims.renew(self.record, self.owner, lease, self.options.retention)


def build_claim_calls(attempts: Sequence[ClaimAttempt], most: int) -> list[PerKeyCall[ClaimReply]]:
    """Build the claims of many attempts, with at most `most` records in a script call.

    The attempts share their options and have no fingerprints.
    """
    if not attempts:
        return []
    options, claims = attempts[0].options, attempts[0].claims
    hold, wait = options.on_lease_loss == "hold", options.on_in_progress == "wait"
    owned = [(attempt.record[0], attempt.owner) for attempt in attempts]
    now = monotonic()
    for attempt in attempts:
        attempt.leased_at = now
    return claims.claim_each(owned, options.lease, options.retention, options.max_attempts, hold, wait, most)


def build_release_calls(attempts: Sequence[ClaimAttempt], most: int, undo: bool = False) -> list[PerKeyCall[bool]]:
    """Build the releases of many attempts, with at most `most` records in a script call."""
    if not attempts:
        return []
    releases = [
        (attempt.record[0], attempt.owner, attempt.options.retention, attempt.shared_failure) for attempt in attempts
    ]
    return attempts[0].claims.release_each(releases, most, undo)


def _encode_failure(error: BaseException) -> bytes:
    """Return the stored form of an exception: its type and the first 1,000 characters of its text."""
    text = message_of(error).encode(errors="replace").decode()
    return _FAILURES.encode((f"{type(error).__module__}.{type(error).__qualname__}", text[:1000]))


def decode_failure(entry: ClaimReply) -> tuple[str, str]:
    """Return the type and the text of a stored failure. Raise DecodeError if they are damaged."""
    decoded = _FAILURES.decode(entry.result)
    if not (isinstance(decoded, tuple) and [*map(type, decoded)] == [str, str]):  # pyright: ignore[reportUnknownArgumentType]
        raise DecodeError("expected the type and the text of a failure")
    return cast("tuple[str, str]", decoded)


_FAILURES = Codec()
"""A codec with the default limit. `max_result_bytes` is meant for results and does not apply to failures."""
_ON_ERROR = f"Use one of {', '.join(map(repr, get_args(OnError)))}"
_SHARED = b"s"
"""The kind of a failure that the release shares."""
_NOT_STORED = "at_most_once stores no result; use on_done='skip' or 'raise'"
