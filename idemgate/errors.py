"""Every error idemgate raises. One root; arranged by who can act on it; facts are fields, the text is derived from
them.

- `InvalidArgument`: the caller passed something that can never work. Raised before anything is written.
- `ClaimRejected`: the store answered, and the answer is no, for a reason that is part of normal life.
- `StoreError`: the store, or the way to it, is at fault.
"""

from __future__ import annotations

import re
import reprlib
import shlex
from typing import Any

__all__ = [
    "AlreadyDone",
    "AlreadyInProgress",
    "AttemptsExhausted",
    "Bury",
    "ClaimRejected",
    "DecodeError",
    "IdemgateError",
    "InvalidArgument",
    "KeyReused",
    "LeaseLost",
    "NoCurrentExecution",
    "NotConfigured",
    "NotDurable",
    "OutcomeUnknown",
    "Overloaded",
    "PartialFailure",
    "PolicyChanged",
    "ReplayedFailure",
    "ResultUnavailable",
    "Retry",
    "ServerRejected",
    "StoreError",
    "StoreUnavailable",
    "TopicInUse",
    "UnexpectedData",
]


class IdemgateError(Exception):
    """Root of every error of this library."""


# -- the caller can mend it -------------------------------------------------------------------------------------------


class InvalidArgument(IdemgateError, ValueError):
    """A value that can never work; nothing was written. `name` is the parameter, `value` what was passed."""

    def __init__(self, name: str, value: object, problem: str, fix: str) -> None:
        super().__init__(f"{name}={_shown(value)}: {problem}. {fix}")
        self.name = name
        self.value = value
        self.problem = problem
        self.fix = fix


_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 120


def _shown(value: object) -> str:
    """A short repr that cannot fail: values that are refused are the strange ones."""
    try:
        return _REPR.repr(value)
    except Exception:  # noqa: BLE001 - a repr of a user's class may fail in any way
        return f"<{type(value).__name__}>"


class NotConfigured(IdemgateError):
    """No server was named, so there is nobody to coordinate with."""


class NoCurrentExecution(IdemgateError, RuntimeError):
    """Something was asked that only a guarded function or a handler can be told."""


class PolicyChanged(IdemgateError):
    """A topic was opened with another policy than the one it was made with.

    `topic`, `stored` and `asked` (the differing values by name) say what differs.
    """

    def __init__(self, topic: str, stored: dict[str, object], asked: dict[str, object]) -> None:
        differing = ", ".join(f"{name} is {stored.get(name)!r}, asked {asked.get(name)!r}" for name in sorted(asked))
        super().__init__(
            f"topic {topic!r} exists with another policy ({differing}). Open it with the stored policy, "
            f"or change it for everybody with redefine=True (slots and merge cannot be changed that way; "
            f"slots can with: idemgate slots {topic} N)."
        )
        self.topic = topic
        self.stored = stored
        self.asked = asked


class TopicInUse(IdemgateError):
    """A topic cannot be changed now: it holds messages, or another change of it has not ended. `topic` names it."""

    def __init__(self, topic: str, why: str) -> None:
        super().__init__(f"topic {topic!r}: {why}")
        self.topic = topic


# -- the store said no ------------------------------------------------------------------------------------------------


class ClaimRejected(IdemgateError):
    """The store answered no. `key` is the idempotency key as the caller gave it."""

    def __init__(self, key: str, text: str) -> None:
        super().__init__(text)
        self.key = key


class AlreadyInProgress(ClaimRejected):
    """Another owner is running this key. `retry_after`: seconds until its lease ends unless it is renewed."""

    def __init__(self, key: str, retry_after: float) -> None:
        super().__init__(key, f"{key!r} is in progress elsewhere; try again in {retry_after:.3f} s")
        self.retry_after = retry_after


class AlreadyDone(ClaimRejected):
    """The key is done and the guard was told to raise on duplicates. `result` is the stored result, or None."""

    def __init__(self, key: str, result: object = None) -> None:
        super().__init__(key, f"{key!r} is already done")
        self.result = result


class ResultUnavailable(ClaimRejected):
    """The key is done, but its result could not be stored, so there is nothing to replay. The work must not run
    again."""

    def __init__(self, key: str, why: str) -> None:
        super().__init__(key, f"{key!r} is done, but its result was not stored: {why}")
        self.why = why


class ReplayedFailure(ClaimRejected):
    """The first run failed and its failure was stored (`on_error="store"`). `kind` and `text` describe that
    exception."""

    def __init__(self, key: str, kind: str, text: str) -> None:
        super().__init__(key, f"{key!r} failed before with {kind}: {text}")
        self.kind = kind
        self.text = text


class KeyReused(ClaimRejected):
    """Same key, other payload: the fingerprints differ. Nothing ran, no result is disclosed."""

    def __init__(self, key: str) -> None:
        super().__init__(key, f"{key!r} was used before with another payload; use a new key for a new intent")


class LeaseLost(ClaimRejected):
    """This owner's lease ended and its right is gone. `token` is the fencing token it held."""

    def __init__(self, key: str, token: int) -> None:
        super().__init__(key, f"the lease of {key!r} (fencing token {token}) was lost")
        self.token = token


class OutcomeUnknown(ClaimRejected):
    """A former owner vanished and the guard holds (`on_lease_loss="hold"`): somebody must look, then `gate.resolve`."""

    def __init__(self, key: str, attempt: int, scope: str) -> None:
        super().__init__(
            key,
            f"{key!r} was started (attempt {attempt}) and its owner vanished; its outcome is unknown. Look whether the "
            f"effect happened, then gate.resolve({key!r}, scope={scope!r}, done=True or False)",
        )
        self.attempt = attempt
        self.scope = scope


class AttemptsExhausted(ClaimRejected):
    """The key was started `attempts` times without success and may not be started again within its retention."""

    def __init__(self, key: str, attempts: int, scope: str) -> None:
        super().__init__(
            key,
            f"{key!r} was started {attempts} times without success; "
            f"gate.forget({key!r}, scope={scope!r}) allows it again",
        )
        self.attempts = attempts
        self.scope = scope


# -- the store is at fault --------------------------------------------------------------------------------------------


class StoreError(IdemgateError):
    """The store, or the way to it, is at fault."""


class StoreUnavailable(StoreError):
    """No answer within the deadline. `executed` is "no" when the request certainly did not run, else "unknown"
    ("yes": see `NotDurable`)."""

    def __init__(self, text: str, executed: str) -> None:
        super().__init__(text)
        self.executed = executed


class NotDurable(StoreUnavailable):
    """The call was executed, but its write is not as durable as `Gate(durability=...)` asks: it is in the primary's
    memory, and a failover or a power loss may forget it. `executed` is "yes".

    Sending the same again is safe where a call is: a trigger with its `event_id`, a settlement, a completion.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text, "yes")


class ServerRejected(StoreError):
    """The server answered with an error that repeating cannot mend (permission, configuration, script error)."""


class UnexpectedData(StoreError):
    """A key of our namespace holds something we did not write: a wrong type or another version. Nothing was written.

    `redis_key` is that key, `problem` what is wrong with it. Where it is but one field or member, the text has the
    command that removes that alone.
    """

    def __init__(self, redis_key: str, text: str) -> None:
        remedy = _removing(redis_key, text) or "move or delete that key, or use another namespace"
        super().__init__(f"{redis_key}: {text}. Nothing was written; {remedy}")
        self.redis_key = redis_key
        self.problem = text


def _removing(redis_key: str, text: str) -> str | None:
    """The command that removes the one field of a hash, or member of a sorted set, that `text` names (lib/sound)."""
    for verb, pattern in (
        ("HDEL", "holds under (.*) what idemgate has not written"),
        ("ZREM", "names (.*) of which nothing is stored"),
    ):
        if found := re.fullmatch(pattern, text, re.DOTALL):
            return f"{verb} {shlex.quote(redis_key)} {shlex.quote(found[1])}"
    return None


class DecodeError(StoreError):
    """Stored bytes cannot be turned back into a value; repeating cannot mend it. Nothing was written.

    They are not ours, damaged, of another version, over a limit, or not what the handler's annotation asks for:
    `why` says which.
    """

    def __init__(self, why: str) -> None:
        super().__init__(f"stored bytes cannot be decoded: {why}")
        self.why = why


# -- what a handler may raise -----------------------------------------------------------------------------------------


class Bury(Exception):
    """Raised by a topic's handler: trying again cannot help, so the message goes to the dead letters now."""


class Retry(Exception):
    """Raised by a topic's handler: try again after `delay` (seconds, timedelta or "30s"; None: the topic's backoff)."""

    def __init__(self, text: str = "", *, delay: Any = None) -> None:
        super().__init__(text)
        self.delay = delay


class Overloaded(Retry):
    """Raised by a topic's handler whose downstream said that it is too busy (HTTP 429, 503): as `Retry`, and a topic
    with an `Adaptive` limit lowers it when there are many of them."""


class PartialFailure(Exception):
    """Returned or raised by a topic's handler: of the merged payload only these items failed, the rest is done and not
    delivered again (elsewhere called batch item failures, or partial batch response).

    - `items`: of an append or union, items of `delivery.payload`; of fields, their names, or a mapping of field -> its
      failed items, or `...` for all of it. None at all: the whole delivery is done. What is not in the payload, or a
      merge policy that keeps no items (last, first, count, sum, min, max): a failed attempt of the whole delivery.
    - `reason` is kept as the failure, and shown by dead letters.
    - `delay`: seconds, timedelta or "30s"; None: the topic's backoff.
    """

    def __init__(self, items: Any, reason: str = "", *, delay: Any = None) -> None:
        super().__init__(reason or "some of its items failed")
        self.items = items
        self.delay = delay
