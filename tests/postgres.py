"""A PostgreSQL server of this test process, started from the programs of the system."""

from __future__ import annotations

import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg

__all__ = ["Postgres", "find_programs"]

DEBIAN = Path("/usr/lib/postgresql")
_ERROR_AFTER = 90
"""Seconds until a server that does not answer is an error."""


def find_programs() -> Path | None:
    """Return the directory of `initdb` and `postgres`, or None. Debian does not put it on PATH."""
    versions = sorted(DEBIAN.glob("*/bin"), key=lambda path: float(path.parent.name), reverse=True)
    linked = shutil.which("initdb")
    found = [*versions, *([Path(linked).resolve().parent] if linked else [])]
    return next((path for path in found if (path / "initdb").exists() and (path / "postgres").exists()), None)


class Postgres:
    """A server with its own data directory, reached by a Unix socket in that directory.

    PostgreSQL refuses to run as root. A test process of root starts it as `postgres`, or as `nobody`.
    """

    def __init__(self, programs: Path) -> None:
        # Not pytest's tmp_path: another user cannot enter it, and its path may be too long for a socket.
        self._home = Path(tempfile.mkdtemp(prefix="idemgate-postgres-", dir=_memory()))
        self._names = itertools.count()
        self._free: list[str] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._programs = programs
        self._options: dict[str, Any] = {"cwd": self._home, "stderr": subprocess.STDOUT}
        try:
            self._initialize()
            self._start()
        except BaseException:
            self.stop()
            raise

    def _initialize(self) -> None:
        if os.geteuid() == 0:
            user = _unprivileged_user()
            os.chown(self._home, user.pw_uid, user.pw_gid)
            self._options |= {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
        words = [
            self._programs / "initdb", "-D", self._home / "data",
            "-A", "trust", "-U", "postgres", "-E", "UTF8", "--locale=C", "--no-sync",
        ]  # fmt: skip
        log = self._home / "log"
        with log.open("wb") as out:
            initialized = subprocess.run(words, stdout=out, check=False, **self._options)
        assert initialized.returncode == 0, f"initdb failed: {log.read_text()}"

    def _start(self) -> None:
        # No fsync: the tests end clients and this server, never the machine.
        words = ["-c", "listen_addresses=", "-c", "fsync=off", "-c", "autovacuum=off", "-k", str(self._home)]
        log = self._home / "log"
        with log.open("ab") as out:
            command = [self._programs / "postgres", "-D", self._home / "data", *words]
            self._process = subprocess.Popen(command, stdout=out, **self._options)
        deadline = time.monotonic() + _ERROR_AFTER
        while not self._answers():
            assert self._process.poll() is None, f"PostgreSQL ended: {log.read_text()}"
            assert time.monotonic() < deadline, f"PostgreSQL does not answer: {log.read_text()}"
            time.sleep(0.05)

    def _answers(self) -> bool:
        try:
            psycopg.connect(self._url("postgres")).close()
        except psycopg.OperationalError:
            return False
        return True

    def _url(self, database: str) -> str:
        return f"postgresql:///{database}?host={self._home}&user=postgres"

    def create_database(self, options: str = "") -> str:
        """Create an empty database, with options of CREATE DATABASE. Return its URL."""
        name = f"t{next(self._names)}"
        with psycopg.connect(self._url("postgres"), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name} {options}".encode())
        return self._url(name)

    @contextmanager
    def lend_database(self) -> Iterator[str]:
        """Lend an empty database, by its URL. A later test gets the same one, emptied: creating one takes 200 ms."""
        url = self._free.pop() if self._free else self.create_database()
        yield url
        if _empty(url):
            self._free.append(url)

    def restart(self) -> None:
        """End the server without a checkpoint, and start it again. It recovers what was committed."""
        self._end()
        self._start()

    def stop(self) -> None:
        """Stop the server without a checkpoint, and remove its data."""
        if self._process is not None:
            self._end()
        while _observers:
            _observers.popitem()[1].close()
        shutil.rmtree(self._home)

    def _end(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGQUIT)
        self._process.wait(30)


_observers: dict[str, psycopg.Connection[Any]] = {}


def execute(url: str, sql: str) -> list[Any]:
    """Execute a statement outside of a transaction. Return its rows.

    A database has one connection for this, which stays open: the server starts a process for each connection.
    """
    observer = _observers.get(url)
    if observer is None or observer.closed:
        observer = _observers[url] = psycopg.connect(url, autocommit=True)
    try:
        cursor = observer.execute(sql)
    except psycopg.OperationalError:
        if not observer.closed:
            raise
        return execute(url, sql)  # the server was restarted
    return cursor.fetchall() if cursor.description else []


def _empty(url: str) -> bool:
    """Empty a database. Return False if that fails, or if a client is still connected to it."""
    try:
        for _ in range(20):  # a server process ends soon after its client
            others = execute(
                url,
                "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()",
            )
            if not others:
                break
            time.sleep(0.01)
        else:
            return False
        [(database,)] = execute(url, "SELECT current_database()")
        execute(url, f"ALTER DATABASE {database} RESET ALL")
        schemas = execute(url, r"SELECT nspname FROM pg_namespace WHERE nspname !~ '^pg_|^information_schema$'")
        for (schema,) in schemas:
            execute(url, f'DROP SCHEMA "{schema}" CASCADE')
        execute(url, "CREATE SCHEMA public")
    except psycopg.Error:
        return False
    return True


def _memory() -> str | None:
    """Return a directory in memory with room for many servers, or None. Tests make and delete many files."""
    path = "/dev/shm"  # a container may have 64 MB of it, which one server uses up
    return path if os.access(path, os.W_OK) and shutil.disk_usage(path).free > 4 << 30 else None


def _unprivileged_user() -> pwd.struct_passwd:
    try:
        return pwd.getpwnam("postgres")
    except KeyError:
        return pwd.getpwnam("nobody")
