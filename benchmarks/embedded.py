"""The embedded server: a unix socket, every write in its append-only file, against redis-server over TCP."""

from __future__ import annotations

from benchmarks.contestants import contestants
from benchmarks.machine import SERVER, pin
from benchmarks.measuring import Row, Step, rounds
from benchmarks.plan import Plan
from benchmarks.server import port_of, started
from idemgate.store.embedded.server import start

__all__ = ["run"]

SIDES = ["idemgate_guard", "idemgate_scheduler"]


def run(plan: Plan) -> list[Row]:
    """The rows of both; `who` says which server."""
    import redis

    with started() as server:
        rows = _rows(plan, server, f"redis://127.0.0.1:{port_of(server)}/0", "redis-server, TCP")
    with start() as embedded, redis.Redis.from_url(embedded.url) as server:
        pin(embedded.pid, SERVER)
        return rows + _rows(plan, server, embedded.url, "embedded")


def _rows(plan: Plan, server: object, url: str, name: str) -> list[Row]:
    n, many = plan.size(2_000), plan.size(20_000)
    guard = [Step("first", {"n": n}), Step("replay", {"n": n})]
    topic = [
        Step("enqueue_many", {"n": many, "delay": 0}, of="q"), Step("drain", {"n": many, "wait": 0.1}, of="q"),
    ]  # fmt: skip
    rows = []
    for side, steps in zip(SIDES, (guard, topic), strict=True):
        with contestants([side], url) as sides:
            rows += rounds(server, sides, [steps], plan.repetitions)
    return [{**row, "who": name} for row in rows]
