"""One asynchronous connection that pipelines the calls of all tasks.

redis-py opens the connection: addresses, TLS, credentials, handshake. After that this module owns the transport.
Requests of one tick of the event loop are written at once. Replies are matched to requests in order.

A cancelled caller leaves its callback in the queue, so no reply goes to another caller.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import redis.exceptions as rx

from idemgate.core.clock import monotonic
from idemgate.lua.checked import checks_rights, with_check
from idemgate.store.resp import new_reader

__all__ = ["CLOSE_TIMEOUT", "AsyncConnection", "open_connection", "open_transport"]


CLOSE_TIMEOUT = 1.0
"""Seconds to wait for the server's side of closing."""
ReplyCallback = Callable[[Any], None]
"""A callback for a reply, or for the exception that replaces it. It must not raise."""


class AsyncConnection(asyncio.Protocol):
    """One connection. `send` returns a future, `submit` calls back.

    `closed` is True once the connection is unusable, and `retired` once a new one replaces it. `ready` is True while it
    accepts writes at once.
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
        self._writable = asyncio.Event()
        self._writable.set()
        self._closed_event = asyncio.Event()
        self.closed = False
        self.retired = False
        self.ready = True

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

    def submit(self, request: bytes, on_reply: ReplyCallback) -> None:
        """Queue a request. It is written at the end of this tick. `on_reply` receives its reply or the error."""
        if self.closed:
            on_reply(rx.ConnectionError("the connection was lost before the request was sent"))
            return
        if not self._callbacks:
            self._last_progress = monotonic()
            if self._timer is None:
                self._timer = self._loop.call_later(self._reply_timeout, self._check_timeout)
        self._callbacks.append(on_reply)
        if not self._outgoing:
            self._loop.call_soon(self._flush)
        self._outgoing.append(request)

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

    @property
    def is_congested(self) -> bool:
        """Return whether the write buffer is full. Await `wait_writable` before sending more."""
        return not self._writable.is_set()

    async def wait_writable(self) -> None:
        await self._writable.wait()

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
        self._writable.clear()
        self.ready = False

    def resume_writing(self) -> None:
        self._writable.set()
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
        self._writable.set()
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

    def submit(self, request: bytes, on_reply: ReplyCallback) -> None:
        super().submit(with_check(request), on_reply)


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
