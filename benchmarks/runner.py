"""What `guard.run` costs the client beside a decorated function: CPU of this process, which takes turns with both."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable
from time import process_time
from typing import Any

from benchmarks.measuring import Row
from benchmarks.plan import Plan
from benchmarks.server import port_of, started
from idemgate import Gate

__all__ = ["run"]

TASKS = (1, 50, 200)
BLOCK = 400
"""Calls of one turn. Turns are short, so that both sides meet the same load of the machine."""
RESULT = "a result of just thirty bytes."


def run(plan: Plan) -> list[Row]:
    """The rows: `client_us` has one figure for each turn."""
    costs: dict[tuple[str, str], list[float]] = defaultdict(list)
    with started() as server, Gate(f"redis://127.0.0.1:{port_of(server)}/0", namespace="bench") as gate:
        sides = _sides(gate)
        with asyncio.Runner() as runner:
            for turn in range(-1, max(4, round(8 * plan.repetitions * plan.share))):
                for who in sides if turn % 2 else reversed(sides):
                    blocking, awaiting = sides[who]
                    for step, cost in _turn(runner, blocking, awaiting, f"{who}{turn}"):
                        if turn >= 0:  # the first one warms up
                            costs[who, step].append(cost)
                print(".", end="", flush=True)
            runner.run(gate.aio.close())
    print()
    return [{"who": who, "step": step, "client_us": figures} for (who, step), figures in costs.items()]


def _sides(gate: Gate) -> dict[str, tuple[Callable[[str], Any], Callable[[str], Awaitable[Any]]]]:
    def handle(key: str) -> str:
        return RESULT

    async def ahandle(key: str) -> str:
        return RESULT

    sync, aio = gate.guard("run-sync"), gate.guard("run-async").aio
    return {
        "once": (gate.once(key="{key}", scope="sync")(handle), gate.once(key="{key}", scope="async")(ahandle)),
        "guard.run": (lambda key: sync.run(key, handle, key), lambda key: aio.run(key, ahandle, key)),
    }


def _turn(
    runner: asyncio.Runner, blocking: Callable[[str], Any], awaiting: Callable[[str], Awaitable[Any]], tag: str
) -> list[tuple[str, float]]:
    """Call new keys, then the same again. Return the CPU of each step in us per call."""

    async def call_all(name: str, tasks: int) -> None:
        async def call_some(first: int) -> None:
            for number in range(first, BLOCK, tasks):
                await awaiting(f"{name}-{number}")

        await asyncio.gather(*(call_some(first) for first in range(tasks)))

    found = []
    for step in ("first", "replay"):
        began = process_time()
        for number in range(BLOCK):
            blocking(f"{tag}-{number}")
        found.append((f"{step}, blocking", process_time() - began))
        for tasks in TASKS:
            began = process_time()
            runner.run(call_all(f"{tag}-{tasks}", tasks))
            found.append((f"{step}, {tasks} tasks", process_time() - began))
    return [(step, seconds / BLOCK * 1e6) for step, seconds in found]
