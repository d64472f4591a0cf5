"""How long after due a message is handled, at 200 a second, each scheduled one second ahead."""

from __future__ import annotations

from benchmarks.contestants import contestants
from benchmarks.measuring import Row, Step, rounds
from benchmarks.plan import Plan
from benchmarks.scheduler import SIDES
from benchmarks.server import port_of, started

__all__ = ["run"]


def run(plan: Plan) -> list[Row]:
    """The rows; `p50`, `p99` and `max` are milliseconds."""
    step = Step("steady", {"rate": 200, "seconds": 2.0, "delay": 1.0})
    with (
        started() as server,
        contestants(["idemgate_scheduler", *SIDES], f"redis://127.0.0.1:{port_of(server)}/0") as sides,
    ):
        return rounds(server, sides, [[step]], min(plan.repetitions, 3))
