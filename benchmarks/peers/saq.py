"""saq: one worker, 100 jobs at once. Delayed jobs are found by a timer of one second, the least there is."""

from __future__ import annotations

import asyncio
import logging
import time
from functools import cache
from typing import Any

from saq import Queue, Worker

from benchmarks.peers.asking import awaiting
from benchmarks.peers.scheduling import late
from benchmarks.peers.speak import Tally, main, url


@cache
def queue_of(name: str) -> Queue:
    return Queue.from_url(url(), name=name)


async def send(queue: str, data: dict[str, Any], delay: float, key: str | None) -> object:
    named = {} if key is None else {"key": key}
    return await queue_of(queue).enqueue("handle", data=data, scheduled=time.time() + delay, ttl=-1, **named)


async def work(queue: str, tally: Tally) -> None:
    async def handle(_context: object, *, data: dict[str, Any]) -> None:
        tally.one(late(data["due"]) if "due" in data else None)

    await Worker(queue_of(queue), [("handle", handle)], concurrency=100).start()


async def waiting(queue: str) -> int:
    return int(await queue_of(queue).count("incomplete"))


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    main(**awaiting(asyncio.Runner(), send, work, waiting))
