"""Places of a worker: how many deliveries its topics hold, and how many each topic may fetch.

A worker runs `concurrency` handlers at once, and holds some more deliveries ready (the prefetch), so that no handler
waits for a round trip. Slow handlers get few ready deliveries, fast ones many: `adjust` is the rule.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextlib import contextmanager
from math import ceil
from typing import NamedTuple

from idemgate.core.clock import monotonic

__all__ = ["MAX_HOLD", "SLOW", "Places", "PrefetchState", "TopicPlaces", "adjust", "initial_state"]

SPAN = 0.05
"""Seconds of work to hold ready."""
MAX_HOLD = 1.0
"""Seconds for which a delivery may wait unstarted. After that the worker returns it to the topic."""
MAX_PREFETCH = 500


class TopicPlaces:
    """The places of one topic. Only `Places` changes them.

    Attributes:
        held: Number of deliveries that wait or run.
        requested: Number of deliveries that calls under way may bring.
        last_fetch: Number of the worker's fetch that brought the topic's newest deliveries.
        limit: Function that returns how many of a number of free places the topic may use.
    """

    __slots__ = ("held", "last_fetch", "limit", "requested")

    def __init__(self, limit: Callable[[int], int]) -> None:
        self.held: int = 0
        self.requested: int = 0
        self.last_fetch: int = 0
        self.limit: Callable[[int], int] = limit


class Places:
    """The places of one run of a worker.

    A topic waits in the `line` until its `share` is positive. It reserves places for the deliveries that a call may
    bring, takes places for those that arrive, and frees each place when its delivery has ended.

    Attributes:
        prefetch: The current number of deliveries to hold beyond those that run.
        freed: Set when a topic in the line may have a share.
        line: The topics that wait for a share, the first that came first.
        starving: The number of topics that hold no delivery, and fetch or wait for a share. Any thread may read it.
    """

    def __init__(self, concurrency: int, prefetch: int | None) -> None:
        """Build the places. `prefetch` is the number of deliveries to hold ready; None means adaptive."""
        self.freed: asyncio.Event = asyncio.Event()
        self.line: dict[TopicPlaces, None] = {}
        self._concurrency = concurrency
        self._fixed = prefetch
        self._held = self._requested = self._fetches = 0
        self.starving: int = 0
        self._fetching = 0  # of those that hold no delivery: how many fetch
        self._restart(initial_state(concurrency))

    # -- fetching -----------------------------------------------------------------------------------------------------

    @property
    def is_empty(self) -> bool:
        """True if no delivery waits or runs."""
        return not self._held

    @property
    def room(self) -> int:
        """The number of deliveries that the worker may fetch now."""
        return self._concurrency + self.prefetch - self._held - self._requested

    @contextmanager
    def wait_in_line(self, topic: TopicPlaces) -> Generator[None]:
        """Put a topic into the line. Topics behind it may go on when it leaves."""
        starving = topic.held == 0
        self.line[topic] = None
        self.starving += starving
        try:
            yield
        finally:
            del self.line[topic]
            self.starving -= starving
            self.freed.set()

    def share(self, topic: TopicPlaces) -> int:
        """Return how many deliveries of the topic to fetch. Never more than 0 while others have to go first.

        Free places go first to the waiting topic that holds the fewest deliveries, then to the one whose last fetch is
        the longest ago.
        While others wait, no topic exceeds an equal share. So a topic with slow handlers cannot refill all places.
        """
        self._adjust_prefetch()
        room = self.room
        if others := [other for other in self.line if other is not topic]:
            equal = ceil((self._concurrency + self.prefetch) / (1 + len(others)))
            room = min(room - self._count_before(topic), equal - topic.held)
        return min(room, topic.limit(room))

    def _count_before(self, topic: TopicPlaces) -> int:
        """Return how many topics in the line come before this one."""
        ahead, count = topic in self.line, 0
        for other in self.line:
            ahead = ahead and other is not topic
            difference = other.held - topic.held or other.last_fetch - topic.last_fetch
            count += other is not topic and (difference < 0 or (difference == 0 and ahead))
        return count

    def reserve(self, topic: TopicPlaces, room: int) -> None:
        """Reserve places for the deliveries that a call may bring."""
        self._requested += room  # all topics share the room
        topic.requested += room

    def release(self, topic: TopicPlaces, room: int) -> None:
        """End the reservation of a call that has ended."""
        self._requested -= room
        topic.requested -= room

    @contextmanager
    def fetch(self, topic: TopicPlaces, room: int) -> Generator[None]:
        """Reserve places for a fetch. While a topic that holds no delivery fetches, one place stays free for it."""
        starving = topic.held == 0
        self.reserve(topic, room)
        self.starving += starving
        self._fetching += starving
        try:
            yield
        finally:
            self.release(topic, room)
            self.starving -= starving
            self._fetching -= starving
            self.freed.set()

    def take(self, topic: TopicPlaces, n: int) -> None:
        """Take places for fetched deliveries."""
        if n:
            self._fetches += 1
            topic.last_fetch = self._fetches
        self._held += n
        topic.held += n

    def free(self, topic: TopicPlaces, handled: int = 0) -> None:
        """Free the place of a delivery that has ended. `handled` is 1 if its handler ran. The caller sets `freed`."""
        self._handled += handled
        self._held -= 1
        topic.held -= 1

    # -- places to leave free -----------------------------------------------------------------------------------------

    @property
    def kept_free(self) -> int:
        """The number of places to leave free for topics that hold no delivery.

        Without it, a prefetched delivery of another topic would take each place before they have fetched one.
        """
        if self.starving:
            return self._fetching + min(self.starving - self._fetching, max(0, self.room))
        return 0

    # -- prefetch -----------------------------------------------------------------------------------------------------

    @property
    def is_adaptive(self) -> bool:
        """Return True if the prefetch follows the rate at which handlers end."""
        return self._fixed is None

    def slow_down(self) -> None:
        """Prefetch nothing until handlers are fast again."""
        self._restart(SLOW)

    def _adjust_prefetch(self) -> None:
        seconds = monotonic() - self._since
        if seconds >= self._state.window:
            self._restart(adjust(self._state, self._concurrency, self._handled, seconds))

    def _restart(self, state: PrefetchState) -> None:
        self._state, self._handled, self._since = state, 0, monotonic()
        self.prefetch: int = state.size if self._fixed is None else self._fixed


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
