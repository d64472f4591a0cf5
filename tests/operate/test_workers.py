"""The verbs of processes: who runs what, since when and where in the code."""

from __future__ import annotations

import json
import os
import socket
from typing import Any

import pytest

from idemgate import Gate
from idemgate.core import keys
from idemgate.operate.workers import join_failures
from idemgate.presence.calls import beat
from idemgate.presence.report import WorkFailure
from tests.audit.test_running import ago, process
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


def test_worker_show_says_that_a_process_has_ended(reported: Gate, command: Command, raw: Any, namespace: str) -> None:
    reported.context.link.run(beat(namespace, None, "0" * 32, b"report", named=True))
    raw.delete(*keys.presence(namespace, "0" * 32))
    assert "it has ended: its last report was at about 20" in command("worker", "show", ME).err
    assert "it does not report here" in command("worker", "show", "nobody:1").err


def test_worker_ls_joins_equal_errors_and_leaves_out_what_was_tried_again() -> None:
    def failure(key: str, age: float, after: float | None, error: str = "KeyError: 'a'") -> WorkFailure:
        return WorkFailure("jobs", key, 1, error, ago(age), None if after is None else ago(age - after))

    failures = (
        failure("retried", 9, 5), failure("waits", 9, 60), failure("waits too", 3, 60), failure("gave up", 8, None),
        failure("other", 5, 60, "ValueError"),
    )  # fmt: skip
    rows = join_failures([process(failures=failures), process(2, failures=(failure("third", 1, 60),))])
    assert [(row["key"], row["others"]) for row in rows] == [("third", 3), ("other", None)]


def test_worker_ls_says_that_no_process_reports(command: Command, gate: Gate) -> None:
    ran = command("worker", "ls")
    assert (ran.code, ran.out.split(maxsplit=1)[1].strip()) == (0, "no process reports here")
