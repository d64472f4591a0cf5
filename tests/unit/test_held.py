"""The renewal of what a consumer holds: what is sent together, what is lost, and what a settlement waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from idemgate.core.calls import Batch
from idemgate.core.clock import monotonic
from idemgate.errors import StoreUnavailable, UnexpectedData
from idemgate.store.held import HeldRenewal

LEASE = 600.0
AWAY = StoreUnavailable("away", executed="no")
CORRUPT = UnexpectedData("key", "holds a list")


class Thing:
    settling = False
    is_renewable = True

    def __init__(self, left: float = LEASE) -> None:
        self.until = monotonic() + left


class Consumer:
    """It notes what is lost, and whether each split was for one alone."""

    def __init__(self, *held: Thing) -> None:
        self.held = held
        self.lost: list[Thing] = []
        self.alone: list[bool] = []

    def copy_held(self) -> Sequence[Thing]:
        return self.held

    def split_renewal(self, held: list[Thing], alone: bool, /) -> list[list[Thing]]:
        self.alone.append(alone)
        return [held]

    def build_renewal(self, part: Sequence[Thing], /) -> Batch[list[bool]]:
        return Batch([], list)

    def mark_lost(self, one: Thing, /) -> None:
        self.lost.append(one)


def test_one_goes_alone_only_in_the_try_that_follows_an_error_about_data() -> None:
    consumer = Consumer(Thing())
    renewal = HeldRenewal(LEASE, consumer, expires=True)
    for error in (None, AWAY, CORRUPT, None):
        if error:
            renewal.note_error(error)
        renewal.renew()
    assert consumer.alone == [False, False, True, False]


@pytest.mark.parametrize("expires", [False, True])
def test_what_may_end_before_the_next_renewal_is_lost_unless_the_store_decides(expires: bool) -> None:
    near, far, settling = Thing(LEASE / 12), Thing(LEASE / 3), Thing(LEASE / 12)
    settling.settling = True
    consumer = Consumer(near, far, settling)
    HeldRenewal(LEASE, consumer, expires=expires).overdue()
    assert consumer.lost == ([near] if expires else [])


def test_an_answer_extends_what_is_held_from_the_request_and_marks_the_rest_lost() -> None:
    kept, gone, settling = Thing(0), Thing(), Thing()
    settling.settling = True
    consumer = Consumer(kept, gone, settling)
    began = monotonic()
    (batch,) = HeldRenewal(LEASE, consumer, expires=False).renew()
    sent = monotonic()
    batch.join([True, False, False])
    assert began + LEASE <= kept.until <= sent + LEASE
    assert consumer.lost == [gone]


@pytest.mark.parametrize("end", ["answer", "error"])
async def test_what_is_released_waits_for_its_renewal_and_for_no_other(end: str) -> None:
    # Given a renewal under way of one of two, of which the other was released before
    one, other = Thing(), Thing()
    other.is_renewable = False
    renewal = HeldRenewal(LEASE, Consumer(one, other), expires=True)
    (batch,) = renewal.renew()
    # When both are waited for
    async with asyncio.timeout(30):
        await renewal.wait_for(other)
        waiting = asyncio.create_task(renewal.wait_for(one))
        await asyncio.sleep(0)
        assert not waiting.done()
        # Then the wait for the one ends with its renewal
        if end == "answer":
            batch.join([True])
        else:
            renewal.note_error(AWAY)
        await waiting
