"""One asynchronous Pub/Sub connection.

redis-py opens the connection. After that this module owns the transport, as `store.connection_aio` does. The `PubSub`
class of redis-py raises AttributeError and RuntimeError if a task subscribes while another one replaces the connection.
Here a command is written without an await, and a lost connection ignores it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import Any, cast

import redis.exceptions as rx

from idemgate.core.backoff import SOCKET_TIMEOUT
from idemgate.store.connection_aio import CLOSE_TIMEOUT, open_transport
from idemgate.store.resp import new_reader, pack

__all__ = ["PubSubConnection"]

PING_AFTER = 5.0
"""Seconds without a message before a PING. The kernel would keep a connection that swallows everything for longer."""


class PubSubConnection(asyncio.Protocol):
    """One Pub/Sub connection. `on_push` receives the words of each message; it must not raise.

    `lost` is the future of the error that ended the connection.
    """

    def __init__(self, writer: asyncio.StreamWriter, on_push: Callable[[list[Any]], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._writer = writer  # a writer closes its transport when it is garbage-collected
        self._transport = writer.transport
        self._on_push = on_push
        self._reader = new_reader()
        self._outgoing: list[bytes] = []
        self._received_at, self._pinged_at = monotonic(), 0.0
        self._gone = asyncio.Event()
        self.lost: asyncio.Future[Exception] = self._loop.create_future()
        self._transport.set_protocol(self)

    @classmethod
    async def open(cls, pool: Any, on_push: Callable[[list[Any]], None]) -> PubSubConnection:
        """Open a connection with the settings of a redis-py pool."""
        return cls(await open_transport(pool), on_push)

    def send(self, *words: bytes | str) -> None:
        """Queue a command. The commands of one tick of the event loop are written together."""
        if not self._outgoing:
            self._loop.call_soon(self._flush)
        self._outgoing.append(pack(words))

    def _flush(self) -> None:
        outgoing, self._outgoing = self._outgoing, []
        if not self.lost.done():
            self._transport.write(b"".join(outgoing))

    def data_received(self, data: bytes) -> None:
        self._received_at = monotonic()
        try:
            self._reader.feed(data)
            while (reply := self._reader.gets()) is not False:
                if isinstance(reply, Exception):
                    self.end(reply)
                elif isinstance(reply, list):
                    self._on_push(cast(Any, reply))
        except rx.InvalidResponse as error:
            self.end(rx.ConnectionError(f"invalid reply from the server: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self.end(rx.ConnectionError(f"the connection was lost: {exc or 'closed by the server'}"))
        self._gone.set()

    async def wait_lost(self, seconds: float) -> None:
        """Raise the error of a lost connection. Return after `seconds`; a silent server then gets a PING.

        Raises:
            RedisError: the connection was lost, the server refused a command, or a PING got no reply in time.
        """
        await asyncio.wait([self.lost], timeout=seconds)
        if self.lost.done():
            raise self.lost.result()
        now = monotonic()
        if self._pinged_at > self._received_at:
            if now - self._pinged_at > SOCKET_TIMEOUT:
                raise rx.TimeoutError("Timeout reading from the server")
        elif now - self._received_at > PING_AFTER:
            self.send("PING")
            self._pinged_at = now

    def end(self, error: Exception) -> None:
        """End the connection with an error, unless it has ended."""
        if not self.lost.done():
            self.lost.set_result(error)
            self._transport.abort()

    async def close(self) -> None:
        """Close the connection, and wait for the end of its transport."""
        self.end(rx.ConnectionError("the connection was closed"))
        with suppress(TimeoutError):
            await asyncio.wait_for(self._gone.wait(), CLOSE_TIMEOUT)
