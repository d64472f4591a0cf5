"""Where a script's time comes from: the server, unless a test says otherwise."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Clock", "stamp"]


class Clock(Protocol):
    """A clock that every script is told instead of asking the server (`idemgate.testing.Clock`)."""

    def microseconds(self) -> int:
        """Now, in microseconds since the epoch."""
        ...


def stamp(clock: Clock | None) -> bytes:
    """ARGV[1] of every script: the test clock's time, or nothing, which means the server's."""
    return b"" if clock is None else b"%d" % clock.microseconds()
