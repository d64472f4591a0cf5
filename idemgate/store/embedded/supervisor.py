"""The process that owns an embedded server: one per data directory, alive as long as a client uses it.

`idemgate.store.embedded.server` starts it as a script. It imports the standard library only, so it starts in 30 ms
without idemgate or redis.

Why a separate process: a server must end with its *last client*, also after SIGKILL, and must not end with the first.
So every client holds a connection to this process. The end-of-file of that connection *is* the client's end, because
the kernel closes the files of a dead process. This works alike on Linux and macOS, from any thread. PR_SET_PDEATHSIG
fires when the *thread* that forked ends, so clients cannot use it.

A forked child holds a copy of the connection. It counts as the same client until both are gone.

Only the link from server to supervisor uses PR_SET_PDEATHSIG. This process has one thread, which forks the server and
lives to the end. Without prctl, a server whose supervisor was killed is shut down by the next client of its directory.

One supervisor per directory: it holds an exclusive flock on `idemgate.lock`, and its server inherits the lock. So a
directory is free only when both are gone. The lock file names the directory of the sockets.

The protocol of the control socket is one word from the client and JSON lines in reply:

    hold    The client holds the server until it disconnects.
            -> {"state": "ready", ...} | {"state": "failed", "text": ...}; blank lines while the server loads its file
    info    -> the same, at once
    watch   -> {"level": "warning" | "error", "text": ...} for every restart, and for the final failure
    wait    -> {"state": "busy"} while other clients remain, else end-of-file when everything has ended
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

LOCK_FILE = "idemgate.lock"
LOG_FILE = "server.log"
CONTROL_SOCKET = "ctl.sock"
SERVER_SOCKET = "redis.sock"
RUN = "run"  # the directory of the sockets inside the data directory

SUN_PATH = 103  # bytes of a socket's path: 107 on Linux, 103 on macOS
RESTARTS = 5  # the most restarts within RESTART_SPAN seconds
RESTART_SPAN = 60.0
STOP_TIMEOUT = 10.0  # seconds for the server to write its file and exit, before it is killed


class Order(TypedDict):
    """The parameters from `embedded.server`, as JSON in argv[1]."""

    data: str  # absolute
    temporary: bool  # remove the directory at the end
    binary: Sequence[str]  # path, source, version
    silence: float  # seconds that a starting server may send nothing
    starter: int  # inherited file descriptor: the connection of the first client


def fits(directory: Path) -> bool:
    """Return whether the paths of the sockets in this directory are short enough for sun_path."""
    return len(os.fsencode(directory / SERVER_SOCKET)) <= SUN_PATH


def short_temporary() -> Path:
    """Create a private temporary directory whose path is short enough for sockets."""
    usual = Path(tempfile.gettempdir())
    base = usual if fits(usual / "idemgate-12345678" / RUN) else "/tmp"  # noqa: S108 - mkdtemp makes it private
    return Path(tempfile.mkdtemp(prefix="idemgate-", dir=base))


def lock_id(data: Path) -> list[int]:
    return [(stat := (data / LOCK_FILE).stat()).st_dev, stat.st_ino]


def published_run(data: Path, published: dict[str, Any]) -> Path | None:
    """Return the directory of the sockets that a lock file names. None: it was copied or moved from elsewhere."""
    run = Path(published["run"])
    return run if run == data / RUN or (run.name != RUN and published.get("lock") == lock_id(data)) else None


def ping(path: Path) -> bytes:
    """Return the first bytes of the reply to PING, or b"" when none arrives within 0.5 s."""
    with socket.socket(socket.AF_UNIX) as conn, contextlib.suppress(OSError):
        conn.settimeout(0.5)
        conn.connect(str(path))
        conn.sendall(b"PING\r\n")
        return conn.recv(64)
    return b""


def _listen(data: Path) -> tuple[Path, socket.socket]:
    """Return the directory of the sockets, and the listening control socket.

    The directory is inside the data directory if its path is short and its file system supports sockets. Else it is a
    temporary one.
    """
    inside = data / RUN
    if fits(inside):
        with contextlib.suppress(OSError):  # some file systems have no sockets
            inside.mkdir(mode=0o700, exist_ok=True)
            inside.chmod(0o700)
            return inside, _bind_control(inside)
    outside = short_temporary()
    return outside, _bind_control(outside)


def _bind_control(home: Path) -> socket.socket:
    (home / CONTROL_SOCKET).unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(home / CONTROL_SOCKET))
    listener.listen(128)
    return listener


def _die_with_parent(supervisor: int) -> None:
    """Let the kernel end the server with its supervisor. Runs in the server's process between fork and exec.

    This is safe because the supervisor has one thread.
    """
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
        if os.getppid() != supervisor:  # the supervisor died before the prctl
            os._exit(1)


class Supervisor:
    """One server, its clients, and the loop that serves both."""

    def __init__(self, order: Order, lock: int, starter: socket.socket) -> None:
        self.order = order
        self.lock = lock
        self.data: Path = Path(order["data"])
        self.binary: str
        self.home: Path
        self.binary, _, version = order["binary"]
        self.program: str = f"{self.binary} {version}"
        self.previous: dict[str, Any] = _read_lock_file(lock)
        self.home, listener = _listen(self.data)
        self.home_fd: int = os.open(self.home, os.O_RDONLY | os.O_CLOEXEC)
        self.log: Path = self.data / LOG_FILE
        self.log_start: int = self.log.stat().st_size if self.log.exists() else 0

        self.holders: set[socket.socket] = {starter}  # the server runs while there is one
        self.not_ready_holders: set[socket.socket] = {starter}  # holders that wait for the server to start
        self.watchers: set[socket.socket] = set()
        self.exit_waiters: list[socket.socket] = []  # clients that wait for the end

        self.server: subprocess.Popen[bytes] | None = None
        self.ready: bool = False
        self.ever_ready: bool = False
        self.failed: bool = False
        self.responded_at: float = 0.0  # time of the last reply while starting
        self.launch_at: float = 0.0
        self.restarts: list[float] = []
        self.last_exit: str = ""  # the reason of the previous server's exit

        self.selector: selectors.DefaultSelector = selectors.DefaultSelector()
        self.register(starter, self.handle_holder)
        self.register(listener, self.accept)
        self.register(_child_signals(), lambda conn: conn.recv(4096))

    def register(self, conn: socket.socket, handler: Callable[[socket.socket], object]) -> None:
        conn.setblocking(False)  # a stopped client that reads nothing must not block this process
        self.selector.register(conn, selectors.EVENT_READ, handler)

    # -- clients -------------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        while self.holders and not self.failed:
            self.update_server()
            exit_waiters, self.exit_waiters = self.exit_waiters, []
            # A client that sends `wait` has disconnected its holder before. This pass reads that end-of-file, then
            # replies.
            for key, _ in self.selector.select(0 if exit_waiters else self.poll_delay()):
                key.data(key.fileobj)
            if self.holders and not self.failed:
                for conn in exit_waiters:
                    self.send_json(conn, {"state": "busy"})
                    self.drop(conn)

    def accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # too many open files: existing clients take precedence
            conn, _ = listener.accept()
            self.register(conn, self.handle_command)

    def handle_command(self, conn: socket.socket) -> None:
        command = _receive(conn).strip()
        if command == b"hold":
            self.selector.modify(conn, selectors.EVENT_READ, self.handle_holder)
            self.holders.add(conn)
            self.not_ready_holders.add(conn)
        elif command == b"watch":
            self.selector.modify(conn, selectors.EVENT_READ, self.drop)
            self.watchers.add(conn)
        elif command == b"wait":
            self.selector.unregister(conn)
            self.exit_waiters.append(conn)
        else:
            if command == b"info":
                self.send_json(conn, self.state())
            self.drop(conn)

    def handle_holder(self, conn: socket.socket) -> None:
        if not _receive(conn):
            self.drop(conn)

    def drop(self, conn: socket.socket) -> None:
        for group in (self.holders, self.not_ready_holders, self.watchers):
            group.discard(conn)
        with contextlib.suppress(KeyError):
            self.selector.unregister(conn)
        conn.close()

    def send_json(self, conn: socket.socket, message: object) -> None:
        with contextlib.suppress(OSError):  # a disconnected client is dropped at its end-of-file
            conn.sendall(json.dumps(message).encode() + b"\n")

    def state(self) -> dict[str, object]:
        return {
            "state": "ready" if self.ready else "starting",
            "socket": str(self.home / SERVER_SOCKET),
            "pid": self.server.pid if self.server else 0,
            "supervisor": os.getpid(),
            "binary": self.order["binary"],
        }

    # -- the server ------------------------------------------------------------------------------------------

    def update_server(self) -> None:
        if self.server is None:
            if time.monotonic() >= self.launch_at:
                self.launch()
        elif (code := self.server.poll()) is not None:
            self.handle_exit(f"exited with code {code}" if code >= 0 else f"was ended by {signal.Signals(-code).name}")
        elif not self.ready:
            self.check_ready(self.server)
        if self.ready:
            for conn in self.not_ready_holders:
                self.send_json(conn, self.state())
            self.not_ready_holders.clear()

    def poll_delay(self) -> float | None:
        """Return the seconds until the next check of the server; None: wait for events only."""
        if self.ready:
            return None
        if self.server is None:
            return max(0.0, self.launch_at - time.monotonic())
        return 0.005

    def launch(self) -> None:
        if not self.in_place():
            self.fail(f"{self.data} was moved or deleted while its server ran; it is not started again at that path")
            return
        self.responded_at = time.monotonic()
        self.server = subprocess.Popen(  # noqa: S603
            self.server_command(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(self.lock,),
            preexec_fn=partial(_die_with_parent, os.getpid()),  # noqa: PLW1509 - see there
        )

    def server_command(self) -> list[str]:
        options = {
            "port": "0",
            # Relative to `dir`, because the server deletes this path at its end. The directory may have moved by then.
            "unixsocket": f"{RUN}/{SERVER_SOCKET}" if self.home == self.data / RUN else str(self.home / SERVER_SOCKET),
            "unixsocketperm": "700",
            "dir": str(self.data),
            "logfile": str(self.log),
            "save": "",
            "appendonly": "yes",
            # Without fsync an acknowledged write survives a crash of the server, but not of the machine. A temporary
            # server needs no more.
            "appendfsync": "no" if self.order["temporary"] else "everysec",
            "maxmemory-policy": "noeviction",
            "daemonize": "no",
        }
        arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
        return [self.binary, *arguments]

    def check_ready(self, server: subprocess.Popen[bytes]) -> None:
        answer = ping(self.home / SERVER_SOCKET)
        if answer.startswith(b"+PONG"):
            if not self.ever_ready:
                self.publish(self.program)
            self.ready = self.ever_ready = True
            if self.last_exit:
                self.report("warning", f"{self.last_exit}; restarted as pid {server.pid} on the same data")
        elif answer.startswith(b"-LOADING"):
            self.responded_at = time.monotonic()
            for conn in self.not_ready_holders:
                with contextlib.suppress(OSError):
                    conn.sendall(b"\n")
        elif time.monotonic() - self.responded_at > self.order["silence"]:
            server.kill()
            server.wait()
            self.handle_exit(f"said nothing for {self.order['silence']:g} s after its start")

    def handle_exit(self, reason: str) -> None:
        assert self.server is not None
        name = f"embedded {Path(self.binary).name} (pid {self.server.pid}) for {self.data}"
        self.server, self.ready = None, False
        if not self.ever_ready:
            previous = self.previous.get("program") or self.program
            # Name the program: a file of a newer server looks damaged, and the server's log advises to "fix" it.
            hint = f"; the data was last served by {previous}" if previous != self.program else ""
            self.fail(f"{name} {reason} before it was ready{hint}")
            return
        now = time.monotonic()
        self.restarts = [at for at in self.restarts if now - at < RESTART_SPAN]
        if len(self.restarts) >= RESTARTS:
            self.fail(f"{name} {reason}, after {RESTARTS} restarts within {RESTART_SPAN:g} s; it stays down")
            return
        self.launch_at = now + (0.1 * 2 ** (len(self.restarts) - 1) if self.restarts else 0)
        self.restarts.append(now)
        self.last_exit = f"{name} {reason}"

    def fail(self, reason: str) -> None:
        self.report("error", text := f"{reason}. {LOG_FILE} ends with:\n{self.log_tail()}")
        for conn in self.not_ready_holders:
            self.send_json(conn, {"state": "failed", "text": text})
        self.failed = True

    def report(self, level: str, text: str) -> None:
        self.write_log(text)
        for conn in self.watchers:
            self.send_json(conn, {"level": level, "text": text})

    def write_log(self, text: str) -> None:
        with contextlib.suppress(OSError), self.log.open("a") as log:
            log.write(f"{os.getpid()}:supervisor {time.strftime('%d %b %Y %H:%M:%S')} {text}\n")

    def log_tail(self) -> str:
        appended = self.log.read_bytes()[self.log_start :] if self.log.exists() else b"(no log)"
        return b"\n".join(appended.splitlines()[-12:]).decode(errors="replace") or "(nothing)"

    def stop(self) -> None:
        """Stop the server, then delete its files. A client that waits for end-of-file then finds nothing left."""
        if self.server:
            # The data of a temporary server is deleted next, so kill it: an orderly exit takes 100 ms.
            (self.server.kill if self.order["temporary"] else self.server.terminate)()
            try:
                self.server.wait(STOP_TIMEOUT)
            except subprocess.TimeoutExpired:
                self.server.kill()
                self.server.wait()
        if self.in_place():
            shutil.rmtree(self.home, ignore_errors=True)
        else:  # another directory may be at that path by now
            for name in (CONTROL_SOCKET, SERVER_SOCKET):
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=self.home_fd)
        if self.order["temporary"]:
            shutil.rmtree(self.data, ignore_errors=True)

    def in_place(self) -> bool:
        """Return whether the directory of the sockets is still the one at its path."""
        with contextlib.suppress(OSError):
            return os.path.samestat(self.home.stat(), os.fstat(self.home_fd))
        return False

    def publish(self, program: str) -> None:
        """Write the directory of the sockets, and the program that can read the data, into the lock file."""
        os.ftruncate(self.lock, 0)
        os.pwrite(
            self.lock, json.dumps({"run": str(self.home), "program": program, "lock": lock_id(self.data)}).encode(), 0
        )

    def remove_stale_sockets(self) -> None:
        """Remove the sockets of a killed supervisor, if they were outside the data directory."""
        run = published_run(self.data, self.previous) if "run" in self.previous else None
        if run is not None and run != self.home:
            with contextlib.suppress(OSError):
                for name in (CONTROL_SOCKET, SERVER_SOCKET):
                    (run / name).unlink(missing_ok=True)
                run.rmdir()


def _read_lock_file(lock: int) -> dict[str, Any]:
    """Return the text that the previous supervisor wrote into the lock file, or {}."""
    with contextlib.suppress(ValueError):
        return dict(json.loads(os.pread(lock, 8192, 0)))
    return {}


def _receive(conn: socket.socket) -> bytes:
    with contextlib.suppress(OSError):
        return conn.recv(256)
    return b""


def _child_signals() -> socket.socket:
    """Return a socket that is readable when a child ends. Without it select() would sleep on."""
    readable, writable = socket.socketpair()
    writable.setblocking(False)
    signal.set_wakeup_fd(writable.detach(), warn_on_full_buffer=False)
    return readable


def _ignore(_number: int, _frame: object) -> None:
    """Ignore a signal. SIG_IGN would be inherited by the server, a handler is not."""


def _lock(data: Path) -> int | None:
    import fcntl  # not on Windows, where this module must be importable

    lock = os.open(data / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    return lock


def run(order: Order) -> None:
    """Supervise until the last client is gone. Report each failure to the first client."""
    starter = socket.socket(fileno=order["starter"])
    supervisor: Supervisor | None = None
    try:
        lock = _lock(Path(order["data"]))
        if lock is None:
            starter.sendall(b'{"state": "busy"}\n')
            return
        supervisor = Supervisor(order, lock, starter)
        supervisor.remove_stale_sockets()
        supervisor.publish(supervisor.previous.get("program", ""))
        supervisor.serve()
    except Exception as failure:  # noqa: BLE001 - stderr is closed
        if supervisor:
            supervisor.write_log(traceback.format_exc())
        with contextlib.suppress(OSError):
            starter.sendall(json.dumps({"state": "failed", "text": f"{order['data']}: {failure!r}"}).encode() + b"\n")
    finally:
        if supervisor:
            supervisor.stop()
        # On exit the kernel closes the lock before the younger sockets of waiting clients, so their end-of-file comes
        # last. A normal exit of the interpreter would close the sockets first and end later.
        os._exit(0)


def main() -> None:
    # The starter waits for this process only until here, and so has no child to reap later.
    if os.fork():
        os._exit(0)
    # A signal may reach the whole process group or control group while clients still finish. Only the end of the
    # clients ends this process.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, _ignore)
    os.umask(0o077)
    run(json.loads(sys.argv[1]))


if __name__ == "__main__":
    main()
