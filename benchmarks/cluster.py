"""Three primaries on the server's core: a guard's keys spread over all of them, a topic of eight slots."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import redis

from benchmarks.contestants import begin, contestants, end
from benchmarks.machine import SERVER, pin
from benchmarks.measuring import Row
from benchmarks.plan import Plan
from benchmarks.server import spent
from tests.cluster import cluster

__all__ = ["run"]


def run(plan: Plan) -> list[Row]:
    """The rows. `server_us` is that of all three together."""
    steps = {"first": plan.size(2_000), "replay": plan.size(2_000), "first_async": plan.size(10_000)}
    steps |= {"first_many": plan.size(10_000), "slots": plan.size(20_000)}
    rows = {step: Row(who="cluster of three", step=step, rate=[], client_us=[], server_us=[]) for step in steps}
    with tempfile.TemporaryDirectory() as home, cluster(Path(home)) as ports:
        nodes = [redis.Redis(port=port) for port in ports]
        for node in nodes:
            pin(node.info("server")["process_id"], SERVER)
        url = "redis+cluster://" + ",".join(f"127.0.0.1:{port}" for port in ports)
        with contestants(["idemgate_guard"], url) as guards, contestants(["idemgate_scheduler"], url) as topics:
            for repetition in range(plan.repetitions):
                for step, n in steps.items():
                    side = topics["idemgate_scheduler"] if step == "slots" else guards["idemgate_guard"]
                    _note(rows[step], nodes, side, n, f"r{repetition}{KEYS_OF.get(step, step)}")
                print(".", end="", flush=True)
    print()
    return list(rows.values())


KEYS_OF = {"replay": "first"}
MORE = {"first_async": {"tasks": 200}, "first_many": {"batch": 200}}


def _note(row: Row, nodes: list[Any], side: Any, n: int, tag: str) -> None:
    before = sum(spent(node).cpu for node in nodes)
    begin(side, row["step"], tag=tag, n=n, **MORE.get(row["step"], {}))
    answer = end(side)
    if "error" in answer:
        row["error"] = answer["error"]
        return
    row["rate"].append(n / answer["seconds"])
    row["client_us"].append(answer["cpu"] / n * 1e6)
    row["server_us"].append((sum(spent(node).cpu for node in nodes) - before) / n * 1e6)
