"""The process that owns an embedded server: one per data directory, alive as long as somebody uses it.

`idemgate.store.embedded.server` starts it as a script. It needs the standard library only, so it is up in 30 ms and
costs no import of idemgate or redis.

Why a process of its own. A server must end with its *last user*, also when that user is killed by SIGKILL,
and must not end with the first. So every user holds a connection to this process, and its end-of-file *is*
the user's end, however it came: the kernel closes what a process held. That is the same on Linux and macOS
and does not care which thread started us. (PR_SET_PDEATHSIG would: it fires when the *thread* that forked
ends.) A forked child holds a copy of the connection, so it counts as the same user until both are gone. Only
the last link, server to supervisor, uses PR_SET_PDEATHSIG: this process has one thread, which forks the
server and lives to the end. Where there is no prctl, a server whose supervisor was killed is shut down by the
next user of its directory.

One supervisor per directory: it holds an exclusive flock on `idemgate.lock`, and so does its server
(inherited), so a directory is free only when both are gone. The lock file's text says where the sockets are.

What is said on the control socket: one line of a word from the user, JSON lines back.

    hold    I am a user until I hang up. -> {"state": "ready", ...} | {"state": "failed", "text": ...},
            blank lines while the server reads its file
    info    -> the same, at once
    watch   -> {"level": "warning" | "error", "text": ...} for every restart, and when giving up
    wait    -> {"state": "busy"} when there are still users, else end-of-file when everything is gone
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
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from collections.abc import Callable

LOCK_FILE = "idemgate.lock"
LOG_FILE = "server.log"
CONTROL_SOCKET = "ctl.sock"
SERVER_SOCKET = "redis.sock"

SUN_PATH = 103  # bytes of a socket's path: 107 on Linux, 103 on macOS
RESTARTS = 5  # within RESTART_SPAN seconds; the next end of the server is the last
RESTART_SPAN = 60.0
STOP_PATIENCE = 10.0  # seconds for the server to write its file and go, before it is killed


class Order(TypedDict):
    """What `embedded.start` hands over, as JSON in argv[1]."""

    data: str  # absolute
    temporary: bool  # the directory is ours: remove it at the end
    binary: str
    source: str
    version: str
    silence: float  # seconds a starting server may say nothing
    starter: int  # inherited descriptor: the connection of the first user


def fits(directory: Path) -> bool:
    """Whether the sockets' paths in this directory are short enough for sun_path."""
    return len(os.fsencode(directory / SERVER_SOCKET)) <= SUN_PATH


def short_temporary(prefix: str) -> Path:
    """A new private directory, short enough to hold sockets."""
    usual = Path(tempfile.gettempdir())
    short = fits(usual / (prefix + "12345678") / "run")
    base = usual if short else Path("/tmp")  # noqa: S108 - mkdtemp makes it private
    return Path(tempfile.mkdtemp(prefix=prefix, dir=base))


def ping(path: Path) -> bytes:
    """The first bytes a server answers to PING; b"" when nobody does within 0.5 s."""
    with socket.socket(socket.AF_UNIX) as conn, contextlib.suppress(OSError):
        conn.settimeout(0.5)
        conn.connect(str(path))
        conn.sendall(b"PING\r\n")
        return conn.recv(64)
    return b""


def _listen(data: Path) -> tuple[Path, socket.socket]:
    """The directory of the sockets, and our own one listening there.

    Inside the data directory if its path is short and its file system knows sockets, else a temporary one.
    """
    inside = data / "run"
    if fits(inside):
        with contextlib.suppress(OSError):  # file systems without sockets exist
            inside.mkdir(mode=0o700, exist_ok=True)
            inside.chmod(0o700)
            return inside, _bound(inside)
    outside = short_temporary("idemgate-")
    return outside, _bound(outside)


def _bound(home: Path) -> socket.socket:
    (home / CONTROL_SOCKET).unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(home / CONTROL_SOCKET))
    listener.listen(128)
    return listener


def _die_with(supervisor: int) -> None:
    """Runs in the server's process between fork and exec; safe, since the supervisor has one thread."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
        if os.getppid() != supervisor:  # it died before the line above
            os._exit(1)


def _ending(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    with contextlib.suppress(ValueError):
        return f"was ended by {signal.Signals(-code).name}"
    return f"was ended by signal {-code}"


class Supervisor:
    """One server, its users, and the loop that serves both."""

    def __init__(self, order: Order, lock: int, starter: socket.socket) -> None:
        self.order = order
        self.lock = lock
        self.data = Path(order["data"])
        self.program = f"{order['binary']} {order['version']}"
        self.former = _published(lock)
        self.home, listener = _listen(self.data)
        self.log = self.data / LOG_FILE
        self.log_start = self.log.stat().st_size if self.log.exists() else 0

        self.holders = {starter}  # while there is one, the server lives
        self.unanswered = {starter}  # holders who wait for the server to be ready
        self.watchers: set[socket.socket] = set()
        self.waiting: list[socket.socket] = []  # want to know whether anybody is left

        self.server: subprocess.Popen[bytes] | None = None
        self.ready = False
        self.ever_ready = False
        self.given_up = False
        self.loading = False
        self.heard_at = 0.0  # last sign of life while starting
        self.launch_at = 0.0
        self.restarts: list[float] = []
        self.obituary = ""  # how the server before this one ended

        self.selector = selectors.DefaultSelector()
        self.listen_to(starter, self.hear_holder)
        self.listen_to(listener, self.accept)
        self.listen_to(_child_signals(), lambda conn: conn.recv(4096))

    def listen_to(self, conn: socket.socket, react: Callable[[socket.socket], object]) -> None:
        conn.setblocking(False)  # a user who is stopped and reads nothing must not stop us
        self.selector.register(conn, selectors.EVENT_READ, react)

    # -- users -----------------------------------------------------------------------------------------------

    def serve(self) -> None:
        while self.holders and not self.given_up:
            self.tend()
            asked, self.waiting = self.waiting, []
            # Who asks whether anybody is left has hung up before: that is read in this pass, then answered.
            for key, _ in self.selector.select(0 if asked else self.pause()):
                key.data(key.fileobj)
            if self.holders and not self.given_up:
                for conn in asked:
                    self.say(conn, {"state": "busy"})
                    self.drop(conn)

    def accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # too many open files: the users there are come first
            conn, _ = listener.accept()
            self.listen_to(conn, self.hear)

    def hear(self, conn: socket.socket) -> None:
        word = _heard(conn).strip()
        if word == b"hold":
            self.selector.modify(conn, selectors.EVENT_READ, self.hear_holder)
            self.holders.add(conn)
            self.unanswered.add(conn)
        elif word == b"watch":
            self.selector.modify(conn, selectors.EVENT_READ, self.drop)
            self.watchers.add(conn)
        elif word == b"wait":
            self.selector.unregister(conn)
            self.waiting.append(conn)
        else:
            if word == b"info":
                self.say(conn, self.state())
            self.drop(conn)

    def hear_holder(self, conn: socket.socket) -> None:
        if not _heard(conn):
            self.drop(conn)

    def drop(self, conn: socket.socket) -> None:
        for group in (self.holders, self.unanswered, self.watchers):
            group.discard(conn)
        with contextlib.suppress(KeyError):
            self.selector.unregister(conn)
        conn.close()

    def say(self, conn: socket.socket, what: object) -> None:
        with contextlib.suppress(OSError):  # who hung up is dropped when its end-of-file is read
            conn.sendall(json.dumps(what).encode() + b"\n")

    def state(self) -> dict[str, object]:
        return {
            "state": "ready" if self.ready else "starting",
            "socket": str(self.home / SERVER_SOCKET),
            "pid": self.server.pid if self.server else 0,
            "supervisor": os.getpid(),
            **{name: self.order[name] for name in ("binary", "source", "version")},
        }

    # -- the server ------------------------------------------------------------------------------------------

    def tend(self) -> None:
        if self.server is None:
            if time.monotonic() >= self.launch_at:
                self.launch()
        elif (code := self.server.poll()) is not None:
            self.ended(_ending(code))
        elif not self.ready:
            self.look_whether_ready(self.server)
        if self.ready:
            for conn in self.unanswered:
                self.say(conn, self.state())
            self.unanswered.clear()

    def pause(self) -> float | None:
        """Seconds until the server has to be looked at again; None: no need, news come by themselves."""
        if self.ready:
            return None
        if self.server is None:
            return max(0.0, self.launch_at - time.monotonic())
        return 0.05 if self.loading else 0.002

    def launch(self) -> None:
        self.heard_at = time.monotonic()
        self.loading = False
        self.server = subprocess.Popen(  # noqa: S603
            self.command(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(self.lock,),
            preexec_fn=partial(_die_with, os.getpid()),  # noqa: PLW1509 - see there
        )

    def command(self) -> list[str]:
        options = {
            "port": "0",
            "unixsocket": str(self.home / SERVER_SOCKET),
            "unixsocketperm": "700",
            "dir": str(self.data),
            "logfile": str(self.log),
            "save": "",
            "appendonly": "yes",
            # Without fsync an acknowledged write survives the end of the server, not of the machine. A
            # temporary server wants no more than that.
            "appendfsync": "no" if self.order["temporary"] else "everysec",
            "maxmemory-policy": "noeviction",
            "daemonize": "no",
        }
        words = [word for name, value in options.items() for word in (f"--{name}", value)]
        return [self.order["binary"], *words]

    def look_whether_ready(self, server: subprocess.Popen[bytes]) -> None:
        answer = ping(self.home / SERVER_SOCKET)
        if answer.startswith(b"+PONG"):
            if not self.ever_ready:
                self.publish(self.program)
            self.ready = self.ever_ready = True
            if self.obituary:
                self.report("warning", f"{self.obituary}; restarted as pid {server.pid} on the same data")
        elif answer.startswith(b"-LOADING"):
            self.loading = True
            self.heard_at = time.monotonic()
            for conn in self.unanswered:
                with contextlib.suppress(OSError):
                    conn.sendall(b"\n")
        elif time.monotonic() - self.heard_at > self.order["silence"]:
            server.kill()
            server.wait()
            self.ended(f"said nothing for {self.order['silence']:g} s after its start")

    def ended(self, how: str) -> None:
        assert self.server is not None
        name = f"embedded {Path(self.order['binary']).name} (pid {self.server.pid}) for {self.data}"
        self.server, self.ready = None, False
        if not self.ever_ready:
            former = self.former.get("program") or self.program
            # Without this a file of a newer server looks damaged, and the log advises to "fix" it.
            hint = f"; the data was last served by {former}" if former != self.program else ""
            self.give_up(f"{name} {how} before it was ready{hint}")
            return
        now = time.monotonic()
        self.restarts = [at for at in self.restarts if now - at < RESTART_SPAN]
        if len(self.restarts) >= RESTARTS:
            self.give_up(f"{name} {how}, after {RESTARTS} restarts within {RESTART_SPAN:g} s; it stays down")
            return
        self.launch_at = now + (0.1 * 2 ** (len(self.restarts) - 1) if self.restarts else 0)
        self.restarts.append(now)
        self.obituary = f"{name} {how}"

    def give_up(self, why: str) -> None:
        text = f"{why}. {LOG_FILE} ends with:\n{self.log_tail()}"
        self.report("error", text)
        for conn in self.unanswered:
            self.say(conn, {"state": "failed", "text": text})
        self.given_up = True

    def report(self, level: str, text: str) -> None:
        self.note(text)
        for conn in self.watchers:
            self.say(conn, {"level": level, "text": text})

    def note(self, text: str) -> None:
        with contextlib.suppress(OSError), self.log.open("a") as log:
            log.write(f"{os.getpid()}:supervisor {time.strftime('%d %b %Y %H:%M:%S')} {text}\n")

    def log_tail(self) -> str:
        try:
            written = self.log.read_bytes()[self.log_start :]
        except OSError:
            return "(no log)"
        return b"\n".join(written.splitlines()[-12:]).decode(errors="replace") or "(nothing)"

    def stop(self) -> None:
        """Everything gone, files last: who waits for our end-of-file finds nothing left."""
        if self.server:
            # What a temporary server holds is about to be deleted, so it need not tidy up (100 ms).
            (self.server.kill if self.order["temporary"] else self.server.terminate)()
            try:
                self.server.wait(STOP_PATIENCE)
            except subprocess.TimeoutExpired:
                self.server.kill()
                self.server.wait()
        shutil.rmtree(self.home, ignore_errors=True)
        if self.order["temporary"]:
            shutil.rmtree(self.data, ignore_errors=True)

    def publish(self, program: str) -> None:
        """Write into the lock file where the sockets are, and which program can read the data."""
        os.ftruncate(self.lock, 0)
        os.pwrite(self.lock, json.dumps({"run": str(self.home), "program": program}).encode(), 0)

    def tidy(self) -> None:
        """Remove the sockets of a killed supervisor, where they were outside the data directory."""
        run = Path(self.former["run"]) if "run" in self.former else self.home
        if run != self.home:
            with contextlib.suppress(OSError):
                for name in (CONTROL_SOCKET, SERVER_SOCKET):
                    (run / name).unlink(missing_ok=True)
                run.rmdir()


def _published(lock: int) -> dict[str, str]:
    """What the supervisor before us wrote into the lock file."""
    try:
        published: dict[str, str] = json.loads(os.pread(lock, 8192, 0))
    except ValueError:
        return {}
    return published


def _heard(conn: socket.socket) -> bytes:
    try:
        return conn.recv(256)
    except OSError:
        return b""


def _child_signals() -> socket.socket:
    """Readable when a child ended: select() alone would sleep on."""
    readable, writable = socket.socketpair()
    writable.setblocking(False)
    signal.set_wakeup_fd(writable.detach(), warn_on_full_buffer=False)
    return readable


def _ignore(_number: int, _frame: object) -> None:
    """A handler rather than SIG_IGN: the server would inherit that."""


def _lock(data: Path) -> int | None:
    import fcntl  # not on Windows, where this module must still import

    lock = os.open(data / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    return lock


def _refusal(order: Order, data: Path) -> str | None:
    """Why this server must not open this directory: an old one would start empty beside the newer file."""
    if int(order["version"].split(".")[0]) < 7 and (data / "appendonlydir").exists():
        return (
            f"{data} was written by a server of version 7 or later; {order['binary']} is {order['version']} "
            f"and would not see that data. Name a newer one with IDEMGATE_SERVER, or use another directory"
        )
    return None


def run(order: Order) -> None:
    """Supervise until the last user is gone. Every failure is told to the first user."""
    starter = socket.socket(fileno=order["starter"])
    supervisor: Supervisor | None = None
    try:
        lock = _lock(Path(order["data"]))
        if lock is None:
            starter.sendall(b'{"state": "busy"}\n')
            return
        if refused := _refusal(order, Path(order["data"])):
            starter.sendall(json.dumps({"state": "failed", "text": refused}).encode() + b"\n")
            return
        supervisor = Supervisor(order, lock, starter)
        supervisor.tidy()
        supervisor.publish(supervisor.former.get("program", ""))
        supervisor.serve()
    except Exception as failure:  # noqa: BLE001 - nobody sees our stderr
        if supervisor:
            supervisor.note(traceback.format_exc())
        with contextlib.suppress(OSError):
            starter.sendall(json.dumps({"state": "failed", "text": f"{order['data']}: {failure!r}"}).encode() + b"\n")
    finally:
        if supervisor:
            supervisor.stop()
        # The kernel closes the lock before the younger sockets of those who wait for our end-of-file, and we
        # are gone with that. The interpreter's own tidying would hang up first and end later.
        os._exit(0)


def main() -> None:
    # The starter waits for this process only until here, and has no child of ours to reap later.
    if os.fork():
        os._exit(0)
    # A whole process group or control group may be signalled while users still drain: only their end is our
    # end.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, _ignore)
    os.umask(0o077)
    run(json.loads(sys.argv[1]))


if __name__ == "__main__":
    main()
