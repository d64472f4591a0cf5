"""The awaiting wires to a cluster, a `Line` for each node; which node is decided in `topology`."""

from __future__ import annotations

import asyncio
from collections.abc import Container, Sequence
from time import monotonic
from typing import Any

from idemgate.core.backoff import SOCKET_TIMEOUT
from idemgate.store.clients import async_client
from idemgate.store.cluster.topology import WHO_SERVES, Address, Topology, Trip, Way, node_of
from idemgate.store.connection_aio import Wire
from idemgate.store.endpoint import Endpoint
from idemgate.store.reconnecting import Line, Lines, line_of, raised
from idemgate.store.retry import FAILURES

__all__ = ["ClusterLines"]


class ClusterLines:
    """As `cluster.ClusterWires`, for the running event loop only: what is asked of a node in one tick, by all tasks,
    travels together."""

    def __init__(self, endpoint: Endpoint, seconds: float, connections: int) -> None:
        self._endpoint = endpoint
        self._seconds = seconds
        self._connections = connections
        self._topology = Topology(endpoint.nodes)
        self._nodes: dict[Address, Line | Lines] = {}
        self._reading: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()

    def at_hand(self, key: bytes) -> Wire | None:
        """The wire for a key if it can be written to at once. Who gets an error on it tells `suspect`, and asks again
        with `ask`."""
        node = None if self._topology.stale else self._topology.serving(key)
        line = node and self._nodes.get(node)
        return line.at_hand() if line else None

    def suspect(self, wire: Wire, error: Exception) -> None:
        """Makes of an error heard on a wire that was at hand what it says of the nodes."""
        for node, line in self._nodes.items():
            if line.made(wire):
                self._topology.follow(error, Way(node))
        self._look()

    async def ask(self, key: bytes, request: bytes, seconds: float | None = None) -> Any:
        """As that of `ClusterWires`."""
        way = Way(await self._owner(key))
        try:
            wire = await self._line(way.node).wire()
            return await (wire.send(request) if seconds is None else wire.send_within(request, seconds))
        except FAILURES as error:
            there = self._topology.follow(error, way)
            self._look()
            if there is None:
                raise
        (reply,) = await self._travel(Trip(self._topology, [key], there), [request])
        return raised(reply)

    async def ask_all(self, keys: Sequence[bytes], requests: Sequence[bytes]) -> list[Any]:
        """As that of `ClusterWires`."""
        await self._known()
        return await self._travel(Trip(self._topology, keys), requests)

    async def ask_apart(self, key: bytes, request: bytes) -> Any:
        """As `ask`, for what blocks on the server: over a connection of its own, whose reply may take any time.
        Cancelling it drops that connection."""
        trip = Trip(self._topology, [key], Way(await self._owner(key)))
        while trip.legs:
            (way,) = trip.legs
            try:
                async with self._line(way.node).apart() as wire:
                    sent = [wire.send(one) for one in way.carry([request])]
                    replies = way.bring(await asyncio.gather(*sent, return_exceptions=True))
            except FAILURES as error:
                replies = [error]
            trip.arrived({way: replies})
            self._look()
        return raised(trip.replies[0])

    async def _travel(self, trip: Trip, requests: Sequence[bytes]) -> list[Any]:
        while trip.legs:
            legs = {way: [requests[place] for place in places] for way, places in trip.legs.items()}
            replies = await asyncio.gather(*(self._carried(way, asked) for way, asked in legs.items()))
            trip.arrived(dict(zip(legs, replies, strict=True)))
            self._look()
        return trip.replies

    async def _carried(self, way: Way, requests: Sequence[bytes]) -> Sequence[Any]:
        try:
            wire = await self._line(way.node).wire()
        except FAILURES as error:
            return [error] * len(requests)
        # With nothing awaited between them they follow each other directly.
        sent = [wire.send(one) for one in way.carry(requests)]
        return way.bring(await asyncio.gather(*sent, return_exceptions=True))

    # -- nodes --------------------------------------------------------------------------------------------------------

    def _line(self, node: Address) -> Line | Lines:
        found = self._nodes.get(node)
        if found is None:
            pool = async_client(node_of(self._endpoint, node), self._seconds).connection_pool
            found = self._nodes[node] = line_of(pool, min(self._seconds, SOCKET_TIMEOUT), self._connections)
        return found

    async def _owner(self, key: bytes) -> Address:
        if self._topology.stale:
            await self._known()
        return self._topology.owner(key)

    async def _known(self) -> None:
        """Waits for the table only where nothing is known yet."""
        self._look()
        if self._reading is not None and not self._topology.primaries:
            await asyncio.shield(self._reading)

    def _look(self) -> None:
        """Has the table read again if that is due."""
        if self._reading is None and self._topology.due(monotonic()):
            self._reading = asyncio.get_running_loop().create_task(self._read())
            self._reading.add_done_callback(self._was_read)

    def _was_read(self, reading: asyncio.Task[None]) -> None:
        self._reading = None
        if not reading.cancelled():
            reading.exception()  # who waits for it hears of it, if anybody does

    async def _read(self) -> None:
        failed: Exception | None = None
        for node in self._topology.begin(monotonic()):
            try:
                if self._topology.read(node, await (await self._line(node).wire()).send(WHO_SERVES)):
                    break
            except FAILURES as error:
                self._topology.doubt(node)
                failed = error
        else:
            self._topology.unread(failed)
        self._keep(self._topology.primaries)

    def _keep(self, nodes: Container[Address]) -> None:
        """Closes the lines to all others, once what was asked on them is answered."""
        for node in [one for one in self._nodes if one not in nodes]:
            closing = asyncio.get_running_loop().create_task(self._nodes.pop(node).close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def drain(self) -> None:
        for line in tuple(self._nodes.values()):
            await line.drain()

    async def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])
        self._keep(())
        if self._closing:
            await asyncio.wait(self._closing)
