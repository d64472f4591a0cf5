"""How many deliveries a worker holds beyond those that run: slow handlers few, quick ones many, none where they would
wait for so long that another worker might have them. Pure: state and what was seen in, state out."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["PATIENCE", "SLOW", "Ahead", "after", "first"]

SPAN = 0.05
"""Seconds of work that are held ready: so much that no handler waits for a round trip."""
PATIENCE = 1.0
"""Seconds that a delivery is held without being started; then it goes back."""
MOST = 500


class Ahead(NamedTuple):
    """`most` are held. `slow`: something has waited for `PATIENCE`, and since then handlers did not become quick."""

    most: int
    slow: bool = False

    @property
    def window(self) -> float:
        """Seconds to look at what is handled before `after` decides anew."""
        return PATIENCE if self.slow else SPAN


SLOW = Ahead(0, slow=True)


def first(concurrency: int) -> Ahead:
    """That of a worker that knows nothing yet."""
    return Ahead(max(1, concurrency // 4))


def after(state: Ahead, concurrency: int, handled: int, seconds: float) -> Ahead:
    """Once `handled` deliveries have ended in a window of so many seconds. What is slow becomes quick when every place
    was free again within `PATIENCE`: then nothing that is held waits for longer."""
    if state.slow and handled * PATIENCE < concurrency * seconds:
        return state
    return Ahead(min(MOST, max(1, concurrency // 4, int(handled * SPAN / seconds))))
