"""Work that counts its runs, for tests of servers in trouble: a handler and two guarded functions."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from idemgate import Gate

__all__ = ["CountedWork"]


class CountedWork:
    """A topic whose handler counts its payloads in `runs`, and two functions that count their keys in `guarded`.

    The functions are guarded with `once`. Run a worker beside them.
    """

    def __init__(self, gate: Gate) -> None:
        self.topic = gate.topic("t", slots=2, lease="60s", merge="append")
        self.runs, self.guarded = Counter[int](), Counter[str]()

        @self.topic.handler
        async def handle(delivery: Any) -> None:
            self.runs.update(delivery.payload)

        @gate.once(key="{key}", scope="charge", lease="60s")
        def charge(key: str) -> str:
            self.guarded[key] += 1
            return key

        @gate.once(key="{key}", scope="acharge", lease="60s")
        async def acharge(key: str) -> str:
            self.guarded[f"a{key}"] += 1
            return key

        self._charge, self._acharge = charge, acharge

    async def do(self, number: int, keys: int = 20) -> None:
        """Trigger a message of one of so many keys, and call both functions."""
        await self.topic.aio.trigger(f"k{number % keys}", number, event_id=number)
        assert await asyncio.to_thread(self._charge, f"{number}") == f"{number}"
        assert await self._acharge(f"{number}") == f"{number}"
