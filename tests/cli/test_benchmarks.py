"""The contestants that need nothing installed still run: a benchmark that fell behind the library would only say so in
a report."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from benchmarks.contestants import begin, contestants, end
from benchmarks.machine import ROOT
from benchmarks.plan import APART, PARTS, Plan
from benchmarks.report.figures import shown

pytest.importorskip("hiredis")  # as the measured runs have it

from benchmarks import backlog, pieces
from benchmarks.callgrind import Rooms, counted
from benchmarks.profile import under_callgrind
from benchmarks.server import port_of, started
from tests.for_each import for_each


def needs(*programs: str) -> pytest.MarkDecorator:
    missing = [name for name in programs if shutil.which(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not on PATH: {', '.join(missing)}")


SENT = {"n": 200, "delay": 0.0}
TAKEN = {"n": 200, "wait": 0.0}
STEPS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "idemgate_guard": [
        ("first", {"n": 20}),
        ("replay", {"n": 20}),
        ("first_async", {"n": 20, "tasks": 4}),
        ("replay_async", {"n": 20, "tasks": 4}),
        ("first_many", {"n": 200, "batch": 200}),
        ("claim_many", {"n": 200, "batch": 200, "of": "claims"}),
        ("known", {"n": 20}),
    ],
    "idemgate_scheduler": [
        ("enqueue_many", SENT),
        ("drain", TAKEN | {"kind": "sync"}),
        ("enqueue", SENT | {"of": "async"}),
        ("drain", TAKEN | {"kind": "async", "of": "async"}),
        ("enqueue_many", SENT | {"of": "take"}),
        ("take", TAKEN | {"of": "take"}),
        ("steady", {"rate": 100, "seconds": 0.2, "delay": 0.1, "of": "steady"}),
        ("slots", {"n": 500, "of": "slots"}),
        ("merge", {"n": 500, "keys": 5, "keep": "last", "several": False, "of": "merge"}),
        ("merge", {"n": 500, "keys": 5, "keep": "last", "several": True, "of": "several"}),
    ],
    "by_hand": [
        ("first", {"n": 20}),
        ("replay", {"n": 20}),
        ("first_many", {"n": 200, "batch": 200}),
        ("claim_many", {"n": 200, "batch": 200, "of": "claims"}),
    ],
    "bare": [
        ("enqueue_many", SENT),
        ("take", TAKEN),
        ("send", {"n": 200, "tasks": 2, "of": "send"}),
        ("drain", TAKEN | {"of": "send"}),
        ("enqueue", {"n": 20, "delay": 0.0, "of": "one"}),
        ("floor", SENT | {"of": "floor"}),
        ("first", {"n": 20}),
    ],
}


LIMIT: list[tuple[str, dict[str, Any]]] = [
    ("first", {"n": 20}),
    ("replay", {"n": 20}),
    ("first_async", {"n": 20, "tasks": 4}),
    ("replay_async", {"n": 20, "tasks": 4}),
]


@pytest.mark.parametrize("who", STEPS)
@pytest.mark.slow
def test_every_step_of_a_contestant_does_what_it_was_asked_for(who: str, url: str, namespace: str) -> None:
    _do(who, STEPS[who], url, namespace)


@needs("redis-server")
def test_every_step_of_the_limit_does_what_it_was_asked_for() -> None:
    with started() as server:
        _do("limit", LIMIT, f"redis://127.0.0.1:{port_of(server)}/0", "limit")


def _do(who: str, steps: list[tuple[str, dict[str, Any]]], url: str, namespace: str) -> None:
    with contestants([who], url) as sides:
        for step, words in steps:
            wanted = words.get("n") or words["rate"] * words["seconds"]
            tag = namespace + words.get("of", "")
            begin(sides[who], step, tag=tag, **{name: word for name, word in words.items() if name != "of"})
            answer = end(sides[who])
            assert answer.get("ops") == wanted, (step, answer)
            assert answer["seconds"] > 0, (step, answer)


@pytest.mark.parametrize("repetitions", ["0", "-1", "1.5", "many"])
@pytest.mark.slow
def test_less_than_one_repetition_is_refused(repetitions: str) -> None:
    asked = _benchmarks("pieces", f"--repetitions={repetitions}")
    assert asked.returncode == 2
    assert "is not a whole number from 1 on" in asked.stderr


@pytest.mark.parametrize("part", ["all", "report"])
@pytest.mark.slow
def test_the_report_asks_for_matplotlib_before_anything_is_measured(part: str, tmp_path: Path) -> None:
    code = "import sys; sys.modules['matplotlib'] = None; from benchmarks.__main__ import main; main()"
    asked = _python("-c", code, part, IDEMGATE_BENCHMARKS=str(tmp_path))
    assert asked.returncode == 1
    assert "pip install matplotlib" in asked.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_part_shows_the_medians_of_the_figures_it_has() -> None:
    rows = [
        {"who": "a", "step": "s", "rate": [100.0, 300.0, 200.0], "client_us": [1.0]},
        {"who": "b", "step": "s", "rate": [50.0]},
    ]
    assert shown(rows).splitlines() == [
        "| who | step | rate | client_us |",
        "| --- | --- | --- | --- |",
        "| a | s | 200 | 1.0 |",
        "| b | s | 50 | - |",
    ]


def _benchmarks(*words: str) -> subprocess.CompletedProcess[str]:
    return _python("-m", "benchmarks", *words)


def _python(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@for_each("part", [*PARTS, *APART])
def test_every_part_can_be_imported(part: str) -> None:
    assert callable(importlib.import_module(f"benchmarks.{part}").run)


def test_every_piece_of_a_call_can_be_taken_by_itself() -> None:
    rows = pieces.run(Plan(repetitions=1, share=0.01))

    assert all(row["client_us"][0] > 0 for row in rows)


@needs("redis-server")
@pytest.mark.parametrize("kind", [backlog.Backlog, backlog.Bare])
def test_a_backlog_is_as_large_after_it_was_measured_as_before(kind: type[backlog.Backlog | backlog.Bare]) -> None:
    with started() as server, closing(kind(server)) as filled:
        assert filled.fill(1_000) > 0
        for work in filled.works(200).values():
            work()
        filled.tidy(200)
        assert server.hlen("what") in (0, 1_000)


@needs("redis-server", "valgrind", "nm")
@pytest.mark.slow
def test_the_instructions_of_a_server_are_told_apart_by_role() -> None:
    script = "redis.call('SET', KEYS[1], cmsgpack.pack({1, 2})) return 1"
    rooms = Rooms(shutil.which("redis-server") or "")
    with under_callgrind() as (server, counting):
        file = counting(lambda: server.eval(script, 1, "key"))
        of_script, of_command = counted(file, rooms), counted(counting(lambda: server.set("key", "x")), rooms)
    for found in (of_script, of_command):
        roles = [found[role] for role in ("network", "lua", "packing", "plumbing", "commands")]
        assert min(roles) >= 0
        assert sum(roles) == found["all"]
    assert min(of_script.values()) > 0
    assert of_command["lua"] == of_command["packing"] == of_command["plumbing"] == 0 < of_command["commands"]
