"""Asking for a claim so that being cancelled meanwhile leaves nothing held."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING

from idemgate.core.claims import Entry
from idemgate.core.keys import text_of
from idemgate.core.passage import Passage
from idemgate.errors import NotDurable, StoreError

if TYPE_CHECKING:
    from idemgate.gate import Gate
    from idemgate.link.aio import Asking

__all__ = ["asked", "claimed", "left", "undone"]

log = logging.getLogger("idemgate.once")


def asked(gate: Gate, passage: Passage) -> Entry:
    """The claim's answer. What was granted, but not as durably as asked, is given back."""
    try:
        return gate.link.run(passage.enter())
    except NotDurable:
        undone(gate, passage)
        raise


def undone(gate: Gate, passage: Passage) -> None:
    """Gives back what was granted, if that can be done at once."""
    if not passage.guard.at_most_once:
        with suppress(StoreError):
            gate.link.run(passage.release(undo=True), within=0)


async def claimed(gate: Gate, passage: Passage) -> Entry:
    """The claim's answer. Cancelled meanwhile: the outcome is learnt and what was granted is given back, while the
    cancellation goes on."""
    asking = gate.aio.link.start(passage.enter())
    try:
        return await asking.answer
    except (NotDurable, asyncio.CancelledError) as error:
        await left(gate, passage, asking, error)
        raise


async def left(gate: Gate, passage: Passage, asking: Asking[Entry], error: BaseException) -> None:
    """Gives back what was granted to who does not take it: not as durably as asked, or cancelled."""
    link = gate.aio.link
    if not isinstance(error, NotDurable):
        link.spawn(_give_back(gate, passage, asking.outcome()))
    elif not passage.guard.at_most_once:
        with suppress(StoreError):
            await link.run(passage.release(undo=True), within=0)


async def _give_back(gate: Gate, passage: Passage, asking: asyncio.Future[Entry]) -> None:
    try:
        entry = await asking
        if entry.state == "started" and not passage.guard.at_most_once:
            await gate.aio.link.run(passage.release(undo=True))
    except StoreError as error:
        log.warning("once.cancelled_claim_left", extra={"key": text_of(passage.key), "error": str(error)})
