"""Protocol between the demo and its child processes: JSON lines on stdin and stdout."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["DemoOrder", "ReportStream", "obey"]

EVERY = 0.05
"""Seconds between reports: the publisher paces itself by them."""
PATIENCE = 15.0
"""Seconds for a graceful end; then the process ends without."""


@dataclass(frozen=True, slots=True)
class DemoOrder:
    """The settings of one demo for its processes; `window` is in seconds.

    They travel on stdin, since a URL may contain a password and arguments are visible.
    """

    url: str
    namespace: str
    channel: str
    window: float

    def line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"


def obey() -> DemoOrder:
    """Read the order of the parent. From then on the process ends with its parent, whose end closes stdin.

    A signal before `gate.run()` ends the process as well as one after it.
    """
    signal.signal(signal.SIGTERM, _exit_early)
    said = b""
    while not said.endswith(b"\n"):
        if not (piece := os.read(0, 65536)):
            sys.exit(0)  # the parent changed its mind
        said += piece
    threading.Thread(target=_end_with_parent, name="demo-parent", daemon=True).start()
    return DemoOrder(**json.loads(said))


def _exit_early(_number: int, _frame: object) -> None:
    sys.exit(0)


def _end_with_parent() -> None:
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(PATIENCE)
    os._exit(1)


class ReportStream:
    """Collects what happened here and sends it to the parent, a line every `EVERY` seconds. Not through Redis: this is
    the record that the demo's promises are checked against, so it must not depend on what it is to prove."""

    def __init__(self) -> None:
        self._facts: defaultdict[str, list[Any]] = defaultdict(list)
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="demo-report", daemon=True)
        self._thread.start()

    def add(self, kind: str, fact: object) -> None:
        with self._lock:
            self._facts[kind].append(fact)

    def close(self) -> None:
        """Sends what is left."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(EVERY):
            self.send()
        self.send()

    def send(self) -> None:
        """Send what was collected. The parent reads it even if this process is killed then."""
        with self._sending:
            with self._lock:
                facts, self._facts = self._facts, defaultdict(list)
            line = json.dumps(facts).encode() + b"\n" if facts else b""
            try:
                while line:
                    line = line[os.write(1, line) :]
            except BrokenPipeError:
                os._exit(1)
