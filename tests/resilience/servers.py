"""A server of a test's own that is killed and started again on its data, and whose append-only file is cut."""

from __future__ import annotations

import mmap
import os
import shutil
import struct
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import time
from typing import Any, ClassVar, Self

import pytest
import redis

from idemgate.store.embedded.server import find_server
from tests.cluster import unused_ports, wait_for

__all__ = ["APPEND", "DEBUG", "Jumpy", "Preloaded", "Server", "cut_back", "everything", "library"]

DEBUG = ("--enable-debug-command", "yes") if int(find_server().version.partition(".")[0]) >= 7 else ()
"""Options of a server that is to be asked DEBUG. Before Redis 7.0 everybody may ask it, and the option is unknown."""
APPEND = ("--appendonly", "yes", "--auto-aof-rewrite-percentage", "0", "--appendfsync")
"""Options of a server with one append-only file, before the policy of its sync."""


class Server:
    """`start`, `kill` (-9), `file`: the append-only file that is written to. Options as on a command line; the
    surroundings (a library to preload) in `environment`."""

    leaving: ClassVar[Callable[[str], object]] = staticmethod(lambda url: None)
    """Told the URL of a server that is up and about to end, as a test is done with it: `conftest.py` audits it then."""

    def __init__(self, home: Path, *options: str, environment: dict[str, str] | None = None) -> None:
        self.home = home
        self.options = options
        self.environment = environment
        self.process: subprocess.Popen[bytes] | None = None
        self._move()
        home.mkdir()

    def _move(self) -> None:
        self.port = unused_ports(1)[0]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.client: Any = redis.Redis(port=self.port)

    def start(self) -> None:
        tries = 5 if self.process is None else 1  # one that was down comes back where others look for it
        while not self._serves():
            tries -= 1
            assert tries, f"no server came to port {self.port}"
            self._move()

    def _serves(self) -> bool:
        """False: the port was taken, by another server or as a connection's own end, before this one came to it."""
        words = ["--port", str(self.port), "--dir", str(self.home), "--bind", "127.0.0.1", "--save", ""]
        self.process = process = subprocess.Popen(
            [find_server().path, *words, *self.options], stdout=subprocess.DEVNULL, env=self.environment
        )
        wait_for(lambda: process.poll() is not None or self.client.ping())
        return process.poll() is None and self.client.info("server")["process_id"] == process.pid

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        self.client.connection_pool.disconnect()

    @property
    def file(self) -> Path:
        found = [*self.home.glob("**/*.incr.aof"), *self.home.glob("appendonly.aof")]
        return found[0]

    def size(self) -> int:
        return self.file.stat().st_size

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        try:
            if failed is None and self.process is not None and self.process.poll() is None:
                self.leaving(self.url)
        finally:
            with suppress(AssertionError):
                self.kill()
            self.client.close()


class Preloaded(Server):
    """A server with a library of `library`, which shares one number with the test: `shared`."""

    variable: ClassVar[str]
    """The environment variable that names the file of the number."""

    def __init__(self, home: Path, library: Path, *options: str) -> None:
        path = home.parent / self.variable
        path.write_bytes(bytes(8))
        super().__init__(
            home, *options, environment=os.environ | {"LD_PRELOAD": str(library), self.variable: str(path)}
        )
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 8)

    @property
    def shared(self) -> int:
        return int(struct.unpack("l", self._map[:])[0])

    @shared.setter
    def shared(self, number: int) -> None:
        self._map[:] = struct.pack("l", number)


class Jumpy(Preloaded):
    """`jump(ms)`: from now on its clock is off by so much in all. Skips the test where a server does not take its time
    from the C library."""

    variable = "CLOCK_FILE"

    def __enter__(self) -> Self:
        super().__enter__()
        try:
            self.jump(10_000, within=5)
        except AssertionError:
            self.kill()
            pytest.skip("this server does not take its time from the C library")
        self.jump(0)
        return self

    def jump(self, milliseconds: int, within: float = 60) -> None:
        self.shared = milliseconds
        wait_for(lambda: abs(self.client.time()[0] - (time() + milliseconds / 1000)) < 5, within)


def library(name: str, folder: Path) -> Path:
    """Made of the C beside this file, to be preloaded into a server; skips where there is no compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("a C compiler makes the library")
    made, source = folder / f"{name}.so", Path(__file__).with_name(f"{name}.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(made), str(source)], check=True)
    return made


def cut_back(home: Path, old: Path, content: bytes) -> Server:
    """A server on a copy of that directory, whose append-only file ends so."""
    made = Server(home, *APPEND, "no")
    shutil.copytree(old, home, dirs_exist_ok=True)
    made.file.write_bytes(content)
    return made


def everything(client: Any) -> dict[bytes, Any]:
    """All keys and what they hold, but for when they expire."""
    return {key: _value(client, key) for key in sorted(client.keys("*"))}


def _value(client: Any, key: bytes) -> Any:
    kind = client.type(key)
    if kind == b"string":
        return client.get(key)
    if kind == b"hash":
        return client.hgetall(key)
    if kind == b"list":
        return client.lrange(key, 0, -1)
    assert kind == b"zset", kind
    return client.zrange(key, 0, -1, withscores=True)
