"""The clock of a client's machine is a day off: what it asks for is by the server's clock all the same."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from idemgate import Gate

DAY = 86_400_000
ROOT = Path(__file__).parents[2]


def run(program: str, url: str, namespace: str, environment: dict[str, str]) -> Any:
    """What a program says that runs with the wrong time."""
    command = [sys.executable, "-P", str(Path(__file__).with_name(program)), url, namespace]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.parametrize("wrong", [-DAY, DAY])
def test_leases_windows_and_plans_are_by_the_servers_clock(
    url: str,
    raw: Any,
    namespace: str,
    tmp_path: Path,
    clock_library: Path,
    wrong: int,
    sound: Callable[[Gate], None],
    record_fault: Callable[..., None],
) -> None:
    offset = tmp_path / "offset"
    offset.write_bytes(struct.pack("l", wrong))
    surroundings = {"LD_PRELOAD": str(clock_library), "CLOCK_FILE": str(offset), "PYTHONPATH": str(ROOT)}
    with Gate(url, namespace=namespace) as gate:
        theirs = gate.claim("theirs", lease="30s")
        # When a program asks whose clock is wrong
        said = run("elsewhen.py", url, namespace, os.environ | surroundings)
        seconds, micros = raw.time()
        now = datetime.fromtimestamp(seconds, UTC)
        if abs(said["now"] - seconds - wrong / 1000) > 60:
            pytest.skip("this Python does not take its time from the C library")
        # Then it is answered as everybody: what is another's is another's, and a second one is no first one
        assert said["taken"] == ["soon", "ok"]
        assert said["theirs"] == "in_progress"
        assert said["first"] == said["dedup"] == [True, False]
        # And what it holds ends when it said, and what it did is done
        assert 0 < (gate.claim("held").retry_after or 0) <= 30
        assert gate.claim("done").result == "receipt"
        assert not gate.first("mark", "1h")
        assert abs(said["token"] - seconds * 1_000_000 - micros) < 60_000_000
        assert theirs.complete("receipt")
        # And what it triggered, or planned, is due in so long from now on
        topic = gate.topic("t", window="1h", lease="30s", backoff=0)
        assert due_in(topic, "window", now, timedelta(hours=1))
        assert due_in(topic, "later", now, timedelta(minutes=90))
        hour = now.replace(minute=0, second=0, microsecond=0) + timedelta(hours=1)
        assert gate.topic("hourly").next_due() in (hour, hour + timedelta(hours=1))
        sound(gate)
    record_fault("a client's clock is wrong", 1, promises="P4 P8 P9", milliseconds=str(wrong), lost=0)


def due_in(topic: Any, key: str, now: datetime, after: timedelta) -> bool:
    due: datetime = topic.peek(key).due_at
    return abs(due - now - after) < timedelta(minutes=1)
