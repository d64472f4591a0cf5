"""A callback that does not end when it is cancelled."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from tests.waiting import eventually

__all__ = ["Stubborn"]


class Stubborn:
    """`handle` swallows its cancellation and runs until `fail` lets it raise LookupError. `running` has its tasks."""

    def __init__(self) -> None:
        self.running: list[asyncio.Task[Any] | None] = []
        self._go = asyncio.Event()

    async def handle(self, entry: Any) -> None:
        self.running.append(asyncio.current_task())
        while not self._go.is_set():
            with suppress(asyncio.CancelledError):
                await self._go.wait()
        raise LookupError

    async def fail(self) -> None:
        """Let the callback fail, and wait until it has."""
        self._go.set()
        await eventually(lambda: self.running[0] is not None and self.running[0].done())
