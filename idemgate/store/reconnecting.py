"""Asynchronous connections to one server that reconnect when they are lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import redis.exceptions as rx

from idemgate.core.backoff import SOCKET_TIMEOUT
from idemgate.core.clock import monotonic
from idemgate.store.clients import async_pool, close_sentinels
from idemgate.store.connection_aio import AsyncConnection, open_connection
from idemgate.store.endpoint import Endpoint
from idemgate.store.refusals import explain_redirect, suggests_failover
from idemgate.store.replication import DurabilityCheck

__all__ = ["ReconnectingConnection", "SingleServer", "raise_if_error"]

NO_TIMEOUT = 86_400.0
"""Reply timeout in seconds (a day) for commands that block on the server."""


class ReconnectingConnection:
    """The connection to one server. A lost connection is opened again at the next use."""

    __slots__ = ("_closed", "_connecting", "_connection", "_idle", "_on_failover", "_pool", "_retired", "_timeout")

    def __init__(self, pool: Any, timeout: float, on_failover: Callable[[], object] = lambda: None) -> None:
        self._pool = pool
        self._timeout = timeout
        self._on_failover = on_failover
        self._connection: AsyncConnection | None = None
        self._connecting: asyncio.Task[AsyncConnection] | None = None
        self._idle: list[AsyncConnection] = []
        self._retired: list[AsyncConnection] = []
        self._closed = False

    def ready_connection(self) -> AsyncConnection | None:
        """Return the connection if it accepts writes at once, else None."""
        connection = self._connection
        return connection if connection is not None and connection.ready else None

    def owns(self, connection: AsyncConnection) -> bool:
        """Return whether this is the present connection, or the last one."""
        return self._connection is connection

    def _start_connecting(self) -> asyncio.Task[AsyncConnection]:
        """Return the task that connects. Start it unless it runs already."""
        if self._connecting is None:
            self._connecting = asyncio.get_running_loop().create_task(self._connect())
            self._connecting.add_done_callback(self._finish_connecting)
        return self._connecting

    async def acquire(self) -> AsyncConnection:
        """Return the connection once it is open and accepts writes.

        Raises:
            ConnectionError: connecting failed. All callers that wait for the same connection get the same error.
        """
        connection = self._connection
        if connection is None or connection.retired:
            connection = await asyncio.shield(self._start_connecting())
        if connection.is_congested:
            await connection.wait_writable()
        return connection

    async def _connect(self) -> AsyncConnection:
        if self._closed:
            raise rx.ConnectionError("Error connecting to a server: its connection was closed")
        self._connection = connection = await open_connection(self._pool, self._timeout)
        return connection

    def _finish_connecting(self, connecting: asyncio.Task[AsyncConnection]) -> None:
        self._connecting = None
        if not connecting.cancelled():
            connecting.exception()  # mark the exception as retrieved: perhaps no caller waits any more

    @asynccontextmanager
    async def dedicated_connection(self) -> AsyncGenerator[AsyncConnection]:
        """Yield a connection for one caller, whose replies may take any time.

        An exception inside the block, also a cancellation, drops the connection.
        """
        idle = self._idle
        while idle and idle[-1].retired:
            idle.pop()
        connection = idle.pop() if idle else await open_connection(self._pool, NO_TIMEOUT)
        try:
            yield connection
        except BaseException:
            connection.abort()
            raise
        idle.append(connection)
        if self._closed:
            self._close_idle()

    def report_error(self, connection: AsyncConnection, error: object) -> None:
        """Replace a connection, and the idle ones, if an error on it suggests a failover behind its address.

        They would lead to the former primary for ever. The next connection resolves the name again.
        """
        if suggests_failover(error) and not connection.retired:
            self._close_idle()
            self._retired = [*(one for one in self._retired if not one.closed), connection]
            connection.retire()
            self._on_failover()

    def report_errors(self, connection: AsyncConnection, replies: Sequence[object]) -> None:
        """Call `report_error` for the errors among the replies."""
        if rx.ResponseError in map(type, replies):
            for reply in replies:
                self.report_error(connection, reply)

    async def drain(self) -> None:
        """Wait for the outstanding replies, at most the reply timeout."""
        for connection in self._open_connections():
            await connection.drain()

    def _open_connections(self) -> list[AsyncConnection]:
        return [*self._retired, *([self._connection] if self._connection is not None else [])]

    def _close_idle(self) -> None:
        while self._idle:
            self._idle.pop().abort()

    async def close(self) -> None:
        """Wait for the outstanding replies, then close."""
        self._closed = True
        self._close_idle()
        if self._connecting is not None:
            await asyncio.wait([self._connecting])
        for connection in self._open_connections():
            await connection.close()


class SingleServer:
    """The access of one event loop to a single server, or to the master that Sentinel names.

    It has the interface of `AsyncCluster` and ignores the keys.
    """

    __slots__ = ("_connection", "_pool")

    def __init__(self, endpoint: Endpoint, seconds: float, on_failover: Callable[[], object]) -> None:
        self._pool = async_pool(endpoint, seconds)
        self._connection = ReconnectingConnection(self._pool, min(seconds, SOCKET_TIMEOUT), on_failover)

    def ready_connection(self, _key: bytes) -> AsyncConnection | None:
        connection = self._connection._connection  # inlined `ready_connection`: every call comes here
        return connection if connection is not None and connection.ready else None

    def report_error(self, connection: AsyncConnection, error: Exception) -> Exception:
        """Replace the connection after an error that suggests a failover. Return the error to raise."""
        self._connection.report_error(connection, error)
        return explain_redirect(error)

    async def _acquire(self, seconds: float | None) -> AsyncConnection:
        """Return the connection. After `seconds` the caller gives up, and connecting goes on for the next call."""
        if seconds is None:
            return await self._connection.acquire()
        try:
            async with asyncio.timeout(seconds):
                return await self._connection.acquire()
        except TimeoutError as error:
            raise rx.TimeoutError("Timeout connecting to the server") from error

    async def execute(self, _key: bytes, request: bytes, seconds: float | None = None) -> Any:
        """Send a request and return its reply.

        `seconds` bounds the wait for a connection and the reply; None: the timeout of the connection.
        """
        started = monotonic()
        connection = await self._acquire(seconds)
        try:
            if seconds is None:
                return await connection.send(request)
            return await connection.send_within(request, max(0.0, started + seconds - monotonic()))
        except rx.ResponseError as error:
            if (explained := self.report_error(connection, error)) is error:
                raise
            raise explained from error

    async def execute_all(
        self, _keys: Sequence[bytes], requests: Sequence[bytes], seconds: float | None = None
    ) -> list[Any]:
        """Send requests and return their replies. Errors are values among them. `seconds` as for `execute`."""
        connection = await self._acquire(seconds)
        replies = await asyncio.gather(*connection.send_each(requests, seconds), return_exceptions=True)
        self._connection.report_errors(connection, replies)
        return replies

    async def execute_durably(self, check: DurabilityCheck, requests: Sequence[bytes]) -> list[Any]:
        """Send writes, wait for their durability, and return their replies. Errors of the server are values.

        Raises:
            NotReplicated: the writes are less durable than required. Not raised when all requests failed.
        """
        connection = await self._connection.acquire()
        await self._probe(connection, check)
        futures = [connection.send(request) for request in requests]
        durability = asyncio.shield(connection.send_after_tick(check.requests))
        replies: list[Any] = await asyncio.gather(*futures, return_exceptions=True)
        replies = [self.report_error(connection, reply) if isinstance(reply, Exception) else reply for reply in replies]
        durability_replies = await durability
        if not all(isinstance(reply, Exception) for reply in replies):
            check.check_replies(durability_replies)
        return replies

    async def _probe(self, connection: AsyncConnection, check: DurabilityCheck) -> None:
        """Check once that the server supports the required durability."""
        for request in check.probe:
            replies = await asyncio.gather(connection.send(request), return_exceptions=True)
            self._connection.report_errors(connection, replies)
            check.check_probe(request, replies[0])

    async def execute_dedicated(self, _key: bytes, request: bytes) -> Any:
        async with self._connection.dedicated_connection() as connection:
            replies = await asyncio.gather(connection.send(request), return_exceptions=True)
            self._connection.report_errors(connection, replies)
        return raise_if_error(explain_redirect(replies[0]))

    async def drain(self) -> None:
        await self._connection.drain()

    async def close(self) -> None:
        await self._connection.close()
        await close_sentinels(self._pool)


def raise_if_error(reply: Any) -> Any:
    """Return the reply, or raise it when it is an exception."""
    if isinstance(reply, Exception):
        raise reply
    return reply
