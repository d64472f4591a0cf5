"""The verdict on one message: what happened to it, and the one table of what an error means for a message."""

from __future__ import annotations

import logging
from typing import Any, Generic, Literal, NamedTuple, TypeVar, cast

from idemgate.core.backoff import BackoffPolicy, delays
from idemgate.core.durations import milliseconds
from idemgate.core.text import one_line
from idemgate.errors import (
    AlreadyDone,
    AlreadyInProgress,
    AttemptsExhausted,
    Bury,
    DecodeError,
    DownstreamUnavailable,
    InvalidArgument,
    KeyReused,
    LeaseLost,
    NotDurable,
    OutcomeUnknown,
    PartialFailure,
    ReplayedFailure,
    ResultUnavailable,
    Retry,
    StoreError,
    StoreUnavailable,
)

__all__ = [
    "HANDLED", "Action", "Outcome", "Step", "Verdict", "choose_step", "counts_no_attempt", "error_of_run",
    "failure_of", "judge_error", "verdict_of",
]  # fmt: skip

log: logging.Logger = logging.getLogger("idemgate.once")
R_co = TypeVar("R_co", covariant=True)

Outcome = Literal["handled", "duplicate", "in_progress", "rejected", "failed", "lost", "unguarded", "skipped"]
Action = Literal["ack", "retry", "reject"]
Step = Literal["ack", "bury", "pause", "defer", "retry"]

_DUPLICATE = (AlreadyDone, ResultUnavailable)
_PERMANENT = (
    Bury, InvalidArgument, KeyReused, ReplayedFailure, OutcomeUnknown, AttemptsExhausted, DecodeError,
)  # fmt: skip
"""Errors that each further delivery of the message would raise again."""
_UNCOUNTED = (DownstreamUnavailable, StoreUnavailable, AlreadyInProgress, LeaseLost)
_RETRIES = frozenset({
    "idemgate.errors.Retry", "celery.exceptions.Retry", "dramatiq.errors.Retry", "faststream.exceptions.NackMessage",
})  # fmt: skip
"""The exceptions by which a handler asks for another attempt. A subclass of our `Retry` says what failed."""


class Verdict(NamedTuple, Generic[R_co]):
    """The verdict on one message: what happened to it, and what a consumer does with it.

    | outcome | meaning | `action` |
    |---|---|---|
    | "handled" | the handler returned, and its key is done | "ack" |
    | "duplicate" | the key was done before; the handler did not run | "ack" |
    | "in_progress" | another owner runs the key | "retry" after `retry_after` seconds |
    | "rejected" | each further delivery ends in the same error | "reject": dead-letter it |
    | "failed" | the handler raised (also SharedFailure), or no store answered | "retry", after `retry_after` if set |
    | "lost" | the lease was lost before the handler started or returned; another owner may run | "retry" |
    | "unguarded" | the handler returned without a guard, as an option asks | "ack" |
    | "skipped" | the message has no key, and `on_missing_key` is "skip" | "ack" |

    Attributes:
        outcome: one of the words above.
        value: what the handler returned, or the stored result of a duplicate.
        error: the error of the handler, of the key or of the store. None if there is none; never with "rejected", for
            which a type checker wants `assert verdict.error is not None` before `raise verdict.error`. With "handled"
            it is the StoreError that kept the completion from being stored, so that a later copy may run again. Or it
            is the exception by which the handler told its framework something, if `on_error` said "complete": raise it.
        retry_after: seconds until another attempt makes sense. None: the consumer decides.
        attempt: the number of this attempt, or of the owner's if the key is done or in progress. 0: unknown.
        token: the fencing token. 0 if no claim was granted.
        replayed: True if `value` or `error` is the stored end of an earlier run.
        ran: True if the handler was called.
    """

    outcome: Outcome
    value: R_co | None = None
    error: Exception | None = None
    retry_after: float | None = None
    attempt: int = 0
    token: int = 0
    replayed: bool = False
    ran: bool = False

    @property
    def action(self) -> Action:
        """The way to settle the message: "ack", "retry" (redeliver it) or "reject" (dead-letter it).

        A message in progress is retried, also with `on_in_progress="skip"`, because the other owner may still fail.
        """
        return _ACTIONS[self.outcome]

    @property
    def exhausted(self) -> bool:
        """True if no attempt is left of `max_attempts`, so that the outcome is "rejected".

        That of the last attempt itself says so, too: its `error` is AttemptsExhausted, whose `__cause__` is the error
        of the handler. A later copy has no cause.
        """
        return isinstance(self.error, AttemptsExhausted)

    def delay(self, backoff: BackoffPolicy) -> float:
        """Return the seconds until another attempt: `retry_after`, or that of the backoff if it is None.

        Args:
            backoff: the delay after each attempt, as of a topic. It is one duration (5 or "5s"), or a list of them
                whose last one repeats. It may be a tenacity wait strategy. None: full jitter from 1 s to 10 min.

        Raises:
            InvalidArgument: `backoff` is none of these.
        """
        if self.retry_after is not None:
            return self.retry_after
        return delays(backoff).ms(max(self.attempt, 1), self.error) / 1000


_ACTIONS: dict[Outcome, Action] = {
    "handled": "ack", "duplicate": "ack", "unguarded": "ack", "skipped": "ack",
    "in_progress": "retry", "failed": "retry", "lost": "retry", "rejected": "reject",
}  # fmt: skip
HANDLED: Verdict[Any] = Verdict("handled", ran=True)
"""The verdict on a handler that returned None, made once because it is the most frequent."""


def verdict_of(error: BaseException | None) -> Verdict[Any]:
    """Return what an error means for the message whose handling raised it; None means that it was handled.

    Use it in a consumer's loop that calls a guarded function. It is the only table of permanent errors: workers,
    subscribers and integrations use it, too. It sends nothing.
    """
    if error is None:
        return HANDLED
    if not isinstance(error, Exception):  # such as a cancellation, of which workers and subscribers get a verdict
        return Verdict("failed", None, cast("Exception", error))
    if isinstance(error, _DUPLICATE):
        value = error.result if isinstance(error, AlreadyDone) else None
        return Verdict("duplicate", value, error, replayed=value is not None)
    if isinstance(error, AlreadyInProgress):
        return Verdict("in_progress", None, error, error.retry_after)
    if isinstance(error, _PERMANENT):
        return Verdict("rejected", None, error, replayed=isinstance(error, ReplayedFailure))
    if isinstance(error, LeaseLost):
        return Verdict("lost", None, error)
    return Verdict("failed", None, error, _delay_of(error))


def judge_error(error: BaseException) -> Verdict[Any]:
    """Return the verdict on a message whose handler was called and raised this error."""
    return verdict_of(error)._replace(ran=True)


def error_of_run(error: BaseException) -> BaseException:
    """Return what the handler raised. `error` is that of a verdict: AttemptsExhausted has it as its cause."""
    return (isinstance(error, AttemptsExhausted) and error.__cause__) or error


def counts_no_attempt(error: BaseException | None) -> bool:
    """Return whether a run that raised this error counts as no attempt of its key: the error is not the run's fault.

    `NotDurable` counts. The write that raised it was executed and each further run may repeat it.
    """
    return isinstance(error, _UNCOUNTED) and not isinstance(error, NotDurable)


def failure_of(error: BaseException) -> BaseException | None:
    """Return what failed in a run that raised this error, for those who look for failures.

    It is None if the handler asked for another attempt, and named no error as the reason (`from`, `exc` of Celery).
    """
    kind = type(error)
    if f"{kind.__module__}.{kind.__qualname__}" not in _RETRIES:
        return error
    named: object = getattr(error, "exc", None)
    return named if isinstance(named, BaseException) else error.__cause__


def choose_step(verdict: Verdict[Any]) -> Step:
    """Return what a worker or subscriber does with a message after its handler ended or could not run.

    | step | meaning | counts as an attempt |
    |---|---|---|
    | "ack" | it is done now or was done before | |
    | "bury" | each further delivery ends in the same error: dead-letter it | |
    | "pause" | the downstream service is unavailable: deliver it again after a pause of the whole source | no |
    | "defer" | it is in progress or its lease was lost or no store answered before it ran: deliver it again | no |
    | "retry" | the handler raised: deliver it again after the backoff | yes |
    """
    if verdict.action != "retry":
        return "ack" if verdict.action == "ack" else "bury"
    if isinstance(verdict.error, DownstreamUnavailable):
        return "pause"
    if verdict.outcome != "failed" or (not verdict.ran and isinstance(verdict.error, StoreError)):
        return "defer"
    return "retry"


def _delay_of(error: BaseException) -> float | None:
    """Return the delay of a `Retry` or a `PartialFailure` in seconds. An invalid delay is logged and ignored."""
    if not isinstance(error, Retry | PartialFailure) or error.delay is None:
        return None
    try:
        return milliseconds(error.delay, "delay", zero=True) / 1000
    except InvalidArgument as invalid:
        log.error("verdict.bad_delay: %s", one_line(invalid), extra={"error": str(invalid)})  # noqa: TRY400 - the text has the cause
        return None
