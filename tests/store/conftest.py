"""The two links as one fixture, a server that a test may break, and proxies in front of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest
import redis

from idemgate import Gate
from idemgate.store.embedded.server import Embedded, start
from idemgate.testing.proxy import Proxy
from tests.claims import claims_of


@pytest.fixture(scope="session")
def own_server() -> Iterator[Embedded]:
    with start() as server:
        yield server


@pytest.fixture
def own(own_server: Embedded) -> Iterator[redis.Redis]:
    """A client of a server whose settings this test may spoil; they are as before afterwards."""
    with redis.Redis.from_url(own_server.url, decode_responses=True) as client:
        before = client.config_get("*")
        yield client
        changed = {name: value for name, value in client.config_get("*").items() if before[name] != value}
        for name in changed:
            client.config_set(name, before[name])
        client.flushall()


@pytest.fixture
def own_url(own: redis.Redis, own_server: Embedded) -> str:
    return own_server.url


@pytest.fixture
def proxy(url: str) -> Iterator[Proxy]:
    with Proxy(url) as made:
        yield made


class Asker:
    """A gate's blocking or awaiting link; `await ask.run(call)` is the same with both."""

    def __init__(self, gate: Gate, awaiting: bool) -> None:
        self.gate = gate
        self.awaiting = awaiting
        self.claims = claims_of(gate)

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        if self.awaiting:
            return getattr(self.gate.aio.context.aio_link, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            return await asyncio.to_thread(getattr(self.gate.context.link, name), *args, **kwargs)

        return call


@pytest.fixture(params=["blocking", "awaiting"])
async def asker(request: pytest.FixtureRequest, namespace: str) -> AsyncIterator[Callable[..., Asker]]:
    """Makes an Asker for a URL or a client; all are closed at the end."""
    gates: list[Gate] = []

    def make(store: object = None, **options: Any) -> Asker:
        gates.append(Gate(store, namespace=namespace, **options))
        return Asker(gates[-1], request.param == "awaiting")

    yield make
    for gate in gates:
        await gate.aio.close()
        gate.close()
