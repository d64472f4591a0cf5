"""The values of one guarded call. None of them changes: a step that learns more returns a new one."""

from __future__ import annotations

from typing import Any, Final, Literal, NamedTuple

from idemgate.core.calls import Call, new_id
from idemgate.core.keys import Key, record, text_of
from idemgate.errors import IdemgateError, LeaseLost, StoreError
from idemgate.guard.claim_calls import ClaimReply, Claims, Renewal
from idemgate.guard.options import OnceOptions

__all__ = [
    "COMPLETED", "COMPLETES", "FAILURE", "INFINITE", "KEEP", "NOT_STORED", "RELEASE", "UNASKED", "UNDO", "VALUE",
    "Account", "Duplicate", "End", "Ending", "Grant", "Guards", "LocalRun", "Request", "build_ending",
    "build_renewal", "build_undo", "lease_lost_error", "log_facts",
]  # fmt: skip

INFINITE = float("inf")
UNASKED = ClaimReply("unasked")
"""Stands for the reply to a claim that got none."""
VALUE, NOT_STORED, FAILURE, RELEASE, UNDO, KEEP = b"v", b"n", b"e", b"r", b"u", b"k"
"""The kinds of an ending. The first three complete the key. RELEASE and UNDO release it, UNDO without counting the
attempt. KEEP leaves the claim."""
COMPLETES = (VALUE, NOT_STORED, FAILURE)
Guards = Literal["lease", "mark", "process", "nothing"]
"""What keeps other callers out while the work runs. A mark is that of `at_most_once`."""


class Request:
    """The request of one call, by a new owner. Raise MissingKey or InvalidArgument for a key that is none.

    `record` is its key in Redis. `owner` identifies who claims it. `wait` is how long to wait for another owner, in ms,
    or None. An argument of None stands for the wait of the options.
    """

    __slots__ = ("claims", "fingerprint", "key", "options", "owner", "record", "wait")

    def __init__(
        self,
        options: OnceOptions,
        claims: Claims,
        key: Key,
        fingerprint: bytes = b"",
        wait: int | None = None,
    ) -> None:
        self.options: Final = options
        self.claims: Final = claims
        self.key: Final = key
        self.record: Final = (record(claims.namespace, options.scope, key),)
        self.fingerprint: Final = fingerprint
        self.owner: Final = new_id()
        self.wait: Final = options.wait if wait is None or options.shadow else wait

    def with_new_owner(self) -> Request:
        """Return the same request of another owner."""
        return Request(self.options, self.claims, self.key, self.fingerprint, self.wait)


class LocalRun:
    """A run that only this process guards. Its key is free again once the object is gone."""

    __slots__ = ("__weakref__", "fingerprint")

    def __init__(self, fingerprint: bytes) -> None:
        self.fingerprint: bytes = fingerprint


class Grant:
    """The permission of a call to run: the reply to its claim, and what guards it.

    The lease counts from `leased_at`, this process's time of the request that started or renewed it. `evictions` is the
    count of the cache before the claim was sent. `local` is the run within this process, if that guards it.
    """

    __slots__ = ("evictions", "guarded_by", "leased_at", "local", "reply", "request")

    def __init__(
        self,
        request: Request,
        reply: ClaimReply,
        leased_at: float = INFINITE,
        guarded_by: Guards = "nothing",
        evictions: int = 0,
        local: LocalRun | None = None,
    ) -> None:
        self.request: Final = request
        self.reply: Final = reply
        self.leased_at: Final = leased_at
        self.guarded_by: Final[Guards] = guarded_by
        self.evictions: Final = evictions
        self.local: Final = local

    def with_lease_from(self, leased_at: float) -> Grant:
        """Return the grant whose lease counts from this time."""
        return Grant(self.request, self.reply, leased_at, self.guarded_by, self.evictions, self.local)


class Duplicate:
    """The answer to a call that does not run: its value or error, and the reply that says so."""

    __slots__ = ("error", "reply", "value")

    def __init__(self, reply: ClaimReply, value: Any = None, error: IdemgateError | None = None) -> None:
        self.reply: Final = reply
        self.value: Final = value
        self.error: Final = error


class End(NamedTuple):
    """The outcome of the end of a run.

    `unended` is the error that kept it from being stored. `interruption` is that of its ending.
    """

    kind: bytes
    held: bool = True
    unended: StoreError | None = None
    interruption: BaseException | None = None


COMPLETED = End(VALUE)
"""The end of most runs."""
Ending = tuple[bytes, bytes, bool, BaseException | None]
"""The ending of a run as it is stored: its kind and its data.

Then True if the result is a model that duplicates get as a dict, and what a signal handler raised while the result was
encoded. A plain tuple, because each call makes one.
"""
Account = tuple[Any, BaseException | None, Grant | Duplicate | None, End | None, bool]
"""The account of a call: its value, its error, the answer to its claim, its end, and whether its work was called."""


def build_ending(kind: bytes, data: bytes = b"") -> Ending:
    """Return an ending that is no result."""
    return kind, data, False, None


def build_renewal(grant: Grant, seconds: float = 0.0) -> Call[Renewal]:
    """Build the call that renews a lease, for its length or for this many seconds, whichever is longer."""
    request = grant.request
    lease = max(request.options.lease, round(seconds * 1000))
    return request.claims.renew(request.record, request.owner, lease, request.options.retention)


def build_undo(request: Request) -> Call[bool]:
    """Build the call that takes back a claim whose work did not run."""
    return request.claims.release(request.record, request.owner, request.options.retention, undo=True)


def lease_lost_error(grant: Grant) -> LeaseLost:
    """Return the error of a lost lease."""
    return LeaseLost(text_of(grant.request.key), grant.reply.token, grant.request.options.scope)


def log_facts(request: Request) -> dict[str, object]:
    """Return the scope and the key for a log record, in this order."""
    return {"scope": request.options.scope, "key": text_of(request.key)}
