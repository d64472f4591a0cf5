"""Number of deliveries that a worker holds beyond those that run.

Slow handlers get few, fast ones many. The rule itself is pure (`adjust`); `Prefetch` feeds it with measurements.
"""

from __future__ import annotations

from typing import NamedTuple

from idemgate.core.clock import monotonic

__all__ = ["MAX_HOLD", "SLOW", "Prefetch", "PrefetchState", "adjust", "initial_state"]

SPAN = 0.05
"""Seconds of work to hold ready, so that no handler waits for a round trip."""
MAX_HOLD = 1.0
"""Seconds for which a delivery may wait unstarted. After that the worker returns it to the topic."""
MAX_PREFETCH = 500


class PrefetchState(NamedTuple):
    """A prefetch size, and whether the worker is in slow mode.

    Slow mode starts when a delivery waited for `MAX_HOLD`.
    """

    size: int
    slow: bool = False

    @property
    def window(self) -> float:
        """Seconds to count handled deliveries before the next `adjust`."""
        return MAX_HOLD if self.slow else SPAN


SLOW = PrefetchState(0, slow=True)


def initial_state(concurrency: int) -> PrefetchState:
    """Return the state of a worker without measurements."""
    return PrefetchState(max(1, concurrency // 4))


def adjust(state: PrefetchState, concurrency: int, handled: int, seconds: float) -> PrefetchState:
    """Return the next state, after `handled` deliveries ended within `seconds`.

    Leave slow mode once every slot turned over within `MAX_HOLD`, so no prefetched delivery waits longer than that.
    """
    if state.slow and handled * MAX_HOLD < concurrency * seconds:
        return state
    return PrefetchState(min(MAX_PREFETCH, max(1, concurrency // 4, int(handled * SPAN / seconds))))


class Prefetch:
    """The prefetch size of one worker: a fixed number, or adapted to the rate at which handlers end."""

    __slots__ = ("_concurrency", "_fixed", "_since", "_state", "handled")

    def __init__(self, concurrency: int, fixed: int | None) -> None:
        self._concurrency = concurrency
        self._fixed = fixed
        self.reset()

    def reset(self) -> None:
        """Forget all measurements."""
        self._restart(initial_state(self._concurrency))

    @property
    def is_adaptive(self) -> bool:
        """Return True if the size follows the measurements."""
        return self._fixed is None

    @property
    def size(self) -> int:
        """The number of deliveries to hold beyond those that run."""
        return self._state.size if self._fixed is None else self._fixed

    def update(self) -> int:
        """Adjust the size if a window has passed, and return it."""
        seconds = monotonic() - self._since
        if seconds >= self._state.window:
            self._restart(adjust(self._state, self._concurrency, self.handled, seconds))
        return self.size

    def slow_down(self) -> None:
        """Enter slow mode: prefetch nothing until handlers are fast again."""
        self._restart(SLOW)

    def _restart(self, state: PrefetchState) -> None:
        self._state, self.handled, self._since = state, 0, monotonic()
