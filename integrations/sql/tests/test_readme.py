"""The first block of the README, as a new user runs it, and the example.

The slow test builds the wheels and installs them into an empty environment, which needs the package index.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from idemgate_sql.psycopg import Inbox

from tests.readmes import MINUTES, install, read_readme, run

HERE = Path(__file__).parents[1]
README, (INSTALL, PROGRAM, COMMAND, *_) = read_readme(__file__)
EXPECTED = "{'receipt': 'p1'}\n{'receipt': 'p1'}\n(1,)\n"


def run_program(python: object, folder: Path, **options: Any) -> str:
    (folder / "shop.py").write_text(PROGRAM)
    assert COMMAND == "python shop.py\n"
    return run(python, "-W", "error", "shop.py", cwd=folder, **options)


@pytest.mark.slow
def test_the_first_block_runs(tmp_path: Path) -> None:
    assert run_program(sys.executable, tmp_path) == EXPECTED
    assert "It prints `{'receipt': 'p1'}` twice and `(1,)`" in README
    assert run_program(sys.executable, tmp_path) == EXPECTED  # the database and its rows are there


@pytest.mark.slow
@pytest.mark.timeout(MINUTES * 60)
def test_the_first_block_runs_in_an_empty_environment(tmp_path: Path) -> None:
    scripts, env = install(INSTALL, tmp_path)
    assert run_program(scripts / "python", tmp_path, env=env) == EXPECTED


@pytest.mark.slow
def test_the_example_prints_what_happened() -> None:
    answers = [line.split(": ", 1) for line in run(sys.executable, "-W", "error", HERE / "example.py").splitlines()]
    assert [answer for _, answer in answers] == [
        "{'receipt': 'p1'}, credits in all: 1",
        "{'receipt': 'p1'}, credits in all: 1",
        "{'receipt': 'p1'}, credits in all: 1",
        "ConnectionError, credits in all: 1",
        "{'receipt': 'p2'}, credits in all: 2",
        "signal 9",
        "{'receipt': 'p3'}, credits in all: 3",
        "EndedByHandler, credits in all: 3",
        "1",
    ]


def test_the_readme_names_each_option_and_error() -> None:
    import inspect

    import idemgate_sql

    options = [name for name in inspect.signature(Inbox.__init__).parameters if name not in ("self", "source")]
    errors = [name for name in idemgate_sql.__all__ if inspect.isclass(getattr(idemgate_sql, name))]
    assert [name for name in options + errors if f"`{name}" not in README] == []
