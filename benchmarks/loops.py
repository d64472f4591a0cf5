"""Guards on the event loop of asyncio and on that of uvloop."""

from __future__ import annotations

from benchmarks.contestants import contestants
from benchmarks.guard import tasks_group
from benchmarks.measuring import Row, rounds
from benchmarks.plan import Plan
from benchmarks.server import port_of, started

__all__ = ["SIDES", "TASKS", "run"]

SIDES = ["idemgate_guard", "idemgate_guard+uvloop", "by_hand", "by_hand+uvloop"]
TASKS = (1, 200)


def run(plan: Plan) -> list[Row]:
    """The rows; none with uvloop where it is not installed."""
    groups = [tasks_group(plan, tasks) for tasks in TASKS]
    with started() as server, contestants(SIDES, f"redis://127.0.0.1:{port_of(server)}/0") as sides:
        return rounds(server, sides, groups, plan.repetitions)
