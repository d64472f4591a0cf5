"""Pub/Sub: one connection with many listeners, restored after each failure.

redis-py opens the connection. After that this module owns the transport, as `store.connection_aio` does. The `PubSub`
class of redis-py raises AttributeError and RuntimeError if a task subscribes while another one replaces the connection.
Here a command is written without an await, and a lost connection ignores it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

import redis.exceptions as rx

from idemgate.core.backoff import SOCKET_TIMEOUT
from idemgate.core.clock import monotonic
from idemgate.core.text import one_line
from idemgate.core.waits import finish_despite_cancel
from idemgate.store.clients import async_pool, close_sentinels
from idemgate.store.connection_aio import CLOSE_TIMEOUT, open_transport
from idemgate.store.endpoint import Endpoint, pick_node
from idemgate.store.resp import new_reader, pack_command

__all__ = ["Losses", "MessageCallback", "Subscription"]

log: logging.Logger = logging.getLogger("idemgate.listen")
PING_AFTER = 5.0
"""Seconds without a message before a PING. The kernel would keep a connection that swallows everything for longer."""
LINGER = 1.0
"""Seconds after which a connection without listeners is closed."""
Name = tuple[bool, bytes]
"""The name of a pattern (True) or of a channel (False)."""
MessageCallback = Callable[[bytes, bytes | None], None]
"""A callback for (channel, data). It must not raise. Data is None after a gap: messages published while the connection
was lost are unknown.
"""


class Losses:
    """The lost connections of the subscriptions that share it. The first of an outage is logged."""

    def __init__(self) -> None:
        self._lost: set[Subscription] = set()

    def add(self, subscription: Subscription, error: Exception) -> None:
        if not self._lost:
            text = str(error)
            log.warning("listen.lost error=%s", one_line(text), extra={"error": text})
        self._lost.add(subscription)

    def discard(self, subscription: Subscription) -> None:
        """Note that the subscription listens again, or has ended."""
        self._lost.discard(subscription)


class Subscription:
    """One Pub/Sub connection of the event loop. It connects with the first listener and closes after the last.

    One task owns the connection. Others change the listeners and queue a command on the connection. If it is being
    replaced, the task subscribes the next one to all names.
    """

    def __init__(self, endpoint: Endpoint, losses: Losses | None = None) -> None:
        """Build a subscription. Several of one store share their `losses`."""
        self._losses = losses or Losses()
        self._endpoint = endpoint
        self._listeners: dict[Name, set[MessageCallback]] = {}
        self._ready: dict[Name, asyncio.Event] = {}
        self._unconfirmed: Counter[Name] = Counter()
        self._gaps: set[Name] = set()  # the next confirmation notifies their listeners
        self._connection: PubSubConnection | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def is_listening(self) -> bool:
        """True if the server has confirmed every subscription and the connection is not known to be lost.

        A connection that became silent counts as listening until its PING is overdue.
        """
        connection = self._connection
        return connection is not None and not connection.lost.done() and not self._unconfirmed

    async def add(self, name: bytes, callback: MessageCallback, *, pattern: bool = False) -> None:
        """Listen to a channel, or to a pattern. Failures of the connection do not raise.

        Returns once the server has confirmed, or after 2 s. After that the subscription starts as soon as it can, and
        `callback` receives a gap.
        """
        key = pattern, name
        if key not in self._listeners:
            self._listeners[key], self._ready[key] = set(), asyncio.Event()
            self._subscribe(key)
        self._listeners[key].add(callback)
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._listen())
        try:
            async with asyncio.timeout(2.0):
                await self._ready[key].wait()
        except TimeoutError:
            self._gaps.add(key)

    def remove(self, name: bytes, callback: MessageCallback) -> None:
        """Remove a listener to a channel. The last one ends the subscription."""
        key = False, name
        listeners = self._listeners.get(key, set())
        listeners.discard(callback)
        if not listeners and self._listeners.pop(key, None) is not None:
            del self._ready[key]
            self._gaps.discard(key)
            if self._connection is not None:
                self._connection.send("UNSUBSCRIBE", name)

    def reconnect(self) -> None:
        """Replace the connection, for example because it leads to a former primary."""
        if self._connection is not None:
            self._connection.end(rx.ConnectionError("replaced, because another server may be the primary"))

    async def close(self) -> None:
        """Close the connection. A cancellation does not interrupt this: the connection would stay open."""
        await finish_despite_cancel(self._close())

    async def _close(self) -> None:
        # redis-py may swallow a cancellation while it connects. Without listeners the task then ends on its next check.
        self._listeners.clear()
        self._ready.clear()
        self._losses.discard(self)
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    # -- the task that owns the connection ----------------------------------------------------------------------------

    async def _listen(self) -> None:
        failures = tries = 0
        # Checked after every await: a listener may have been added while the last connection was being closed.
        while self._listeners:
            pool = async_pool(pick_node(self._endpoint, failures), SOCKET_TIMEOUT)
            try:
                await self._hold_connection(pool)
            except Exception as error:  # noqa: BLE001 - whatever ends a connection, the listeners need the next one
                tries = 0 if any(ready.is_set() for ready in self._ready.values()) else tries
                self._losses.add(self, error)
                self._mark_gap()
                await asyncio.sleep(min(1.0, 0.05 * 2 ** min(tries, 5)))
                failures, tries = failures + 1, tries + 1
            finally:
                await close_sentinels(pool)
        self._losses.discard(self)

    async def _hold_connection(self, pool: Any) -> None:
        """Keep a connection until the last listener is removed. Raise when it fails."""
        connection = self._connection = await PubSubConnection.open(pool, self._on_push)
        try:
            self._unconfirmed.clear()
            for key in self._listeners:
                self._subscribe(key)
            while self._listeners:
                await connection.wait_lost(LINGER)
        finally:
            self._connection = None
            await connection.close()

    def _subscribe(self, key: Name) -> None:
        if self._connection is not None:
            self._unconfirmed[key] += 1
            self._connection.send("PSUBSCRIBE" if key[0] else "SUBSCRIBE", key[1])

    def _mark_gap(self) -> None:
        self._gaps.update(self._listeners)
        for ready in self._ready.values():
            ready.clear()

    # -- messages -----------------------------------------------------------------------------------------------------

    def _on_push(self, words: list[Any]) -> None:
        match words:
            case [b"message", bytes(channel), bytes(data)]:
                self._notify((False, channel), channel, data)
            case [b"pmessage", bytes(pattern), bytes(channel), bytes(data)]:
                self._notify((True, pattern), channel, data)
            case [b"subscribe" | b"psubscribe" as kind, bytes(name), _]:
                self._confirm((kind == b"psubscribe", name))
            case _:
                pass  # the reply to PING or to UNSUBSCRIBE

    def _confirm(self, key: Name) -> None:
        """Mark a name as subscribed, unless a later command for it is still on its way."""
        self._unconfirmed[key] -= 1
        if self._unconfirmed[key] > 0:
            return
        del self._unconfirmed[key]
        self._losses.discard(self)
        if key in self._ready:
            self._ready[key].set()
            if key in self._gaps:
                self._gaps.discard(key)
                self._notify(key, key[1], None)

    def _notify(self, key: Name, channel: bytes, data: bytes | None) -> None:
        for callback in tuple(self._listeners.get(key, ())):
            callback(channel, data)


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
        self._outgoing.append(pack_command(words))

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
        """Close the connection and wait for the end of its transport."""
        self.end(rx.ConnectionError("the connection was closed"))
        with suppress(TimeoutError):
            await asyncio.wait_for(self._gone.wait(), CLOSE_TIMEOUT)
