"""The report of faults."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tools.reliability import FIGURES, PAGE, document, merged


def row(**other: Any) -> dict[str, Any]:
    return {
        "fault": "a reply is lost",
        "test": "tests/resilience/test_x.py::test_y",
        "n": 10,
        "promises": ["P6"],
        "violations": 0,
        "exhaustive": False,
        "passed": True,
        "seed": None,
        "server": "valkey 9.1.0",
        "figures": {},
        "redis-py": "8.1.0",
        "parser": "pure",
        "python": "3.11.7",
        "commit": "abc",
        "date": "2026-11-21",
        **other,
    }


def test_rows_of_a_fault_are_one() -> None:
    # Given rows of one fault, of two processes, and of another server
    rows = [
        row(seed=1, figures={"lost": 0, "runs": 3, "link": "sync"}),
        row(seed=2, figures={"lost": 0, "runs": 4, "link": "async"}, promises=["P10", "P2"], violations=2),
        row(server="redis 6.2.14"),
    ]
    # Then they are one row a server: what is counted is added up
    other, one = merged(rows)
    assert (one["n"], one["violations"], one["seeds"]) == (20, 2, [1, 2])
    assert one["figures"] == {"lost": 0, "runs": 7, "link": "sync, async"}
    assert one["promises"] == ["P2", "P6", "P10"]
    assert (other["n"], other["server"]) == (10, "redis 6.2.14")


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (row(n=1000), "| 1,000 | 0 | 0.003 |"),
        (row(n=9, exhaustive=True), "| 9 | 0 | all there are |"),
        (row(violations=2), "| 10 | 2 |  |"),
        (row(passed=False), "| 10 | **0, test failed** |  |"),
        (row(n=0, passed=False), "| 0 | **0, test failed** |  |"),
    ],
)
def test_what_was_found_is_said(found: dict[str, Any], said: str) -> None:
    assert said in document(merged([found]))


def test_what_is_of_another_kind_is_added_up_by_itself() -> None:
    # Given rows of the files of several kinds
    files = {
        "tests/resilience/test_x.py::a": 1, "tests/worker/test_y.py::b": 2, "tests/scripts/test_states.py::c": 10,
        "tests/guard/test_model.py::d": 20, "tests/topics/test_search.py::e": 30,
        "tests/security/test_injection.py::f": 5, "tests/security/test_fuzz.py::g": 6,
        "tests/security/test_least.py::h": 7, "tools/mutation": 8,
    }  # fmt: skip
    text = document(merged(row(fault=name, test=name, n=n) for name, n in files.items()))
    # Then faults, cases, models and names have a sum each
    for said in (
        "3 faults injected", "10 cases of single scripts", "50 calls and states of models", "5 made-up names",
        "6 made-up bytes", "7 calls beyond an access list", "8 changes to the code",
    ):  # fmt: skip
        assert f" {said}" in text, said


def test_the_page_is_made_of_the_figures() -> None:
    assert PAGE.read_text() == document(json.loads(FIGURES.read_text()))
