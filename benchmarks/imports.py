"""What importing costs, each time in a new process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.machine import CLIENT, ROOT, pinned
from benchmarks.measuring import Row
from benchmarks.plan import Plan

__all__ = ["run"]

NAMES = ("idemgate", "idemgate; idemgate.Gate('redis://localhost')", "redis", "redis.asyncio")
TIMED = "import time; began = time.perf_counter(); import {}; print(time.perf_counter() - began)"


def run(plan: Plan) -> list[Row]:
    """Milliseconds, `ms`, a list of one figure a process. The first of each compiles, and is not counted."""
    found: dict[str, list[float]] = {name: [] for name in NAMES}
    with TemporaryDirectory() as compiled:
        for _ in range(plan.repetitions * 2 + 1):
            for name in NAMES:
                found[name].append(_import(name, Path(compiled)))
    print()
    return [{"who": name, "step": "import", "ms": figures[1:]} for name, figures in found.items()]


def _import(name: str, compiled: Path) -> float:
    """In a process that finds what the one before it has compiled, whatever the environment says of that."""
    words = pinned(CLIENT, [sys.executable, "-c", TIMED.format(name)])
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONPYCACHEPREFIX": str(compiled)}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    return float(subprocess.run(words, capture_output=True, text=True, check=True, env=env).stdout) * 1000
