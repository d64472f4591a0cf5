"""Blocking connections to one server, without the command layer of redis-py.

redis-py opens the connection: addresses, TLS, credentials, handshake. After that this module owns the socket. A request
is one `send`, one `recv`, and one reply parsed by hiredis where it is installed. That costs a quarter of
`execute_command`.
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
from typing import Any

import redis.exceptions as rx

from idemgate.core.clock import monotonic
from idemgate.core.forks import fork_counter
from idemgate.lua.checked import checks_rights, with_check
from idemgate.store.clients import find_master
from idemgate.store.plain import probe_of, takes_plain
from idemgate.store.resp import new_reader
from idemgate.store.retry import suggests_failover

__all__ = ["Connection", "ConnectionPool"]

CONNECTIONS = 64
"""The most connections to one server. Further calls wait for one."""
IDLE_CHECK_AFTER = 1.0
"""Seconds of idle time after which a connection is checked before use. The server may have closed it."""
RECEIVE_SIZE = 4096
"""Buffer size in bytes for one `recv`. It holds most replies; a larger buffer takes longer to allocate."""


class Connection:
    """One blocking connection. Close it after any outcome other than a reply."""

    __slots__ = ("_kernel_timeout", "_reader", "_seconds", "_socket", "idle_since")

    def __init__(self, sock: socket.socket, seconds: float) -> None:
        self._socket = sock
        self._seconds = seconds
        self._reader = new_reader()
        self.idle_since: float = monotonic()
        # TLS uses Python's timeouts: after a kernel timeout its reads would retry for ever.
        self._kernel_timeout = type(sock) is socket.socket and sys.platform != "win32"
        if self._kernel_timeout:
            sock.settimeout(None)
        self._set_timeout(seconds)

    def _set_timeout(self, seconds: float) -> None:
        if self._kernel_timeout:
            # Python's own timeout costs a poll before each send and each recv.
            span = struct.pack("ll", int(seconds), int(seconds % 1 * 1_000_000))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, span)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, span)
        else:
            self._socket.settimeout(seconds)

    def execute(self, request: bytes, pair: bool = False) -> Any:
        """Send a request and return its reply. `pair`: it is two commands; return both replies.

        Raises:
            ResponseError: the server returned an error (redis-py's class, as below). Of a pair: for the first one.
            ConnectionError: the connection was lost.
            TimeoutError: the timeout of the connection passed.
        """
        reader = self._reader
        try:  # inlined `_send` and `_receive`: every blocking call waits for this
            self._socket.sendall(request)
            data = self._socket.recv(RECEIVE_SIZE)
        except OSError as error:
            raise _socket_error(error) from error
        if not data:
            raise _closed_error()
        try:
            reader.feed(data)
            while (reply := reader.gets()) is False:
                self._receive()
            if pair:
                while (second := reader.gets()) is False:
                    self._receive()
                if not isinstance(reply, Exception):
                    return reply, second
        except rx.InvalidResponse as error:
            raise _protocol_error(error) from error
        if isinstance(reply, Exception):
            raise reply
        return reply

    def execute_within(self, request: bytes, seconds: float, pair: bool = False) -> Any:
        """Execute a request, but wait for its reply no longer than `seconds`."""
        self._set_timeout(max(0.001, min(seconds, self._seconds)))  # the kernel takes 0 for no timeout
        try:
            return self.execute(request, pair)
        finally:
            self._set_timeout(self._seconds)

    def send_all(self, requests: Sequence[bytes]) -> None:
        """Send requests together. Call `read_replies` for all of them before the next request."""
        self._send(b"".join(requests))

    def read_replies(self, number: int, seconds: float | None = None) -> list[Any]:
        """Return `number` replies. Errors of the server are values among them.

        `seconds` bounds each wait for bytes; None: the timeout of the connection. Drop the connection after an error.
        """
        replies: list[Any] = []
        if seconds is not None:
            self._set_timeout(max(0.001, min(seconds, self._seconds)))
        try:
            while len(replies) < number:
                while (reply := self._reader.gets()) is not False:
                    replies.append(reply)
                if len(replies) < number:
                    self._receive()
        except rx.InvalidResponse as error:
            raise _protocol_error(error) from error
        if seconds is not None:
            self._set_timeout(self._seconds)
        return replies

    def _send(self, request: bytes) -> None:
        try:
            self._socket.sendall(request)
        except OSError as error:
            raise _socket_error(error) from error

    def _receive(self) -> None:
        try:
            data = self._socket.recv(65_536)
        except OSError as error:
            raise _socket_error(error) from error
        if not data:
            raise _closed_error()
        self._reader.feed(data)

    def is_stale(self) -> bool:
        """Return whether input arrived while the connection was idle. That can only be its end."""
        return bool(_has_input(self._socket))

    def close(self) -> None:
        self._socket.close()


class CheckedConnection(Connection):
    """A connection whose scripts check the rights of its user before the first write."""

    __slots__ = ()

    def execute(self, request: bytes, pair: bool = False) -> Any:
        return super().execute(with_check(request), pair)

    def send_all(self, requests: Sequence[bytes]) -> None:
        super().send_all([with_check(request) for request in requests])


def _socket_error(error: OSError) -> rx.RedisError:
    if isinstance(error, BlockingIOError | TimeoutError):
        return rx.TimeoutError("Timeout writing to the server, or reading from it")
    return rx.ConnectionError(f"the connection was lost: {error}")


def _closed_error() -> rx.ConnectionError:
    return rx.ConnectionError("the connection was lost: closed by the server")


def _protocol_error(error: rx.InvalidResponse) -> rx.ConnectionError:
    return rx.ConnectionError(f"invalid reply from the server: {error}")


def _has_input(sock: socket.socket) -> object:
    poll = getattr(select, "poll", None)
    if poll is None:  # Windows
        return select.select([sock], [], [], 0)[0]
    poller = poll()
    poller.register(sock, select.POLLIN)
    return poller.poll(0)


class ConnectionPool:
    """A pool of at most `CONNECTIONS` blocking connections to one server. Callers wait while all are in use.

    Safe to share between threads. A forked child drops its parent's connections. `takes_plain` says whether the server
    has the plain commands of the guard; None: it was not asked yet.

    Args:
        pool: the redis-py pool whose settings are used.
        seconds: the timeout of one connection attempt, and of one reply.
        within: the timeout of a call that opens a connection: for both together. None: no further bound.
    """

    def __init__(self, pool: Any, seconds: float, within: float | None = None) -> None:
        self._pool = pool
        self._seconds = seconds
        self._within = 2 * seconds if within is None else within
        self._reset()

    def _reset(self) -> None:
        self._forks = fork_counter.count
        self._idle: deque[Connection] = deque()
        self._opened = 0
        self._waiters = 0
        self._closed = False
        self._available = threading.Condition()
        self.takes_plain: bool | None = None

    def execute(self, request: bytes, now: float = 0.0, seconds: float | None = None, pair: bool = False) -> Any:
        """Send a request over a pooled connection and return its reply.

        Args:
            request: the packed request.
            now: the value of `monotonic()`, if the caller has just read it.
            seconds: the longest wait for a connection and the reply; None: `within` of the pool.
            pair: the request is two commands. Return both replies.

        Raises:
            ResponseError: the server returned an error.
            ConnectionError: the connection was lost, or no connection became free.
            TimeoutError: the reply did not arrive in time.
        """
        now = now or monotonic()
        try:  # inlined `_acquire`
            connection = self._idle.pop() if self._forks == fork_counter.count else self._acquire(seconds)
        except IndexError:
            seconds = self._within if seconds is None else seconds
            connection = self._acquire(seconds)
        if now - connection.idle_since > IDLE_CHECK_AFTER and connection.is_stale():
            self.discard(connection)
            seconds = self._within if seconds is None else seconds
            connection = self._acquire(seconds)
        try:
            if seconds is None:
                reply = connection.execute(request, pair)
            else:
                reply = connection.execute_within(request, now + seconds - monotonic(), pair)
        except rx.ResponseError as error:
            self._end_refused(connection, error)
            raise
        except BaseException:
            self.discard(connection)
            raise
        connection.idle_since = now  # too early by the duration of the call, so a slow reply only causes one check more
        self._idle.append(connection)
        if self._closed or self._waiters:
            self._notify_release()
        return reply

    def learn_plain(self, key: bytes) -> bool | None:
        """Ask the server whether it has the plain commands of the guard for this user. None: ask again later."""
        self.takes_plain = False  # other threads do not ask meanwhile
        replies: list[Any] = []
        try:
            for request in probe_of(key):
                replies += self.execute_all([request])
                if isinstance(replies[-1], Exception):
                    break
        except BaseException:
            self.takes_plain = None
            raise
        self.takes_plain = takes_plain(replies)
        return self.takes_plain

    def execute_all(self, requests: Sequence[bytes], seconds: float | None = None) -> list[Any]:
        """Send requests together and return their replies. Errors of the server are values among them.

        `seconds` bounds the wait for a connection, and each wait for bytes of the replies; None: the timeout of the
        pool.
        """
        return self.collect(self.send(requests, seconds), len(requests), seconds)

    def send(self, requests: Sequence[bytes], seconds: float | None = None) -> Connection:
        """Send requests and return their connection. Pass it to `collect` or to `discard`."""
        connection = self._acquire(seconds)
        try:
            connection.send_all(requests)
        except BaseException:
            self.discard(connection)
            raise
        return connection

    def collect(self, connection: Connection, number: int, seconds: float | None = None) -> list[Any]:
        """Return the replies to the requests sent on a connection, then release it. Errors of the server are values."""
        try:
            replies = connection.read_replies(number, seconds)
        except BaseException:
            self.discard(connection)
            raise
        if rx.ResponseError in map(type, replies):
            self._end_refused(connection, *replies)
        else:
            self._release(connection)
        return replies

    def _acquire(self, seconds: float | None = None) -> Connection:
        if self._forks != fork_counter.count:
            self._reset()
        deadline = None
        while True:
            try:
                connection = self._idle.pop()  # the most recently used: its caches are warm
            except IndexError:
                deadline = deadline or monotonic() + self._limit(seconds)
                if self._reserve(deadline):
                    return self._open(seconds)
                continue
            if monotonic() - connection.idle_since <= IDLE_CHECK_AFTER or not connection.is_stale():
                return connection
            self.discard(connection)

    def _limit(self, seconds: float | None) -> float:
        return self._seconds if seconds is None else max(0.001, min(seconds, self._seconds))

    def _reserve(self, deadline: float) -> bool:
        """Return True when a new connection may be opened. Otherwise wait for a release, until the deadline."""
        with self._available:
            self._waiters += 1
            try:
                # `_release` reads `_waiters` after it appended. This reads `_idle` after it incremented, so no release
                # is missed.
                free = self._available.wait_for(self._may_proceed, deadline - monotonic())
            except BaseException:  # such as Ctrl-C: the release that was meant for this caller goes to the next one
                self._available.notify()
                raise
            finally:
                self._waiters -= 1
            if not free:
                raise rx.ConnectionError("No connection available.")
            if self._idle or self._opened >= CONNECTIONS:
                return False
            self._opened += 1
            return True

    def _may_proceed(self) -> bool:
        return bool(self._idle) or self._opened < CONNECTIONS

    def _open(self, seconds: float | None) -> Connection:
        deadline = monotonic() + self._limit(seconds)
        try:
            address = find_master(self._pool, self._limit(seconds))
            limit = max(0.001, deadline - monotonic())
            timeouts = {"socket_timeout": limit, "socket_connect_timeout": limit}
            connection = self._pool.connection_class(**(self._pool.connection_kwargs | timeouts))
            if address is None:
                connection.connect()
            else:
                connection.connect_to(address)
            # redis-py's object must not close the socket, which belongs to this module from here on.
            sock, connection._sock = connection._sock, None
            checks = checks_rights(self._pool.connection_kwargs)
            self.takes_plain = None  # the address may lead to another server now
            return (CheckedConnection if checks else Connection)(sock, self._seconds)
        except BaseException as error:
            self._free_slot()
            if isinstance(error, rx.TimeoutError):  # also of the handshake: no request was sent
                raise rx.TimeoutError("Timeout connecting to the server") from error
            raise

    def _release(self, connection: Connection) -> None:
        connection.idle_since = monotonic()
        self._idle.append(connection)
        if self._closed or self._waiters:
            self._notify_release()

    def _end_refused(self, connection: Connection, *replies: object) -> None:
        """Release a connection after an error of the server, or drop it with all idle ones.

        After a failover behind one address they lead to the former primary. The next connection resolves the name.
        """
        if any(map(suggests_failover, replies)):
            self.discard(connection)
            self.discard_idle()
        else:
            self._release(connection)

    def _notify_release(self) -> None:
        """Wake a waiter. Each waiter increments `_waiters` before it reads `_idle`, so this never misses one."""
        if self._closed:
            self.discard_idle()
        else:
            with self._available:
                self._available.notify()

    def discard(self, connection: Connection) -> None:
        """Close a connection and free its place in the pool."""
        connection.close()
        self._free_slot()

    def _free_slot(self) -> None:
        with self._available:
            self._opened -= 1
            self._available.notify()

    def discard_idle(self) -> None:
        """Close the idle connections, for example because they lead to a former primary."""
        with suppress(IndexError):  # another thread may take the last connection
            while True:
                self.discard(self._idle.pop())

    def close(self) -> None:
        """Close the idle connections now, and those in use when they are released."""
        self._closed = True
        self.discard_idle()
