"""A live system of processes: a server and two workers and two producers and an exporter and a Prometheus."""

from __future__ import annotations

import io
import json
import os
import pty
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout, suppress
from functools import partial
from pathlib import Path
from time import monotonic, sleep, time
from typing import Any, NamedTuple, Self

import redis

from idemgate import Gate
from idemgate.cli import main
from idemgate.store.embedded.server import find_server
from idemgate.store.embedded.supervisor import _die_with_parent
from idemgate.testing import Clock
from tests.cluster import unused_ports, wait_for
from tests.prometheus import configure, find_alerts, has_scraped, prometheus

__all__ = ["PRODUCERS", "WORKERS", "Alert", "Failed", "Live", "await_true"]

ROOT = Path(__file__).parents[2]
IDEMGATE = (sys.executable, "-m", "idemgate")
WORKERS, PRODUCERS = ("worker-0", "worker-1"), ("producer-0", "producer-1")
SOUND = ("--appendonly", "yes", "--appendfsync", "everysec", "--save", "", "--maxmemory-policy", "noeviction")
"""The settings of a server of which nothing is found."""
_AHEAD = """\
import time
clock = time.time
time.time = lambda: clock() + {ahead}
from tools.night.app import produce
produce(2)
"""


class Failed(Exception):
    """Something that the night promises did not hold."""


def await_true(check: Callable[[], Any]) -> Any:
    """Return what `check` returns once it is true. It looks seldom, because other systems share the machine."""
    end = monotonic() + 120
    while True:
        with suppress(OSError):  # a server that starts
            if found := check():
                return found
        if monotonic() > end:
            raise Failed("it did not happen")
        sleep(0.1)


class Alert(NamedTuple):
    """An alert that fires: the kind of its finding, and its topic or scope, or ""."""

    kind: str
    of: str


class Live:
    """A live system with the programs of `app.py`. It ends with its `with` block.

    Attributes:
        quick: Prometheus scrapes and evaluates each second instead of every ten.
        minutes: how long a quiet time lasts.
        port: the port of the server on this machine.
        redis: a plain client of the server.
    """

    def __init__(self, folder: Path, namespace: str, *, quick: bool = False, minutes: float = 1) -> None:
        self.quick, self.minutes = quick, minutes
        self._folder, self._namespace = folder, namespace
        self.port, self._exporter, self._monitor, *probes = unused_ports(3 + len(WORKERS))
        self._probes = dict(zip(WORKERS, probes, strict=True))
        self._url = f"redis://127.0.0.1:{self.port}/0"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._world: dict[str, Any] = {}
        self._stack = ExitStack()
        self.redis: Any = redis.Redis(port=self.port, decode_responses=True)

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.callback(self._end)
            self.change()
            data = self._folder / "server"
            data.mkdir()
            where = ("--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(data))
            self._start("server", find_server().path, *where, *SOUND)
            wait_for(self.redis.ping)
            self._start("exporter", *IDEMGATE, *self._words("metrics"), "--listen", str(self._exporter))
            for name in (*WORKERS, *PRODUCERS):
                self.start(name)
            await_true(lambda: socket.create_connection(("127.0.0.1", self._exporter)).close() is None)
            workers = [f"127.0.0.1:{port}" for port in self._probes.values()]
            config = configure(self._folder, f"127.0.0.1:{self._exporter}", workers, quick=self.quick)
            self._prometheus = stack.enter_context(prometheus(self._folder, config, self._monitor))
            await_true(lambda: len(self.status()["snapshot"]["processes"]) == len(WORKERS) + len(PRODUCERS))
            await_true(lambda: has_scraped(self._prometheus) and not self.alerts())
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _end(self) -> None:
        self.redis.close()
        for process in reversed(self._processes.values()):
            process.kill()
            process.wait()

    # -- processes ----------------------------------------------------------------------------------------------------

    def start(self, name: str, *, revision: int = 1, renamed: str = "", ahead: float = 0) -> None:
        """Start a worker or a producer. `ahead`: the seconds by which its clock is wrong."""
        if name in WORKERS:
            probe = str(self._probes[name])
            words = [*IDEMGATE, "run", "tools.night.app:gate", "--concurrency", "8", "--grace", "1s", "--probe", probe]
        elif ahead:
            words = [sys.executable, "-c", _AHEAD.format(ahead=ahead)]
        else:
            words = [sys.executable, "-m", "tools.night.app", name[-1]]
        self._start(name, *words, NIGHT_REVISION=str(revision), NIGHT_RENAMED=renamed)

    def _words(self, *words: str) -> list[str]:
        """Return the arguments of `idemgate` for this system. Behind the verb and the store, any text is safe."""
        return [*words[:2], "--url", self._url, "--namespace", self._namespace, *words[2:]]

    def _start(self, name: str, *words: str, **more: str) -> None:
        own = {"IDEMGATE_URL": self._url, "IDEMGATE_NAMESPACE": self._namespace}
        own |= {"NIGHT_WORLD": str(self._folder / "world"), "PYTHONDONTWRITEBYTECODE": ""}
        with (self._folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                words, cwd=ROOT, env={**os.environ, **own, **more}, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                preexec_fn=partial(_die_with_parent, os.getpid()),  # noqa: PLW1509 - see there
            )  # fmt: skip

    def stop(self, name: str, by: signal.Signals = signal.SIGTERM) -> None:
        """End a process and return when it has ended."""
        self._processes[name].send_signal(by)
        self._processes[name].wait(30)

    def restart(self, *names: str, **options: Any) -> None:
        """Restart processes one after the other, each when the one before reports."""
        for name in names:
            self.stop(name)
            self.start(name, **options)
            await_true(lambda: self.pid(name) in {one["pid"] for one in self.status()["snapshot"]["processes"]})  # noqa: B023

    def pid(self, name: str) -> int:
        return self._processes[name].pid

    def signal(self, name: str, by: signal.Signals) -> None:
        self._processes[name].send_signal(by)

    def await_end(self) -> str:
        """Return the name of the producer that ends, when it does."""
        ended: str = await_true(lambda: next((one for one in PRODUCERS if self._processes[one].poll() is not None), ""))
        return ended

    def await_stop(self) -> str:
        """Return the name of the producer that SIGSTOP stops, when it does."""
        stopped: str = await_true(lambda: next((one for one in PRODUCERS if self._state(one) == "T"), ""))
        return stopped

    def _state(self, name: str) -> str:
        return Path(f"/proc/{self.pid(name)}/stat").read_text().rpartition(") ")[2][0]

    # -- the world, and what others do --------------------------------------------------------------------------------

    def change(self, **facts: Any) -> None:
        """Change facts of the world, in one step."""
        self._world |= facts
        new = self._folder / "world.new"
        new.write_text(json.dumps(self._world))
        new.replace(self._folder / "world")

    def gate(self, *, seconds_ago: float = 0) -> Gate:
        """Return a gate that does not report. `seconds_ago`: its calls happen so much earlier."""
        clock = Clock(time() - seconds_ago) if seconds_ago else None
        return Gate(self._url, namespace=self._namespace, presence=False, clock=clock)

    def run(self, *words: str) -> str:
        """Run `idemgate` and return what it prints. Raises Failed."""
        return self._run([*IDEMGATE, *self._words(*words)], shlex.join(["idemgate", *words]))

    def mend(self, line: str) -> str:
        """Run a printed command as a shell reads it, and answer "yes" if it asks. Raises Failed."""
        ours, theirs = pty.openpty()
        try:
            os.write(ours, b"yes\n")
            return self._run(["bash", "-c", line], line, stdin=theirs)
        finally:
            os.close(ours)
            os.close(theirs)

    def _run(self, words: list[str], shown: str, **options: Any) -> str:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        ran = subprocess.run(
            words, capture_output=True, text=True, timeout=60, cwd=ROOT, check=False, env={**os.environ, "PATH": path},
            **options,
        )  # fmt: skip
        if ran.returncode > shown.startswith("idemgate doctor "):  # it ends with 1 if something is critical
            raise Failed(f"`{shown}` ended with {ran.returncode}: {(ran.stderr or ran.stdout).strip()[-300:]}")
        return ran.stdout

    # -- what is seen -------------------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Return what `idemgate status --json` prints. Raises Failed."""
        with redirect_stdout(io.StringIO()) as printed:
            code = main(self._words("status", "--json"))
        if code not in (0, 3, 4):
            raise Failed(f"`idemgate status` ended with {code}")
        found: dict[str, Any] = json.loads(printed.getvalue())
        return found

    def alerts(self) -> set[Alert]:
        """Return the alerts that fire."""
        labels = [one["labels"] for one in find_alerts(self._prometheus)]
        return {
            Alert(one.get("finding", one["alertname"]), one.get("topic", "") or one.get("scope", "")) for one in labels
        }
