"""For tests of programs that use idemgate: a clock that is moved instead of waited for."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from threading import Lock

from idemgate.core.durations import Duration, milliseconds
from idemgate.errors import InvalidArgument

__all__ = ["Clock"]


class Clock:
    """A clock for `Gate(..., clock=clock)`: every script of that gate is told its time instead of asking the server.

    `start` in seconds since the epoch. Only leases, windows, retention and the like follow it; how long a worker
    sleeps does too. When Redis itself drops a key (a record, a page of marks) is decided by the server's real time:
    what is over by this clock is over at once, but a clock that stands still keeps nothing longer than its
    retention in real time.
    """

    def __init__(self, start: float = 1_700_000_000.0) -> None:
        self._lock = Lock()
        self._now = _microseconds(start)
        self._listeners: list[Callable[[], None]] = []

    def __repr__(self) -> str:
        return f"<Clock {self.now().isoformat()}>"

    def microseconds(self) -> int:
        return self._now

    def now(self) -> datetime:
        """The time it shows, as an aware datetime."""
        return datetime.fromtimestamp(self._now / 1_000_000, UTC)

    def advance(self, by: Duration) -> None:
        """Moves it forward: `clock.advance("60s")`."""
        with self._lock:
            self._now += milliseconds(by, "by", zero=True) * 1000
        self._moved()

    def set(self, seconds: float) -> None:
        """Sets it, forward or back, to seconds since the epoch."""
        with self._lock:
            self._now = _microseconds(seconds)
        self._moved()

    def on_move(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Calls `listener`, in the thread that moves the clock, after each move: so that whoever sleeps can look
        again. Returns the function that ends it."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def _moved(self) -> None:
        for listener in tuple(self._listeners):
            listener()


def _microseconds(seconds: float) -> int:
    if not 0 <= seconds < 2**53 / 1_000_000:
        raise InvalidArgument(
            "seconds", seconds, "not a time since the epoch", "Pass seconds since 1970, up to the year 2255"
        )
    return round(seconds * 1000) * 1000
