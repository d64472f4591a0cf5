"""100,000 triggers of 1,000 keys: how fast they are taken, and how many messages they make."""

from __future__ import annotations

from benchmarks.contestants import contestants
from benchmarks.measuring import Row, Step, rounds
from benchmarks.plan import Plan
from benchmarks.server import port_of, started

__all__ = ["run"]

SIDES = ["idemgate_scheduler", "bullmq_node", "bullmq_python", "docket", "arq", "saq"]
LESS = {name: {"n": 3_000, "keys": 30} for name in ("bullmq_python", "docket", "arq", "saq")}
"""The slower ones get fewer, as many of each key."""


def run(plan: Plan) -> list[Row]:
    """The rows; `left` is the number of messages. `keep` says which payload of a key is delivered: the last one or the
    first. With the first, a peer need not write anything for a duplicate. `several`: whether it sends the next before
    it has heard of the last."""
    words = {"n": plan.size(100_000), "keys": plan.size(100_000) // 100}
    groups = [
        [
            Step(
                "merge",
                {**words, "keep": keep, "several": how == "several"},
                LESS,
                label=f"keep_{keep}_{how}",
                of=keep + how,
            )
        ]
        for how in ("one", "several")
        for keep in ("last", "first")
    ]
    with started() as server, contestants(SIDES, f"redis://127.0.0.1:{port_of(server)}/0") as sides:
        return rounds(server, sides, groups, plan.repetitions)
