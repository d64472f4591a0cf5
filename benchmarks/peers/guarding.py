"""The steps of a guard, from its guarded function: `n` new keys, and the same keys again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from benchmarks.peers.speak import Answer, in_tasks, in_threads, runner, timed

__all__ = ["awaiting", "blocking"]

Steps = dict[str, Callable[..., Answer]]


def blocking(guarded: Callable[[str], object]) -> Steps:
    """Steps `first` and `replay` of a function that blocks, by one caller and (`..._threads`) by so many threads."""

    def calls(tag: str, n: int) -> Answer:
        with timed(n) as answer:
            for number in range(n):
                guarded(f"{tag}-{number}")
        return answer

    def threaded(tag: str, n: int, threads: int) -> Answer:
        return in_threads(n, threads, lambda number: guarded(f"{tag}-{threads}-{number}"))

    return {"first": calls, "replay": calls, "first_threads": threaded, "replay_threads": threaded}


def awaiting(guarded: Callable[[str], Awaitable[object]]) -> Steps:
    """Steps `first_async` and `replay_async` of a function that is awaited by so many tasks; one event loop."""
    loop = runner()

    def calls(tag: str, n: int, tasks: int) -> Answer:
        async def one(number: int) -> Any:
            return await guarded(f"{tag}-{tasks}-{number}")

        return loop.run(in_tasks(n, tasks, one))

    return {"first_async": calls, "replay_async": calls}
