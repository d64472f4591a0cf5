"""The documentation names what is there: each promise the tests that show it, and each page files that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROMISES = (ROOT / "docs" / "promises.md").read_text(encoding="utf-8")
PROMISED = re.findall(r"^\| (P\d+) \| ", PROMISES, re.MULTILINE)
NAMED = re.compile(r"(?<![\w/-])((?:tests|benchmarks|idemgate|integrations)/[\w/.-]*\w)(?:::(\w+))?`")
SHOWN = {
    name: NAMED.findall(tests)
    for name, tests in re.findall(r"^- \*\*(P\d+)\*\*\n((?:  .*\n)+)", PROMISES, re.MULTILINE)
}


@cache
def functions_of(path: str) -> dict[str, str]:
    """The source of each test of a file, by its name."""
    text = (ROOT / path).read_text(encoding="utf-8")
    found = [one for one in ast.parse(text).body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {one.name: ast.get_source_segment(text, one) or "" for one in found if one.name.startswith("test_")}


def test_each_promise_names_tests() -> None:
    assert list(SHOWN) == PROMISED == [f"P{n + 1}" for n in range(len(SHOWN))]
    assert all(names and all(test for _, test in names) for names in SHOWN.values()), SHOWN


@pytest.mark.parametrize("promise", SHOWN)
def test_the_tests_of_a_promise_are_there_and_say_so(promise: str) -> None:
    for path, name in SHOWN[promise]:
        assert name in functions_of(path), f"{path}::{name}"
        recorded = re.findall(r'promises="([^"]+)"', functions_of(path)[name])
        assert not recorded or any(promise in one.split() for one in recorded), f"{path}::{name} records {recorded}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_is_there(page: Path) -> None:
    for path, name in NAMED.findall(page.read_text(encoding="utf-8")):
        assert (ROOT / path).exists() or (ROOT / f"{path}.py").exists(), path
        assert not name or name in functions_of(path), f"{path}::{name}"
