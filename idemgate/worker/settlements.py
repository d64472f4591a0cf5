"""The choice of a settlement: what a worker does with a delivery whose handler ended."""

from __future__ import annotations

import asyncio
import logging
from math import ceil
from typing import Any

from idemgate.core.codec.storable import refuse_unfinished_inside
from idemgate.core.text import event_log, last_line
from idemgate.core.verdict import Verdict, choose_step, failure_of, judge_error
from idemgate.errors import DownstreamUnavailable, IdemgateError, InvalidArgument, PartialFailure
from idemgate.store.retry import is_of_store
from idemgate.topics.deliveries import Settlement, nack_items
from idemgate.topics.messages import Delivery
from idemgate.topics.results import encode_result
from idemgate.worker.consumer import InFlight, attempt_number

__all__ = ["choose_settlement"]

log: logging.Logger = event_log("idemgate.worker")
_LOST_DELAY = 1000
"""Ms until a message returns whose guard lost its lease. Another owner runs its key, so the guard then defers it."""


def choose_settlement(entry: InFlight, verdict: Verdict[Any], stopping: bool) -> Settlement:
    """Choose how to settle a delivery after its handler ended. Count and log what the operator must know.

    - Handled, or done before: acknowledge, with the result if the topic keeps results.
    - Rejected, or an unreadable message: bury.
    - In progress, lease of the guard lost, or store unavailable before the handler ran: defer; this does not count as
      an attempt.
    - `DownstreamUnavailable`: defer, and pause the topic.
    - Cancelled by the stop of the worker: return; this does not count as an attempt either.
    - `PartialFailure`: retry some items after the backoff.
    - Any other failure: retry the message after the backoff.

    Args:
        entry: The delivery that the handler got.
        verdict: The verdict on it.
        stopping: Whether the worker is stopping.
    """
    if isinstance(verdict.value, PartialFailure):  # returning it counts as raising it
        verdict = judge_error(verdict.value)
    delivery, error, consumer = entry.delivery, verdict.error, entry.consumer
    counters = consumer.context.counters
    consumer.backpressure.on_handler_end(delivery, error)
    try:
        settlement = _of_verdict(entry, verdict, stopping)
    except Exception as invalid:  # an invalid backoff of the user must not end the worker
        facts = entry.log_facts()
        log.exception("worker.bad_delay topic=%r key=%r", *facts.values(), extra=facts)
        settlement = Settlement("nack", delivery, 1000, repr(invalid)[:500])
    if settlement.verb == "ack" and consumer.poller.calls.policy.result_retention is not None:
        try:
            settlement = _add_result(entry, settlement, verdict.value)
        except InvalidArgument as unfinished:
            error, settlement = unfinished, Settlement("bury", delivery, failure=last_line(unfinished))
    if verdict.outcome == "duplicate":
        counters.add("worker.duplicate")
    if error is not None and settlement.verb not in ("ack", "defer", "return"):
        facts, attempt = entry.log_facts(), attempt_number(delivery)
        log.warning(
            "worker.handler_failed topic=%r key=%r attempt=%s", *facts.values(), attempt,
            exc_info=error, extra=facts | {"attempt": attempt, "token": delivery.token},
        )  # fmt: skip
        counters.add("worker.failed")
        retry_after = settlement.delay / 1000 if settlement.verb == "nack" and not _is_last(entry, attempt) else None
        failed = error if retry_after is None else failure_of(error)
        if failed is not None:
            text = (failed is error and settlement.failure) or last_line(failed)
            consumer.context.activity.note_failure(
                delivery.topic, delivery.key, attempt, text, retry_after, is_of_store(failed)
            )
    return settlement


def _is_last(entry: InFlight, attempt: int | None) -> bool:
    """Return True if the store buries the message after this attempt."""
    return attempt is not None and attempt >= entry.consumer.poller.calls.policy.max_attempts


def _of_verdict(entry: InFlight, verdict: Verdict[Any], stopping: bool) -> Settlement:
    delivery, backoff = entry.delivery, entry.consumer.poller.calls.policy.backoff
    step, outcome, error = choose_step(verdict), verdict.outcome, verdict.error
    if isinstance(error, DownstreamUnavailable):
        _begin_pause(entry, verdict, error)  # also if a stored failure buries the message: the service is away
    if step == "pause":
        return Settlement("defer", delivery, delay=ceil(entry.consumer.backpressure.pause * 1000))
    if step == "ack":
        return Settlement("ack", delivery)
    if outcome == "lost":
        return Settlement("defer", delivery, delay=_LOST_DELAY)
    if outcome == "in_progress":
        return Settlement("defer", delivery, delay=max(1, round((verdict.retry_after or 0) * 1000)))
    assert error is not None, "the other verdicts have an error"
    if step == "bury" or attempt_number(delivery) is None:
        return Settlement("bury", delivery, failure=last_line(error))
    if step == "defer":
        return Settlement("defer", delivery, delay=backoff.ms(delivery.attempt, error))
    if stopping and isinstance(error, asyncio.CancelledError):
        return Settlement("return", delivery)
    delay = verdict.retry_after
    delay_ms = backoff.ms(delivery.attempt, error) if delay is None else round(delay * 1000)
    if isinstance(error, PartialFailure):
        return _settle_partially(delivery, error, delay_ms)
    return Settlement("nack", delivery, delay_ms, last_line(error))


def _begin_pause(entry: InFlight, verdict: Verdict[Any], error: DownstreamUnavailable) -> None:
    """Pause the topic of a delivery whose downstream service is unavailable."""
    consumer, backpressure = entry.consumer, entry.consumer.backpressure
    consumer.context.counters.add("worker.downstream_unavailable")
    if not backpressure.pause:  # else another delivery of the same outage began it
        seconds = verdict.retry_after
        if seconds is None:
            seconds = consumer.poller.calls.policy.backoff.ms(backpressure.failures + 1, error) / 1000
        backpressure.begin_pause(seconds, error)


def _settle_partially(delivery: Delivery[Any], error: PartialFailure, delay: int) -> Settlement:
    """Retry the failed items. If an item is not in the message, retry the whole message, so that nothing is lost."""
    try:
        return nack_items(delivery, error.items, delay, last_line(error))
    except IdemgateError as invalid:
        return Settlement("nack", delivery, delay, last_line(invalid))


def _add_result(entry: InFlight, settlement: Settlement, value: object) -> Settlement:
    """Add what the handler returned to the acknowledgement. A value that cannot be stored is counted and logged.

    Raises InvalidArgument if work that has not ended is in it.
    """
    result = encode_result(entry.consumer.context.codec, value)
    if result[:1] == b"n":
        refuse_unfinished_inside(value)
        facts = entry.log_facts() | {"why": result[1:].decode()}
        log.warning("worker.result_not_stored topic=%r key=%r why=%r", *facts.values(), extra=facts)
        entry.consumer.context.counters.add("worker.result_not_stored")
    return settlement._replace(result=result)
