"""The documentation names what is there: each promise the tests that show it, and each page files that exist."""

from __future__ import annotations

import ast
import importlib
import re
from functools import cache
from pathlib import Path

import pytest

from idemgate import Gate
from idemgate.topics.messages import Stats
from idemgate.topics.policy import _LOCAL, TopicOptions
from tests.for_each import for_each

ROOT = Path(__file__).parents[2]
STORIES = sorted((ROOT / "idemgate").rglob("README.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")), *STORIES]
PROMISES = (ROOT / "docs" / "promises.md").read_text(encoding="utf-8")
PROMISED = re.findall(r"^\| (P\d+) \| ", PROMISES, re.MULTILINE)
NAMED = re.compile(r"(?<![\w/-])((?:tests|benchmarks|idemgate|integrations)/[\w/.-]*\w)(?:::(\w+))?`")
SHOWN = {
    name: NAMED.findall(tests)
    for name, tests in re.findall(r"^- \*\*(P\d+)\*\*\n((?:  .*\n)+)", PROMISES, re.MULTILINE)
}


@cache
def functions_of(path: str) -> dict[str, str]:
    """Return the source of each test of a file, with its decorators, by the test's name."""
    text = (ROOT / path).read_text(encoding="utf-8")
    lines = text.splitlines()
    found = [one for one in ast.parse(text).body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
    starts = {one.name: min(node.lineno for node in (one, *one.decorator_list)) for one in found}
    return {
        one.name: "\n".join(lines[starts[one.name] - 1 : one.end_lineno])
        for one in found
        if one.name.startswith("test_")
    }


def is_slow(path: str, name: str) -> bool:
    """Return True if `poe test` leaves the test out."""
    return path.startswith("tests/resilience/") or "@pytest.mark.slow\n" in functions_of(path)[name]


def test_each_promise_names_tests() -> None:
    assert list(SHOWN) == PROMISED == [f"P{n + 1}" for n in range(len(SHOWN))]
    assert all(names and all(test for _, test in names) for names in SHOWN.values()), SHOWN


@pytest.mark.parametrize("promise", SHOWN)
def test_the_tests_of_a_promise_are_there_and_say_so(promise: str) -> None:
    for path, name in SHOWN[promise]:
        assert name in functions_of(path), f"{path}::{name}"
        recorded = re.findall(r'promises="([^"]+)"', functions_of(path)[name])
        assert not recorded or any(promise in one.split() for one in recorded), f"{path}::{name} records {recorded}"


def test_poe_test_runs_a_test_of_each_promise() -> None:
    assert [name for name, tests in SHOWN.items() if all(is_slow(*test) for test in tests)] == []


@for_each("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_is_there(page: Path) -> None:
    for path, name in NAMED.findall(page.read_text(encoding="utf-8")):
        assert (ROOT / path).exists() or (ROOT / f"{path}.py").exists(), path
        assert not name or name in functions_of(path), f"{path}::{name}"


@pytest.mark.parametrize("page", STORIES, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_step_of_a_story_names_functions_of_its_files(page: Path) -> None:
    steps = [
        row.strip("| ").split(" | ")
        for row in page.read_text(encoding="utf-8").splitlines()
        if row[:3] > "| 0" and row[:3] < "| :"
    ]
    assert steps
    for _, *calls, files in steps:
        found = [
            ROOT / name if name.startswith("idemgate/") else page.parent / name for name in re.findall("`(.+?)`", files)
        ]
        text = "\n".join(file.read_text(encoding="utf-8") for file in found)
        for call in re.findall("`(.+?)`", " ".join(calls)):
            for name in call.split("."):
                assert re.search(rf"^\s*(?:async def|def|class|local function) {name}\b", text, re.MULTILINE), (
                    f"{call}: {files}"
                )


@for_each("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_module_that_a_page_names_has_that_name(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for module, name in re.findall(r"`(idemgate(?:\.[a-z_]+)+)\.([a-z_]+)\(", text):
        assert hasattr(importlib.import_module(module), name), f"{module}.{name}"


def test_operations_lists_each_log_event() -> None:
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "idemgate").rglob("*.py"))
    event = r'"([a-z]+\.[a-z_]+)'
    levels = r"(?:debug|info|warning|error|exception|critical)\(|log\(level,"
    emitted = set(re.findall(rf"\blog\.(?:{levels})\s*{event}", sources))
    for names in re.findall(rf'name = {event}" if .* else {event}"', sources):
        emitted.update(names)
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    table = page[page.index("## Read the log") : page.index("## Fork after")]
    listed = {
        name
        for line in table.splitlines()
        if line.startswith("| `")
        for name in re.findall(r"`(\w+\.\w+)`", line.split("|")[1])
    }
    assert listed == emitted


def test_the_pages_name_each_option_of_a_topic() -> None:
    page = (ROOT / "docs" / "guides" / "options.md").read_text(encoding="utf-8")
    listed = _first_cells(page[page.index("## When a topic delivers") :])
    assert sorted(listed) == sorted(TopicOptions.__annotations__)
    assert TopicOptions.__annotations__.keys() <= set(re.findall(r"\w+", Gate.topic.__doc__ or ""))
    (local,) = re.findall(r"Options that are not stored \(([^)]+)\)", PROMISES)
    assert sorted(re.findall(r"\w+", local)) == sorted([*_LOCAL, "backoff"])


def test_the_promises_name_each_counter_of_a_process() -> None:
    added = {
        name
        for path in (ROOT / "idemgate").rglob("*.py")
        for call in re.findall(r"\.add(?:_each)?\((.+)\)", path.read_text(encoding="utf-8"))
        for name in re.findall(r'(?<!f)"([a-z]+\.[a-z_.]+)"', call)
    }
    listed = _first_cells(PROMISES[PROMISES.index("## Read the counters") :])
    assert "once.started" in added
    assert added <= set(listed)


def test_stats_document_each_counter_of_a_topic() -> None:
    counted = set[str]()
    for path in (ROOT / "idemgate" / "topics" / "scripts").rglob("*.lua"):
        text = path.read_text(encoding="utf-8")
        counted |= set(re.findall(r'add_count\("(\w+)"', text))
        counted |= {
            name for made in re.findall(r"add_counters\(K, \{([^}]*)\}", text) for name in re.findall(r"(\w+) =", made)
        }
        counted |= set(re.findall(r"\bdone\.(\w+) =", text))
    documented = set(re.findall(r"\w+", Stats.__doc__ or ""))
    assert {"folded", "nacked", "lapsed", "buried", "dropped_version", "items_dropped"} <= counted
    assert {name for name in counted - documented if not name.endswith("_triggers")} == set()


def test_the_bytes_of_the_chooser_are_those_that_were_measured() -> None:
    def read(name: str) -> str:
        return (ROOT / "docs" / name).read_text(encoding="utf-8")

    memory = read("performance.md").partition("\n## Memory\n")[2].partition("\n## ")[0]
    measured = {
        what: f"{min(sizes):.0f} to {max(sizes):.0f}"
        for what, *cells in re.findall(r"^\| idemgate, (.+?) \| (.+) \| (.+) \| (.+) \|$", memory, re.MULTILINE)
        for sizes in [[float(cell) for cell in cells]]
    }
    rows = ("with a 30-byte result", "no result", "compact", "compact, 16-byte result", "event id of a topic")
    said = re.findall(r"\d+ to \d+", read("choose.md"))
    assert said == [measured[row] for row in (*rows, "a pending message")]


def _first_cells(page: str) -> list[str]:
    """Return the names in the first column of the tables. `.b` behind `a.c` is `a.b`."""
    found: list[str] = []
    for cell in re.findall(r"^\| (`.+?`) \| ", page, re.MULTILINE):
        for name in re.findall(r"`(.+?)`", cell):
            found.append(found[-1].partition(".")[0] + name if name[0] == "." else name)
    return found
