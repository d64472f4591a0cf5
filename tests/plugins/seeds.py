"""One seed for everything that the tests draw at random, as a plugin of pytest (`addopts` in pyproject.toml).

Without IDEMGATE_SEED each run draws the same, so a red run shows a change of the code or of the machine.
`IDEMGATE_SEED=fresh` draws a new seed (`poe resilience` does), and `IDEMGATE_SEED=4711` repeats one. Each run prints
its seed.
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest

FIXED = 0
VARIABLE = "IDEMGATE_SEED"


def find_seed() -> int:
    """Return the seed of this run. The processes that pytest starts inherit a fresh one."""
    given = os.environ.get(VARIABLE, str(FIXED))
    if given == "fresh":
        os.environ[VARIABLE] = given = str(random.SystemRandom().randrange(1_000_000))
    if not given.isdecimal():
        raise pytest.UsageError(f"invalid {VARIABLE}: expected a whole number or 'fresh', got {given!r}")
    return int(given)


def pytest_load_initial_conftests(args: list[str]) -> None:
    if not any(arg.startswith("--hypothesis-seed") for arg in args):
        args.append(f"--hypothesis-seed={find_seed()}")


def pytest_report_header() -> str:
    return f"seed: {VARIABLE}={find_seed()}"


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.line(f"seed: {VARIABLE}={find_seed()}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that draw from the seed. Hypothesis marks its own."""
    for item in items:
        if "seed" in getattr(item, "fixturenames", ()):
            item.add_marker("drawn")


@pytest.fixture
def seed() -> int:
    """The seed of what a test leaves to chance."""
    return find_seed()


@pytest.fixture
def drawn(seed: int) -> random.Random:
    return random.Random(seed)
