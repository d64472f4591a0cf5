"""The awaiting wire to one server for as long as it is needed: connections come and go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from time import monotonic
from typing import Any

import redis.exceptions as rx

from idemgate.core.backoff import SOCKET_TIMEOUT
from idemgate.store.clients import async_client, close_client
from idemgate.store.connection_aio import Wire, connected
from idemgate.store.endpoint import Endpoint
from idemgate.store.replication import Copies

__all__ = ["Line", "Lines", "OneLine", "line_of", "raised"]

A_MOMENT = 1.0
"""In seconds: after one of several connections could not be made, until it is tried again."""
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

    @property
    def lost(self) -> bool:
        """There is no wire: it was never made, or it cannot be used any more."""
        return self._wire is None or self._wire.closed

    def made(self, wire: Wire) -> bool:
        """Whether this is the present wire, or the last one."""
        return self._wire is wire

    def begin(self) -> asyncio.Task[Wire]:
        """Connects, unless that is under way."""
        if self._connecting is None:
            self._connecting = asyncio.get_running_loop().create_task(self._connect())
            self._connecting.add_done_callback(self._connected)
        return self._connecting

    async def wire(self) -> Wire:
        """The wire; waits while it is being made, and while the server reads too slowly. Raises what connecting
        raises, to all who wait for the same connection."""
        wire = self._wire
        if wire is None or wire.closed:
            wire = await asyncio.shield(self.begin())
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


class Lines:
    """Several lines to one server, as one `Line`: each call goes over the one on which the fewest wait for a reply.

    A caller that awaits each answer has its calls done in turn; nothing else keeps its order. Those of one `ask_all`
    go over one line, and so does what waits for copies of a write.
    """

    __slots__ = ("_lines", "_tried")

    def __init__(self, pool: Any, patience: float, number: int) -> None:
        self._lines = [Line(pool, patience) for _ in range(number)]
        self._tried = -A_MOMENT

    @property
    def _wire(self) -> Wire | None:
        """As `at_hand`: of those that can be written to at once, the one that has least to do."""
        best, lost = None, False
        for line in self._lines:
            wire = line._wire
            if wire is None or wire.closed:
                lost = True
            elif wire.ready and (best is None or wire.load < best.load):
                best = wire
        if lost:
            self._restore()
        return best

    def _restore(self) -> None:
        """Connects those that are not, beside what goes on: nobody waits for them while there is another."""
        now = monotonic()
        if now - self._tried >= A_MOMENT:
            self._tried = now
            for line in self._lines:
                if line.lost:
                    line.begin()

    def at_hand(self) -> Wire | None:
        return self._wire

    def made(self, wire: Wire) -> bool:
        return any(line.made(wire) for line in self._lines)

    async def wire(self) -> Wire:
        """As that of `Line`, of the line that has least to do; of one that has to be made only where all have."""
        self._restore()
        there = [line for line in self._lines if not line.lost]
        return await min(there or self._lines[:1], key=_load).wire()

    def apart(self) -> AbstractAsyncContextManager[Wire]:
        return self._lines[0].apart()

    async def drain(self) -> None:
        await asyncio.gather(*(line.drain() for line in self._lines))

    async def close(self) -> None:
        await asyncio.gather(*(line.close() for line in self._lines))


def _load(line: Line) -> tuple[bool, int]:
    wire = line._wire
    return (wire.crowded, wire.load) if wire is not None else (True, 0)


def line_of(pool: Any, patience: float, number: int) -> Line | Lines:
    """The way to one server over so many connections."""
    return Line(pool, patience) if number == 1 else Lines(pool, patience, number)


class OneLine:
    """The way to a single server, or to the master that sentinels name, for the running event loop only. As
    `cluster_aio.ClusterLines`, with keys that do not matter."""

    __slots__ = ("_client", "_line", "_sentinel")

    def __init__(self, endpoint: Endpoint, seconds: float, connections: int) -> None:
        self._client = async_client(endpoint, seconds)
        self._line = line_of(self._client.connection_pool, min(seconds, SOCKET_TIMEOUT), connections)
        self._sentinel = endpoint.kind == "sentinel"

    def at_hand(self, _key: bytes) -> Wire | None:
        wire = self._line._wire  # as `Line.at_hand`, for every call
        return wire if wire is not None and wire.ready else None

    def suspect(self, wire: Wire, error: Exception) -> None:
        """Makes of an error heard on a wire what it says of the way: it was the master; the next connection asks the
        sentinels who is now."""
        if self._sentinel and isinstance(error, rx.ResponseError) and "READONLY" in str(error):
            wire.abandon()

    async def ask(self, _key: bytes, request: bytes, seconds: float | None = None) -> Any:
        """The reply, awaited for at most `seconds` (None: as long as a connection allows)."""
        wire = await self._line.wire()
        try:
            return await (wire.send(request) if seconds is None else wire.send_within(request, seconds))
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
