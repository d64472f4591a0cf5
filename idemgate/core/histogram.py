"""Histogram of durations in fixed buckets."""

from __future__ import annotations

from bisect import bisect_left

from idemgate.core.clock import monotonic

__all__ = ["BOUNDS", "Histogram", "Sampled"]

BOUNDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
"""The largest seconds of each bucket. The last bucket, after these, has no bound. The same for all histograms, so that
readers can add them up."""


class Histogram:
    """The number of durations in each bucket since the start of the process.

    Any thread may add one, without a lock. An increment may be lost if two threads add at the same moment.
    """

    __slots__ = ("counts",)

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)

    def add(self, seconds: float) -> None:
        """Count one duration. A negative one, of clocks that differ, belongs to the first bucket."""
        self.counts[bisect_left(BOUNDS, seconds)] += 1


PAUSE = 0.01
"""Seconds between two samples of frequent durations. Each would cost a call of the store 2 % of its instructions."""


class Sampled:
    """A histogram of frequent durations, of which it counts at most 100 a second.

    The caller compares the start of each duration with `due`, and calls `add` for one that began later.
    """

    __slots__ = ("due", "histogram")

    def __init__(self) -> None:
        self.due = 0.0
        self.histogram = Histogram()

    def add(self, started: float) -> None:
        """Count a duration that began at `started` and ends now, seconds of `monotonic`."""
        now = monotonic()
        self.due = now + PAUSE
        self.histogram.add(now - started)
