"""The machine: which cores, which versions."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

__all__ = ["CLIENT", "ROOT", "SERVER", "facts", "pin", "pinned"]

ROOT = Path(__file__).parents[1]
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
SERVER = CORES[0] if CORES else 0
"""The core of the server, and that of all clients."""
CLIENT = CORES[-1] if CORES else 0


def pinned(core: int | None, command: list[str]) -> list[str]:
    """The command, bound to a core where the system can do that; None: to none."""
    bound = core is not None and CORES and shutil.which("taskset")
    return ["taskset", "-c", str(core), *command] if bound else command


def pin(pid: int, core: int) -> None:
    """Binds a process that runs already."""
    if CORES:
        os.sched_setaffinity(pid, {core})


def facts(repetitions: int) -> dict[str, str]:
    """What a reader needs to judge the figures."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": _said("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"),
        "machine": f"{_processor()}, {len(CORES)} cores, {platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "server": _said("redis-server", "--version").split(" sha")[0],
        "redis-py": version("redis"),
        "hiredis": version("hiredis"),
        "uvloop": version("uvloop") if find_spec("uvloop") else "absent",
        "node": _said("node", "--version"),
        "repetitions": str(repetitions),
        "load": "{:.1f} {:.1f} {:.1f}".format(*os.getloadavg()),
    }


def _processor() -> str:
    about = Path("/proc/cpuinfo")
    lines = about.read_text().splitlines() if about.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _said(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return "absent"
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
