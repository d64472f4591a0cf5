"""Running the suite in a cell, and what came of it."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree as ET

from tools.compat import environments, servers
from tools.compat.cells import Cell
from tools.compat.uv import CACHE, ROOT

__all__ = ["FOLDERS", "QUICK", "RESULTS", "commit", "counts", "run"]

FOLDERS = [
    f"tests/{name}"
    for name in ("unit", "scripts", "guard", "dedup", "topics", "store", "worker", "audit", "security", "resilience")
]
"""All but what needs no other server: whole programs (tests/cli)."""
QUICK = [
    "tests/scripts",
    "tests/guard",
    "tests/dedup",
    *(f"tests/store/test_{name}.py" for name in ("cluster", "endpoint", "faults", "links")),
    *(f"tests/topics/test_{name}.py" for name in ("deliveries", "limits", "merging", "priorities", "triggers")),
    *(f"tests/worker/test_subscribers_{name}.py" for name in ("channel", "expiry", "list", "stream")),
    "tests/worker/test_worker_store.py",
]
"""What touches the most of a server and of redis-py in the least time."""
RESULTS = CACHE / "results"
SEVERAL = "test_cluster.py"
"""The tests that start clusters and sentinels, counted by themselves."""


def run(cell: Cell, interpreter: Path, folders: list[str], workers: int) -> dict[str, object]:
    """Its result, which is written to RESULTS, too, with pytest's words beside it."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    server, report, said = servers.program(cell.server), RESULTS / f"{cell.name}.xml", RESULTS / f"{cell.name}.txt"
    report.unlink(missing_ok=True)
    surroundings = os.environ | {"IDEMGATE_SERVER": str(server), "IDEMGATE_TEST_PROTOCOL": cell.protocol}
    words = ["-q", "-n", str(workers), "-p", "no:cacheprovider", "--timeout", "300", f"--junitxml={report}"]
    began = time.monotonic()
    with said.open("w") as out:
        command = [interpreter, "-m", "pytest", *words, *folders]
        code = subprocess.run(command, cwd=ROOT, env=surroundings, stdout=out, stderr=out, check=False).returncode
    result = {
        **environments.installed(interpreter),
        "server": servers.version(server),
        "protocol": cell.protocol,
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
        "folders": folders,
        "seconds": round(time.monotonic() - began),
        "code": code,
        **(counts(report) if report.exists() else {}),
    }
    (RESULTS / f"{cell.name}.json").write_text(json.dumps(result, indent=1))
    return result


def counts(report: Path) -> dict[str, object]:
    """How many tests passed, were skipped and failed, how many of those that passed ran on clusters and sentinels, and
    the names of those that failed."""
    found: Counter[str] = Counter(passed=0, skipped=0, failed=0, several=0)
    failures: list[str] = []
    for case in ET.parse(report).iter("testcase"):
        outcome = next((_OUTCOMES[child.tag] for child in case if child.tag in _OUTCOMES), "passed")
        found[outcome] += 1
        where = case.get("classname", "")
        found["several"] += outcome == "passed" and where.endswith(SEVERAL.removesuffix(".py"))
        if outcome == "failed":
            failures.append(f"{where}::{case.get('name')}")
    return {**found, "failures": failures}


_OUTCOMES = {"failure": "failed", "error": "failed", "skipped": "skipped"}


def commit() -> str:
    """That of the checkout."""
    said = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    return said.stdout.strip()
