"""Asking for a claim so that being cancelled meanwhile leaves nothing held."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from idemgate.core.calls import OF_ONE_KEY, Each
from idemgate.core.keys import text_of
from idemgate.errors import NotDurable, ServerRejected, StoreError
from idemgate.guard.attempt import Passage, enter_each, release_each
from idemgate.guard.calls import Entry
from idemgate.store.context import Context

if TYPE_CHECKING:
    from idemgate.store.aio import Asking

__all__ = ["asked", "asked_together", "claimed", "claimed_together", "left", "undone"]

log = logging.getLogger("idemgate.once")


def asked(context: Context, passage: Passage) -> Entry:
    """The claim's answer. What was granted, but not as durably as asked, is given back."""
    try:
        return context.link.run(passage.enter())
    except NotDurable:
        undone(context, passage)
        raise


def undone(context: Context, passage: Passage) -> None:
    """Gives back what was granted, if that can be done at once."""
    if not passage.guard.at_most_once:
        with suppress(StoreError):
            context.link.run(passage.release(undo=True), within=0)


async def claimed(context: Context, passage: Passage) -> Entry:
    """The claim's answer. Cancelled meanwhile: the outcome is learnt and what was granted is given back, while the
    cancellation goes on."""
    asking = context.aio_link.start(passage.enter())
    try:
        return await asking.answer
    except (NotDurable, asyncio.CancelledError) as error:
        await left(context, passage, asking, error)
        raise


async def left(context: Context, passage: Passage, asking: Asking[Entry], error: BaseException) -> None:
    """Gives back what was granted to who does not take it: not as durably as asked, or cancelled."""
    link = context.aio_link
    if not isinstance(error, NotDurable):
        link.spawn(_give_back(context, passage, asking.outcome()))
    elif not passage.guard.at_most_once:
        with suppress(StoreError):
            await link.run(passage.release(undo=True), within=0)


async def _give_back(context: Context, passage: Passage, asking: asyncio.Future[Entry]) -> None:
    try:
        entry = await asking
        if entry.state == "started" and not passage.guard.at_most_once:
            await context.aio_link.run(passage.release(undo=True))
    except StoreError as error:
        log.warning("once.cancelled_claim_left", extra={"key": text_of(passage.key), "error": str(error)})


# Many at once: all travel together, and either all are answered, or none is kept.

Outcome = Entry | StoreError
"""Of one claim of many: its answer, or what is wrong with what is stored under its key."""


def asked_together(context: Context, passages: Sequence[Passage]) -> list[Outcome]:
    """The claims' answers. Where the store failed, what was granted is given back, if that can be done at once."""
    outcomes = context.link.run_each(enter_each(passages, context.batch_size))
    if (error := _failure(outcomes)) is not None:
        for calls in _returns(context, passages, outcomes):
            context.link.run_each(calls, within=0)
        raise error
    return outcomes


async def claimed_together(context: Context, passages: Sequence[Passage]) -> list[Outcome]:
    """As `asked_together`. Cancelled meanwhile: the outcomes are learnt and what was granted is given back, while the
    cancellation goes on."""
    link = context.aio_link
    asking = link.start_each(enter_each(passages, context.batch_size))
    try:
        outcomes = await asyncio.shield(asking)
    except asyncio.CancelledError:
        link.spawn(_give_all_back(context, passages, asking))
        raise
    if (error := _failure(outcomes)) is not None:
        await asyncio.shield(link.spawn(_give_all_back(context, passages, asking, within=0)))
        raise error
    return outcomes


async def _give_all_back(
    context: Context, passages: Sequence[Passage], asking: asyncio.Task[list[Outcome]], within: float | None = None
) -> None:
    for calls in _returns(context, passages, await asking):
        for error in await context.aio_link.run_each(calls, within):
            if isinstance(error, StoreError) and within is None:
                log.warning("once.cancelled_claim_left", extra={"error": str(error)})


def _failure(outcomes: Sequence[Outcome]) -> StoreError | None:
    """What went wrong for more than one key."""
    for one in outcomes:
        if isinstance(one, StoreError) and not isinstance(one, OF_ONE_KEY):
            return one
    return None


def _returns(
    context: Context, passages: Sequence[Passage], outcomes: Sequence[Outcome]
) -> tuple[list[Each[bool]], list[Each[bool]]]:
    """Gives back what was granted, though perhaps not as durably as asked: one call, with which comes the script where
    the server has it not, then all others."""
    pairs = zip(passages, outcomes, strict=True)
    calls = release_each([passage for passage, outcome in pairs if _is_granted(outcome)], context.batch_size, undo=True)
    return calls[:1], calls[1:]


def _is_granted(outcome: Outcome) -> bool:
    """Or perhaps: of what a call was refused for, it may have done a part."""
    return (
        outcome.state == "started" if isinstance(outcome, Entry) else isinstance(outcome, NotDurable | ServerRejected)
    )
