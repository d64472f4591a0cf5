"""The faults for which the exhaustive searches look. These are slow, so they notice late that a script changed."""

from __future__ import annotations

import pytest

from tests.exhaustive import broken
from tests.guard import test_search as guard
from tests.topics import test_search as topics
from tests.worker import test_search as worker

CHANGES = [
    *((name, changes) for _, name, changes in guard.FAULTS.values()),
    *((name, {before: after}) for _, name, before, after in topics.FAULTS.values()),
    *((name, {before: after}) for name, before, after in worker.FAULTS.values()),
]


@pytest.mark.parametrize(("name", "changes"), CHANGES)
def test_a_planted_fault_changes_its_script(name: str, changes: dict[str, str]) -> None:
    assert broken(name, changes)
