"""Histogram of durations in fixed buckets."""

from __future__ import annotations

from bisect import bisect_left

__all__ = ["BOUNDS", "Histogram"]

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
