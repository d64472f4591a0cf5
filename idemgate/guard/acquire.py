"""Acquire claims, and roll them back when the caller is cancelled."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from idemgate.core.calls import KEY_ERRORS, Batch, PerKeyCall
from idemgate.core.clock import monotonic
from idemgate.core.text import one_line
from idemgate.errors import NotDurable, ServerRejected, StoreError
from idemgate.guard.attempt import ClaimAttempt, build_claim_calls, build_release_calls
from idemgate.guard.claims import ClaimReply, Renewal
from idemgate.store.context import Context

if TYPE_CHECKING:
    from idemgate.store.aio import PendingCall

__all__ = [
    "acquire", "acquire_async", "acquire_many", "acquire_many_async", "may_start", "renew_before_start",
    "renew_before_start_async", "renew_late", "renew_late_async", "rollback", "rollback_async",
]  # fmt: skip

log = logging.getLogger("idemgate.once")


def acquire(context: Context, attempt: ClaimAttempt) -> ClaimReply:
    """Send a claim and return its reply.

    If the claim was granted but not replicated as `durability` asks, release it and raise NotDurable.
    """
    try:
        return context.link.run(attempt.build_claim())
    except NotDurable:
        rollback(context, attempt)
        raise


def rollback(context: Context, attempt: ClaimAttempt) -> None:
    """Release a claim that was granted, with one try and no retries."""
    if not attempt.options.at_most_once:
        with suppress(StoreError):
            context.link.run(attempt.give_up().build_release(undo=True), within=0)


async def acquire_async(context: Context, attempt: ClaimAttempt) -> ClaimReply:
    """Send a claim and return its reply.

    If the caller is cancelled, a background task waits for the reply and releases a granted claim.
    """
    pending = context.aio_link.start(attempt.build_claim())
    try:
        return await pending.answer
    except (NotDurable, asyncio.CancelledError) as error:
        await rollback_async(context, attempt, pending, error)
        raise


async def rollback_async(
    context: Context, attempt: ClaimAttempt, pending: PendingCall[ClaimReply], error: BaseException
) -> None:
    """Release a granted claim after a NotDurable error or a cancellation."""
    link = context.aio_link
    if not isinstance(error, NotDurable):
        link.spawn(_rollback_when_answered(context, attempt.give_up(), pending.outcome()))
    elif not attempt.options.at_most_once:
        with suppress(StoreError):
            await link.run(attempt.give_up().build_release(undo=True), within=0)


async def _rollback_when_answered(context: Context, attempt: ClaimAttempt, pending: asyncio.Future[ClaimReply]) -> None:
    """Wait for the reply of a cancelled claim, and release the claim if it was granted."""
    try:
        entry = await pending
        if entry.state == "started" and not attempt.options.at_most_once:
            await context.aio_link.run(attempt.build_release(undo=True))
    except StoreError as error:
        facts = attempt.log_facts()
        log.warning(
            "once.cancelled_claim_left scope=%r key=%r: %s",
            *facts.values(),
            one_line(error),
            extra=facts | {"error": str(error)},
        )


def renew_before_start(context: Context, attempt: ClaimAttempt) -> None:
    """Renew a lease of which less than half is left. Raise LeaseLost if the work must not start."""
    leased_at = monotonic()
    if not may_start(context, attempt, leased_at, context.link.run(attempt.build_renewal())):
        rollback(context, attempt)
        raise attempt.build_lease_lost()


async def renew_before_start_async(context: Context, attempt: ClaimAttempt) -> None:
    """Renew a lease of which less than half is left; see `renew_before_start`."""
    leased_at, link = monotonic(), context.aio_link
    try:
        renewal = await link.run(attempt.build_renewal())
    except asyncio.CancelledError:
        link.spawn(_release_async(context, attempt.give_up()))
        raise
    if not may_start(context, attempt, leased_at, renewal):
        await _release_async(context, attempt.give_up())
        raise attempt.build_lease_lost()


def may_start(context: Context, attempt: ClaimAttempt, leased_at: float, renewal: Renewal) -> bool:
    """Return True if the lease that was renewed may start its work. Count and log one that may not."""
    attempt.leased_at = leased_at
    if renewal != "lost" and not attempt.needs_renewal:
        return True
    context.counters.add("once.not_started")
    facts = attempt.log_facts()
    log.warning("once.not_started scope=%r key=%r", *facts.values(), extra=facts)
    return False


async def _release_async(context: Context, attempt: ClaimAttempt) -> None:
    """Release a claim whose work did not start, with one try."""
    with suppress(StoreError):
        await context.aio_link.run(attempt.build_release(undo=True), within=0)


# Claims of a batch travel together. Either all are answered, or the granted ones are released.

ReplyOrError = ClaimReply | StoreError
"""The reply to one claim of a batch, or the error about what is stored under its key."""


def acquire_many(context: Context, attempts: Sequence[ClaimAttempt]) -> list[ReplyOrError]:
    """Send many claims together and return their replies in order.

    If the store fails, release the granted claims with one try and raise the error.
    """
    outcomes = context.link.run_each(build_claim_calls(attempts, context.batch_size))
    if (error := _first_failure(outcomes)) is not None:
        for calls in _build_rollback(context, attempts, outcomes):
            context.link.run_each(calls, within=0)
        raise error
    return outcomes


async def acquire_many_async(context: Context, attempts: Sequence[ClaimAttempt]) -> list[ReplyOrError]:
    """Send many claims together and return their replies in order.

    If the store fails, release the granted claims with one try and raise the error. If the caller is cancelled, a
    background task waits for the replies and releases the granted claims.
    """
    link = context.aio_link
    pending = link.start_each(build_claim_calls(attempts, context.batch_size))
    try:
        outcomes = await asyncio.shield(pending)
    except asyncio.CancelledError:
        link.spawn(_rollback_many(context, [attempt.give_up() for attempt in attempts], pending))
        raise
    if (error := _first_failure(outcomes)) is not None:
        given_up = [attempt.give_up() for attempt in attempts]
        await asyncio.shield(link.spawn(_rollback_many(context, given_up, pending, within=0)))
        raise error
    return outcomes


def renew_late(context: Context, attempts: Sequence[ClaimAttempt], outcomes: list[ReplyOrError]) -> list[ReplyOrError]:
    """Renew the granted claims of which less than half of the lease is left. A lost one becomes "stale"."""
    if not (late := _find_late(attempts, outcomes)):
        return outcomes
    leased_at = monotonic()
    renewals = context.link.run_all(Batch([attempts[index].build_renewal() for index in late], list))
    return _apply_renewals(context, attempts, outcomes, dict(zip(late, renewals, strict=True)), leased_at)


async def renew_late_async(
    context: Context, attempts: Sequence[ClaimAttempt], outcomes: list[ReplyOrError]
) -> list[ReplyOrError]:
    """Renew the granted claims of which less than half of the lease is left; see `renew_late`."""
    if not (late := _find_late(attempts, outcomes)):
        return outcomes
    leased_at = monotonic()
    renewals = await context.aio_link.run_all(Batch([attempts[index].build_renewal() for index in late], list))
    return _apply_renewals(context, attempts, outcomes, dict(zip(late, renewals, strict=True)), leased_at)


def _find_late(attempts: Sequence[ClaimAttempt], outcomes: Sequence[ReplyOrError]) -> list[int]:
    """Return the indexes of the granted claims of which less than half of the lease is left.

    The claims were sent together with the same lease, so the first one answers for all.
    """
    if not attempts or not attempts[0].needs_renewal:
        return []
    return [
        index
        for index, outcome in enumerate(outcomes)
        if isinstance(outcome, ClaimReply) and outcome.state == "started"
    ]


def _apply_renewals(
    context: Context,
    attempts: Sequence[ClaimAttempt],
    outcomes: Sequence[ReplyOrError],
    renewals: dict[int, Renewal],
    leased_at: float,
) -> list[ReplyOrError]:
    """Return the outcomes after these renewals, by index. A claim whose renewal is late itself gets a heartbeat."""
    lost = set[int]()
    for index, renewal in renewals.items():
        attempts[index].leased_at = leased_at
        if renewal == "lost":
            may_start(context, attempts[index], leased_at, renewal)
            lost.add(index)
    return [ClaimReply("stale") if index in lost else outcome for index, outcome in enumerate(outcomes)]


async def _rollback_many(
    context: Context,
    attempts: Sequence[ClaimAttempt],
    pending: asyncio.Task[list[ReplyOrError]],
    within: float | None = None,
) -> None:
    """Wait for the replies of many claims, and release those that were granted."""
    for calls in _build_rollback(context, attempts, await pending):
        for error in await context.aio_link.run_each(calls, within):
            if isinstance(error, StoreError) and within is None:
                log.warning("once.cancelled_claim_left: %s", one_line(error), extra={"error": str(error)})


def _first_failure(outcomes: Sequence[ReplyOrError]) -> StoreError | None:
    """Return the first error that is not about a single key, or None."""
    for outcome in outcomes:
        if isinstance(outcome, StoreError) and not isinstance(outcome, KEY_ERRORS):
            return outcome
    return None


def _build_rollback(
    context: Context, attempts: Sequence[ClaimAttempt], outcomes: Sequence[ReplyOrError]
) -> tuple[list[PerKeyCall[bool]], list[PerKeyCall[bool]]]:
    """Build the calls that release the claims that may be held.

    Return one call first and the others second. The first call loads the script on a server that does not have it.
    """
    pairs = zip(attempts, outcomes, strict=True)
    calls = build_release_calls(
        [attempt for attempt, outcome in pairs if _may_hold(outcome)], context.batch_size, undo=True
    )
    return calls[:1], calls[1:]


def _may_hold(outcome: ReplyOrError) -> bool:
    """Return True if the claim was granted, or if a failed call may have granted it."""
    return (
        outcome.state == "started"
        if isinstance(outcome, ClaimReply)
        else isinstance(outcome, NotDurable | ServerRejected)
    )
