"""The asynchronous connection of an event loop to one server: it pipelines the calls of all tasks, and reconnects.

redis-py opens the connection: addresses, TLS, credentials, handshake. After that this module owns the transport.
Requests of one tick of the event loop are written at once. Replies are matched to requests in order.

A cancelled caller leaves its callback in the queue, so no reply goes to another caller.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import redis.exceptions as rx

from idemgate.core.backoff import SOCKET_TIMEOUT
from idemgate.core.clock import monotonic
from idemgate.lua.checked import checks_rights, with_check
from idemgate.store.clients import async_pool, close_sentinels
from idemgate.store.endpoint import Endpoint
from idemgate.store.plain import probe_of, takes_plain
from idemgate.store.replication import DurabilityCheck
from idemgate.store.resp import new_reader
from idemgate.store.retry import explain_redirect, suggests_failover

__all__ = [
    "CLOSE_TIMEOUT",
    "AsyncConnection",
    "ReconnectingConnection",
    "SingleServer",
    "open_connection",
    "open_transport",
    "raise_if_error",
]


CLOSE_TIMEOUT = 1.0
"""Seconds to wait for the server's side of closing."""
NO_TIMEOUT = 86_400.0
"""Reply timeout in seconds (a day) for commands that block on the server."""
ReplyCallback = Callable[[Any], None]
"""A callback for a reply, or for the exception that replaces it. It must not raise."""


class AsyncConnection(asyncio.Protocol):
    """One connection. `send` returns a future, `submit` calls back.

    `closed` is True once the connection is unusable, and `retired` once a new one replaces it. `ready` is True while it
    accepts writes at once. `writable` is set unless the write buffer is full. `takes_plain` says whether the server has
    the plain commands of the guard; None: it was not asked yet.
    """

    def __init__(self, writer: asyncio.StreamWriter, reply_timeout: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._writer = writer  # a writer closes its transport when it is garbage-collected
        self._transport = writer.transport
        self._reply_timeout = reply_timeout
        self._reader = new_reader()
        self._callbacks: deque[ReplyCallback] = deque()
        self._drained: asyncio.Future[None] | None = None
        self._outgoing: list[bytes] = []
        self._trailer: tuple[Sequence[bytes], asyncio.Future[list[Any]]] | None = None
        self._last_progress = monotonic()
        self._timer: asyncio.TimerHandle | None = None
        self.writable: asyncio.Event = asyncio.Event()
        self.writable.set()
        self._closed_event = asyncio.Event()
        self.closed: bool = False
        self.retired: bool = False
        self.ready: bool = True
        self.takes_plain: bool | None = None

    # -- sending ------------------------------------------------------------------------------------------------------

    def send(self, request: bytes) -> asyncio.Future[Any]:
        """Send a request and return the future of its reply. Errors of the server are raised by awaiting it."""
        future = self._loop.create_future()
        self.submit(request, partial(_resolve_future, future))
        return future

    def send_each(self, requests: Sequence[bytes], seconds: float | None) -> list[Awaitable[Any]]:
        """Queue requests, adjacent on the connection, and return their replies. `seconds` as for `send_within`."""
        replies: list[Awaitable[Any]] = [self.send(request) for request in requests]
        return replies if seconds is None else [self._await_within(reply, seconds) for reply in replies]

    def send_within(self, request: bytes, seconds: float) -> Awaitable[Any]:
        """Return the reply, or raise redis-py's TimeoutError after `seconds`.

        If nothing at all arrived for that time, the connection is aborted, and the next try opens another one.
        """
        return self._await_within(self.send(request), seconds)

    async def _await_within(self, reply: Awaitable[Any], seconds: float) -> Any:
        try:
            async with asyncio.timeout(seconds):
                return await reply
        except TimeoutError as error:
            if not self.closed and self._callbacks and monotonic() - self._last_progress > seconds * 0.9:
                self.abort()
            raise rx.TimeoutError("Timeout reading from the server") from error

    def send_many(self, request: bytes, number: int, seconds: float | None) -> Awaitable[list[Any]]:
        """Send a request of `number` commands and return their replies. Errors of the server are values among them.

        Awaiting them raises redis-py's ConnectionError if the connection was lost. `seconds` as for `send_within`.
        """
        future, replies = self._loop.create_future(), list[Any]()

        def end(reply: Any) -> None:
            replies.append(reply)
            _resolve_future(future, reply if isinstance(reply, rx.ConnectionError | rx.TimeoutError) else replies)

        self.submit(request, *[replies.append] * (number - 1), end)
        return future if seconds is None else self._await_within(future, seconds)

    def submit(self, request: bytes, on_reply: ReplyCallback, /, *others: ReplyCallback) -> None:
        """Queue a request. It is written at the end of this tick. A callback receives the reply or the error.

        A request that is several commands has a callback for each of them.
        """
        if self.closed:
            error = rx.ConnectionError("the connection was lost before the request was sent")
            for callback in (on_reply, *others):
                callback(error)
            return
        if not self._callbacks:
            self._last_progress = monotonic()
            if self._timer is None:
                self._timer = self._loop.call_later(self._reply_timeout, self._check_timeout)
        self._callbacks.append(on_reply)
        if others:
            self._callbacks.extend(others)
        if not self._outgoing:
            self._loop.call_soon(self._flush)
        self._outgoing.append(request)

    def learn_plain(self, key: bytes) -> bool:
        """Ask the server whether it has the plain commands of the guard for this user. Return False: not known yet."""
        replies: list[Any] = []

        def learn(reply: Any) -> None:
            replies.append(reply)
            if len(replies) < len(probe) and not isinstance(reply, Exception):
                self.submit(probe[1], learn)
            else:
                self.takes_plain = takes_plain(replies)

        self.takes_plain = False  # other tasks do not ask meanwhile
        probe = probe_of(key)
        self.submit(probe[0], learn)
        return False

    def send_after_tick(self, requests: Sequence[bytes]) -> asyncio.Future[list[Any]]:
        """Send requests once, behind all requests of this tick, and return the future of their replies.

        All callers of one tick share the future and must not cancel it. Call this right after `send`. Errors of the
        server are values among the replies.
        """
        if self._trailer is None:
            self._trailer = requests, self._loop.create_future()
            if not self._outgoing:
                self._loop.call_soon(self._flush)
        return self._trailer[1]

    def _send_trailer(self, requests: Sequence[bytes], result: asyncio.Future[list[Any]]) -> None:
        replies = asyncio.gather(*map(self.send, requests), return_exceptions=True)
        replies.add_done_callback(
            lambda done: result.cancel() if done.cancelled() else result.set_result(done.result())
        )

    def _flush(self) -> None:
        if self._trailer is not None:
            trailer, self._trailer = self._trailer, None
            self._send_trailer(*trailer)
        if self._outgoing and not self.closed:
            self._transport.write(b"".join(self._outgoing))
        self._outgoing.clear()

    # -- callbacks of the transport ---------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self._last_progress = monotonic()
        reader = self._reader
        try:
            reader.feed(data)
            while (reply := reader.gets()) is not False:
                self._callbacks.popleft()(reply)
        except (rx.InvalidResponse, IndexError) as error:
            self._fail_all(rx.ConnectionError(f"invalid reply from the server: {error}"))
            self._transport.abort()
        if self._drained is not None and not self._callbacks and not self._drained.done():
            self._drained.set_result(None)

    def pause_writing(self) -> None:
        self.writable.clear()
        self.ready = False

    def resume_writing(self) -> None:
        self.writable.set()
        self.ready = not self.retired

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail_all(rx.ConnectionError(f"the connection was lost: {exc or 'closed by the server'}"))
        self._closed_event.set()

    # -- closing ------------------------------------------------------------------------------------------------------

    def _check_timeout(self) -> None:
        """Fail the connection when nothing arrived for the timeout while replies were outstanding."""
        self._timer = None
        if self.closed or not self._callbacks:
            return
        remaining = self._last_progress + self._reply_timeout - monotonic()
        if remaining > 0:
            self._timer = self._loop.call_later(remaining, self._check_timeout)
            return
        self._fail_all(rx.TimeoutError("Timeout reading from the server"))
        self._transport.abort()

    def _fail_all(self, error: rx.RedisError) -> None:
        self.closed = self.retired = True
        self.ready = False
        self.writable.set()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._callbacks:
            self._callbacks.popleft()(error)

    def abort(self) -> None:
        """Close the connection at once. Outstanding requests fail with ConnectionError."""
        self._fail_all(rx.ConnectionError("the connection was aborted"))
        self._transport.abort()

    def retire(self) -> None:
        """Take no more requests, and close after the outstanding replies. Each caller gets its own reply."""
        if not self.retired:
            self.retired, self.ready = True, False
            self._loop.call_soon(self._close_drained)

    def _close_drained(self, _: object = None) -> None:
        if self._callbacks:
            self._when_drained().add_done_callback(self._close_drained)
        elif not self.closed:
            self.abort()

    def _when_drained(self) -> asyncio.Future[None]:
        if self._drained is None or self._drained.done():
            self._drained = self._loop.create_future()
        return self._drained

    async def drain(self) -> None:
        """Wait for the outstanding replies, at most the reply timeout."""
        if self._callbacks:
            await asyncio.wait({self._when_drained()}, timeout=self._reply_timeout)

    async def close(self) -> None:
        """Wait for the outstanding replies, then close, and wait for the end of the transport.

        An event loop that ends before that warns of an open transport.
        """
        await self.drain()
        self._fail_all(rx.ConnectionError("the connection was closed"))
        self._transport.close()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._closed_event.wait(), CLOSE_TIMEOUT)
        self._transport.abort()


class CheckedConnection(AsyncConnection):
    """A connection whose scripts check the rights of its user before the first write."""

    def submit(self, request: bytes, *on_replies: ReplyCallback) -> None:
        super().submit(with_check(request), *on_replies)


def _resolve_future(future: asyncio.Future[Any], reply: Any) -> None:
    if future.done():
        return  # cancelled: the callback stayed in the queue
    if isinstance(reply, Exception):
        future.set_exception(reply)
    else:
        future.set_result(reply)


async def open_connection(pool: Any, reply_timeout: float) -> AsyncConnection:
    """Open a connection with the settings of a redis-py pool. `reply_timeout` is in seconds."""
    writer = await open_transport(pool)
    checks = checks_rights(pool.connection_kwargs)
    opened = (CheckedConnection if checks else AsyncConnection)(writer, reply_timeout)
    writer.transport.set_protocol(opened)
    return opened


async def open_transport(pool: Any) -> asyncio.StreamWriter:
    """Connect with the settings of a redis-py pool. Return the writer, whose transport needs another protocol."""
    connection = pool.make_connection()
    try:
        await connection.connect()
    except BaseException as error:
        await connection.disconnect(nowait=True)  # a connection cancelled during its handshake would stay open
        if isinstance(error, rx.TimeoutError):  # also of the handshake: no request was sent
            raise rx.TimeoutError("Timeout connecting to the server") from error
        raise
    writer: asyncio.StreamWriter = connection._writer
    # redis-py's object must not close, or warn about, a transport that belongs to the caller from here on.
    connection._reader = connection._writer = None
    return writer


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
        if not connection.writable.is_set():
            await connection.writable.wait()
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
