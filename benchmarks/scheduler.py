"""Schedulers: enqueue with a delay, drain when all is due; and sending and consuming at the same time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from benchmarks.contestants import Ask, begin, contestants, end
from benchmarks.measuring import Row, Step, rounds
from benchmarks.plan import Plan
from benchmarks.server import port_of, spent, started

__all__ = ["SIDES", "both", "run"]

LESS = {
    "bullmq_python": 2_000, "docket": 2_000, "arq": 2_000, "saq": 2_000, "dramatiq": 2_000,
    "rq": 500, "celery": 1_000, "huey": 1_000,
}  # fmt: skip
"""How many messages the slower ones get."""
OURS = ["idemgate_scheduler", "bare"]
"""And the limit: the bare commands."""
SIDES = ["bullmq_node", *LESS]
DELAY = 0.5


def run(plan: Plan) -> list[Row]:
    """The rows of all schedulers, then those of sending and consuming at once."""
    with started() as server:
        url = f"redis://127.0.0.1:{port_of(server)}/0"
        with contestants(OURS, url) as ours:
            rows = rounds(server, ours, _own(plan), plan.repetitions)
        with contestants(OURS, url) as sent, contestants(OURS, url) as taken:
            rows += both(server, sent, taken, plan.size(100_000), plan.repetitions)
        with contestants([*OURS, *SIDES], url) as sides:
            return rows + rounds(server, sides, _against(plan), plan.repetitions)


def _own(plan: Plan) -> list[list[Step]]:
    """Sizes that only idemgate and the bare commands can do in a second."""
    many = plan.size(40_000)
    fill, due = Step("enqueue_many", {"n": many, "delay": DELAY}, label=None), {"n": many, "wait": DELAY}
    drains = [[fill, Step("drain", {**due, "kind": kind}, label=f"many_{kind}")] for kind in ("sync", "async")]
    named = [[one._replace(of=f"d{number}") for one in group] for number, group in enumerate(drains)]
    floor = Step("floor", {"n": many, "delay": DELAY}, label="many_floor", of="floor")
    return [[fill._replace(label="many"), Step("take", due, label="many_take")], [floor], *named]


def _against(plan: Plan) -> list[list[Step]]:
    """Sizes that the slowest peer does in a few seconds."""
    n, less = plan.size(10_000), {name: {"n": plan.size(size)} for name, size in LESS.items()}
    return [[Step("enqueue", {"n": n, "delay": DELAY}, less), Step("drain", {"n": n, "wait": DELAY}, less)]]


def both(server: Any, sent: Mapping[str, Ask], taken: Mapping[str, Ask], n: int, repetitions: int) -> list[Row]:
    """The rows of sending and consuming at once, each by a process of its own: by each of `sent` in turn."""
    rows: dict[str, Row] = {who: defaultdict(list) for who in sent}
    for repetition in range(repetitions):
        for who, row in rows.items():
            server.flushall()
            before, tag = spent(server), f"both{repetition}"
            begin(taken[who], "drain", tag=tag, n=n, wait=0.1)
            begin(sent[who], "send", tag=tag, n=n, tasks=2)
            sender, consumer = end(sent[who]), end(taken[who])
            row["rate"].append(n / max(sender["seconds"], consumer["seconds"]))
            row["sender_us"].append(sender["cpu"] / n * 1e6)
            row["client_us"].append(consumer["cpu"] / n * 1e6)
            row["server_us"].append((spent(server).cpu - before.cpu) / n * 1e6)
    return [{"who": who, "step": "both", **row} for who, row in rows.items()]
