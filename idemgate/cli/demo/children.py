"""The demo's child processes: started, heard, ended. None outlives the parent: its end is the end of their stdin."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import IO, Any

from idemgate.cli.demo.order import PATIENCE, DemoOrder

__all__ = ["Child", "end"]


MOST_SAID = 60
"""Lines of a child's log that are passed on: one fault for each of 60,000 events says no more than the first."""

_PATH = () if Path(__file__).parents[3] == Path.cwd() else ("-P",)
"""A redis.py in the user's current directory is not meant; a checkout that is the current directory is."""


class Child:
    """One process. `heard` gets its reports, `said` what it writes to stderr; both in threads of their own."""

    def __init__(
        self,
        role: str,
        name: str,
        order: DemoOrder,
        heard: Callable[[Mapping[str, Any]], None],
        said: Callable[[str], None],
    ) -> None:
        self.name = name
        self._process = subprocess.Popen(  # noqa: S603 - this very interpreter
            [sys.executable, *_PATH, "-m", "idemgate.cli.demo.actors", role],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,  # Ctrl-C is for the parent alone; it ends the others in their order
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._stdin = self._process.stdin
        self._readers = [
            _reading(self._process.stdout, lambda line: heard(json.loads(line))),
            _reading(self._process.stderr, _first_of(name, said)),
        ]
        with contextlib.suppress(BrokenPipeError):  # it ended already, as `failure` will say
            self._stdin.write(order.line())
            self._stdin.flush()

    @property
    def failure(self) -> str:
        """Return a text about the end of the process; empty while it runs."""
        code = self._process.poll()
        return "" if code is None else f"{self.name} ended with {code}"

    def kill(self) -> None:
        """Kill the process as a crash does. What it reported before is read to its end."""
        self._process.kill()
        self._process.wait()
        for reader in self._readers:
            reader.join()
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()

    def dismiss(self) -> None:
        """Asks it to end, gracefully."""
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()

    def wait(self, seconds: float) -> str:
        """Until it ended and all it said was heard. What was wrong with its end, in words; empty: nothing."""
        wrong = ""
        try:
            code = self._process.wait(seconds)
            wrong = f"{self.name} ended with {code}" if code else ""
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            wrong = f"{self.name} had to be killed"
        for reader in self._readers:
            reader.join()
        return wrong


def end(children: list[Child]) -> list[str]:
    """Ends all of them at once; what was wrong with that, in words."""
    for child in children:
        child.dismiss()
    deadline = time.monotonic() + PATIENCE + 2
    wrong = [child.wait(max(0.1, deadline - time.monotonic())) for child in children]
    return [words for words in wrong if words]


def _first_of(name: str, said: Callable[[str], None]) -> Callable[[bytes], None]:
    lines = count(1)

    def tell(line: bytes) -> None:
        if (number := next(lines)) <= MOST_SAID:
            said(f"{name}: {line.decode(errors='replace').rstrip()}")
        elif number == MOST_SAID + 1:
            said(f"{name}: (the rest of its log is left out)")

    return tell


def _reading(stream: IO[bytes], tell: Callable[[bytes], None]) -> threading.Thread:
    def read() -> None:
        with stream:
            for line in stream:
                tell(line)

    thread = threading.Thread(target=read, name="demo-reader", daemon=True)
    thread.start()
    return thread
