"""What `import idemgate` brings along, each time in a new process: start-up time is what every program pays."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

LATER = {
    "redis": "with the first gate that has a store",
    "hiredis": "with redis",
    "wrapt": "with the first decorator",
    "importlib.metadata": "with wrapt, or with redis",
    "tenacity": "by users with a policy or strategy of its",
    "zoneinfo": "with the first recurring trigger",
    "cronsim": "with the first recurring trigger",
    "prometheus_client": "with `idemgate.metrics`",
    "rich": "by the command line",
    "starlette": "by the page",
    "uvicorn": "by `idemgate ui`",
    "argparse": "by the command line",
    "idemgate.cli": "by the command line",
    "idemgate.testing": "by tests",
    "idemgate.worker.worker": "with the first worker",
    "idemgate.subscribers": "with the first subscriber",
    "idemgate.store.embedded.server": "with the first embedded server",
}
SEEN = "import sys, json; before = set(sys.modules); {}; print(json.dumps(sorted(set(sys.modules) - before)))"


def brought(program: str) -> list[str]:
    """The modules that a program of one line imports."""
    done = subprocess.run(
        [sys.executable, "-c", SEEN.format(program)], capture_output=True, text=True, check=True, timeout=60
    )
    found: list[str] = json.loads(done.stdout)
    return found


def test_what_is_not_used_yet_is_not_imported() -> None:
    found = brought("import idemgate")
    assert "idemgate.gate" in found
    assert [name for name in LATER if name in found] == []


def test_the_front_door_names_everything_without_it() -> None:
    found = brought("from idemgate import *")
    assert [name for name in LATER if name in found] == []


@pytest.mark.parametrize(
    ("program", "late"),
    [
        ("import idemgate; idemgate.Gate('redis://localhost')", "redis"),
        ("import idemgate; idemgate.once(key='{x}', scope='s')(lambda x: x)", "wrapt"),
    ],
)
def test_it_comes_with_its_first_use(program: str, late: str) -> None:
    found = brought(program)
    assert late in found
    assert "idemgate.store.embedded.server" not in found


def test_a_strategy_that_is_imported_after_idemgate_is_known_for_one() -> None:
    program = (
        "import idemgate, tenacity; policy = idemgate.Gate().topic('t', backoff=tenacity.wait_fixed(7)).policy; "
        "assert policy.backoff.ms(1) == 7000"
    )
    assert "tenacity" in brought(program)
