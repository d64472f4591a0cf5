"""The verbs of processes: who runs what, since when and where in the code."""

from __future__ import annotations

import json
import os
import socket
from typing import Any

import pytest

from idemgate import Gate
from tests.operate.conftest import Command
from tests.presence.conftest import report

ME = f"{socket.gethostname()}:{os.getpid()}"


@pytest.fixture
def reported(gate: Gate) -> Gate:
    """A gate with a claim of "order-7" and a failure of "order-8" in its last report."""

    @gate.once(key="{key}", scope="charge")
    def charge(key: str) -> None:
        if key == "order-8":
            raise ValueError("no \x1b[31mmoney")
        report(gate)

    with pytest.raises(ValueError, match="money"):
        charge("order-8")
    charge("order-7")
    return gate


def as_json(command: Command, *words: str) -> Any:
    return json.loads(command(*words, "--json").out)


def test_worker_ls_shows_processes_what_runs_and_what_failed(reported: Gate, command: Command) -> None:
    shown = command("worker", "ls").out
    assert ME in shown
    assert "order-7" in shown
    assert " report" in shown
    assert "ValueError: no \\x1b[31mmoney" in shown
    found = as_json(command, "worker", "ls")
    assert [row["process"] for row in found["processes"]] == [ME]
    assert [(row["of"], row["key"]) for row in found["running"]] == [("charge", "order-7")]
    assert [(row["of"], row["key"], row["next_at"]) for row in found["failures"]] == [("charge", "order-8", None)]


@pytest.mark.parametrize(
    ("words", "processes", "running", "failures"),
    [
        ("--of charge", 1, 1, 1),
        ("--of jobs", 0, 0, 0),
        ("--key order-7", 1, 1, 0),
        ("--key order-8", 0, 0, 0),
    ],
)
def test_worker_ls_filters(
    reported: Gate, command: Command, words: str, processes: int, running: int, failures: int
) -> None:
    found = as_json(command, "worker", "ls", *words.split())
    assert [len(found[name]) for name in ("processes", "running", "failures")] == [processes, running, failures]


def test_worker_show_shows_counters_and_durations(reported: Gate, command: Command) -> None:
    found = as_json(command, "worker", "show", ME)
    counters = {row["name"]: row["total"] for row in found["counters"]}
    assert counters["once.started"] == 2
    [calls] = found["durations"]
    assert (calls["of"], calls["what"]) == ("store", "calls")
    assert calls["number"] == sum(n for name, n in calls.items() if name[0] in "<>")
    assert "once.started" in command("worker", "show", found["id"]).out


def test_worker_show_names_the_processes_for_an_unknown_one(reported: Gate, command: Command) -> None:
    ran = command("worker", "show", "nobody:1")
    assert ran.code == 2
    assert ME in ran.err


def test_worker_ls_says_that_no_process_reports(command: Command, gate: Gate) -> None:
    ran = command("worker", "ls")
    assert (ran.code, ran.out.split(maxsplit=1)[1].strip()) == (0, "no process reports here")
