"""Tests of `tests/plugins/seeds.py`: what the tests draw at random follows from one seed."""

from __future__ import annotations

import ast
from pathlib import Path

import hypothesis
import pytest

from tests.plugins.seeds import FIXED, VARIABLE, find_seed

ROOT = Path(__file__).parents[2]
FILES = [path for folder in ("tests", "integrations") for path in sorted((ROOT / folder).rglob("*.py"))]
SEEDED = {"Random", "seed", "getstate", "setstate"}


def test_without_a_seed_each_run_draws_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert find_seed() == FIXED


def test_a_fresh_seed_is_the_same_in_all_processes_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = set[int]()
    for _ in range(3):
        monkeypatch.setenv(VARIABLE, "fresh")
        first = find_seed()
        assert find_seed() == first  # a child of this process sees the number, not the word
        drawn.add(first)
    assert len(drawn) > 1


def test_a_seed_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "-1")
    with pytest.raises(pytest.UsageError, match=r"invalid IDEMGATE_SEED: .* got '-1'"):
        find_seed()


def test_hypothesis_draws_from_the_seed_and_remembers_no_earlier_run(pytestconfig: pytest.Config) -> None:
    assert str(pytestconfig.getoption("hypothesis_seed")) == str(find_seed())
    assert hypothesis.settings().database is None


def test_no_test_draws_from_another_source() -> None:
    """`random.random()` and its siblings, and `random.SystemRandom`, follow from no seed."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: random.{node.attr}"
        for path in FILES
        if path.name != "seeds.py"  # it draws the fresh one
        and "random." in (text := path.read_text(encoding="utf-8"))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "random"
        and node.attr not in SEEDED
    ]
    assert found == []
