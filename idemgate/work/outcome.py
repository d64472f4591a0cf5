"""What the end of a handler means for its delivery."""

from __future__ import annotations

import traceback
from typing import Any

from idemgate.core.durations import milliseconds
from idemgate.core.messages import Delivery
from idemgate.core.policy import Policy
from idemgate.core.topics import Settlement
from idemgate.errors import (
    AlreadyInProgress,
    AttemptsExhausted,
    Bury,
    KeyReused,
    NotDecodable,
    OutcomeUnknown,
    Retry,
)

__all__ = ["settlement_of"]

_HOPELESS = (Bury, KeyReused, OutcomeUnknown, AttemptsExhausted, NotDecodable)


def settlement_of(delivery: Delivery[Any], error: BaseException | None, policy: Policy) -> Settlement:
    """No error: ack. `Bury` and what repeating cannot mend: to the dead letters. Another owner runs the key: later,
    and that was no
    attempt. Cancelled by the worker's stop: at once. All else: again after the backoff."""
    if error is None:
        return Settlement("ack", delivery)
    if isinstance(error, _HOPELESS):
        return Settlement("bury", delivery, failure=last_line(error))
    if isinstance(error, AlreadyInProgress):
        return Settlement("defer", delivery, delay=max(1, round(error.retry_after * 1000)))
    if not isinstance(error, Exception):
        return Settlement("nack", delivery, failure="stopped before it had finished")
    if isinstance(error, Retry) and error.delay is not None:
        return Settlement("nack", delivery, milliseconds(error.delay, "delay", zero=True), last_line(error))
    return Settlement("nack", delivery, policy.backoff.ms(delivery.attempt, error), last_line(error))


def last_line(error: BaseException) -> str:
    """The last line of the traceback, at most 500 characters: what a dead letter says of its end."""
    lines = [line for line in "".join(traceback.format_exception_only(error)).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:500]
