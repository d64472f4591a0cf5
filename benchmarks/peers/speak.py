"""How a contestant is spoken to: one JSON object a line, {"step": name, ...words}; the answer is one line too.

Imports nothing but the standard library: it runs in every contestant's own environment.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import import_module
from itertools import count
from time import perf_counter, process_time
from typing import Any

__all__ = [
    "RESULT", "Tally", "drained", "fields", "in_tasks", "in_threads", "main", "numbers", "payload", "runner", "timed",
    "url",
]  # fmt: skip

Answer = dict[str, Any]
RESULT = "a result of just thirty bytes."
"""What every guarded handler returns."""


def url() -> str:
    """Where the server is."""
    return sys.argv[1]


def fields() -> dict[str, Any]:
    """The same as a host and a port."""
    host, port = url().removeprefix("redis://").split("/")[0].split(":")
    return {"host": host, "port": int(port)}


def runner() -> asyncio.Runner:
    """An event loop: of asyncio, or of the library that the command line names."""
    return asyncio.Runner(loop_factory=import_module(sys.argv[2]).new_event_loop if sys.argv[2:] else None)


def payload(number: int) -> dict[str, Any]:
    """What every scheduled message carries: about 100 bytes."""
    return {"item": number, "name": "one of many things to do", "price": 19.99, "tags": ["a", "b"], "at": 1_700_000_000}


def numbers(n: int, tasks: int) -> list[range]:
    """0 .. n dealt to so many tasks."""
    return [range(task, n, tasks) for task in range(tasks)]


@contextmanager
def timed(ops: int) -> Iterator[Answer]:
    """Times a block: `ops`, `seconds` by the clock, `cpu` seconds of this process."""
    answer: Answer = {"ops": ops}
    cpu, began = process_time(), perf_counter()
    yield answer
    answer["seconds"], answer["cpu"] = perf_counter() - began, process_time() - cpu


async def in_tasks(n: int, tasks: int, one: Callable[[int], Coroutine[Any, Any, object]]) -> Answer:
    """`one(number)` for 0 .. n, in so many tasks at once, timed."""

    async def deal(part: range) -> None:
        for number in part:
            await one(number)

    with timed(n) as answer:
        await asyncio.gather(*(deal(part) for part in numbers(n, tasks)))
    return answer


def in_threads(n: int, threads: int, one: Callable[[int], object]) -> Answer:
    """The same in so many threads."""

    def deal(part: range) -> None:
        for number in part:
            one(number)

    with ThreadPoolExecutor(threads) as pool, timed(n) as answer:
        list(pool.map(deal, numbers(n, threads)))
    return answer


class Tally:
    """Counts what a worker of this process handled: from the first handled to the `wanted`-th is the time of a drain.

    `late` are the milliseconds after due, of messages that say when they are due.
    """

    def __init__(self, wanted: int) -> None:
        self.wanted, self.seen = wanted, 0
        self._numbers = count(1)  # handlers may run in threads: drawing a number is atomic, adding is not
        self.late: list[float] = []
        self.began = self.cpu = 0.0
        self.ended: tuple[float, float] | None = None

    def one(self, late_ms: float | None = None) -> None:
        self.seen = number = next(self._numbers)
        if number == 1:
            self.began, self.cpu = perf_counter(), process_time()
        if late_ms is not None:
            self.late.append(late_ms)
        if number == self.wanted:
            self.ended = perf_counter(), process_time()

    @property
    def done(self) -> bool:
        return self.ended is not None


def drained(tally: Tally) -> Answer:
    """The answer of a step in which a worker handled everything; how late, if that was asked."""
    if tally.ended is None:
        return {"ops": tally.seen, "error": f"only {tally.seen} of {tally.wanted} were handled"}
    answer: Answer = {"ops": tally.wanted, "seconds": tally.ended[0] - tally.began, "cpu": tally.ended[1] - tally.cpu}
    if tally.late:
        late = sorted(tally.late)
        answer |= {"p50": late[len(late) // 2], "p99": late[len(late) * 99 // 100], "max": late[-1]}
    return answer


def main(**steps: Callable[..., Answer]) -> None:
    """Answers requests until the input ends. What is printed meanwhile goes to the error output."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        words = json.loads(line)
        step = words.pop("step")
        try:
            answer = steps[step](**words) if step in steps else {"absent": True}
        except Exception as error:  # noqa: BLE001 - whatever it was belongs into the report
            answer = {"error": f"{type(error).__name__}: {error}"[:300]}
        out.write(json.dumps(answer) + "\n")
