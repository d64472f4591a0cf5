"""Pub/Sub: one connection, many listeners, subscribed anew whenever it broke."""

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
from idemgate.store.endpoint import Endpoint, one_node
from idemgate.store.shielded import to_the_end

__all__ = ["Ear", "Heard"]

log = logging.getLogger("idemgate.listen")
IDLE = 5.0
"""Seconds of silence after which the server is asked whether it is there. redis-py's health check asks, too, but does
not mind that nothing comes back: one would listen to a connection that swallows everything until the kernel gives
up."""
Heard = Callable[[bytes, bytes | None], None]
"""Called with channel and data; data is None after a gap: the connection was lost and what was published meanwhile is
not known."""


class Ear:
    """One Pub/Sub connection of the running event loop. It connects with the first listener and closes with the
    last."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._channels: dict[bytes, set[Heard]] = {}
        self._patterns: dict[bytes, set[Heard]] = {}
        self._ready: dict[bytes, asyncio.Event] = {}
        self._pubsub: Any = None
        self._task: asyncio.Task[None] | None = None

    async def add(self, name: bytes, heard: Heard, *, pattern: bool = False) -> None:
        """Listens to a channel, or to a pattern. Returns once the server confirmed, or after 2 s: hearing starts when
        it can."""
        table = self._patterns if pattern else self._channels
        new = name not in table
        table.setdefault(name, set()).add(heard)
        ready = self._ready.setdefault(name, asyncio.Event())
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._listen())
        elif new and self._pubsub is not None:
            with suppress(rx.RedisError, OSError):
                await (self._pubsub.psubscribe if pattern else self._pubsub.subscribe)(name)
        with suppress(TimeoutError):
            async with asyncio.timeout(2.0):
                await ready.wait()

    def remove(self, name: bytes, heard: Heard, *, pattern: bool = False) -> None:
        """Stops this listener. The subscription itself ends with the connection, or is dropped when next heard."""
        table = self._patterns if pattern else self._channels
        listeners = table.get(name, set())
        listeners.discard(heard)
        if not listeners:
            table.pop(name, None)
            self._ready.pop(name, None)

    async def close(self) -> None:
        """Not left half-way: a connection that nobody closes stays."""
        await to_the_end(self._close())

    async def _close(self) -> None:
        # A cancellation that arrives while redis-py connects may be swallowed: with no listeners it ends by itself.
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
        # Asked anew after every await: somebody may have come while the last connection was being closed.
        while self._channels or self._patterns:
            client = async_client(one_node(self._endpoint, failures))
            try:
                await self._hear(client.pubsub(), gap=failures > 0)
            except (rx.RedisError, OSError) as error:
                log.warning("listen.lost", extra={"error": str(error)})
                await asyncio.sleep(min(1.0, 0.05 * 2 ** min(failures, 5)))
                failures += 1
            finally:
                with suppress(rx.RedisError, OSError):
                    await close_client(client)

    async def _hear(self, pubsub: Any, gap: bool) -> None:
        """Until nobody listens any more; raises where the connection fails."""
        try:
            await pubsub.connect()
            # From here `add` subscribes by itself: what comes during the next awaits is not in these snapshots.
            self._pubsub = pubsub
            if channels := tuple(self._channels):
                await pubsub.subscribe(*channels)
            if patterns := tuple(self._patterns):
                await pubsub.psubscribe(*patterns)
            if gap:
                self._tell_all(None)
            heard, asked = monotonic(), 0.0
            while self._channels or self._patterns:
                message = await pubsub.get_message(ignore_subscribe_messages=False, timeout=1.0)
                if message is not None:
                    heard = monotonic()
                    await self._pass_on(pubsub, message)
                elif asked > heard:
                    _check(asked)
                elif monotonic() - heard > IDLE:
                    await pubsub.ping()
                    asked = monotonic()
        finally:
            self._pubsub = None
            with suppress(rx.RedisError, OSError):
                await pubsub.aclose()

    async def _pass_on(self, pubsub: Any, message: dict[str, Any]) -> None:
        kind, channel = message["type"], message["channel"]
        if kind in ("subscribe", "psubscribe"):
            if channel in self._ready:
                self._ready[channel].set()
        elif kind == "message":
            listeners = self._channels.get(channel)
            if listeners is None:
                await pubsub.unsubscribe(channel)
                return
            for heard in tuple(listeners):
                heard(channel, message["data"])
        elif kind == "pmessage":
            for heard in tuple(self._patterns.get(message["pattern"], ())):
                heard(channel, message["data"])

    def _tell_all(self, data: bytes | None) -> None:
        for table in (self._channels, self._patterns):
            for name, listeners in table.items():
                for heard in tuple(listeners):
                    heard(name, data)


def _check(asked: float) -> None:
    """Raises where nothing has come for too long since the server was asked."""
    if monotonic() - asked > SOCKET_TIMEOUT:
        raise rx.TimeoutError("Timeout reading from the server")
