"""The command as a user has it: a process of its own, everything it starts found by a mark in its environment."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

MARK = "IDEMGATE_E2E_MARK"
FOLDER = re.compile(r"/[^\s\":]*/idemgate-[A-Za-z0-9_]+")


class Command:
    """A running `idemgate ...`, in a process group of its own, as a shell starts it."""

    def __init__(self, arguments: list[str], folder: Path, mark: str, environment: dict[str, str]) -> None:
        self.mark = f"{MARK}={mark}".encode()
        self.folders: set[str] = set()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "idemgate", *arguments],
            cwd=folder,
            env=os.environ | {MARK: mark, "PYTHONUNBUFFERED": "1"} | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def read_until(self, text: str) -> str:
        """What it writes to stdout, up to and with the line that holds `text`."""
        assert self.process.stdout is not None
        seen = ""
        for line in self.process.stdout:
            seen += line
            if text in line:
                return seen
        pytest.fail(f"it ended without saying {text!r}: {seen}{self.process.stderr.read()}")

    def end(self, seconds: float = 60) -> tuple[int, str, str]:
        """Exit code, and the rest of stdout and stderr."""
        out, err = self.process.communicate(timeout=seconds)
        return self.process.returncode, out, err

    def signal_group(self, number: int) -> None:
        os.killpg(self.process.pid, number)

    def alive(self) -> dict[int, str]:
        """Every process it started, however far down, that still runs: pid -> command line."""
        found: dict[int, str] = {}
        for place in Path("/proc").iterdir():
            if not place.name.isdecimal() or int(place.name) == self.process.pid:
                continue
            try:
                environment = (place / "environ").read_bytes().split(b"\0")
                line = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            # A server writes its title over its environment, but names its directory in it.
            if line and (self.mark in environment or any(folder in line for folder in self.folders)):
                found[int(place.name)] = line
                self.folders.update(FOLDER.findall(line))
        return found

    def all_gone(self, seconds: float = 60) -> bool:
        deadline = time.monotonic() + seconds
        while self.alive() and time.monotonic() < deadline:
            time.sleep(0.05)
        return not self.alive()


@pytest.fixture
def start(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Command]]:
    """`start("demo", "--json", IDEMGATE_URL=...)`; whatever is left at the end is killed."""
    started: list[Command] = []

    def start(*arguments: str, **environment: str) -> Command:
        mark = f"{os.getpid()}-{len(started)}-{request.node.name[:60]}"
        started.append(Command(list(arguments), tmp_path, mark, environment))
        return started[-1]

    yield start
    for command in started:
        for pid in (command.process.pid, *command.alive()):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        command.process.communicate()
