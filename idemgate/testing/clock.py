"""Manual clock for tests of programs that use idemgate."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from threading import Lock

from idemgate.core.durations import Duration, milliseconds
from idemgate.errors import InvalidArgument

__all__ = ["Clock"]


class Clock:
    """A manual clock for `Gate(..., clock=clock)`. The gate's scripts use its time instead of the server's.

    Leases, windows, retention and the sleep of workers follow it. But the server deletes expired keys by its real time.
    So data expires at once when this clock passes its expiry, but never lives longer than its retention in real time.

    Args:
        start: Seconds since the epoch.
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
        """Return the current time of the clock, as an aware datetime."""
        return datetime.fromtimestamp(self._now / 1_000_000, UTC)

    def advance(self, by: Duration) -> None:
        """Move the clock forward by whole milliseconds: `clock.advance("60s")`. Less than one counts as one."""
        with self._lock:
            self._now += milliseconds(by, "by", zero=True) * 1000
        self._notify()

    def set(self, seconds: float) -> None:
        """Set the clock, forward or back, to seconds since the epoch."""
        with self._lock:
            self._now = _microseconds(seconds)
        self._notify()

    def on_move(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` after each move, in the thread that moves the clock, so that sleeping tasks can wake.

        Returns:
            A function that removes the listener.
        """
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def _notify(self) -> None:
        for listener in tuple(self._listeners):
            listener()


def _microseconds(seconds: float) -> int:
    if not 0 <= seconds < 2**53 / 1_000_000:
        raise InvalidArgument(
            "seconds", seconds, "not a time since the epoch", "Pass seconds since 1970, up to the year 2255"
        )
    return round(seconds * 1000) * 1000
