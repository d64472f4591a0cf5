"""The server under test: Debian's redis-server, on a core of its own unless that is not wanted, nothing saved."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import redis

from benchmarks.machine import SERVER, pinned

__all__ = ["Spent", "port_of", "spent", "started", "used_memory"]


PATIENCE = 300
"""Seconds for one command: saving millions of keys, or a server that is run slowly, takes some."""


class Spent(NamedTuple):
    """What a server has spent since it started: seconds of CPU, seconds inside of scripts, and
    reads from sockets (one a round trip)."""

    cpu: float
    scripts: float
    reads: int


@contextmanager
def started(*options: str, core: int | None = SERVER, under: Sequence[str] = ()) -> Iterator[Any]:
    """A client of a new server, which is gone afterwards; empty, unless an option says where a file lies that it loads.
    `core`: None for any. `under`: a command that runs it."""
    port = _unused_port()
    with tempfile.TemporaryDirectory() as home:
        words = ["--port", str(port), "--dir", home, "--save", "", "--bind", "127.0.0.1", *options]
        program = shutil.which("redis-server")
        if program is None:
            raise SystemExit("redis-server is not on PATH: apt-get install redis-server")
        process = subprocess.Popen(pinned(core, [*under, program, *words]), stdout=subprocess.DEVNULL)
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
