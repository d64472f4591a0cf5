"""Record the replies to the ends of claims, also when their caller was cancelled."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from typing import Protocol

from idemgate.core.keys import text_of
from idemgate.core.text import one_line
from idemgate.errors import StoreError
from idemgate.guard.heartbeat import Heartbeat
from idemgate.guard.request import Request
from idemgate.store.context import Context

__all__ = ["record_block_end", "renew_until_ended"]

log = logging.getLogger("idemgate.once")


class _EndedClaim(Protocol):
    """A claim whose end was sent."""

    _request: Request

    def _record_end(self, held: bool) -> bool: ...


def record_block_end(
    context: Context, claims: Sequence[_EndedClaim], outcomes: Sequence[bool | StoreError], error: BaseException | None
) -> None:
    """Record the replies to the claims that a block ended, and count the lost ones.

    If the store failed, raise its error, unless the body raised or was cancelled. The caller needs that error instead.
    The unreleased claims are then counted, and their leases expire.
    """
    failed = [
        (claim, outcome) for claim, outcome in zip(claims, outcomes, strict=True) if isinstance(outcome, StoreError)
    ]
    for claim, outcome in zip(claims, outcomes, strict=True):
        if not isinstance(outcome, StoreError):
            claim._record_end(outcome)
    if failed and error is None:
        raise failed[0][1]
    if failed:
        context.counters.add("once.unreleased", len(failed))
        keys = [text_of(claim._request.key) for claim, _ in failed]
        error = failed[0][1]
        log.error("once.unreleased keys=%r: %s", keys, one_line(error), extra={"keys": keys, "error": str(error)})


async def renew_until_ended(
    context: Context,
    running: Sequence[Heartbeat],
    claims: Sequence[_EndedClaim],
    pending: Awaitable[bool | list[bool | StoreError]],
) -> None:
    """Renew the claims of a cancelled caller until the store answers their end.

    Stop the heartbeats then, and record the replies.
    """
    outcomes: list[bool | StoreError]
    try:
        found = await pending
        outcomes = found if isinstance(found, list) else [found]
    except StoreError as error:
        outcomes = [error for _ in claims]
    finally:
        for heartbeat in running:
            heartbeat.stop()
    record_block_end(context, claims, outcomes, asyncio.CancelledError())
