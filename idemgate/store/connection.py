"""The blocking wire: a connection a thread at a time, without redis-py's command layer.

redis-py connects (addresses, TLS, credentials, its handshake); from then on the socket is ours: one `send`, one
`recv`, one reply parsed by hiredis where it is installed. That is a quarter of the cost of `execute_command`.
"""

from __future__ import annotations

import select
import socket
import struct
import sys
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from time import monotonic
from typing import Any

import redis.exceptions as rx

from idemgate.store.forks import forks
from idemgate.store.resp import new_reader

__all__ = ["BlockingWire", "Wires"]

REST = 1.0
"""Seconds after which a resting connection is looked at before it is used: the server may have closed it."""
MOST_REPLIES = 4096
"""Bytes of most replies; making room for more than there is costs time."""


class BlockingWire:
    """One connection. Whatever else than a reply comes of asking, it must not be used again."""

    __slots__ = ("_by_kernel", "_reader", "_seconds", "_socket", "rested")

    def __init__(self, connected: socket.socket, seconds: float) -> None:
        self._socket = connected
        self._seconds = seconds
        self._reader = new_reader()
        self.rested = monotonic()
        # TLS is left to Python: it would go on for ever after a time-out of the kernel's.
        self._by_kernel = type(connected) is socket.socket and sys.platform != "win32"
        if self._by_kernel:
            connected.settimeout(None)
        self._set_timeout(seconds)

    def _set_timeout(self, seconds: float) -> None:
        if self._by_kernel:
            # Python's own time-out costs a poll before each send and each recv.
            span = struct.pack("ll", int(seconds), int(seconds % 1 * 1_000_000))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, span)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, span)
        else:
            self._socket.settimeout(seconds)

    def ask(self, request: bytes) -> Any:
        """The reply; an error of the server is raised. Raises ConnectionError and TimeoutError of redis-py."""
        reader = self._reader
        try:  # as `_send` and `_hear`, without calling them: this is what a call waits for
            self._socket.sendall(request)
            data = self._socket.recv(MOST_REPLIES)
        except OSError as error:
            raise _failed(error) from error
        if not data:
            raise _closed()
        try:
            reader.feed(data)
            while (reply := reader.gets()) is False:
                self._hear()
        except rx.InvalidResponse as error:
            raise _nonsense(error) from error
        if isinstance(reply, Exception):
            raise reply
        return reply

    def ask_within(self, request: bytes, seconds: float) -> Any:
        """Return the reply as `ask` does, but wait for it no longer than `seconds`."""
        self._set_timeout(min(seconds, self._seconds))
        try:
            return self.ask(request)
        finally:
            self._set_timeout(self._seconds)

    def send_all(self, requests: Sequence[bytes]) -> None:
        """Requests that travel together; `hear_all` their replies before anything else is asked."""
        self._send(b"".join(requests))

    def hear_all(self, number: int) -> list[Any]:
        """That many replies, the errors of the server among them."""
        replies: list[Any] = []
        try:
            while len(replies) < number:
                while (reply := self._reader.gets()) is not False:
                    replies.append(reply)
                if len(replies) < number:
                    self._hear()
        except rx.InvalidResponse as error:
            raise _nonsense(error) from error
        return replies

    def _send(self, request: bytes) -> None:
        try:
            self._socket.sendall(request)
        except OSError as error:
            raise _failed(error) from error

    def _hear(self) -> None:
        try:
            data = self._socket.recv(65_536)
        except OSError as error:
            raise _failed(error) from error
        if not data:
            raise _closed()
        self._reader.feed(data)

    def stale(self) -> bool:
        """Whether something came while it rested, which can only be its end."""
        return bool(_readable(self._socket))

    def close(self) -> None:
        self._socket.close()


def _failed(error: OSError) -> rx.RedisError:
    if isinstance(error, BlockingIOError | TimeoutError):
        return rx.TimeoutError("Timeout writing to the server, or reading from it")
    return rx.ConnectionError(f"the connection was lost: {error}")


def _closed() -> rx.ConnectionError:
    return rx.ConnectionError("the connection was lost: closed by the server")


def _nonsense(error: rx.InvalidResponse) -> rx.ConnectionError:
    return rx.ConnectionError(f"the server's replies make no sense: {error}")


def _readable(one: socket.socket) -> object:
    poll = getattr(select, "poll", None)
    if poll is None:  # Windows
        return select.select([one], [], [], 0)[0]
    watch = poll()
    watch.register(one, select.POLLIN)
    return watch.poll(0)


class Wires:
    """The blocking wires to one server, at most `most`; who finds all of them taken waits for one.

    Safe to share between threads. A forked child forgets its parent's.
    """

    def __init__(self, pool: Any, seconds: float, most: int) -> None:
        self._pool = pool
        self._seconds = seconds
        self._most = most
        self._reset()

    def _reset(self) -> None:
        self._forks = forks.count
        self._resting: deque[BlockingWire] = deque()
        self._made = 0
        self._waiting = 0
        self._closed = False
        self._freed = threading.Condition()

    def ask(self, request: bytes, now: float = 0.0, seconds: float | None = None) -> Any:
        """As `BlockingWire.ask`; `now` is what `monotonic` says, if that is known. The reply is waited for no longer
        than `seconds`; None: as long as this pool allows."""
        now = now or monotonic()
        try:  # as `_taken`, without calling it
            wire = self._resting.pop() if self._forks == forks.count else self._taken()
        except IndexError:
            wire = self._taken()
        if now - wire.rested > REST and wire.stale():
            self.drop(wire)
            wire = self._taken()
        try:
            reply = wire.ask(request) if seconds is None else wire.ask_within(request, seconds)
        except rx.ResponseError:
            self._give_back(wire)
            raise
        except BaseException:
            self.drop(wire)
            raise
        wire.rested = now  # it has rested less: it is looked at a little too often, after a reply that took long
        self._resting.append(wire)
        if self._closed or self._waiting:
            self._given_back()
        return reply

    def ask_all(self, requests: Sequence[bytes]) -> list[Any]:
        """The replies of requests that travel together, the errors of the server among them."""
        return self.collect(self.send(requests), len(requests))

    def send(self, requests: Sequence[bytes]) -> BlockingWire:
        """The wire on which they are under way: `collect` their replies, or `drop` it."""
        wire = self._taken()
        try:
            wire.send_all(requests)
        except BaseException:
            self.drop(wire)
            raise
        return wire

    def collect(self, wire: BlockingWire, number: int) -> list[Any]:
        """The replies to what was sent on it, errors among them."""
        try:
            replies = wire.hear_all(number)
        except BaseException:
            self.drop(wire)
            raise
        self._give_back(wire)
        return replies

    def _taken(self) -> BlockingWire:
        if self._forks != forks.count:
            self._reset()
        while True:
            try:
                wire = self._resting.pop()  # the one used last: its caches are warm, and the others may fade
            except IndexError:
                if self._may_make():
                    return self._new()
                continue
            if monotonic() - wire.rested <= REST or not wire.stale():
                return wire
            self.drop(wire)

    def _may_make(self) -> bool:
        """Whether there is room for a new one; else waits until one is given back, or as long as a reply may take."""
        with self._freed:
            if self._made < self._most:
                self._made += 1
                return True
            self._waiting += 1
            try:
                # `_give_back` looks at `_waiting` after it appended, we look at `_resting` after we counted ourselves.
                if not self._resting and not self._freed.wait(self._seconds):
                    raise rx.ConnectionError("No connection available.")
            finally:
                self._waiting -= 1
        return False

    def _new(self) -> BlockingWire:
        try:
            connection = self._pool.connection_class(**self._pool.connection_kwargs)
            connection.connect()
            # The connection object has done its work: it must not close a socket that is not its own now.
            connected, connection._sock = connection._sock, None
            return BlockingWire(connected, self._seconds)
        except BaseException:
            self._lost()
            raise

    def _give_back(self, wire: BlockingWire) -> None:
        wire.rested = monotonic()
        self._resting.append(wire)
        if self._closed or self._waiting:
            self._given_back()

    def _given_back(self) -> None:
        """`_waiting` is looked at after the wire was put there: whoever waits counted itself before it looked."""
        if self._closed:
            self.abandon()
        else:
            with self._freed:
                self._freed.notify()

    def drop(self, wire: BlockingWire) -> None:
        """It is not to be used any more."""
        wire.close()
        self._lost()

    def _lost(self) -> None:
        with self._freed:
            self._made -= 1
            self._freed.notify()

    def abandon(self) -> None:
        """Those that rest are not to be used any more: they lead to the wrong server."""
        with suppress(IndexError):  # another thread may take the last one
            while True:
                self.drop(self._resting.pop())

    def close(self) -> None:
        """Closes what rests, and what is in use as soon as it is given back."""
        self._closed = True
        self.abandon()
