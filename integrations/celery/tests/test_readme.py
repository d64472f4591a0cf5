"""The blocks of the README run, the first one as a new user runs it, and the example.

The slow test builds the wheels and installs them into an empty environment, which needs the package index, with the
newest Celery and with the oldest that the package allows.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.readmes import MINUTES, install, read_readme, run

FOLDER = Path(__file__).parents[1]
_, (INSTALL, PROGRAM, COMMANDS, *BLOCKS, _) = read_readme(__file__)


def connect(block: str, store: str, broker: str) -> str:
    return block.replace("redis://localhost:6379/0", store).replace("redis://localhost:6379/1", broker)


def test_the_blocks_run(store: str, broker: str, close: Callable[[Any], None]) -> None:
    found: dict[str, Any] = {"__name__": "shop"}
    for block in (PROGRAM, *BLOCKS):
        exec(connect(block, store, broker), found)
    assert found["again"].id == found["first"].id
    assert found["charge"]({"id": "o1"}) == "receipt of o1"
    assert callable(found["ShopTask"].delay_on_commit)
    close(found["app"])
    found["gate"].close()


@pytest.mark.slow
@pytest.mark.timeout(MINUTES * 60)
@pytest.mark.parametrize("version", ["", "==5.5.0"])
def test_the_first_block_runs_in_an_empty_environment(
    tmp_path: Path, store: str, broker: str, namespace: str, version: str
) -> None:
    scripts, env = install(INSTALL, tmp_path, f"celery{version}")
    program = connect(PROGRAM, store, broker).replace('namespace="shop"', f'namespace="{namespace}"')
    (tmp_path / "shop.py").write_text(program)
    assert COMMANDS == "celery -A shop worker &\npython shop.py\n"
    with (tmp_path / "log").open("wb") as log:
        worker = subprocess.Popen(
            [scripts / "celery", "-A", "shop", "worker"], cwd=tmp_path, env=env, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
        try:
            printed = run(scripts / "python", "shop.py", cwd=tmp_path, env=env)
        finally:
            os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()
    assert printed == "receipt of o1\n" * 2
    assert (tmp_path / "log").read_text().count("charging o1") == 1


@pytest.mark.slow
def test_the_example_shows_what_happened() -> None:
    lines = run(sys.executable, FOLDER / "example.py").splitlines()
    assert [line for line in lines if line.startswith("charging")] == ["charging o1", "charging o2", "charging o3"]
    assert "copy: receipt of o1" in lines
    assert "enqueued 1 of 3" in lines
    assert "o3: receipt of o3 after a wait of 1 s" in lines
