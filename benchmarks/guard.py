"""Guards: the first call of a key and its replay, sync and async, against what people write and what they install;
and what the barest program reaches that asks the server as often."""

from __future__ import annotations

from benchmarks.contestants import contestants
from benchmarks.measuring import Row, Step, rounds
from benchmarks.plan import Plan
from benchmarks.server import port_of, started

__all__ = ["run", "tasks_group"]

SIDES = ["idemgate_guard", "idemgate_run", "by_hand", "redis_lock", "idemkit", "powertools", "idempotency_kit", "limit"]
TASKS = (1, 50, 200)


def run(plan: Plan) -> list[Row]:
    """The rows of all guards."""
    n, many = plan.size(3_000), plan.size(40_000)
    groups = [[Step("first", {"n": n}), Step("replay", {"n": n})]]
    groups += [tasks_group(plan, tasks) for tasks in TASKS]
    batches = {"n": many, "batch": 200}
    groups += [[Step("first_many", batches)], [Step("claim_many", batches)], [Step("known", {"n": 10 * many})]]
    with started() as server, contestants(SIDES, f"redis://127.0.0.1:{port_of(server)}/0") as sides:
        return rounds(server, sides, groups, plan.repetitions)


def tasks_group(plan: Plan, tasks: int) -> list[Step]:
    """First calls and replays of so many tasks."""
    words = {"n": plan.size(3_000 if tasks == 1 else 6_000), "tasks": tasks}
    return [Step(f"{word}_async", words, label=f"{word}_async_{tasks}") for word in ("first", "replay")]
