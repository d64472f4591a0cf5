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
from string import Template
from typing import Any

import pytest

from benchmarks import results
from benchmarks.contestants import begin, contestants, end
from benchmarks.environments import made
from benchmarks.machine import ROOT
from benchmarks.plan import APART, PARTS, Plan
from benchmarks.report import SECTIONS, summary
from benchmarks.report.figures import shown

pytest.importorskip("hiredis")  # as the measured runs have it

from benchmarks import backlog, pieces
from benchmarks.callgrind import Rooms, counted
from benchmarks.profile import under_callgrind
from benchmarks.server import OTHERS, port_of, programs, started
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
        ("first_threads", {"n": 20, "threads": 4}),
        ("replay_threads", {"n": 20, "threads": 4}),
    ],
    "idemgate_guard+uvloop": [
        ("first_async", {"n": 20, "tasks": 4}),
        ("replay_async", {"n": 20, "tasks": 4}),
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
        ("first_threads", {"n": 20, "threads": 4}),
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
    if not made(who):
        pytest.skip("no uvloop here")
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


def test_a_contestant_that_was_killed_ends_no_part(url: str) -> None:
    with contestants(["by_hand"], url) as sides:
        sides["by_hand"].kill()
        sides["by_hand"].wait()
        begin(sides["by_hand"], "first", tag="t", n=1)
        assert "it ended before the command" in end(sides["by_hand"])["error"]


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


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Results in an empty folder of the test."""
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    return tmp_path


def test_the_page_has_a_place_for_each_section_also_where_nothing_was_measured(measured: Path) -> None:
    page = Template((ROOT / "benchmarks" / "report" / "page.md").read_text())

    assert {name for name in page.get_identifiers() if not name.endswith("_plot")} == {*SECTIONS}
    assert all(section() for section in SECTIONS.values())


def test_the_summary_compares_with_each_peer_and_with_the_barest_program(measured: Path) -> None:
    # Given two rounds, in the second of which the machine was half as fast
    ours = {"who": "idemgate_guard", "step": "first", "rate": [400.0, 200.0], "client_us": [90.0], "server_us": [10.0]}
    hand = {"who": "by_hand", "step": "first", "rate": [200.0, 100.0], "client_us": [130.0], "server_us": [20.0]}
    limit = hand | {"who": "limit"}
    results.save("guard", {"rows": [ours, hand, limit]})
    # Then a ratio is that of a round, and the limit is no peer
    assert summary.times().splitlines()[2:5] == [
        "| redis-py by hand | 2.0x, 1.5x | - | - | - | - | - |",
        "",
        TOPIC_HEAD,
    ]
    assert summary.cores().splitlines()[2:5] == [
        "| **idemgate** | 100,000 | - | - | - | - | - |",
        "| redis-py by hand | 50,000 | - | - | - | - | - |",
        "",
    ]
    assert "| guard, first call | `SET NX`, `SET` by hand | 300 | 150 | 2.00x |" in summary.bare()


TOPIC_HEAD = (
    "| idemgate is, against | one trigger | take and settle | merge, the last | merge, the first "
    "| the first, several at once |"
)


def test_the_summary_shows_growth_and_bytes_beside_the_bare_commands(measured: Path) -> None:
    costs = {"10000": (2.0, 1.0), "100000": (3.0, 2.0)}
    results.save(
        "backlog",
        {
            "rows": [
                {"who": size, "step": before + "trigger", "server_us": [cost]}
                for size, both in costs.items()
                for before, cost in zip(("", "bare: "), both, strict=True)
            ]
        },
    )
    sizes = {"Redis 7.0.15": (194.0, 192.0), "Valkey 9.1.2": (154.0, 155.0)}
    what = "idemgate, with a 30-byte result"
    rows = [
        {"who": who, "step": server, "bytes": [size]}
        for server, both in sizes.items()
        for who, size in zip((what, summary.FLOORS[what]), both, strict=True)
    ]
    results.save("memory", {"rows": rows})

    assert "| trigger | 1.5x | 2.0x |" in summary.growth()
    assert summary.bytes_over().splitlines()[0] == "| bytes over the floor (all) | Redis 7.0.15 | Valkey 9.1.2 |"
    assert "| with a 30-byte result | +2 (194) | -1 (154) |" in summary.bytes_over()


def test_a_contestant_is_left_out_where_its_event_loop_is_not_installed() -> None:
    assert made("idemgate_guard")
    assert not made("idemgate_guard+no_such_loop")


@needs("redis-server")
def test_a_server_that_does_not_run_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script, absent = tmp_path / "server", tmp_path / "absent"
    script.write_text("#!/bin/sh\necho 'Valkey server v=1.2.3 sha=0'\n")
    script.chmod(0o755)
    monkeypatch.setenv(OTHERS, os.pathsep.join([str(absent), str(script)]))

    found = programs()

    assert next(iter(found.values())) == shutil.which("redis-server")
    assert found["Valkey 1.2.3"] == str(script)
    assert str(absent) in capsys.readouterr().out


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
def test_the_instructions_of_a_server_are_told_apart_by_role_also_if_a_shell_script_starts_it(tmp_path: Path) -> None:
    program = tmp_path / "server"
    program.write_text(f'#!/bin/sh\nexec {shutil.which("redis-server")} "$@"\n')
    program.chmod(0o755)
    script = "redis.call('SET', KEYS[1], cmsgpack.pack({1, 2})) return 1"
    rooms = Rooms(shutil.which("redis-server") or "")
    with under_callgrind(program=str(program)) as (server, counting):
        file = counting(lambda: server.eval(script, 1, "key"))
        of_script, of_command = counted(file, rooms), counted(counting(lambda: server.set("key", "x")), rooms)
    for found in (of_script, of_command):
        roles = [found[role] for role in ("network", "lua", "packing", "plumbing", "commands")]
        assert min(roles) >= 0
        assert sum(roles) == found["all"]
    assert min(of_script.values()) > 0
    assert of_command["lua"] == of_command["packing"] == of_command["plumbing"] == 0 < of_command["commands"]
