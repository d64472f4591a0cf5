"""What the end of a handler means for its delivery."""

from __future__ import annotations

import asyncio
from typing import Any

from idemgate.core.durations import milliseconds
from idemgate.errors import (
    AlreadyDone,
    AlreadyInProgress,
    AttemptsExhausted,
    Bury,
    DecodeError,
    IdemgateError,
    InvalidArgument,
    KeyReused,
    OutcomeUnknown,
    PartialFailure,
    ReplayedFailure,
    ResultUnavailable,
    Retry,
)
from idemgate.topics.calls import Settlement, failed
from idemgate.topics.messages import Delivery
from idemgate.topics.policy import Policy

__all__ = ["attempt_of", "last_line", "settlement_of"]

_HOPELESS = (
    Bury, InvalidArgument, KeyReused, OutcomeUnknown, AttemptsExhausted, AlreadyDone, ResultUnavailable, ReplayedFailure,
    DecodeError,
)  # fmt: skip
"""The same again tomorrow, so somebody has to look. A handler that is guarded and done returns; it raises none of
these."""


def settlement_of(
    delivery: Delivery[Any], error: BaseException | None, policy: Policy, stopping: bool = False
) -> Settlement:
    """No error: ack. `Bury` and what repeating cannot mend: to the dead letters. Another owner runs the key: later,
    and that was no attempt. Cancelled by the worker's stop: at once. `PartialFailure`: some items, again after the backoff. All
    else: all of it."""
    if error is None:
        return Settlement("ack", delivery)
    if isinstance(error, _HOPELESS) or attempt_of(delivery) is None:
        return Settlement("bury", delivery, failure=last_line(error))
    if isinstance(error, AlreadyInProgress):
        return Settlement("defer", delivery, delay=max(1, round(error.retry_after * 1000)))
    if stopping and isinstance(error, asyncio.CancelledError):
        return Settlement("nack", delivery, failure="cancelled: its worker stopped before it had finished")
    if isinstance(error, (Retry, PartialFailure)) and error.delay is not None:
        delay = milliseconds(error.delay, "delay", zero=True)
    else:
        delay = policy.backoff.ms(delivery.attempt, error)
    if isinstance(error, PartialFailure):
        return _in_part(delivery, error, delay)
    return Settlement("nack", delivery, delay, last_line(error))


def _in_part(delivery: Delivery[Any], error: PartialFailure, delay: int) -> Settlement:
    """Items that are not there fail the whole attempt: what the handler has done is not known, and nothing is lost."""
    try:
        return failed(delivery, error.items, delay, last_line(error))
    except IdemgateError as wrong:
        return Settlement("nack", delivery, delay, last_line(wrong))


def attempt_of(delivery: Delivery[Any]) -> int | None:
    """The number of the attempt; None if the message cannot be read."""
    try:
        return delivery.attempt
    except DecodeError:
        return None


def last_line(error: BaseException) -> str:
    """The traceback's last line, at most 500 characters: what a dead letter says of its end. Where the
    exception's text has many, its first and its last: what went wrong often stands at the beginning."""
    kind = type(error)
    name = (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )
    said = str(error).strip().splitlines()
    text = f"{name}: {said[0]}{f' ... {said[-1]}' if len(said) > 1 else ''}" if said else name
    return text[:500].encode(errors="backslashreplace").decode()  # a lone surrogate of some file name cannot be sent
