"""CPython compiled to WebAssembly (Pyodide), in Node: a Python that may not be had here otherwise, and no server.

It runs `tests/unit`. What it lacks is no failure: `in_node.py` skips tests that need a server, a thread, a process or
an event loop. It needs `node` and `npm`; nothing of Pyodide is part of the checkout.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path

from tools.compat.suite import RESULTS, commit, counts
from tools.compat.uv import CACHE, ROOT, uv

__all__ = ["run"]

FOLDERS = ["tests/unit"]
NEEDED = [
    "pytest>=8.4", "pytest-asyncio", "pytest-timeout", "redis", "wrapt", "tenacity", "msgpack", "rich", "cronsim",
    "tzdata", "prometheus-client", "starlette", "uvicorn",
    "hypothesis==6.151.0",  # later ones need their compiled part; the others work without theirs
]  # fmt: skip

UNAWAITED = ["-W", "ignore:coroutine:RuntimeWarning", "-W", "ignore::pytest.PytestUnraisableExceptionWarning"]
"""A skipped test has made a coroutine that `asyncio.run` refused. The collector finds it in a later test."""


def run(version: str) -> dict[str, object]:
    """Run the tests on this version of the npm package `pyodide`, such as "314". Write the result to RESULTS, too."""
    home = CACHE / f"pyodide-{version}"
    site, report, said = home / "site", RESULTS / f"pyodide-{version}.xml", RESULTS / f"pyodide-{version}.txt"
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    RESULTS.mkdir(parents=True, exist_ok=True)
    report.unlink(missing_ok=True)
    subprocess.run(["npm", "install", "--silent", f"pyodide@{version}"], cwd=home, check=True)
    uv("pip", "install", "--quiet", "--target", site, *NEEDED)
    shutil.copy(Path(__file__).with_name("in_node.mjs"), home)
    words = ["-q", "-m", "not slow", "-p", "no:cacheprovider", "-p", "tools.compat.in_node", "--timeout=0", *UNAWAITED]
    began = time.monotonic()
    with said.open("w") as out:
        command = ["node", "in_node.mjs", ROOT, site, RESULTS, *words, f"--junitxml=/out/{report.name}", *FOLDERS]
        environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
        code = subprocess.run(command, cwd=home, env=environment, stdout=out, stderr=out, check=False).returncode
    python, _, redis = said.read_text().splitlines()[0].partition(" ")
    result: dict[str, object] = {
        "python": python,
        "redis": redis,
        "hiredis": "",
        "server": f"Pyodide {json.loads((home / 'node_modules/pyodide/package.json').read_text())['version']}",
        "protocol": "none",
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
        "folders": FOLDERS,
        "seconds": round(time.monotonic() - began),
        "code": code,
        **(counts(report) if report.exists() else {}),
    }
    (RESULTS / f"pyodide-{version}.json").write_text(json.dumps(result, indent=1))
    return result
