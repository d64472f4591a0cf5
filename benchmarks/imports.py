"""What importing costs, each time in a new process."""

from __future__ import annotations

import os
import subprocess
import sys

from benchmarks.machine import CLIENT, ROOT, pinned
from benchmarks.measuring import Row
from benchmarks.plan import Plan

__all__ = ["run"]

NAMES = ("idemgate", "redis", "redis.asyncio")
TIMED = "import time; began = time.perf_counter(); import {}; print(time.perf_counter() - began)"


def run(plan: Plan) -> list[Row]:
    """Milliseconds, `ms`, a list of one figure a process."""
    found: dict[str, list[float]] = {name: [] for name in NAMES}
    for _ in range(plan.repetitions * 2 + 1):
        for name in NAMES:
            found[name].append(_import(name))
    print()
    return [{"who": name, "step": "import", "ms": figures[1:]} for name, figures in found.items()]


def _import(name: str) -> float:
    words = pinned(CLIENT, [sys.executable, "-c", TIMED.format(name)])
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return float(subprocess.run(words, capture_output=True, text=True, check=True, env=env).stdout) * 1000
