"""BullMQ's Python package: one worker, concurrency 100, nothing kept of finished jobs."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from bullmq import Queue, Worker

from benchmarks.peers.asking import awaiting
from benchmarks.peers.scheduling import late
from benchmarks.peers.speak import Tally, main, url

GONE = {"removeOnComplete": True, "removeOnFail": True}
queues: dict[str, Queue] = {}


def queue_of(name: str) -> Queue:
    if name not in queues:
        queues[name] = Queue(name, {"connection": url()})
    return queues[name]


async def send(queue: str, data: dict[str, Any], delay: float, key: str | None) -> object:
    single = {} if key is None else {"deduplication": {"id": key}}
    return await queue_of(queue).add("handle", data, {"delay": int(delay * 1000), **GONE, **single})


async def work(queue: str, tally: Tally) -> None:
    async def handle(job: Any, _token: str) -> None:
        tally.one(late(job.data["due"]) if "due" in job.data else None)

    worker = Worker(queue, handle, {"connection": url(), "concurrency": 100, **GONE})
    try:
        await asyncio.Event().wait()
    finally:
        await worker.close(force=True)


async def waiting(queue: str) -> int:
    return int((await queue_of(queue).getJobCounts("delayed"))["delayed"])


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    main(**awaiting(asyncio.Runner(), send, work, waiting))
