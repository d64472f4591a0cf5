"""The first block of the README, as a new user runs it, and the example.

The slow test builds the wheels and installs them into an empty environment, which needs the package index.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import pytest
from idemgate_faststream import Once

from tests.readmes import MINUTES, install, read_readme, run

HERE = Path(__file__).parents[1]
README, (INSTALL, PROGRAM, COMMAND, *_) = read_readme(__file__)
EXPECTED = "bill 7\n1 handled, 1 duplicate"


def run_program(python: object, folder: Path, url: str, **options: Any) -> str:
    assert PROGRAM.count("nats://localhost:4222") == 1
    (folder / "shop.py").write_text(PROGRAM.replace("nats://localhost:4222", url))
    assert COMMAND == "python shop.py\n"
    lines = run(python, "-W", "error", "shop.py", cwd=folder, **options).splitlines()
    return "\n".join(line for line in lines if " - " not in line)  # the log of FastStream


@pytest.mark.slow
def test_the_first_block_runs(tmp_path: Path, nats_server: Any) -> None:
    assert run_program(sys.executable, tmp_path, nats_server.url) == EXPECTED
    assert "Beside the log of FastStream it prints `bill 7` and `1 handled, 1 duplicate`" in README


@pytest.mark.slow
@pytest.mark.timeout(MINUTES * 60)
def test_the_first_block_runs_in_an_empty_environment(tmp_path: Path, nats_server: Any) -> None:
    scripts, env = install(INSTALL, tmp_path)
    assert run_program(scripts / "python", tmp_path, nats_server.url, env=env) == EXPECTED


@pytest.mark.slow
def test_the_example_prints_what_happened(nats_server: Any) -> None:
    lines = run(sys.executable, "-W", "error", HERE / "example.py", nats_server.url).splitlines()
    assert lines.count("billing order 7") == 1
    assert lines.count("reply: invoice of order 7") == 2
    assert lines.count("billing order 8") == 2
    assert lines.count("billing order 9") == 3
    assert 'dead letter {"id":9,"total":-1}: a negative total' in lines
    assert lines[-1] == "2 handled, 1 duplicate, 1 rejected"


def test_the_readme_names_each_option() -> None:
    options = [name for name in inspect.signature(Once.__init__).parameters if name not in ("self", "gate", "options")]
    assert [name for name in options if f"`{name}" not in README] == []
