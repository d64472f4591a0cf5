"""Mapping from the end of a handler to the settlement of its delivery."""

from __future__ import annotations

import asyncio
from typing import Any

from idemgate.core.durations import milliseconds
from idemgate.core.failure import last_line
from idemgate.errors import (
    AlreadyDone,
    AlreadyInProgress,
    DecodeError,
    IdemgateError,
    PartialFailure,
    ResultUnavailable,
    Retry,
    is_permanent,
)
from idemgate.topics.calls import Settlement, nack_items
from idemgate.topics.messages import Delivery
from idemgate.topics.policy import Policy

__all__ = ["attempt_number", "choose_settlement"]

_DONE = (AlreadyDone, ResultUnavailable)
"""Errors of a guarded handler whose work is done."""


def choose_settlement(
    delivery: Delivery[Any], error: BaseException | None, policy: Policy, stopping: bool = False
) -> Settlement:
    """Choose how to settle a delivery after its handler ended.

    - No error, or a guard that says that the work is done: acknowledge.
    - `Bury`, any other permanent error or an unreadable message: bury.
    - `AlreadyInProgress`: defer; this does not count as an attempt.
    - Cancelled by the stop of the worker: retry at once.
    - `PartialFailure`: retry some items after the backoff.
    - Any other error: retry the message after the backoff.

    Args:
        delivery: The delivery that the handler got.
        error: The exception that the handler raised, or the `PartialFailure` that it returned. None means success.
        policy: The topic's policy, for its backoff.
        stopping: Whether the worker is stopping.
    """
    if error is None or isinstance(error, _DONE):
        return Settlement("ack", delivery)
    if is_permanent(error) or attempt_number(delivery) is None:
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
        return _settle_partially(delivery, error, delay)
    return Settlement("nack", delivery, delay, last_line(error))


def _settle_partially(delivery: Delivery[Any], error: PartialFailure, delay: int) -> Settlement:
    """Retry the failed items. If an item is not in the message, retry the whole message, so that nothing is lost."""
    try:
        return nack_items(delivery, error.items, delay, last_line(error))
    except IdemgateError as invalid:
        return Settlement("nack", delivery, delay, last_line(invalid))


def attempt_number(delivery: Delivery[Any]) -> int | None:
    """Return the number of the attempt; None if the message cannot be decoded."""
    try:
        return delivery.attempt
    except DecodeError:
        return None
