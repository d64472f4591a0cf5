"""`@pytest.mark.one_in(3)`: of the cases of a parametrized test `poe test` runs one in three, as a plugin of pytest.

For tests whose cases show one rule on many values. The others are marked `slow`: `poe resilience` runs them. Each run
takes the same cases, which are not the first ones of every test. Two cases at least are taken, and both flavours.
"""

from __future__ import annotations

import zlib
from collections import defaultdict

import pytest


def pick(name: str, cases: int, n: int) -> set[int]:
    """Return the numbers of the cases of a test that are taken.

    A step that is odd meets both flavours, which are neighbours where a test has any.
    """
    if n % 2 == 0:
        raise pytest.UsageError(f"{name}: one_in({n}) takes the same flavour each time: use an odd number")
    first = zlib.crc32(name.encode()) % cases
    if cases == n:
        n += 2  # else the second case is the first one
    return {(first + step * n) % cases for step in range(max(2, -(-cases // n)))}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("one_in"):
            tests[item.nodeid.partition("[")[0]].append(item)
    for name, cases in tests.items():
        taken = pick(name, len(cases), max(mark.args[0] for mark in cases[0].iter_markers("one_in")))
        for number, item in enumerate(cases):
            if number not in taken:
                item.add_marker("slow")
