"""The claims of a batch travel together: either all are answered, or the granted ones are released."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter

from idemgate.core.calls import KEY_ERRORS, Batch, PerKeyCall
from idemgate.core.clock import monotonic
from idemgate.core.text import one_line
from idemgate.errors import NotDurable, ServerRejected, StoreError
from idemgate.guard.call import is_late, may_start
from idemgate.guard.claim_calls import ClaimReply, Renewal
from idemgate.guard.request import Grant, Request, build_renewal
from idemgate.store.context import Context

__all__ = ["ReplyOrError", "acquire_many", "acquire_many_async", "renew_late", "renew_late_async"]

log: logging.Logger = logging.getLogger("idemgate.once")
ReplyOrError = ClaimReply | StoreError
"""The reply to one claim of a batch, or the error about what is stored under its key."""


def acquire_many(context: Context, requests: Sequence[Request]) -> list[ReplyOrError]:
    """Send many claims together and return their replies in order.

    If the store fails, release the granted claims with one try and raise the error.
    """
    outcomes = context.link.run_each(_build_claims(requests, context.batch_size))
    if (error := _first_failure(outcomes)) is not None:
        for calls in _build_rollback(context, requests, outcomes):
            context.link.run_each(calls, within=0)
        raise error
    return outcomes


async def acquire_many_async(context: Context, requests: Sequence[Request]) -> list[ReplyOrError]:
    """Send many claims together and return their replies in order.

    If the store fails, release the granted claims with one try and raise the error. If the caller is cancelled, a
    background task waits for the replies and releases the granted claims.
    """
    link = context.aio_link
    pending = link.start_each(_build_claims(requests, context.batch_size))
    try:
        outcomes = await asyncio.shield(pending)
    except asyncio.CancelledError:
        link.spawn(_rollback_many(context, requests, pending))
        raise
    if (error := _first_failure(outcomes)) is not None:
        await asyncio.shield(link.spawn(_rollback_many(context, requests, pending, within=0)))
        raise error
    return outcomes


def renew_late(
    context: Context, requests: Sequence[Request], replies: list[ReplyOrError], sent_at: float
) -> tuple[list[ReplyOrError], float]:
    """Renew the granted claims of which less than half of the lease is left. A lost one becomes "stale".

    Return the replies, and the time from which the leases count.
    """
    if not (late := _find_late(requests, replies, sent_at)):
        return replies, sent_at
    leased_at = monotonic()
    renewals = context.link.run_all(Batch([build_renewal(grant) for grant in late.values()], list))
    return _apply_renewals(context, late, replies, renewals, leased_at), leased_at


async def renew_late_async(
    context: Context, requests: Sequence[Request], replies: list[ReplyOrError], sent_at: float
) -> tuple[list[ReplyOrError], float]:
    """Renew the granted claims of which less than half of the lease is left; see `renew_late`."""
    if not (late := _find_late(requests, replies, sent_at)):
        return replies, sent_at
    leased_at = monotonic()
    renewals = await context.aio_link.run_all(Batch([build_renewal(grant) for grant in late.values()], list))
    return _apply_renewals(context, late, replies, renewals, leased_at), leased_at


def _find_late(requests: Sequence[Request], replies: Sequence[ReplyOrError], sent_at: float) -> dict[int, Grant]:
    """Return the grants of which less than half of the lease is left, by their index.

    The claims were sent together with the same lease, so the first one answers for all.
    """
    if not requests or not is_late(requests[0], sent_at):
        return {}
    return {
        index: Grant(requests[index], reply, sent_at, "lease")
        for index, reply in enumerate(replies)
        if isinstance(reply, ClaimReply) and reply.state == "started"
    }


def _apply_renewals(
    context: Context,
    late: dict[int, Grant],
    replies: Sequence[ReplyOrError],
    renewals: Sequence[Renewal],
    leased_at: float,
) -> list[ReplyOrError]:
    """Return the replies after these renewals. A claim whose renewal is late itself gets a heartbeat."""
    lost = set[int]()
    for (index, grant), renewal in zip(late.items(), renewals, strict=True):
        if renewal == "lost":
            may_start(context, grant.with_lease_from(leased_at), renewal)
            lost.add(index)
    return [ClaimReply("stale") if index in lost else reply for index, reply in enumerate(replies)]


async def _rollback_many(
    context: Context,
    requests: Sequence[Request],
    pending: asyncio.Task[list[ReplyOrError]],
    within: float | None = None,
) -> None:
    """Wait for the replies of many claims, and release those that were granted."""
    for calls in _build_rollback(context, requests, await pending):
        for error in await context.aio_link.run_each(calls, within):
            if isinstance(error, StoreError) and within is None:
                log.warning("once.cancelled_claim_left: %s", one_line(error), extra={"error": str(error)})


def _build_claims(requests: Sequence[Request], most: int) -> list[PerKeyCall[ClaimReply]]:
    """Build the claims of many requests, with at most `most` records in a script call.

    The requests share their options. A script call has one fingerprint, so those with different ones are not together.
    """
    calls = list[PerKeyCall[ClaimReply]]()
    for fingerprint, alike in groupby(requests, attrgetter("fingerprint")):
        first, *others = alike
        options = first.options
        calls += first.claims.claim_each(
            [(request.record[0], request.owner) for request in (first, *others)], options.lease, options.retention,
            options.max_attempts, options.on_lease_loss == "hold", options.wait is not None, most, fingerprint,
        )  # fmt: skip
    return calls


def _first_failure(outcomes: Sequence[ReplyOrError]) -> StoreError | None:
    """Return the first error that is not about a single key, or None."""
    for outcome in outcomes:
        if isinstance(outcome, StoreError) and not isinstance(outcome, KEY_ERRORS):
            return outcome
    return None


def _build_rollback(
    context: Context, requests: Sequence[Request], outcomes: Sequence[ReplyOrError]
) -> tuple[list[PerKeyCall[bool]], list[PerKeyCall[bool]]]:
    """Build the calls that release the claims that may be held.

    Return one call first and the others second. The first call loads the script on a server that does not have it.
    """
    held = [request for request, outcome in zip(requests, outcomes, strict=True) if _may_hold(outcome)]
    if not held:
        return [], []
    releases = [(request.record[0], request.owner, request.options.retention, b"") for request in held]
    calls = held[0].claims.release_each(releases, context.batch_size, undo=True)
    return calls[:1], calls[1:]


def _may_hold(outcome: ReplyOrError) -> bool:
    """Return True if the claim was granted, or if a failed call may have granted it."""
    return (
        outcome.state == "started"
        if isinstance(outcome, ClaimReply)
        else isinstance(outcome, NotDurable | ServerRejected)
    )
