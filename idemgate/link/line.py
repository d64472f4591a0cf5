"""The awaiting wire to one server for as long as it is needed: connections come and go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import redis.exceptions as rx

from idemgate.link.clients import SOCKET_TIMEOUT, async_client, close_client
from idemgate.link.copies import Copies
from idemgate.link.endpoint import Endpoint
from idemgate.link.wire import Wire, connected

__all__ = ["Line", "OneLine", "raised"]

A_DAY = 86_400.0
"""In seconds: longer than anybody lets a command block."""


class Line:
    """The wire to one server, made anew when the one before was lost."""

    __slots__ = ("_closed", "_connecting", "_patience", "_pool", "_resting", "_wire")

    def __init__(self, pool: Any, patience: float) -> None:
        self._pool = pool
        self._patience = patience
        self._wire: Wire | None = None
        self._connecting: asyncio.Task[Wire] | None = None
        self._resting: list[Wire] = []
        self._closed = False

    def at_hand(self) -> Wire | None:
        """The wire, if it can be written to at once."""
        wire = self._wire
        return wire if wire is not None and wire.ready else None

    def made(self, wire: Wire) -> bool:
        """Whether this is the present wire, or the last one."""
        return self._wire is wire

    async def wire(self) -> Wire:
        """The wire; waits while it is being made, and while the server reads too slowly. Raises what connecting
        raises, to all who wait for the same connection."""
        wire = self._wire
        if wire is None or wire.closed:
            if self._connecting is None:
                self._connecting = asyncio.get_running_loop().create_task(self._connect())
                self._connecting.add_done_callback(self._connected)
            wire = await asyncio.shield(self._connecting)
        if wire.crowded:
            await wire.room()
        return wire

    async def _connect(self) -> Wire:
        if self._closed:
            raise rx.ConnectionError("Error connecting to a server that was given up")
        self._wire = wire = await connected(self._pool, self._patience)
        return wire

    def _connected(self, connecting: asyncio.Task[Wire]) -> None:
        self._connecting = None
        if not connecting.cancelled():
            connecting.exception()  # whoever waits for it hears of it, if anybody still does

    @asynccontextmanager
    async def apart(self) -> AsyncGenerator[Wire]:
        """A wire for one caller at a time, whose replies may take any time. Left by an exception, as by cancelling, it
        is dropped."""
        resting = self._resting
        while resting and resting[-1].closed:
            resting.pop()
        wire = resting.pop() if resting else await connected(self._pool, A_DAY)
        try:
            yield wire
        except BaseException:
            wire.abandon()
            raise
        resting.append(wire)
        if self._closed:
            self._close_resting()

    async def drain(self) -> None:
        """Waits for the replies that are due, as long as one may take."""
        if self._wire is not None:
            await self._wire.drain()

    def _close_resting(self) -> None:
        while self._resting:
            self._resting.pop().abandon()

    async def close(self) -> None:
        """Waits for the replies that are due, then closes."""
        self._closed = True
        self._close_resting()
        if self._connecting is not None:
            await asyncio.wait([self._connecting])
        if self._wire is not None:
            await self._wire.close()


class OneLine:
    """The way to a single server, or to the master that sentinels name, for the running event loop only. As
    `cluster_aio.ClusterLines`, with keys that do not matter."""

    __slots__ = ("_client", "_line", "_sentinel")

    def __init__(self, endpoint: Endpoint, seconds: float) -> None:
        self._client = async_client(endpoint, seconds)
        self._line = Line(self._client.connection_pool, min(seconds, SOCKET_TIMEOUT))
        self._sentinel = endpoint.kind == "sentinel"

    def at_hand(self, _key: bytes) -> Wire | None:
        wire = self._line._wire  # as `Line.at_hand`, for every call
        return wire if wire is not None and wire.ready else None

    def suspect(self, wire: Wire, error: Exception) -> None:
        """Makes of an error heard on a wire what it says of the way: it was the master; the next connection asks the
        sentinels who is now."""
        if self._sentinel and isinstance(error, rx.ResponseError) and "READONLY" in str(error):
            wire.abandon()

    async def ask(self, _key: bytes, request: bytes) -> Any:
        wire = await self._line.wire()
        try:
            return await wire.send(request)
        except rx.ResponseError as error:
            self.suspect(wire, error)
            raise

    async def ask_all(self, _keys: Sequence[bytes], requests: Sequence[bytes]) -> list[Any]:
        wire = await self._line.wire()
        return await asyncio.gather(*map(wire.send, requests), return_exceptions=True)

    async def ask_durably(self, copies: Copies, requests: Sequence[bytes]) -> list[Any]:
        """As `ask_all`; Short when the writes are on fewer copies than asked for. What is refused has none."""
        wire = await self._line.wire()
        await self._try(wire, copies)
        asked = [wire.send(request) for request in requests]
        behind = asyncio.shield(wire.behind(copies.requests))
        replies: list[Any] = await asyncio.gather(*asked, return_exceptions=True)
        for error in replies:
            if isinstance(error, Exception):
                self.suspect(wire, error)
        told = await behind
        if not all(isinstance(reply, Exception) for reply in replies):
            copies.check(told)
        return replies

    async def _try(self, wire: Wire, copies: Copies) -> None:
        """As that of `SyncLink`."""
        for request in copies.trial:
            replies = await asyncio.gather(wire.send(request), return_exceptions=True)
            try:
                copies.tried(request, replies[0])
            except rx.ResponseError as error:
                self.suspect(wire, error)
                raise

    async def ask_apart(self, _key: bytes, request: bytes) -> Any:
        async with self._line.apart() as wire:
            replies = await asyncio.gather(wire.send(request), return_exceptions=True)
        return raised(replies[0])

    async def drain(self) -> None:
        await self._line.drain()

    async def close(self) -> None:
        await self._line.close()
        await close_client(self._client)


def raised(reply: Any) -> Any:
    """The reply, if it is no error."""
    if isinstance(reply, Exception):
        raise reply
    return reply
