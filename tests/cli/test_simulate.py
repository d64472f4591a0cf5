"""`idemgate simulate`: what a topic would have made of recorded events."""

from __future__ import annotations

import gzip
import json
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from idemgate.cli import main, simulate
from idemgate.errors import InvalidArgument
from idemgate.testing import delete_keys
from tests.for_each import for_each

Timed = list[tuple[int, str]]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def shared(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run uses the server of this test process, and leaves nothing there: to start one takes longer than a run."""

    @contextmanager
    def server() -> Iterator[str]:
        try:
            yield url
        finally:
            delete_keys(url, "simulate")

    monkeypatch.setattr(simulate, "temporary_server", server)


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """`run(lines, "--window", "2s")`: the exit code, and what is printed."""

    def run(lines: Sequence[object], *options: str) -> tuple[int, str, str]:
        path = tmp_path / "events.ndjson"
        path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
        code = main(["simulate", str(path), *options])
        return code, *capsys.readouterr()

    return run


def expected(events: Timed, span: int, quiet: bool, longest: int | None, most: int | None) -> list[tuple[int, ...]]:
    """The delays of the events of each delivery, in ms."""
    pending: dict[str, list[int]] = {}
    due = dict[str, int]()
    found: list[tuple[int, ...]] = []

    def deliver(key: str) -> None:
        found.append(tuple(due[key] - at for at in pending.pop(key)))

    for at, key in sorted(events):
        if key in pending and due[key] <= at:
            deliver(key)
        times = pending.setdefault(key, [])
        times.append(at)
        due[key] = (at if quiet else times[0]) + span
        if longest is not None:
            due[key] = min(due[key], times[0] + longest)
        if len(times) == most:
            due[key] = at
    for key in [*pending]:
        deliver(key)
    return found


@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize(
    ("options", "quiet", "longest", "most"),
    [
        (("--window", "2s,500ms"), False, None, None),
        (("--quiet", "500ms,2s", "--max-delay", "3s"), True, 3000, None),
        (("--quiet", "2s,500ms", "--max-size", "3"), True, None, 3),
    ],
    ids=["window", "quiet", "max_size"],
)
def test_it_finds_what_a_model_of_a_topic_finds(
    run: Run, options: tuple[str, ...], quiet: bool, longest: int | None, most: int | None, monkeypatch: Any
) -> None:
    # Given bursts of few keys, far and near, in no order; and few that begin together
    monkeypatch.setattr(simulate, "TOGETHER", 7)
    chance = random.Random(1)
    start = 1_774_612_800_000
    moments: dict[str, set[int]] = defaultdict(set)
    for _ in range(300):
        moments[f"k{chance.randrange(8)}"].add(start + int(chance.expovariate(1) * 10_000) // 10 * 10)
    events: Timed = [(at, key) for key, times in moments.items() for at in times]
    chance.shuffle(events)
    # When they are simulated
    lines = [{"key": key, "at": at / 1000, "other": 1} for at, key in events]
    code, out, err = run(lines, *options, "--json")
    # Then each row is that of the model
    assert code == 0
    assert err.startswith(f"{len(events):,} events of 8 keys in ")
    rows = json.loads(out)
    assert [row[f"{'quiet' if quiet else 'window'}_s"] for row in rows] == [0.5, 2]
    for row, span in zip(rows, (500, 2000), strict=True):
        deliveries = expected(events, span, quiet, longest, most)
        late = sorted(delay for delivery in deliveries for delay in delivery)
        assert row["deliveries"] == len(deliveries)
        assert row["saved_percent"] == round(100 - 100 * len(deliveries) / len(events), 1)
        assert row["largest_merge"] == max(map(len, deliveries))
        assert row["lateness_p50_s"] == late[-(-len(late) // 2) - 1] / 1000
        assert row["lateness_p99_s"] == late[-(-len(late) * 99 // 100) - 1] / 1000


@pytest.mark.usefixtures("shared")
def test_payloads_merge_and_what_is_dropped_is_counted(run: Run) -> None:
    lines = [{"key": 7, "at": f"2026-03-27T12:00:00.{n:03}Z", "payload": "x" * 100} for n in range(3)]
    lines += [{"key": 7, "at": 0, "payload": "x"}, "", {"key": "7", "at": "1970-01-01T00:00:00", "payload": "x"}]
    code, out, _ = run(lines, "--window", "1m", "--merge", "append")
    assert code == 0
    titles, row = (line.split("  ") for line in out.splitlines())
    shown = dict(zip(*([cell.strip() for cell in cells if cell.strip()] for cells in (titles, row)), strict=True))
    assert (shown["events"], shown["deliveries"], shown["largest merge"], shown["of key"]) == ("5", "3", "3", "7")
    assert 300 < int(shown["largest bytes"]) < int(shown["bytes"]) < 600
    assert "dropped" not in shown
    rows = json.loads(
        run(
            [{"key": "k", "at": 0, "payload": n} for n in range(1003)], "--window", "1s", "--merge", "append", "--json"
        )[1]
    )
    assert (rows[0]["dropped"], rows[0]["largest_merge"]) == (3, 1000)
    # Scripts merge 128 KiB a call, so these triggers need several
    large = [{"key": n % 3, "at": 0.1 * (n // 60), "payload": "x" * 3000} for n in range(240)]
    (row,) = json.loads(run(large, "--window", "350ms", "--merge", "append", "--json")[1])
    assert (row["deliveries"], row["largest_merge"]) == (3, 80)
    sums = [{"key": "k", "at": 0, "payload": {"total": 1}}, {"key": "k", "at": 0, "payload": {"total": 2}}]
    assert run(sums, "--window", "1s", "--merge", '{"total": "sum"}')[0] == 0


@for_each(
    ("line", "problem"),
    [
        ("nonsense", "is no JSON object"),
        ("[1]", "is no JSON object"),
        ('{"at": 1}', 'has no "key"'),
        ('{"key": "", "at": 1}', 'has no "key"'),
        ('{"key": true, "at": 1}', 'has no "key"'),
        ('{"key": "k"}', 'has no "at"'),
        ('{"key": "k", "at": null}', 'has no "at"'),
        ('{"key": "k", "at": true}', 'has no "at"'),
        ('{"key": "k", "at": NaN}', 'has no "at"'),
        ('{"key": "k", "at": Infinity}', 'has no "at"'),
        ('{"key": "k", "at": "yesterday"}', 'has no "at"'),
        ("[" * 100_000, "is no JSON object"),
    ],
)
def test_a_bad_line_is_named(line: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "events.gz"
    path.write_bytes(gzip.compress(f'{{"key": "k", "at": 1}}\n\n{line}\n'.encode()))
    with pytest.raises(InvalidArgument) as raised:
        simulate.read_events(path)
    assert raised.value.name == f"{path}:3"
    assert raised.value.problem.startswith(problem)
    assert '{"key": "cat.png", "at": 1774612800.25}' in raised.value.fix


@pytest.mark.usefixtures("shared")
def test_a_payload_that_the_policy_cannot_merge_is_named(run: Run) -> None:
    lines = [
        {"key": "k", "at": 2, "payload": 1},
        {"key": "k", "at": 1, "payload": "\x1b[31mone"},
        {"key": "k", "at": 0},
    ]
    code, out, err = run(lines[:2], "--window", "1s", "--merge", "sum")
    assert (code, out) == (2, "")
    assert "events.ndjson:2=" in err
    assert "\x1b" not in err


@pytest.mark.usefixtures("shared")
@for_each(
    ("lines", "options", "problem"),
    [
        ([], ("--window", "1s"), "has no events"),
        (["no event"], ("--window", "1s", "--merge", "largest"), "merge='largest'"),
        (["no event"], ("--window", "1s", "--max-delay", "1m"), "only bounds a quiet time"),
        (["no event"], ("--window", "1s", "--svg", "/nowhere/at.svg"), "svg='/nowhere/at.svg': cannot be written"),
        (["no event"], ("--window", "1s", "--svg", "."), "svg='.': cannot be written"),
        (["no event"], ("--window", "1s", "--svg", "events.ndjson"), "is the file of the events"),
        (["no event"], ("--window", "1s", "--svg", "link"), "is the file of the events"),
    ],
)
def test_a_wrong_option_ends_with_2_before_the_events_are_read(
    lines: list[object], options: tuple[str, ...], problem: str, run: Run, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    if not (tmp_path / "link").is_symlink():
        (tmp_path / "link").symlink_to("events.ndjson")
    code, out, err = run(lines, *options)
    assert (code, out) == (2, "")
    assert problem in err
    assert (tmp_path / "events.ndjson").read_text() == "".join(f"{line}\n" for line in lines)


def test_the_curve_is_drawn(run: Run, tmp_path: Path) -> None:
    lines = [{"key": "\x1b[31m<k>", "at": n / 10} for n in range(100)]
    code, out, _ = run(lines, "--window", "1s,100ms,10s", "--svg", str(tmp_path / "curve.svg"))
    assert code == 0
    assert "\x1b" not in out
    assert "\\x1b[31m<k>" in out
    text = (tmp_path / "curve.svg").read_text()
    root = ET.fromstring(text)
    lines_of = {
        line.get("class"): line.get("points", "").split() for line in root.iter("{http://www.w3.org/2000/svg}polyline")
    }
    assert {name: len(points) for name, points in lines_of.items()} == {"deliveries": 3, "p50": 3, "p99": 3}
    ys = [float(point.partition(",")[2]) for point in lines_of["deliveries"]]
    assert ys == sorted(ys)  # fewer deliveries with a longer window: lower in the picture
    assert "prefers-color-scheme: dark" in text
