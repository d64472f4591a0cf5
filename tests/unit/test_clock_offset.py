"""How far a server's clock is ahead, out of what its replies say."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from idemgate.worker.clock_offset import DRIFT, UNKNOWN, Offset, narrow

TRIP = st.floats(0, 50)
"""Milliseconds of a request, of an answer, or between two of them."""
TRIPS = st.lists(st.tuples(TRIP, TRIP, TRIP), min_size=1, max_size=30)
REAL = st.floats(1e12, 2e12)


def _told(offset: Offset, real: float, at: float, there: float, back: float) -> Offset:
    return narrow(offset, int(at + there + real), at, at + there + back)


@given(real=REAL, trips=TRIPS)
def test_what_is_real_lies_between_its_bounds(real: float, trips: list[tuple[float, float, float]]) -> None:
    at, offset = 1000.0, UNKNOWN
    for rest, there, back in trips:
        at += rest
        offset = _told(offset, real, at, there, back)
        at += there + back
        assert offset.low <= real + 0.01  # what numbers of this size leave
        assert real <= offset.high + 0.01


@given(real=REAL, trips=TRIPS)
def test_no_reply_makes_it_less_certain_but_for_the_drift(real: float, trips: list[tuple[float, float, float]]) -> None:
    at, before = 1000.0, _told(UNKNOWN, real, 999.0, 0.5, 0.5)
    for rest, there, back in trips:
        at += rest
        after = _told(before, real, at, there, back)
        drift = DRIFT * (after.at - before.at) + 0.01
        assert after.low >= before.low - drift
        assert after.high <= before.high + drift
        at, before = at + there + back, after


def test_replies_that_come_at_once_narrow_it_to_less_than_a_millisecond() -> None:
    offset = UNKNOWN
    for tenth in range(20):
        offset = _told(offset, 1e12 + 0.5, 1000 + tenth / 10, 0.05, 0.05)
    assert offset.high - offset.low < 0.3


def test_a_clock_that_was_set_is_believed_at_once() -> None:
    known = _told(UNKNOWN, 1e12, 1000, 1, 1)
    for real in (1e12 - 5000, 1e12 + 5000):
        assert _told(known, real, 2000, 1, 1) == _told(UNKNOWN, real, 2000, 1, 1)


def test_a_server_whose_clock_began_anew_is_believed() -> None:
    assert narrow(UNKNOWN, 5, 1000, 1001) == Offset(-996, -994, 1001)
