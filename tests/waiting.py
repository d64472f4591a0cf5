"""Wait for something to happen, never for time to pass."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any

__all__ = ["eventually", "wait_until"]

MISSED = "it did not happen"


async def eventually(check: Callable[[], Any], within: float = 60.0) -> Any:
    """Return what `check` returns, or what that awaits to, once it is true. Fail after `within` seconds."""
    end = time.monotonic() + within
    while True:
        found = check()
        if inspect.isawaitable(found):
            found = await found
        if found:
            return found
        assert time.monotonic() < end, MISSED
        await asyncio.sleep(0.003)


def wait_until(
    check: Callable[[], Any],
    within: float = 60.0,
    why: Callable[[], object] = lambda: MISSED,
    not_yet: tuple[type[Exception], ...] = (),
) -> Any:
    """Return what `check` returns once it is true. Fail with `why` after `within` seconds.

    The errors `not_yet` count as false.
    """
    end = time.monotonic() + within
    while True:
        try:
            if found := check():
                return found
        except not_yet:
            pass
        assert time.monotonic() < end, why()
        time.sleep(0.003)
