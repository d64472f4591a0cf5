"""arq: one worker, 100 jobs at once, asked to poll every 20 ms (its default is 500), results not kept."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from arq import create_pool
from arq.connections import RedisSettings
from arq.worker import Worker, func

from benchmarks.peers.asking import awaiting
from benchmarks.peers.scheduling import late
from benchmarks.peers.speak import Tally, fields, main

SETTINGS = RedisSettings(**fields())


def steps(runner: asyncio.Runner) -> None:
    pool = runner.run(create_pool(SETTINGS))

    async def send(queue: str, data: dict[str, Any], delay: float, key: str | None) -> object:
        return await pool.enqueue_job("handle", data, _queue_name=queue, _defer_by=delay, _job_id=key)

    async def work(queue: str, tally: Tally) -> None:
        async def handle(_context: object, data: dict[str, Any]) -> None:
            tally.one(late(data["due"]) if "due" in data else None)

        worker = Worker(
            [func(handle, name="handle", keep_result=0)], queue_name=queue, redis_settings=SETTINGS, max_jobs=100,
            poll_delay=0.02, handle_signals=False, log_results=False,
        )  # fmt: skip
        try:
            await worker.async_run()
        finally:
            await worker.close()

    async def waiting(queue: str) -> int:
        return int(await pool.zcard(queue))

    main(**awaiting(runner, send, work, waiting))


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    steps(asyncio.Runner())
