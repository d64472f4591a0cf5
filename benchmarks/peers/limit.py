"""The limit of a guard: as many small scripts as it sends, two for a first call and one for a replay, framed by hand
over a bare socket; no lease, no fence, no result."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from benchmarks.peers.speak import Answer, in_tasks, main, timed
from benchmarks.peers.wires import Together, over_socket, where


def blocking(calls: int) -> Callable[..., Answer]:
    def step(tag: str, n: int) -> Answer:
        with timed(n) as answer:
            for number in range(n):
                for _ in range(calls):
                    over_socket(f"{tag}-{number}")
        return answer

    return step


def awaiting(calls: int) -> Callable[..., Answer]:
    async def run(tag: str, n: int, tasks: int) -> Answer:
        _, line = await asyncio.get_running_loop().create_connection(Together, where["host"], where["port"])

        async def one(number: int) -> None:
            for _ in range(calls):
                await line.ask(f"{tag}-{tasks}-{number}")

        return await in_tasks(n, tasks, one)

    return lambda **words: asyncio.run(run(**words))


if __name__ == "__main__":
    main(first=blocking(2), replay=blocking(1), first_async=awaiting(2), replay_async=awaiting(1))
