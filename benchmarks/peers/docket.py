"""docket: one worker, 100 tasks at once, asked to look every 20 ms (its default is 250)."""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime, timedelta
from typing import Any

from docket import Docket, Worker

from benchmarks.peers.asking import awaiting
from benchmarks.peers.scheduling import late
from benchmarks.peers.speak import Tally, main, url

OFTEN = timedelta(milliseconds=20)
tallies: list[Tally] = []


async def handle(data: dict[str, Any]) -> None:
    tallies[-1].one(late(data["due"]) if "due" in data else None)


def steps(runner: asyncio.Runner) -> None:
    dockets: dict[str, Docket] = {}

    async def docket_of(name: str) -> Docket:
        if name not in dockets:
            dockets[name] = await Docket(
                name=name, url=f"{url()}?max_connections=500", execution_ttl=timedelta(0)
            ).__aenter__()
            dockets[name].register(handle)
        return dockets[name]

    async def send(queue: str, data: dict[str, Any], delay: float, key: str | None) -> object:
        when = datetime.now(UTC) + timedelta(seconds=delay)
        return await (await docket_of(queue)).add(handle, when=when, key=key)(data)

    async def work(queue: str, tally: Tally) -> None:
        tallies.append(tally)
        async with Worker(
            await docket_of(queue), concurrency=100, minimum_check_interval=OFTEN, scheduling_resolution=OFTEN
        ) as worker:
            await worker.run_forever()

    async def waiting(queue: str) -> int:
        return len((await (await docket_of(queue)).snapshot()).future)

    main(**awaiting(runner, send, work, waiting))


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    steps(asyncio.Runner())
