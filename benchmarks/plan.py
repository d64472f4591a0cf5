"""How much is measured."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Plan"]


class Plan(NamedTuple):
    """`share` of the full number of operations, so many `repetitions`."""

    repetitions: int = 5
    share: float = 1.0

    def size(self, full: int) -> int:
        """A full number of operations, cut to the share; a multiple of 200, so that batches come out even."""
        return max(200, round(full * self.share / 200) * 200)
