"""The steps of a scheduler that awaits, from the few verbs in which such libraries differ."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from benchmarks.peers.scheduling import adrain, asettled, pace
from benchmarks.peers.speak import Answer, Tally, payload, timed

__all__ = ["Send", "Work", "awaiting"]

Send = Callable[[str, dict[str, Any], float, str | None], Awaitable[object]]
"""(queue, data, seconds of delay, key or None)."""
AT_ONCE = 50
"""Tasks that send what merges, where several do."""
Work = Callable[[str, Tally], Coroutine[Any, Any, object]]
"""Works at a queue, telling the tally, until it is cancelled."""


def awaiting(
    runner: asyncio.Runner, send: Send, work: Work, waiting: Callable[[str], Awaitable[int]]
) -> dict[str, Callable[..., Answer]]:
    """Steps `enqueue`, `drain`, `steady` and `merge`. `waiting` counts the jobs of a queue; asked first, so that what
    a queue needs is made before anything is timed."""

    async def enqueue(tag: str, n: int, delay: float) -> Answer:
        await waiting(tag)
        with timed(n) as answer:
            for number in range(n):
                await send(tag, payload(number), delay, None)
        return answer

    async def drain(tag: str, n: int, wait: float) -> Answer:
        return await adrain(lambda tally: work(tag, tally), n, wait)

    async def steady(tag: str, rate: int, seconds: float, delay: float) -> Answer:
        tally = Tally(int(rate * seconds))
        working = asyncio.create_task(work(tag, tally))
        try:
            await _paced(lambda: send(tag, {"due": time.time() + delay}, delay, None), rate, seconds)
            return await asettled(tally, working)
        finally:
            working.cancel()
            await asyncio.wait({working}, timeout=5)

    async def merge(tag: str, n: int, keys: int, keep: str, several: bool) -> Answer:
        if keep != "first":
            return {"absent": True}
        await waiting(tag)

        async def sending() -> None:
            for number in numbers:
                await send(tag, payload(number), 600.0, f"key-{number % keys}")

        numbers = iter(range(n))
        with timed(n) as answer:
            await asyncio.gather(*(sending() for _ in range(AT_ONCE if several else 1)))
        return answer | {"left": await waiting(tag)}

    steps = {"enqueue": enqueue, "drain": drain, "steady": steady, "merge": merge}
    return {name: _run(runner, step) for name, step in steps.items()}


def _run(runner: asyncio.Runner, step: Callable[..., Coroutine[Any, Any, Answer]]) -> Callable[..., Answer]:
    return lambda **words: runner.run(step(**words))


async def _paced(send: Callable[[], Awaitable[object]], rate: int, seconds: float) -> None:
    began = time.time()
    for after in pace(rate, seconds):
        await asyncio.sleep(max(0.0, began + after - time.time()))
        await send()
