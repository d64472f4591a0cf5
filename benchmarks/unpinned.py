"""Some of the guard's and the scheduler's rows, with server and clients each on a core of its own, and then on any."""

from __future__ import annotations

from benchmarks.contestants import contestants
from benchmarks.machine import CLIENT, SERVER
from benchmarks.measuring import Row, Step, rounds
from benchmarks.plan import Plan
from benchmarks.scheduler import both
from benchmarks.server import port_of, started

__all__ = ["run"]

DELAY = 0.5


def run(plan: Plan) -> list[Row]:
    """The rows, whose `who` says which."""
    pinned, free = _rows(plan, SERVER, CLIENT), _rows(plan, None, None)
    return [_named(row, "pinned") for row in pinned] + [_named(row, "not pinned") for row in free]


def _named(row: Row, way: str) -> Row:
    return row | {"who": way, "step": f"hand_{row['step']}" if row["who"] == "by_hand" else row["step"]}


def _rows(plan: Plan, core: int | None, clients: int | None) -> list[Row]:
    with started(core=core) as server:
        url = f"redis://127.0.0.1:{port_of(server)}/0"
        with contestants(["idemgate_guard", "by_hand"], url, clients) as guard:
            rows = rounds(server, guard, _guard(plan), plan.repetitions)
        with (
            contestants(["idemgate_scheduler"], url, clients) as sent,
            contestants(["idemgate_scheduler"], url, clients) as taken,
        ):
            rows += rounds(server, sent, _scheduler(plan), plan.repetitions)
            return rows + both(server, sent, taken, plan.size(40_000), plan.repetitions)


def _guard(plan: Plan) -> list[list[Step]]:
    alone = {"n": plan.size(3_000)}
    tasks = {"n": plan.size(6_000), "tasks": 200}
    return [
        [Step("first", alone), Step("replay", alone)],
        [Step("first_async", tasks), Step("replay_async", tasks)],
    ]


def _scheduler(plan: Plan) -> list[list[Step]]:
    n = plan.size(40_000)
    due = {"n": n, "wait": DELAY, "kind": "async"}
    return [[Step("enqueue_many", {"n": n, "delay": DELAY}), Step("drain", due)]]
