"""By how much a server's clock is ahead of ours, as far as its replies tell.

Each reply bounds it from both sides (Cristian, *Probabilistic clock synchronization*, 1989): the server said its time,
in whole milliseconds, after it was asked and before it was heard. What all of them leave is narrower than what one
does.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["UNKNOWN", "Offset", "narrowed"]

DRIFT = 0.0002
"""How much one clock may gain on the other; a clock that NTP slews gains more, for some minutes."""


class Offset(NamedTuple):
    """Between `low` and `high`, ms, when it was told `at`, ms of our clock."""

    low: float
    high: float
    at: float


UNKNOWN = Offset(0.0, float("inf"), 0.0)


def narrowed(offset: Offset, now_ms: int, asked: float, heard: float) -> Offset:
    """After another reply: its time, and when it was asked for and heard, ms of our clock. Where the clock was set, or
    another server answered, only this reply counts."""
    low, high, drift = now_ms - heard, now_ms + 1 - asked, DRIFT * (heard - offset.at)
    if offset.low - drift > high or offset.high + drift < low:
        return Offset(low, high, heard)
    return Offset(max(low, offset.low - drift), min(high, offset.high + drift), heard)
