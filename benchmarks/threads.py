"""Guards that block, called from several threads as by a web server; with server and clients each on a core of its
own, and then on any."""

from __future__ import annotations

from benchmarks.contestants import contestants
from benchmarks.machine import CLIENT, SERVER
from benchmarks.measuring import Row, Step, rounds
from benchmarks.plan import Plan
from benchmarks.server import port_of, started

__all__ = ["THREADS", "WAYS", "run"]

SIDES = ["idemgate_guard", "by_hand", "redis_lock", "idemkit", "powertools"]
THREADS = (1, 8, 32, 64)
WAYS = {"pinned": (SERVER, CLIENT), "not pinned": (None, None)}


def run(plan: Plan) -> list[Row]:
    """The rows; a step is like "first, 8, pinned"."""
    rows = []
    for way, (core, clients) in WAYS.items():
        groups = [_group(plan, threads, way) for threads in THREADS]
        with (
            started(core=core) as server,
            contestants(SIDES, f"redis://127.0.0.1:{port_of(server)}/0", clients) as sides,
        ):
            rows += rounds(server, sides, groups, plan.repetitions)
    return rows


def _group(plan: Plan, threads: int, way: str) -> list[Step]:
    words = {"n": plan.size(2_000 if threads == 1 else 4_000), "threads": threads}
    return [Step(f"{word}_threads", words, label=f"{word}, {threads}, {way}") for word in ("first", "replay")]
