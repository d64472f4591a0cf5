"""The time that scripts use: the server's clock, or a test clock."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Clock", "stamp"]


class Clock(Protocol):
    """A clock that replaces the server's in every script (`idemgate.testing.Clock`)."""

    def microseconds(self) -> int:
        """Return the time in microseconds since the epoch."""
        ...


def stamp(clock: Clock | None) -> bytes:
    """Return ARGV[1] of every script: the test clock's time, or empty for the server's time."""
    return b"" if clock is None else b"%d" % clock.microseconds()
