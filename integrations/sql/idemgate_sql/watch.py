"""How a relay learns of new rows, and which of several relays works."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager, suppress
from typing import Protocol, Self

__all__ = ["Polling", "Watch", "wait_for_stop"]


class Watch(Protocol):
    """A connection of a relay, open while the relay runs."""

    async def try_lock(self) -> bool:
        """Return True if this relay is the one that works. The lock ends with the connection."""
        ...

    async def wait(self, stop: asyncio.Event, seconds: float) -> None:
        """Wait until a row is committed, `stop` is set, or the time has passed. It may return early."""
        ...


class Polling(AbstractAsyncContextManager["Polling"]):
    """A watch without a connection: every relay works, and looks for rows at intervals."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Do nothing."""

    async def try_lock(self) -> bool:
        """Return True."""
        return True

    async def wait(self, stop: asyncio.Event, seconds: float) -> None:
        """Wait until `stop` is set or the time has passed."""
        await wait_for_stop(stop, seconds)


async def wait_for_stop(stop: asyncio.Event, seconds: float) -> None:
    """Wait until `stop` is set, at most this long."""
    with suppress(TimeoutError):
        await asyncio.wait_for(stop.wait(), seconds)
