"""Estimate of how far a server's clock is ahead of this process's clock.

Each reply bounds the offset from both sides (Cristian, *Probabilistic clock synchronization*, 1989). The server read
its clock, in whole milliseconds, after the request was sent and before the reply arrived. The intersection of the
bounds of several replies is narrower than the bounds of one.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["UNKNOWN", "Offset", "narrow"]

DRIFT = 0.0002
"""Assumed relative drift between two clocks. A clock that NTP slews can drift faster for some minutes."""


class Offset(NamedTuple):
    """Bounds of a clock offset: between `low` and `high` ms, measured `at` that time (ms of the local clock)."""

    low: float
    high: float
    at: float


UNKNOWN = Offset(0.0, float("inf"), 0.0)


def narrow(offset: Offset, now_ms: int, sent: float, received: float) -> Offset:
    """Narrow an offset by one more reply.

    If the reply contradicts the known bounds, only the reply counts: the clock was set, or another server replied.

    Args:
        offset: The bounds known so far.
        now_ms: The server's time in the reply.
        sent: When the request was sent, ms of the local clock.
        received: When the reply arrived, ms of the local clock.
    """
    low, high, drift = now_ms - received, now_ms + 1 - sent, DRIFT * (received - offset.at)
    if offset.low - drift > high or offset.high + drift < low:
        return Offset(low, high, received)
    return Offset(max(low, offset.low - drift), min(high, offset.high + drift), received)
