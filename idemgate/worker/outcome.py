"""Mapping from the end of a handler to the settlement of its delivery."""

from __future__ import annotations

import asyncio
from typing import Any

from idemgate.core.text import last_line
from idemgate.core.verdict import Verdict
from idemgate.errors import DecodeError, IdemgateError, PartialFailure, StoreError
from idemgate.topics.deliveries import Settlement, nack_items
from idemgate.topics.messages import Delivery
from idemgate.topics.policy import Policy

__all__ = ["attempt_number", "choose_settlement", "count_dropped"]

_LOST_DELAY = 1000
"""Ms until a message returns whose guard lost its lease. Another owner runs its key, so the guard then defers it."""


def choose_settlement(
    delivery: Delivery[Any], verdict: Verdict[Any], policy: Policy, stopping: bool = False
) -> Settlement:
    """Choose how to settle a delivery after its handler ended.

    - Handled, or done before: acknowledge.
    - Rejected, or an unreadable message: bury.
    - In progress, lease of the guard lost, or store unavailable before the handler ran: defer; this does not count as
      an attempt.
    - Cancelled by the stop of the worker: return; this does not count as an attempt either.
    - `PartialFailure`: retry some items after the backoff.
    - Any other failure: retry the message after the backoff.

    Args:
        delivery: The delivery that the handler got.
        verdict: The verdict on it.
        policy: The topic's policy, for its backoff.
        stopping: Whether the worker is stopping.
    """
    outcome, error = verdict.outcome, verdict.error
    if verdict.action == "ack":
        return Settlement("ack", delivery)
    if outcome == "lost":
        return Settlement("defer", delivery, delay=_LOST_DELAY)
    if outcome == "in_progress":
        return Settlement("defer", delivery, delay=max(1, round((verdict.retry_after or 0) * 1000)))
    assert error is not None, "the other verdicts have an error"
    if outcome == "rejected" or attempt_number(delivery) is None:
        return Settlement("bury", delivery, failure=last_line(error))
    if not verdict.ran and isinstance(error, StoreError):
        return Settlement("defer", delivery, delay=policy.backoff.ms(delivery.attempt, error))
    if stopping and isinstance(error, asyncio.CancelledError):
        return Settlement("return", delivery)
    delay = verdict.retry_after
    delay_ms = policy.backoff.ms(delivery.attempt, error) if delay is None else round(delay * 1000)
    if isinstance(error, PartialFailure):
        return _settle_partially(delivery, error, delay_ms)
    return Settlement("nack", delivery, delay_ms, last_line(error))


def _settle_partially(delivery: Delivery[Any], error: PartialFailure, delay: int) -> Settlement:
    """Retry the failed items. If an item is not in the message, retry the whole message, so that nothing is lost."""
    try:
        return nack_items(delivery, error.items, delay, last_line(error))
    except IdemgateError as invalid:
        return Settlement("nack", delivery, delay, last_line(invalid))


def count_dropped(delivery: Delivery[Any]) -> int:
    """Return the number of dropped items; 0 if the message cannot be decoded."""
    try:
        return delivery.dropped
    except DecodeError:
        return 0


def attempt_number(delivery: Delivery[Any]) -> int | None:
    """Return the number of the attempt; None if the message cannot be decoded."""
    try:
        return delivery.attempt
    except DecodeError:
        return None
