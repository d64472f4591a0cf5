"""The matrix of versions: which combinations are run, and how their results are read and told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.compat import cells, report, suite
from tools.compat.servers import SERVERS

AXES = {
    "server": list(SERVERS),
    "redis_py": cells.REDIS_PY,
    "python": cells.PYTHONS,
    "parser": cells.PARSERS,
    "protocol": cells.PROTOCOLS,
}
JUNIT = """\
<testsuites><testsuite>
<testcase classname="tests.guard.test_once" name="a" />
<testcase classname="tests.store.test_cluster" name="b"><system-out>x</system-out></testcase>
<testcase classname="tests.store.test_endpoint" name="c"><skipped type="pytest.skip">no TLS</skipped></testcase>
<testcase classname="tests.worker.test_worker" name="d[x]"><failure>it did not happen</failure></testcase>
<testcase classname="tests.worker.test_worker" name="e"><error>in a fixture</error></testcase>
</testsuite></testsuites>
"""


@pytest.mark.parametrize("axis", AXES)
def test_the_few_combinations_meet_every_value(axis: str) -> None:
    assert {getattr(cell, axis) for cell in cells.COVER} == set(AXES[axis])


def test_a_selection_is_every_combination_of_what_is_named() -> None:
    # Given two servers, one Python, and nothing said of the rest
    some = cells.product(["redis-6.2", "redis-7.0"], [], ["3.13"], [], [])
    # Then the rest is as usual
    assert [(cell.server, cell.redis_py, cell.python) for cell in some] == [
        ("redis-6.2", cells.BASE.redis_py, "3.13"),
        ("redis-7.0", cells.BASE.redis_py, "3.13"),
    ]


def test_outcomes_are_counted_and_failures_named(tmp_path: Path) -> None:
    (tmp_path / "junit.xml").write_text(JUNIT)
    assert suite.counts(tmp_path / "junit.xml") == {
        "passed": 2,
        "skipped": 1,
        "failed": 2,
        "several": 1,
        "failures": ["tests.worker.test_worker::d[x]", "tests.worker.test_worker::e"],
    }


def test_the_page_tells_results_in_the_order_of_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given results of two servers, and one that did not run
    said = {"redis": "8.1.0", "python": "3.11.7", "hiredis": "", "protocol": "2", "date": "2026-11-21", "commit": "abc"}
    figures = {"passed": 5, "several": 1, "skipped": 0, "failed": 1, "failures": ["tests.x::y"]}
    (tmp_path / "docs").mkdir()
    for number, more in (("8.10.2", figures), ("8.2.0", {})):
        result = {**said, "server": f"Redis {number}", "folders": suite.FOLDERS, **more}
        (tmp_path / f"{number}.json").write_text(json.dumps(result))
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(report, "ROOT", tmp_path)
    # When the page is written
    report.write()
    # Then the older comes first, and neither a failure nor what did not run is hidden
    page = (tmp_path / "docs" / "compatibility.md").read_text()
    assert [line.split(" | ")[0] for line in page.splitlines() if line.startswith("| Redis")] == [
        "| Redis 8.2.0", "| Redis 8.10.2"
    ]  # fmt: skip
    assert "did not run" in page
    assert "- Redis 8.10.2, redis-py 8.1.0: `tests.x::y`" in page
    # And rows of results that are elsewhere stay where that is asked for
    (tmp_path / "8.2.0.json").unlink()
    report.write(keep=True)
    kept = (tmp_path / "docs" / "compatibility.md").read_text()
    assert sorted(page.splitlines()) == sorted(kept.splitlines())
