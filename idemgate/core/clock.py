"""The time that scripts use: the server's clock, or a test clock. The time that passes, for timeouts."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

__all__ = ["Clock", "monotonic", "perf_counter"]

# Freezegun replaces the functions of `time` in all modules that refer to them. It does not find them in a partial, so
# timeouts end in a test that freezes the time.
monotonic: Callable[[], float] = partial(time.monotonic)
"""Return the seconds of a clock that always goes on."""
perf_counter: Callable[[], float] = partial(time.perf_counter)
"""Return the seconds of the most precise clock."""


class Clock(Protocol):
    """A clock that replaces the server's in every script (`idemgate.testing.Clock`)."""

    def microseconds(self) -> int:
        """Return the time in microseconds since the epoch."""
        ...
