"""Where the contestants live: a virtual environment each (and one folder of npm), outside of the tree."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from benchmarks.machine import ROOT

__all__ = ["CACHE", "NODE", "PYTHON", "RESULTS", "command", "made", "make"]

CACHE = Path(os.environ.get("IDEMGATE_BENCHMARKS", Path.home() / ".cache" / "idemgate-benchmarks"))
RESULTS = CACHE / "results"
PYTHON = {
    "idemkit": ["idemkit[redis]==1.0.2"],
    "powertools": ["aws-lambda-powertools[redis]==3.37.0", "jmespath", "boto3"],
    "idempotency_kit": ["idempotency-kit[redis]==0.5.0"],
    "bullmq_python": ["bullmq==3.4.4"],
    "docket": ["pydocket==0.27.0"],
    "arq": ["arq==0.28.0"],
    "saq": ["saq[redis]==0.26.4", "typing_extensions"],
    "dramatiq": ["dramatiq[redis]==2.2.1"],
    "rq": ["rq==3.0.0"],
    "celery": ["celery[redis]==5.7.0"],
    "huey": ["huey[redis]==3.5.4"],
}
"""What each needs. All get hiredis."""
NODE = {"bullmq_node": ["bullmq@6.7.0", "ioredis@6.0.0"]}


def made(name: str) -> bool:
    """Whether a contestant can run. Those that are neither in PYTHON nor in NODE run in this environment.

    "NAME+uvloop" is the contestant NAME with the event loop of that library.
    """
    name, _, loop = name.partition("+")
    if loop and find_spec(loop) is None:
        return False
    if name in NODE:
        return (CACHE / name / "node_modules").exists()
    return name not in PYTHON or (CACHE / name / "bin" / "python").exists()


def make(name: str) -> None:
    """Makes the environment of a peer, anew."""
    home = CACHE / name
    shutil.rmtree(home, ignore_errors=True)
    if name in NODE:
        home.mkdir(parents=True)
        (home / "package.json").write_text('{"private": true, "type": "module"}')
        subprocess.run(["npm", "install", "--silent", *NODE[name]], cwd=home, check=True)
    else:
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        pip = [str(home / "bin" / "python"), "-m", "pip", "install", "--quiet", "hiredis"]
        subprocess.run([*pip, *PYTHON[name]], check=True)


def command(name: str, url: str) -> list[str]:
    """How a contestant is started."""
    if name in NODE:
        script = CACHE / name / f"{name}.mjs"  # beside its node_modules, where imports are looked for
        shutil.copy(ROOT / "benchmarks" / "peers" / f"{name}.mjs", script)
        return ["node", str(script), url]
    name, *loop = name.split("+")
    python = str(CACHE / name / "bin" / "python") if name in PYTHON else sys.executable
    return [python, "-m", f"benchmarks.peers.{name}", url, *loop]
