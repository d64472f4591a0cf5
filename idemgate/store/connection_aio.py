"""The awaiting wire: one connection, on which the calls of one tick, from all tasks, travel together.

redis-py connects (addresses, TLS, credentials, its handshake); from then on the transport is ours. A call is a place in
a queue: requests gathered in a tick of the event loop are written at once, replies are matched in order. A caller that
is cancelled leaves its place in the queue behind, so that no reply is ever given to another.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import Any

import redis.exceptions as rx

from idemgate.store.resp import new_reader

__all__ = ["Wire", "connected"]


GOODBYE = 1.0
"""Seconds that the other side has for its part of closing."""
Heard = Callable[[Any], None]
"""Gets a reply, or the exception that came of asking. Must not raise."""


class Wire(asyncio.Protocol):
    """One connection. `send` gives a future, `ask` calls back; `closed` says that it cannot be used any more, `ready`
    that it can be written to at once."""

    def __init__(self, writer: asyncio.StreamWriter, patience: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._writer = writer  # kept, because a writer that is collected closes its transport
        self._transport = writer.transport
        self._patience = patience
        self._reader = new_reader()
        self._waiting: deque[Heard] = deque()
        self._drained: asyncio.Future[None] | None = None
        self._out: list[bytes] = []
        self._behind: tuple[Sequence[bytes], asyncio.Future[list[Any]]] | None = None
        self._progress = monotonic()
        self._watch: asyncio.TimerHandle | None = None
        self._room = asyncio.Event()
        self._room.set()
        self._gone = asyncio.Event()
        self.closed = False
        self.ready = True

    # -- sending ------------------------------------------------------------------------------------------------------

    def send(self, request: bytes) -> asyncio.Future[Any]:
        """The reply's future. Errors of the server are raised by awaiting it."""
        future = self._loop.create_future()
        self.ask(request, partial(_resolve, future))
        return future

    async def send_within(self, request: bytes, seconds: float) -> Any:
        """Return the reply, or raise TimeoutError of redis-py after `seconds`.

        A connection on which nothing at all came for so long is given up: the next try takes another one."""
        try:
            async with asyncio.timeout(seconds):
                return await self.send(request)
        except TimeoutError as error:
            if not self.closed and self._waiting and monotonic() - self._progress > seconds * 0.9:
                self.abandon()
            raise rx.TimeoutError("Timeout reading from the server") from error

    def ask(self, request: bytes, heard: Heard) -> None:
        """Written at the end of this tick; `heard` gets what comes of it."""
        if self.closed:
            heard(rx.ConnectionError("the connection was lost before the request was sent"))
            return
        if not self._waiting:
            self._progress = monotonic()
            if self._watch is None:
                self._watch = self._loop.call_later(self._patience, self._check)
        self._waiting.append(heard)
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(request)

    def behind(self, requests: Sequence[bytes]) -> asyncio.Future[list[Any]]:
        """The replies, errors among them, to requests that are written once behind all of this tick's, for all who ask
        for them in it. Call it right after `send`; nobody may cancel it."""
        if self._behind is None:
            self._behind = requests, self._loop.create_future()
            if not self._out:
                self._loop.call_soon(self._flush)
        return self._behind[1]

    def _send_behind(self) -> None:
        if self._behind is None:
            return
        (requests, whole), self._behind = self._behind, None
        replies = asyncio.gather(*map(self.send, requests), return_exceptions=True)
        replies.add_done_callback(lambda done: whole.cancel() if done.cancelled() else whole.set_result(done.result()))

    @property
    def load(self) -> int:
        """How many replies are due."""
        return len(self._waiting)

    @property
    def crowded(self) -> bool:
        """The other side reads more slowly than we write; `await room()` before sending more."""
        return not self._room.is_set()

    async def room(self) -> None:
        await self._room.wait()

    def _flush(self) -> None:
        self._send_behind()
        if self._out and not self.closed:
            self._transport.write(b"".join(self._out))
        self._out.clear()

    # -- what the transport tells -------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self._progress = monotonic()
        reader = self._reader
        try:
            reader.feed(data)
            while (reply := reader.gets()) is not False:
                self._waiting.popleft()(reply)
        except (rx.InvalidResponse, IndexError) as error:
            self._end(rx.ConnectionError(f"the server's replies make no sense: {error}"))
            self._transport.abort()
        if self._drained is not None and not self._waiting and not self._drained.done():
            self._drained.set_result(None)

    def pause_writing(self) -> None:
        self._room.clear()
        self.ready = False

    def resume_writing(self) -> None:
        self._room.set()
        self.ready = not self.closed

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(rx.ConnectionError(f"the connection was lost: {exc or 'closed by the server'}"))
        self._gone.set()

    # -- ending -------------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        """Nothing came for too long while something was asked: the connection counts as dead."""
        self._watch = None
        if self.closed or not self._waiting:
            return
        left = self._progress + self._patience - monotonic()
        if left > 0:
            self._watch = self._loop.call_later(left, self._check)
            return
        self._end(rx.TimeoutError("Timeout reading from the server"))
        self._transport.abort()

    def _end(self, error: rx.RedisError) -> None:
        self.closed = True
        self.ready = False
        self._room.set()
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        while self._waiting:
            self._waiting.popleft()(error)

    def abandon(self) -> None:
        """Not to be used any more; what was asked on it is lost."""
        self._end(rx.ConnectionError("the connection was given up"))
        self._transport.abort()

    async def drain(self) -> None:
        """Waits for the replies that are due, as long as one may take."""
        if self._waiting:
            if self._drained is None or self._drained.done():
                self._drained = self._loop.create_future()
            await asyncio.wait({self._drained}, timeout=self._patience)

    async def close(self) -> None:
        """Waits for the replies that are due, then closes, and until it is closed: an event loop that ends sooner warns
        of an open transport."""
        await self.drain()
        self._end(rx.ConnectionError("the connection was closed"))
        self._transport.close()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._gone.wait(), GOODBYE)
        self._transport.abort()


def _resolve(future: asyncio.Future[Any], reply: Any) -> None:
    if future.done():
        return  # cancelled: its place was kept
    if isinstance(reply, Exception):
        future.set_exception(reply)
    else:
        future.set_result(reply)


async def connected(pool: Any, patience: float) -> Wire:
    """A wire on a new connection of this redis-py pool."""
    connection = pool.make_connection()
    try:
        await connection.connect()
    except BaseException:
        await connection.disconnect(nowait=True)  # cancelled in the middle of its handshake it would stay open
        raise
    writer = connection._writer
    wire = Wire(writer, patience)
    writer.transport.set_protocol(wire)
    # The connection object has done its work; it must not close, or complain about, a transport that is not its own
    # now.
    connection._reader = connection._writer = None
    return wire
