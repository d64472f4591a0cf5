"""The claim: one owner at a time, and what everybody else is told."""

from __future__ import annotations

from typing import Any

from idemgate.testing import Clock


async def test_a_second_claim_is_told_that_the_first_runs(face: Any, clock: Clock) -> None:
    # Given a claim that was granted
    first = await face.claim("order-7", lease="30s")
    assert first.started and first.attempt == 1
    # When another owner asks ten seconds later
    clock.advance("10s")
    second = await face.claim("order-7")
    # Then it is told how long the lease still holds
    assert (second.state, second.retry_after) == ("in_progress", 20.0)
