"""A TCP proxy in front of a server or a broker, for faults of the network: `with Proxy(url) as proxy: Gate(proxy.url)`.

A fault acts on the next `times` requests that contain a word, such as `b"EVALSHA"`.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections import Counter
from contextlib import suppress
from typing import Self
from urllib.parse import unquote, urlsplit

__all__ = ["Proxy"]


class Proxy:
    """A TCP proxy on a port of this machine. `close`, or the end of a `with` block, cuts all connections.

    Attributes:
        port: the port on which it listens.
        url: the URL of the server by way of this proxy.
        delay: seconds by which each request and each reply is late.
        black_hole: True to drop all requests silently. A connection that lost one stays silent.
        mute: the same for replies.
        replied: the number of bytes of the last reply.
        swallowed: the number of bytes of all dropped replies.
        passed: the requests that reached the server. Empty without `remember`.
    """

    def __init__(self, upstream: str, remember: bool = True) -> None:
        self._upstream = upstream
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port: int = self._listener.getsockname()[1]
        parts = urlsplit(upstream)
        userinfo, at, _ = parts.netloc.rpartition("@")
        scheme, path = ("redis", "") if parts.scheme == "unix" else (parts.scheme, parts.path)
        self.url: str = f"{scheme}://{userinfo}{at}127.0.0.1:{self.port}{path}"
        self.delay: float = 0.0
        self.black_hole: bool = False
        self.mute: bool = False
        self.passed: list[bytes] = []
        self._remember = remember
        self.replied: int = 0
        self.swallowed: int = 0
        self._toxics: Counter[tuple[str, bytes]] = Counter()
        self._held: list[bytes] = []
        self._let_through = 0
        self._late = 0.0
        self._split_at = b""
        self._joined = threading.Event()
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut_reply(self, word: bytes, times: int = 1) -> None:
        """Pass the request on, and close its connection instead of sending the reply."""
        self._plan("cut", word, times)

    def cut_reply_at(self, word: bytes, length: int) -> None:
        """Pass the request on, send `length` bytes of its reply, and close the connection."""
        self._let_through = length
        self._plan("part", word, 1)

    def reset_reply(self, word: bytes, times: int = 1) -> None:
        """Pass the request on, and reset its connection (RST) instead of sending the reply."""
        self._plan("reset", word, times)

    def hold_request(self, word: bytes, times: int = 1) -> None:
        """Hold the request back until `release`, and close its connection."""
        self._plan("hold", word, times)

    def release(self) -> int:
        """Send the held requests to the server. Return their number once it has replied to all."""
        held, self._held = self._held, []
        for data in held:
            self._run(data)
        return len(held)

    def double_request(self, word: bytes, times: int = 1) -> None:
        """Let the server execute a copy of the request first."""
        self._plan("double", word, times)

    def swallow_request(self, word: bytes, times: int = 1) -> None:
        """Drop the request. Its connection stays open, and nothing passes it any more."""
        self._plan("swallow", word, times)

    def mute_connection(self, word: bytes, times: int = 1) -> None:
        """Pass the request on. Its connection stays open, and no reply passes it any more."""
        self._plan("mute", word, times)

    def delay_reply(self, word: bytes, seconds: float, times: int = 1) -> None:
        """Pass the request on at once, and send its reply `seconds` later."""
        self._late = seconds
        self._plan("late", word, times)

    def split_request(self, word: bytes) -> None:
        """Pass the request on up to this word, and the rest with `join`."""
        self._split_at = word
        self._plan("split", word, 1)

    def join(self) -> None:
        """Pass on the rest of the request that was split."""
        self._joined.set()

    def drop_request(self, word: bytes, times: int = 1) -> None:
        """Drop the request, and close its connection."""
        self._plan("drop", word, times)

    @property
    def faults_left(self) -> int:
        """The number of faults that wait for a request."""
        with self._lock:
            return self._toxics.total()

    def heal(self) -> None:
        """Remove all faults."""
        with self._lock:
            self._toxics.clear()
        self.delay, self.black_hole, self.mute = 0.0, False, False

    def count(self, word: bytes) -> int:
        """Return how often the word was in requests that reached the server."""
        with self._lock:
            return sum(data.count(word) for data in self.passed)

    def cut_all(self) -> None:
        """Close all connections."""
        with self._lock:
            doomed, self._sockets = self._sockets, set()
        for one in doomed:
            _close(one)

    def close(self) -> None:
        """Listen no more, and close all connections."""
        _close(self._listener)
        self.cut_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    server = self._connect()
                except OSError:  # the server is away
                    _close(client)
                    continue
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with self._lock:
                    self._sockets |= {client, server}
                cut = _Cut()
                for work in (self._requests, self._replies):
                    threading.Thread(target=work, args=(client, server, cut), daemon=True).start()

    def _connect(self) -> socket.socket:
        parts = urlsplit(self._upstream)
        if parts.scheme != "unix":
            return socket.create_connection((parts.hostname or "localhost", parts.port or 6379))
        server = socket.socket(socket.AF_UNIX)
        server.connect(unquote(parts.path))
        return server

    def _run(self, data: bytes) -> None:
        """Send a request over another connection, and drop its reply."""
        with self._connect() as server:
            self._note(data)
            server.sendall(data)
            server.recv(1 << 20)

    def _note(self, data: bytes) -> None:
        if self._remember:
            with self._lock:
                self.passed.append(data)

    def _requests(  # noqa: C901 - one step for each toxic
        self, client: socket.socket, server: socket.socket, cut: _Cut
    ) -> None:
        silent = False
        with suppress(OSError):
            while data := client.recv(1 << 20):
                time.sleep(self.delay)
                # A stream loses no bytes in its middle, so a silent connection stays silent.
                silent = silent or self.black_hole or self._hit("swallow", data)
                if silent:
                    continue
                if self._hit("drop", data):
                    break
                if self._hit("hold", data):
                    self._held.append(data)
                    break
                if self._hit("split", data):
                    at = data.index(self._split_at)
                    server.sendall(data[:at])
                    self._joined.wait(120)
                    data = data[at:]
                if self._hit("double", data):
                    self._run(data)
                if self._hit("cut", data):
                    cut.set()
                if self._hit("part", data):
                    cut.part = self._let_through
                if self._hit("reset", data):
                    cut.reset = True
                if self._hit("mute", data):
                    cut.mute = True
                if self._hit("late", data):
                    cut.late = self._late
                self._note(data)
                server.sendall(data)
        if not cut.reset:  # which `_replies` does: closed here, the connection would end before it is reset
            self._part(client, server)

    def _replies(self, client: socket.socket, server: socket.socket, cut: _Cut) -> None:
        silent = False
        with suppress(OSError):
            while data := server.recv(1 << 20):
                time.sleep(self.delay + cut.late)
                cut.late = 0.0
                if cut.reset:
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    client.shutdown(socket.SHUT_RD)  # else the thread that reads it keeps it open
                    client.close()
                if cut.is_set() or cut.reset:
                    break
                self.replied = len(data)
                silent = silent or self.mute or cut.mute
                if silent:
                    self.swallowed += len(data)
                    continue
                client.sendall(data[: cut.part])
                if cut.part is not None:
                    break
        self._part(client, server)

    def _plan(self, toxic: str, word: bytes, times: int) -> None:
        with self._lock:  # `_hit` iterates over the toxics in the threads of the connections
            self._toxics[toxic, word] += times

    def _hit(self, toxic: str, data: bytes) -> bool:
        with self._lock:
            for (kind, word), left in self._toxics.items():
                if kind == toxic and left and word in data:
                    self._toxics[kind, word] -= 1
                    return True
        return False

    def _part(self, *ends: socket.socket) -> None:
        with self._lock:
            self._sockets -= set(ends)
        for end in ends:
            _close(end)


class _Cut(threading.Event):
    """The fault of the next reply of a connection. It is set to drop the whole reply.

    Attributes:
        part: the number of bytes to send. None: all.
        reset: whether to reset the connection.
        mute: whether to drop all replies from now on.
        late: seconds by which the reply is late.
    """

    part: int | None = None
    reset = False
    mute = False
    late = 0.0


def _close(one: socket.socket) -> None:
    with suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads it
    one.close()
