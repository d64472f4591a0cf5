"""Servers that all tests of a process share, a gate whose time is moved, and a client for each face."""

from __future__ import annotations

import itertools
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import pytest

from idemgate import Gate
from idemgate.testing import Clock
from integrations.http.tests.apps import Handler, build_app
from integrations.http.tests.servers import KINDS, Server

_numbers = itertools.count()
FACES = {
    "asgi-uvicorn": ("asgi", "uvicorn"),
    "asgi-hypercorn": ("asgi", "hypercorn"),
    "wsgi-waitress": ("wsgi", "waitress"),
    "wsgi-wsgiref": ("wsgi", "wsgiref"),
    "django-waitress": ("django", "waitress"),
    "django-uvicorn": ("django-async", "uvicorn"),
}


@pytest.fixture(scope="session")
def server_of() -> Iterator[Callable[[str], Server]]:
    """`server_of("uvicorn")`: the running server of a kind."""
    running: dict[str, Server] = {}

    def get(kind: str) -> Server:
        if kind not in running:
            running[kind] = KINDS[kind]()
            running[kind].start()
        return running[kind]

    yield get
    for server in running.values():
        server.stop()


@pytest.fixture
def gate(store: str, namespace: str, clock: Clock) -> Iterator[Gate]:
    made = Gate(store, namespace=namespace, clock=clock)
    yield made
    made.close()


@pytest.fixture
async def agate(gate: Gate) -> AsyncIterator[Gate]:
    """The gate for apps that run in the event loop of the test."""
    yield gate
    await gate.aio.close()


class Client:
    """A client of one mounted app. `post` sends the account "a" and a body unless the test says otherwise."""

    def __init__(self, http: httpx.Client, url: str, gate: Gate) -> None:
        self.http = http
        self.url = url
        self.gate = gate

    def send(self, method: str, path: str, key: str | None, headers: Any, **options: Any) -> httpx.Response:
        fields = {"x-account": "a"} | (headers or {})
        if key is not None:
            fields["idempotency-key"] = key
        fields = {name: value for name, value in fields.items() if value is not None}
        return self.http.request(method, self.url + path, headers=fields, **options)

    def post(self, key: str | None = "k", path: str = "/pay", headers: Any = None, **options: Any) -> httpx.Response:
        return self.send("POST", path, key, headers, **({"content": b"{}"} | options))


@pytest.fixture
def mount(server_of: Callable[[str], Server], gate: Gate) -> Iterator[Callable[..., Client]]:
    """`mount("uvicorn", app)`: a client of an app on a real server."""
    used: list[tuple[Server, str]] = []
    with httpx.Client(timeout=30, verify=False) as http:

        def add(kind: str, app: Any, name: str = "") -> Client:
            server, prefix = server_of(kind), name or f"app-{next(_numbers)}"
            server.mounts.apps[prefix] = app
            used.append((server, prefix))
            return Client(http, f"{server.url}/{prefix}", gate)

        yield add
        http.close()
        for server, prefix in used:
            del server.mounts.apps[prefix]
            if server.loop is not None:
                server.call(gate.aio.close())


@pytest.fixture(params=FACES)
def face(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def serve(face: str, mount: Callable[..., Client], gate: Gate) -> Callable[..., Client]:
    """`serve(handler, **options)`: a client of a guarded app, once for each face and server."""

    def build(handler: Handler, **options: Any) -> Client:
        kind, server = FACES[face]
        name = f"{'async' if kind == 'django-async' else 'sync'}-{next(_numbers)}"
        given = {"caller": lambda request: request.headers["x-account"]} | options
        given = {key: value for key, value in given.items() if value is not None}
        return mount(server, build_app(kind, name, handler, {"gate": gate, **given}), name)

    return build


FORGED = "\nERROR forged\x1b[2J"
"""What a client may send as a part of a path: a line end, and what a terminal acts on."""
QUOTED = "%0AERROR%20forged%1B[2J"
ESCAPED = r"\nERROR forged\x1b[2J"


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the messages of the log. A record has one line, and the indented ones of a traceback, all escaped."""
    records = [record for record in caplog.records if record.name == "idemgate.http"]
    for record in records:
        first, *traceback = logging.Formatter().format(record).split("\n")
        assert first == record.getMessage()
        for line in (first, *traceback, record.__dict__["method"], record.__dict__["path"]):
            assert line.isprintable()
        assert all(line.startswith("  ") for line in traceback)
    return [record.getMessage() for record in records]


class Effects:
    """A handler that counts its calls, and answers each with its number."""

    def __init__(self, answer: Callable[..., Any]) -> None:
        self.calls: list[Any] = []
        self._answer = answer

    def __call__(self, call: Any) -> Any:
        self.calls.append(call)
        return self._answer(call, len(self.calls))
