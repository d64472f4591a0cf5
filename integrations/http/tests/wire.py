"""The server's side of ASGI: requests that a test sends to an app by hand."""

from __future__ import annotations

import asyncio
from typing import Any

OPTIONS: dict[str, Any] = {"single_tenant": True}


def scope(key: str | None = "k", method: str = "POST", path: str = "/pay", **more: Any) -> dict[str, Any]:
    headers = [(b"idempotency-key", key.encode())] if key else []
    return {
        "type": "http", "method": method, "path": path, "query_string": b"", "headers": headers, "extensions": {},
    } | more  # fmt: skip


class Wire:
    """The server's side of one request: what the app receives, and what it has sent."""

    def __init__(self, body: bytes = b"{}") -> None:
        self.incoming: asyncio.Queue[Any] = asyncio.Queue()
        self.incoming.put_nowait({"type": "http.request", "body": body, "more_body": False})
        self.sent: list[Any] = []

    async def receive(self) -> Any:
        return await self.incoming.get()

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    def disconnect(self) -> None:
        self.incoming.put_nowait({"type": "http.disconnect"})

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent[1:])


async def respond(send: Any, body: bytes = b"ok", **headers: str) -> None:
    fields = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": 200, "headers": fields})
    await send({"type": "http.response.body", "body": body})


async def post(app: Any, key: str | None = "k", **more: Any) -> Wire:
    wire = Wire()
    await app(scope(key, **more), wire.receive, wire.send)
    return wire
