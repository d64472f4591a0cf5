"""All errors of the library.

They share one root, `IdemgateError`. Details are attributes, and the text is derived from them. All of them can be
pickled, so they pass between processes.

- `InvalidArgument`: an argument is invalid. Raised before anything is written.
- `ClaimRejected`: the server refused a claim in normal operation.
- `StoreError`: the server or the connection failed.
"""

from __future__ import annotations

import re
import reprlib
import shlex
from typing import Any, Literal, TypeVar

__all__ = [
    "AlreadyDone",
    "AlreadyInProgress",
    "AttemptsExhausted",
    "Bury",
    "ClaimRejected",
    "DecodeError",
    "DeliveryFailed",
    "DownstreamUnavailable",
    "IdemgateError",
    "InvalidArgument",
    "KeyReused",
    "LeaseLost",
    "MissingKey",
    "NoCurrentExecution",
    "NoResult",
    "NotConfigured",
    "NotDrained",
    "NotDurable",
    "OutcomeUnknown",
    "Overloaded",
    "PartialFailure",
    "PolicyChanged",
    "ReplayedFailure",
    "ResultTimeout",
    "ResultUnavailable",
    "Retry",
    "ServerRejected",
    "SharedFailure",
    "StoreError",
    "StoreUnavailable",
    "TooLarge",
    "TopicInUse",
    "UnexpectedData",
]


E = TypeVar("E", bound="Portable")


class Portable(Exception):
    """The base of all exceptions here, which pass between processes unchanged.

    Pickle keeps the attributes, the notes, the cause and the context. A value or a cause that pickle cannot copy is
    replaced by its description. `cls(*error.args)` makes an equal error, as the result backends of task queues do.
    """

    _text: str | None = None
    """The text, if it is not the only argument."""

    def __str__(self) -> str:
        return super().__str__() if self._text is None else self._text

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"  # not `args`, which may hold a result or a payload

    def __reduce__(self) -> tuple[Any, ...]:
        state = {name: _portable_value(value) for name, value in self.__dict__.items()}
        state |= {"__cause__": _portable_error(self.__cause__), "__context__": _portable_error(self.__context__)}
        state["__suppress_context__"] = self.__suppress_context__  # last, because setting a cause sets it too
        return _restore, (type(self), *map(_portable_value, self.args)), state


def _restore(cls: type[E], *args: object) -> E:
    """Build an error without its constructor. Its state follows, also that of a subclass with other parameters."""
    error = cls.__new__(cls, *args)
    error.args = args  # an OSError does not take them from __new__
    return error


def _portable_value(value: object) -> object:
    return value if isinstance(value, Portable) or _can_pickle(value) else _short_repr(value)


def _portable_error(error: BaseException | None) -> BaseException | None:
    if error is None or isinstance(error, Portable) or _can_pickle(error):
        return error
    kind = type(error)
    try:
        return RuntimeError(f"{kind.__module__}.{kind.__qualname__}: {error}")
    except Exception:  # noqa: BLE001 - a `__str__` of the user may raise anything
        return RuntimeError(f"{kind.__module__}.{kind.__qualname__}")


def _can_pickle(value: object) -> bool:
    """Return whether pickle can copy the value. One that it cannot read would end a process pool."""
    if value is None or type(value) in (str, int, float, bool, bytes):
        return True
    import pickle  # only for values that are being pickled

    try:
        pickle.loads(pickle.dumps(value))  # noqa: S301 - only what was just written
    except Exception:  # noqa: BLE001 - a class of the user may raise anything
        return False
    return True


class IdemgateError(Portable):
    """The base class of all errors of this library.

    Attributes:
        subject: for a call of a topic: the topic, the key as text, and the number of further keys of the call.
    """

    subject: tuple[str, str, int] | None = None

    def __str__(self) -> str:
        if self.subject is None:
            return super().__str__()
        topic, key, more = self.subject
        return f"{super().__str__()} (topic {topic!r}, key {_short_repr(key)}{f' and {more} more' if more else ''})"

    def name_subject(self, topic: str, key: object, more: int = 0) -> None:
        """Set `subject`, unless a function that knows more than the caller has set it."""
        if self.subject is None:
            shown = key if isinstance(key, str) else _short_repr(key)
            self.subject = topic, key.decode(errors="backslashreplace") if isinstance(key, bytes) else shown, more


# -- errors of the caller ---------------------------------------------------------------------------------------------


class InvalidArgument(IdemgateError, ValueError):
    """An argument is invalid; nothing was written.

    Attributes:
        name: the parameter.
        value: the argument.
        problem: what is wrong with it.
        fix: how to correct the call.
    """

    def __init__(self, name: str, value: object, problem: str, fix: str) -> None:
        super().__init__(name, value, problem, fix)
        self._text = f"{name}={_short_repr(value)}: {problem}. {fix}"
        self.name = name
        self.value = value
        self.problem = problem
        self.fix = fix


class MissingKey(InvalidArgument):
    """The arguments of a call hold no key: the field is missing, None or empty. See `on_missing_key` of `once`."""


_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 120


def _short_repr(value: object) -> str:
    """Return a short repr. It never raises: an invalid value may have a broken `__repr__`."""
    try:
        return _REPR.repr(value)
    except Exception:  # noqa: BLE001 - a `__repr__` of the user may raise anything
        return f"<{type(value).__name__}>"


class TooLarge(InvalidArgument):
    """A payload or a result takes more bytes than `max_bytes` allows."""


class NotConfigured(IdemgateError):
    """No server is configured."""


class NoCurrentExecution(IdemgateError, RuntimeError):
    """A function that needs a running guarded function or handler was called outside of one."""


class PolicyChanged(IdemgateError):
    """A topic was opened with a policy that differs from the stored one, or from another declaration of the program.

    Attributes:
        topic: the topic's name.
        stored: the stored or declared values that differ, by option.
        asked: the requested values that differ, by option.
        where: "store", or "program" if this program has declared the topic with the values in `stored`.
    """

    def __init__(
        self,
        topic: str,
        stored: dict[str, object],
        asked: dict[str, object],
        where: Literal["store", "program"] = "store",
    ) -> None:
        super().__init__(topic, stored, asked, where)
        differing = ", ".join(f"{name} is {stored.get(name)!r}, asked {asked.get(name)!r}" for name in sorted(asked))
        self._text = (
            f"topic {topic!r} exists with another policy ({differing}). Declare it with the stored policy, or raise "
            f"revision= to change it for all programs (slots and merge cannot be changed that way; "
            f"slots can with: idemgate topic reshard {topic} N)."
            if where == "store"
            else f"this program declares topic {topic!r} twice, with different policies ({differing}). Declare it "
            f"once, or with the same options. gate.topic({topic!r}) without options returns the declared topic."
        )
        self.topic = topic
        self.stored = stored
        self.asked = asked
        self.where = where


class NoResult(IdemgateError):
    """The trigger will have no result: it was not accepted, its message was cancelled, or the value was not stored.

    Attributes:
        topic: the topic's name.
        key: the key of the trigger, as text.
        why: the reason.
    """

    def __init__(self, topic: str, key: str, why: str) -> None:
        super().__init__(topic, key, why)
        self._text = f"topic {topic!r} has no result for {key!r}: {why}"
        self.topic = topic
        self.key = key
        self.why = why


class DeliveryFailed(NoResult):
    """The message became a dead letter after its last attempt. `why` is the failure."""


class ResultTimeout(IdemgateError, TimeoutError):
    """The delivery did not end in time. It may still run; `topic.result` may be called again."""

    def __init__(self, topic: str, key: str, seconds: float) -> None:
        super().__init__(topic, key, seconds)
        self.args: tuple[Any, ...] = topic, key, seconds  # OSError keeps none
        self._text = f"topic {topic!r} had no result for {key!r} within {seconds:g} s; the delivery may still run"
        self.topic = topic
        self.key = key
        self.seconds = seconds


class TopicInUse(IdemgateError):
    """A topic cannot be changed now: it holds messages, or another change is in progress. `topic` is its name."""

    def __init__(self, topic: str, why: str) -> None:
        super().__init__(topic, why)
        self._text = f"topic {topic!r}: {why}"
        self.topic = topic


class NotDrained(IdemgateError):
    """`drain` found more work than its limit.

    Attributes:
        source: the topic or the subscriber.
        limit: the limit.
    """

    def __init__(self, source: str, limit: int) -> None:
        super().__init__(source, limit)
        self._text = (
            f"{source} had more than {limit} deliveries to drain. Does its handler trigger what it handles? If not, "
            f"raise limit="
        )
        self.source = source
        self.limit = limit


# -- rejected claims --------------------------------------------------------------------------------------------------


class ClaimRejected(IdemgateError):
    """The server rejected a claim.

    Attributes:
        key: the idempotency key as the caller passed it.
        scope: the scope of the key.
    """

    def __init__(self, key: str, text: str, scope: str = "claim") -> None:
        super().__init__(key, text, scope)
        self._text = text
        self.key = key
        self.scope = scope


class AlreadyInProgress(ClaimRejected):
    """Another owner runs this key. `retry_after` is the time in seconds until its lease ends unless renewed."""

    def __init__(self, key: str, retry_after: float, scope: str = "claim") -> None:
        text = f"{key!r} is in progress elsewhere (scope {scope!r}); try again in {retry_after:.3f} s"
        super().__init__(key, text, scope)
        self.args: tuple[Any, ...] = key, retry_after, scope
        self.retry_after = retry_after


class AlreadyDone(ClaimRejected):
    """The key is done, and the options say to raise on duplicates. `result` is the stored result, or None."""

    def __init__(self, key: str, result: object = None, scope: str = "claim") -> None:
        super().__init__(key, f"{key!r} is already done (scope {scope!r})", scope)
        # Without the result: programs log `args`, and task queues store them.
        self.args: tuple[Any, ...] = key, None, scope
        self.result = result


class ResultUnavailable(ClaimRejected):
    """The key is done, but its result was not stored and cannot be returned. The function does not run again.

    `why` is the reason.
    """

    def __init__(self, key: str, why: str, scope: str = "claim") -> None:
        super().__init__(key, f"{key!r} is done (scope {scope!r}), but its result was not stored: {why}", scope)
        self.args: tuple[Any, ...] = key, why, scope
        self.why = why


class ReplayedFailure(ClaimRejected):
    """The first run failed, and its failure was stored (`on_error="store"`).

    Attributes:
        kind: the type of that exception.
        text: its message.
    """

    def __init__(self, key: str, kind: str, text: str, scope: str = "claim") -> None:
        super().__init__(key, f"{key!r} failed before (scope {scope!r}) with {kind}: {text}", scope)
        self.args: tuple[Any, ...] = key, kind, text, scope
        self.kind = kind
        self.text = text


class SharedFailure(ClaimRejected):
    """The run for which this call waited failed (`on_error="share"`), and released the key. See `ReplayedFailure`."""

    def __init__(self, key: str, kind: str, text: str, scope: str = "claim") -> None:
        super().__init__(
            key, f"the run of {key!r} (scope {scope!r}) failed while this call waited: {kind}: {text}", scope
        )
        self.args: tuple[Any, ...] = key, kind, text, scope
        self.kind = kind
        self.text = text


class KeyReused(ClaimRejected):
    """The key was used with another payload: the fingerprints differ. Nothing ran; no result is disclosed."""

    def __init__(self, key: str, scope: str = "claim") -> None:
        text = f"{key!r} was used before with another payload (scope {scope!r}); use a new key for a new intent"
        super().__init__(key, text, scope)
        self.args: tuple[Any, ...] = key, scope


class LeaseLost(ClaimRejected):
    """The lease of this owner expired, or another owner took the key over. `token` is the fencing token it held."""

    def __init__(self, key: str, token: int, scope: str = "claim") -> None:
        super().__init__(key, f"the lease of {key!r} (scope {scope!r}, fencing token {token}) was lost", scope)
        self.args: tuple[Any, ...] = key, token, scope
        self.token = token


class OutcomeUnknown(ClaimRejected):
    """A former owner vanished or was interrupted, and `on_lease_loss="hold"` blocks the key.

    An operator has to find out whether the effect happened, and then call `gate.resolve`. `attempt` is the number of
    the attempt that did not end.
    """

    def __init__(self, key: str, attempt: int, scope: str = "claim") -> None:
        text = (
            f"{key!r} was started (attempt {attempt}) and its owner vanished or was interrupted; its outcome is "
            f"unknown. Look whether the effect happened, "
            f"then gate.resolve({key!r}, scope={scope!r}, done=True or False)"
        )
        super().__init__(key, text, scope)
        self.args: tuple[Any, ...] = key, attempt, scope
        self.attempt = attempt


class AttemptsExhausted(ClaimRejected):
    """The key failed `attempts` times and does not run again within its retention.

    In the verdict on the last attempt its `__cause__` is the error of that attempt.
    """

    def __init__(self, key: str, attempts: int, scope: str = "claim", last_error: str = "") -> None:
        text = (
            f"{key!r} was started {attempts} times without success{last_error and f', at last with {last_error}'}; "
            f"gate.forget({key!r}, scope={scope!r}) allows it again"
        )
        super().__init__(key, text, scope)
        self.args: tuple[Any, ...] = key, attempts, scope, last_error
        self.attempts = attempts


# -- server and connection --------------------------------------------------------------------------------------------


class StoreError(IdemgateError):
    """The server or the connection failed."""


class StoreUnavailable(StoreError):
    """The server did not answer before the deadline.

    `executed` is "no" if the request certainly did not run, else "unknown". `NotDurable` sets it to "yes".
    """

    def __init__(self, text: str, executed: str) -> None:
        super().__init__(text, executed)
        self._text = text
        self.executed = executed


class NotDurable(StoreUnavailable):
    """The call ran, but its write is less durable than `Gate(durability=...)` requires. `executed` is "yes".

    The write is in the primary's memory; a failover or a power loss may lose it. A retry is safe for a trigger with an
    `event_id`, a settlement and a completion.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text, "yes")
        self.args: tuple[Any, ...] = (text,)


class ServerRejected(StoreError):
    """The server answered with a permanent error: a missing permission, its configuration or a script error."""


class UnexpectedData(StoreError):
    """A key of the namespace holds data that idemgate did not write, or of another version. Nothing was written to it.

    A batch may have written to its other keys. If a single field or member is wrong, the text contains the command that
    removes it.

    Attributes:
        redis_key: the key.
        problem: what is wrong with its data.
    """

    def __init__(self, redis_key: str, text: str) -> None:
        remedy = _removal_command(redis_key, text) or "move or delete that key, or use another namespace"
        super().__init__(redis_key, text)
        self._text = f"{redis_key}: {text}. Nothing was written to it; {remedy}"
        self.redis_key = redis_key
        self.problem = text


def _removal_command(redis_key: str, text: str) -> str | None:
    """Return the command that removes the hash field or sorted set member named in `text`; None if it names none."""
    for verb, pattern in (
        ("HDEL", "holds corrupt data under (.*)"),
        ("ZREM", "lists (.*), which has no stored data"),
    ):
        if found := re.fullmatch(pattern, text, re.DOTALL):
            return f"{verb} {shlex.quote(redis_key)} {shlex.quote(found[1])}"
    return None


class DecodeError(StoreError):
    """Stored bytes cannot be decoded. The error is permanent. Nothing was written.

    The bytes are corrupt, were written by another program or version, exceed a limit, or do not fit the handler's
    annotation. `why` is the reason.
    """

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self._text = f"stored bytes cannot be decoded: {why}"
        self.why = why


# -- outcomes raised by handlers --------------------------------------------------------------------------------------


class Bury(Portable):
    """Raised by a handler to move the message to the dead letters without further attempts."""


class Retry(Portable):
    """Raised by a handler to retry the message.

    `delay` is the time until the next attempt: seconds, a timedelta or text such as "30s". None means the topic's
    backoff, or the `reclaim` of a stream or list. A stream takes the entry again after `reclaim` at the latest, also if
    the delay is longer. Pub/Sub does not retry.
    """

    def __init__(self, text: str = "", *, delay: Any = None) -> None:
        super().__init__(text)
        self.delay = delay


class Overloaded(Retry):
    """Raised by a handler to retry because a downstream service is overloaded (HTTP 429 or 503).

    It retries like `Retry`. A topic with an `Adaptive` limit lowers the limit if many handlers raise it.
    """


class DownstreamUnavailable(Retry):
    """Raised by a handler because a downstream service cannot be reached. Other messages would fail, too.

    The message is deferred, and the attempt does not count. Nor does it count in a guard (`max_attempts`), unless its
    `on_error` keeps the key or stores the failure. The worker takes no more messages of the topic until
    `delay` or the topic's backoff has passed. Then one delivery at a time tests the service, until one succeeds. A
    subscriber of a stream or list waits for `delay` or its `reclaim`.
    """


class PartialFailure(Portable):
    """Returned or raised by a handler if only some items of a merged payload failed.

    The other items are done and are not delivered again. SQS and Lambda call this a partial batch response.

    The whole delivery counts as a failed attempt if an item is not in the payload. The same holds for a merge policy
    without items (last, first, count, sum, min, max).

    Attributes:
        items: the failed items. For append and union, items of `delivery.payload`. For fields, the names of fields, or
            a mapping of field to its failed items, with `...` for the whole field. If empty, the delivery is done.
        delay: the time until the next attempt: seconds, a timedelta or text such as "30s". None means the topic's
            backoff.

    `reason` is stored as the failure and shown by dead letters.
    """

    def __init__(self, items: Any, reason: str = "", *, delay: Any = None) -> None:
        super().__init__(items, reason)
        self._text = reason or "some of its items failed"
        self.items = items
        self.delay = delay
