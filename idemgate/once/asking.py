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

__all__ = ["asked", "claimed"]

log = logging.getLogger("idemgate.once")


def asked(gate: Gate, passage: Passage) -> Entry:
    """The claim's answer. What was granted, but not as durably as asked, is given back."""
    try:
        return gate.link.run(passage.enter())
    except NotDurable:
        if not passage.guard.at_most_once:
            with suppress(StoreError):
                gate.link.run(passage.release(undo=True), within=0)
        raise


async def claimed(gate: Gate, passage: Passage) -> Entry:
    """The claim's answer. Cancelled meanwhile: the outcome is learnt and what was granted is given back, while the
    cancellation goes on."""
    asking = gate.aio.link.start(passage.enter())
    try:
        return await asking.answer
    except NotDurable:
        if not passage.guard.at_most_once:
            with suppress(StoreError):
                await gate.aio.link.run(passage.release(undo=True), within=0)
        raise
    except asyncio.CancelledError:
        gate.aio.link.spawn(_give_back(gate, passage, asking.outcome()))
        raise


async def _give_back(gate: Gate, passage: Passage, asking: asyncio.Future[Entry]) -> None:
    try:
        entry = await asking
        if entry.state == "started" and not passage.guard.at_most_once:
            await gate.aio.link.run(passage.release(undo=True))
    except StoreError as error:
        log.warning("once.cancelled_claim_left", extra={"key": text_of(passage.key), "error": str(error)})
