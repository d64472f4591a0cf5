"""A gate on the embedded server whose time is moved, and a receiver: a real HTTP server on 127.0.0.1."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from idemgate_webhook import Webhooks, new_secret

from idemgate import Gate
from idemgate.testing import Clock

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


@dataclass
class Request:
    path: str
    headers: dict[str, str]
    body: bytes


Answer = bytes | Callable[[asyncio.StreamWriter], Awaitable[None]]


class Receiver:
    """Answers with what `answers` holds, the last of them for ever; what came in waits in `next()`."""

    def __init__(self) -> None:
        self.answers: list[Answer] = [OK]
        self.requests: asyncio.Queue[Request] = asyncio.Queue()
        self.connections = 0
        self.port = 0

    def url(self, path: str = "/hooks", host: str = "127.0.0.1", scheme: str = "http") -> str:
        return f"{scheme}://{host}:{self.port}{path}"

    async def next(self) -> Request:
        return await asyncio.wait_for(self.requests.get(), 20)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            headers = dict(_header(line) for line in head[1:] if line)
            body = await reader.readexactly(int(headers.get("content-length", "0")))
            await self.requests.put(Request(head[0].split(" ")[1], headers, body))
            answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
            if isinstance(answer, bytes):
                writer.write(answer)
            else:
                await answer(writer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


def _header(line: str) -> tuple[str, str]:
    name, _, value = line.partition(":")
    return name.lower(), value.strip()


def answer(status: str, *headers: str, body: bytes = b"") -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


@asynccontextmanager
async def listening(
    host: str = "127.0.0.1", port: int = 0, tls: ssl.SSLContext | None = None
) -> AsyncIterator[Receiver]:
    made = Receiver()
    server = await asyncio.start_server(made.serve, host, port, ssl=tls)
    made.port = server.sockets[0].getsockname()[1]
    async with server:
        yield made


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with listening() as made:
        yield made


@pytest.fixture
def listen() -> Callable[..., Any]:
    return listening


@pytest.fixture
def respond() -> Callable[..., bytes]:
    return answer


@pytest.fixture
async def gate(store: str, namespace: str, clock: Clock) -> AsyncIterator[Gate]:
    made = Gate(store, namespace=namespace, clock=clock)
    yield made
    await made.aio.close()
    made.close()


@pytest.fixture
def secret() -> str:
    return new_secret()


class Sender:
    """`Webhooks` that may reach the receiver, and what tests do with them."""

    def __init__(self, gate: Gate, secret: object, **options: Any) -> None:
        self.gate = gate
        reach = {} if "transport" in options else {"allow": ["127.0.0.1"]}
        self.webhooks = Webhooks(gate, **{"secret": secret, "https_only": False, **reach, **options})

    @property
    def topic(self) -> Any:
        return self.webhooks.topic.aio

    async def send(self, url: str, body: object = None, id: str = "evt_1", **options: Any) -> Any:
        return await self.webhooks.aio.send(id, url, body, **options)

    async def history(self, id: str = "evt_1") -> Any:
        return await self.webhooks.aio.history(id)

    async def attempt(self) -> Exception | None:
        """Hands out what is due, once, without a worker and without settling it."""
        (delivery,) = await self.topic.take()
        try:
            await self.webhooks.deliver(delivery)
        except Exception as error:
            return error
        return None

    async def ended(self) -> Any:
        """The topic's numbers once nothing is being delivered."""
        async with asyncio.timeout(20):
            while (stats := await self.topic.stats()).in_flight or stats.ready:
                await asyncio.sleep(0.005)
        return stats

    async def dead(self) -> list[Any]:
        await self.ended()
        return await self.topic.dead.list()


@pytest.fixture
def sender(gate: Gate, secret: str) -> Callable[..., Sender]:
    return lambda **options: Sender(gate, **{"secret": secret, **options})
