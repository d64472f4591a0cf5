"""A bridge from worker processes to the handler of a contract test, for consumers that run in such processes."""

from __future__ import annotations

import asyncio
import base64
import inspect
import json
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

__all__ = ["HandlerBridge"]


class HandlerBridge:
    """Runs the handler of a test for worker processes, over a port of this machine.

    In the test write `bridge = HandlerBridge(handler, transport.count)`, and pass `await bridge.start()` to the worker
    process. There, `HandlerBridge.count(port, id)` counts a delivery, and `HandlerBridge.call(port, id, body)` calls
    the handler.

    Args:
        handler: the handler that `Transport.start` got.
        count: `Transport.count`.
    """

    def __init__(self, handler: Callable[[str, bytes], Any], count: Callable[[str], object]) -> None:
        self._handler = handler
        self._count = count
        self._server: asyncio.Server | None = None

    async def start(self) -> int:
        """Listen, and return the port."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def close(self) -> None:
        """Listen no more. Handlers that run go on."""
        if self._server is not None:
            self._server.close()

    @staticmethod
    def count(port: int, message_id: str) -> None:
        """Count a delivery, in the worker process. Raises ConnectionError if the test has ended."""
        _ask(port, {"count": message_id})

    @staticmethod
    def call(port: int, message_id: str, body: bytes) -> Any:
        """Call the handler from the worker process and return what it returns, which must be JSON.

        Raises:
            ValueError: the handler raised; its text is that of the error.
            ConnectionError: the test has ended.
        """
        return _ask(port, {"call": message_id, "body": base64.b64encode(body).decode()})

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            answer = await self._run(reader)
            with suppress(OSError):  # the worker process was killed
                writer.write(json.dumps(answer).encode() + b"\n")
                await writer.drain()
        finally:  # also if the test ends while the handler runs
            writer.close()

    async def _run(self, reader: asyncio.StreamReader) -> dict[str, Any]:
        try:
            return {"result": await self._answer(json.loads(await reader.readline()))}
        except Exception as error:  # noqa: BLE001 - the worker process gets it
            return {"error": f"{type(error).__name__}: {error}"}

    async def _answer(self, request: dict[str, str]) -> Any:
        if "count" in request:
            self._count(request["count"])
            return None
        message = request["call"], base64.b64decode(request["body"])
        if inspect.iscoroutinefunction(self._handler):
            return await self._handler(*message)
        return await asyncio.to_thread(self._handler, *message)


def _ask(port: int, request: dict[str, str]) -> Any:
    with socket.create_connection(("127.0.0.1", port)) as connection, connection.makefile("rwb") as stream:
        stream.write(json.dumps(request).encode() + b"\n")
        stream.flush()
        line = stream.readline()
    if not line:
        raise ConnectionError("the test has ended")
    answer = json.loads(line)
    if "error" in answer:
        raise ValueError(answer["error"])
    return answer["result"]
