"""Waiting for a condition."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

__all__ = ["until"]


async def until(condition: Callable[[], Any], seconds: float = 30.0) -> None:
    """Wait until a condition is true. Fail after so many seconds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        await asyncio.sleep(0.003)
