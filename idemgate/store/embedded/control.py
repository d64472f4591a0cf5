"""Talk to the supervisor of an embedded server, or clean up after one that was killed."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import socket
import threading
from pathlib import Path
from typing import TypedDict

from idemgate.store.embedded import supervisor

__all__ = [
    "State",
    "connect",
    "log_events",
    "query_state",
    "read_state",
    "remove_remains",
    "run_directory",
    "shut_down_orphan",
]

log = logging.getLogger("idemgate.embedded")


class State(TypedDict):
    """The state of a server as its supervisor reports it."""

    state: str
    socket: str
    pid: int
    supervisor: int
    binary: str
    source: str
    version: str
    text: str


def run_directory(home: Path) -> Path | None:
    """Return the directory of the sockets that the lock file names, or None.

    A directory of another user is ignored: that user may have created it since. So is the one of a lock file that was
    copied or moved from another data directory: the server there has other data.
    """
    try:
        run = supervisor.published_run(home, json.loads((home / supervisor.LOCK_FILE).read_bytes()))
        return run if run is not None and run.stat().st_uid == os.getuid() else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def connect(run: Path, command: str | None = None) -> socket.socket | None:
    """Connect to the control socket and send a command. Return None when no supervisor listens."""
    conn = socket.socket(socket.AF_UNIX)
    try:
        conn.connect(str(run / supervisor.CONTROL_SOCKET))
        if command:
            conn.sendall(command.encode() + b"\n")
    except OSError:
        conn.close()
        return None
    return conn


def query_state(run: Path) -> State | None:
    """Return the present state of the server, or None when no supervisor replies within 5 s."""
    conn = connect(run, "info")
    if conn is None:
        return None
    with conn:
        try:
            return read_state(conn, 5.0)
        except (OSError, EOFError):
            return None


def read_state(conn: socket.socket, timeout: float) -> State:
    """Return the next line that is not blank.

    Raises:
        TimeoutError: no byte arrived for `timeout` seconds.
        EOFError: the supervisor closed the connection.
    """
    conn.settimeout(timeout)
    received = b""
    while not received.endswith(b"\n"):
        chunk = conn.recv(65536)
        if not chunk:
            raise EOFError
        received = (received + chunk).lstrip(b"\n")
    state: State = json.loads(received)
    return state


def log_events(watch: socket.socket, closing: threading.Event, directory: str) -> bool:
    """Log what the supervisor reports, in the process of its client. Return True if it ended without a report."""
    with watch, contextlib.suppress(OSError), watch.makefile("rb") as lines:
        for line in lines:
            event = json.loads(line)
            log.log(logging.ERROR if event["level"] == "error" else logging.WARNING, "%s", event["text"])
            if event["level"] == "error":
                return False
    if closing.is_set():
        return False
    log.error("the supervisor of the embedded server in %s is gone, and the server with it", directory)
    return True


def shut_down_orphan(home: Path) -> None:
    """Shut down a server whose supervisor was killed, where the kernel does not end it (no prctl).

    A supervisor listens on its control socket before it starts a server. So this does nothing while that socket
    accepts.
    """
    run = run_directory(home)
    if run is None:
        return
    control = connect(run)
    if control:
        control.close()
        return
    _shut_down(run)


def _shut_down(run: Path) -> None:
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as conn:
        conn.settimeout(supervisor.STOP_TIMEOUT)
        conn.connect(str(run / supervisor.SERVER_SOCKET))
        conn.sendall(b"SHUTDOWN NOSAVE\r\n")
        conn.recv(256)


def remove_remains(run: Path, temporary: Path | None) -> None:
    """Shut down the server of a killed supervisor, and delete its files if it was temporary."""
    _shut_down(run)
    if temporary:
        shutil.rmtree(run, ignore_errors=True)
        shutil.rmtree(temporary, ignore_errors=True)
