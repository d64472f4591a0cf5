"""Where the time of a call goes: client, server (inside and outside of the script), waiting; beside the bare limit."""

from __future__ import annotations

from benchmarks.contestants import contestants
from benchmarks.measuring import Row, Step, rounds
from benchmarks.plan import Plan
from benchmarks.server import port_of, started

__all__ = ["run"]


def run(plan: Plan) -> list[Row]:
    """The rows of idemgate, of people's own SETs, and of the barest way to do the same."""
    n, many = plan.size(4_000), plan.size(40_000)
    guard = [Step("first", {"n": n}), Step("replay", {"n": n}), Step("socket", {"n": n})]
    tasks = [Step(f"{word}_async", {"n": 4 * n, "tasks": 200}) for word in ("first", "replay", "socket")]
    sent = Step("enqueue_many", {"n": many, "delay": 0}, of="q")
    topic = [sent, Step("take", {"n": many, "wait": 0.1}, of="q")]
    with started() as server:
        url = f"redis://127.0.0.1:{port_of(server)}/0"
        with contestants(["idemgate_guard", "by_hand", "bare", "wires"], url) as sides:
            rows = rounds(server, sides, [guard, tasks], plan.repetitions)
        with contestants(["idemgate_scheduler", "bare"], url) as sides:
            return rows + rounds(server, sides, [topic], plan.repetitions)
