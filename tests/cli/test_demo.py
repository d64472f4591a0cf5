"""The demo as a user sees it: its numbers, its end, and what it leaves behind."""

from __future__ import annotations

import gzip
import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from idemgate.cli import command_line, demo
from idemgate.cli.demo.records import Records, check_promises

REAL = Path(__file__).parents[1] / "data" / "repo-changes.ndjson.gz"
EVENTS = int(os.environ.get("IDEMGATE_E2E_EVENTS", "5000"))
"""How much of the real file is played; 60000 is all of it."""
FAST = ("--no-kill", "--speed", "max", "--window", "100ms")
linux = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks into /proc")


def report_of(out: str) -> dict[str, Any]:
    return json.loads(out)


@pytest.mark.slow
def test_a_small_demo_keeps_its_promises_and_its_numbers_add_up(start: Any) -> None:
    # When 300 made-up events are played to 3 subscribers
    code, out, err = start("demo", "--no-kill", "--events", "300", "--subscribers", "3", "--speed", "2", "--json").end()
    # Then all promises were checked and kept
    report = report_of(out)
    assert (code, report["kept"]) == (0, True), err
    assert list(report["promises"].values()) == [[]] * 6
    # and some events were published twice, each copy was heard by each subscriber, and one copy each was handled
    assert report["handled"] == report["triggers"] == report["events"] == 300
    assert 300 < report["published"] < 400
    assert report["copies_received"] == 3 * report["published"]
    assert report["duplicates_dropped"] == report["copies_received"] - 300
    # and windows merged triggers
    assert 0 < report["deliveries"] < 300
    assert report["merge_ratio"] == round(300 / report["deliveries"], 2)
    assert 0 <= report["lateness_p50_ms"] <= report["lateness_p99_ms"]
    # and how it went was told apart from the report
    assert "300 events" in err


@pytest.mark.slow
def test_a_killed_subscriber_and_a_killed_worker_lose_nothing_and_plain_lines_say_so(start: Any) -> None:
    # When a demo kills a subscriber and its worker in the middle
    code, out, err = start("demo", "--events", "600", "--subscribers", "3").end()
    # Then it says so in lines of 80 columns, and what starts
    assert (code, err) == (0, ""), out
    lines = out.splitlines()
    assert [line for line in lines if len(line) > 80 and not line.startswith("Server:")] == []
    assert "Starting 3 subscribers and a worker" in lines
    assert "Killed subscriber 1" in out
    assert "Killed worker" in out
    # and all promises were kept
    assert len([line for line in lines if line.startswith("  kept    ")]) == 6
    assert "BROKEN" not in out
    # and every event was handled; the last reports of the killed subscriber are missing
    assert 500 < _figure(lines, "triggers") <= 600 <= _figure(lines, "published")
    # Each figure says what it means
    assert any(line.startswith("  duplicates dropped") and line.endswith("which the guard stopped") for line in lines)


def _figure(lines: list[str], name: str) -> int:
    (line,) = (line for line in lines if line.startswith(f"  {name} "))
    return int(line.removeprefix(f"  {name} ").split()[0].replace(",", ""))


@pytest.mark.slow
def test_a_file_is_played_in_its_own_time_speeded_up(start: Any, tmp_path: Path) -> None:
    # Given three bursts of the same paths, years apart
    year = 365 * 86_400
    events = [
        {"id": f"{burst}-{number}", "ts": 1_500_000_000 + burst * 3 * year, "path": f"p{number % 5}", "change": "M"}
        for burst in range(3)
        for number in range(20)
    ]
    file = tmp_path / "events.ndjson.gz"
    file.write_bytes(gzip.compress("\n".join(map(json.dumps, events)).encode()))
    # When it is played with a window of 20 s, 40 times as fast
    code, out, err = start(
        *("demo", "--no-kill", "--input", str(file), "--window", "20s", "--speed", "40"),
        *("--subscribers", "2", "--json"),
    ).end()
    # Then each burst made one delivery a path
    report = report_of(out)
    assert (code, report["events"], report["deliveries"]) == (0, 60, 15), err
    # and the years took two pauses of 1 minute, speeded up to 1.5 s
    assert "takes 3 s" in err
    assert report["elapsed_s"] > 3


@pytest.mark.skipif(not REAL.exists(), reason="the real input is not here")
@pytest.mark.timeout(300)
@pytest.mark.slow
def test_real_events_through_four_subscribers(start: Any) -> None:
    # When a part of the real file is played as fast as it goes
    code, out, err = start(
        "demo",
        "--no-kill",
        "--input",
        str(REAL),
        "--events",
        str(EVENTS),
        "--speed",
        "max",
        "--window",
        "300ms",
        "--json",
    ).end(280)
    # Then nothing was lost, repeated, early or left over
    report = report_of(out)
    assert (code, report["kept"], report["handled"]) == (0, True, EVENTS), out + err
    assert report["copies_received"] == 4 * report["published"]
    assert report["deliveries"] < EVENTS


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_a_server_of_ones_own_keeps_nothing_of_the_topic(start: Any, url: str, raw: Any) -> None:
    # When it runs on a given server, with a number of subscribers that NUMSUB of Valkey 9.1 tells wrongly
    code, out, _ = start("demo", *FAST, "--events", "50", "--subscribers", "8", "--url", url, "--json").end(280)
    # Then the guard's records and what a deleted topic leaves stay, and those expire
    assert (code, report_of(out)["handled"]) == (0, 50)
    kept = list(raw.scan_iter(match="ig2:{demo-*", count=1000))
    records = [key for key in kept if b":once:" in key]
    assert len(records) == 50
    assert all(0 < raw.ttl(key) <= 15 * 60 for key in records)
    assert all(0 < raw.ttl(key) <= 30 * 86_400 for key in kept)


@pytest.mark.slow
def test_what_lies_in_the_current_directory_is_not_imported(tmp_path: Path) -> None:
    # Given a directory with modules named like some that idemgate needs
    for name in ("redis", "msgpack", "json"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong one')")
    # Then the demo does not mind
    command = [sys.executable, "-P", "-m", "idemgate", "demo", *FAST, "--events", "20", "--subscribers", "1"]
    demo = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert (demo.returncode, demo.stderr) == (0, ""), demo.stdout


@linux
@pytest.mark.slow
def test_ctrl_c_ends_everything(start: Any) -> None:
    # Given a demo in full swing
    demo = start("demo", "--subscribers", "2", NO_COLOR="1")
    demo.read_until("Publishing")
    assert len(demo.alive()) >= 4  # two subscribers, a worker, a server
    # When the terminal sends Ctrl-C to its process group
    demo.signal_group(signal.SIGINT)
    # Then it says so in a line, without a traceback, and nothing is left
    code, out, err = demo.end(60)
    assert (code, err) == (130, "")
    assert out.splitlines()[-1].startswith("Interrupted after")
    assert demo.all_gone(1)


@linux
@pytest.mark.slow
def test_ctrl_c_while_it_starts_ends_everything(start: Any) -> None:
    demo = start("demo", "--subscribers", "2")
    demo.read_until("Server:")
    demo.signal_group(signal.SIGINT)
    code, _, err = demo.end(60)
    assert (code, err) == (130, "")
    assert demo.all_gone(1)


@linux
@pytest.mark.slow
def test_nothing_outlives_a_killed_demo(start: Any) -> None:
    # Given a demo in full swing
    demo = start("demo", "--subscribers", "2")
    demo.read_until("Publishing")
    assert len(demo.alive()) >= 4
    assert demo.folders
    # When it is killed without a chance to clean up
    demo.process.kill()
    # Then its processes end by themselves, and the server's files are gone
    assert demo.all_gone()
    assert [folder for folder in demo.folders if Path(folder).exists()] == []


@linux
@pytest.mark.slow
def test_a_subscriber_that_is_killed_is_a_broken_promise(start: Any) -> None:
    # Given a demo in full swing
    demo = start("demo", "--no-kill", "--subscribers", "2")
    demo.read_until("Publishing")
    # When one of its subscribers is killed
    victim = next(pid for pid, line in demo.alive().items() if "actors.main() subscriber" in line)
    os.kill(victim, signal.SIGKILL)
    # Then it says which promises that broke, and fails
    code, out, _ = demo.end(60)
    assert code == 1
    assert "BROKEN  no process failed or stood still" in out
    assert "ended with -9" in out
    assert demo.all_gone(1)


def test_a_broken_promise_is_told_and_fails(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    # Given a demo whose records are falsified: an event handled twice, a delivery 5 ms early
    def falsify_and_judge(records: Records) -> dict[str, list[str]]:
        copies, deliveries = records.subscribers[0].copies, records.workers[0].deliveries
        copies.append(next(copy for copy in copies if copy[1]))
        deliveries[0] = deliveries[0]._replace(now_ms=deliveries[0].now_ms - records.late_ms(deliveries[0]) - 5.0)
        return check_promises(records)

    monkeypatch.setattr(demo, "check_promises", falsify_and_judge)
    options = command_line().parse_args(["demo", *FAST, "--events", "40", "--subscribers", "1", "--json"])
    # When it ends
    code = demo.play(options)
    # Then it fails and names them
    broken = report_of(capsys.readouterr().out)["promises"]
    assert code == 1
    assert "1 handled too often: e0000" in broken["each event was handled once, and once only"][0]
    assert "by 5.0 ms" in broken["no delivery was early by the server's clock"][0]


@pytest.mark.slow
def test_a_terminal_gets_a_live_table(tmp_path: Path) -> None:
    pytest.importorskip("rich")
    # Given a terminal
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "idemgate", "demo", *FAST, "--events", "60", "--subscribers", "1"]
    # When the demo runs in it
    with subprocess.Popen(
        command, stdout=theirs, stderr=theirs, env=os.environ | {"TERM": "xterm", "COLUMNS": "100"}
    ) as demo:
        os.close(theirs)
        seen = _all_of(ours)
    # Then it drew over itself, and the report stands at its end
    assert demo.returncode == 0
    assert "\x1b[2K" in seen
    assert "duplicates dropped" in seen.rpartition("\x1b[")[2]


def _all_of(terminal: int) -> str:
    seen = b""
    while True:
        try:
            piece = os.read(terminal, 65536)
        except OSError:  # Linux says EIO when the other end is closed
            piece = b""
        if not piece:
            os.close(terminal)
            return seen.decode()
        seen += piece


@pytest.mark.parametrize("command", ["acl", "demo", "doctor", "run", "server"])
def test_help_fits_80_columns(command: str, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        command_line().parse_args([command, "--help"])
    shown = capsys.readouterr().out
    assert [line for line in shown.splitlines() if len(line) > 80] == []
