"""Pub/Sub: one connection with many listeners, restored after each failure."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import Any

import redis.exceptions as rx

from idemgate.core.backoff import SOCKET_TIMEOUT
from idemgate.store.clients import async_client, close_client
from idemgate.store.endpoint import Endpoint, pick_node
from idemgate.store.shielded import finish_despite_cancel

__all__ = ["MessageCallback", "Subscription"]

log = logging.getLogger("idemgate.listen")
PING_AFTER = 5.0
"""Seconds without a message before a PING.

The health check of redis-py also sends a PING but ignores a missing reply. A connection that swallows everything would
then stay until the kernel gives it up.
"""
MessageCallback = Callable[[bytes, bytes | None], None]
"""A callback for (channel, data). Data is None after a gap: messages published while the connection was lost are
unknown.
"""


class Subscription:
    """One Pub/Sub connection of the event loop. It connects with the first listener and closes with the last."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._channels: dict[bytes, set[MessageCallback]] = {}
        self._patterns: dict[bytes, set[MessageCallback]] = {}
        self._ready: dict[bytes, asyncio.Event] = {}
        self._pubsub: Any = None
        self._task: asyncio.Task[None] | None = None

    @property
    def is_listening(self) -> bool:
        """True if the server has confirmed every subscription and the connection is not known to be lost.

        A connection that became silent counts as listening until its PING is overdue.
        """
        return self._pubsub is not None and all(ready.is_set() for ready in self._ready.values())

    async def add(self, name: bytes, callback: MessageCallback, *, pattern: bool = False) -> None:
        """Listen to a channel, or to a pattern.

        Returns once the server has confirmed, or after 2 s. After that the subscription starts as soon as it can.
        """
        table = self._patterns if pattern else self._channels
        is_new = name not in table
        table.setdefault(name, set()).add(callback)
        ready = self._ready.setdefault(name, asyncio.Event())
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._listen())
        elif is_new and self._pubsub is not None:
            with suppress(rx.RedisError, OSError):
                await (self._pubsub.psubscribe if pattern else self._pubsub.subscribe)(name)
        with suppress(TimeoutError):
            async with asyncio.timeout(2.0):
                await ready.wait()

    def remove(self, name: bytes, callback: MessageCallback, *, pattern: bool = False) -> None:
        """Remove a listener. The subscription ends with the connection, or with the next message on its channel."""
        table = self._patterns if pattern else self._channels
        listeners = table.get(name, set())
        listeners.discard(callback)
        if not listeners:
            table.pop(name, None)
            self._ready.pop(name, None)

    async def close(self) -> None:
        """Close the connection. A cancellation does not interrupt this: the connection would stay open."""
        await finish_despite_cancel(self._close())

    async def _close(self) -> None:
        # redis-py may swallow a cancellation while it connects. Without listeners the task then ends on its next check.
        self._channels.clear()
        self._patterns.clear()
        self._ready.clear()
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    async def _listen(self) -> None:
        failures = 0
        # Checked after every await: a listener may have been added while the last connection was being closed.
        while self._channels or self._patterns:
            client = async_client(pick_node(self._endpoint, failures))
            try:
                await self._receive(client.pubsub(), gap=failures > 0)
            except (rx.RedisError, OSError) as error:
                log.warning("listen.lost", extra={"error": str(error)})
                await asyncio.sleep(min(1.0, 0.05 * 2 ** min(failures, 5)))
                failures += 1
            finally:
                with suppress(rx.RedisError, OSError):
                    await close_client(client)

    async def _receive(self, pubsub: Any, gap: bool) -> None:
        """Receive messages until the last listener is removed. Raise when the connection fails."""
        try:
            await pubsub.connect()
            # From here on `add` subscribes directly: the snapshots below miss names that are added during the next
            # awaits.
            self._pubsub = pubsub
            if channels := tuple(self._channels):
                await pubsub.subscribe(*channels)
            if patterns := tuple(self._patterns):
                await pubsub.psubscribe(*patterns)
            if gap:
                self._notify_gap()
            received_at, pinged_at = monotonic(), 0.0
            while self._channels or self._patterns:
                message = await pubsub.get_message(ignore_subscribe_messages=False, timeout=1.0)
                if message is not None:
                    received_at = monotonic()
                    await self._dispatch(pubsub, message)
                elif pinged_at > received_at:
                    _check_pong(pinged_at)
                elif monotonic() - received_at > PING_AFTER:
                    await pubsub.ping()
                    pinged_at = monotonic()
        finally:
            self._pubsub = None
            with suppress(rx.RedisError, OSError):
                await pubsub.aclose()

    async def _dispatch(self, pubsub: Any, message: dict[str, Any]) -> None:
        kind, channel = message["type"], message["channel"]
        if kind in ("subscribe", "psubscribe"):
            if channel in self._ready:
                self._ready[channel].set()
        elif kind == "message":
            listeners = self._channels.get(channel)
            if listeners is None:
                await pubsub.unsubscribe(channel)
                return
            for callback in tuple(listeners):
                callback(channel, message["data"])
        elif kind == "pmessage":
            for callback in tuple(self._patterns.get(message["pattern"], ())):
                callback(channel, message["data"])

    def _notify_gap(self) -> None:
        for table in (self._channels, self._patterns):
            for name, listeners in table.items():
                for callback in tuple(listeners):
                    callback(name, None)


def _check_pong(pinged_at: float) -> None:
    """Raise TimeoutError when no reply arrived within the timeout after a PING."""
    if monotonic() - pinged_at > SOCKET_TIMEOUT:
        raise rx.TimeoutError("Timeout reading from the server")
