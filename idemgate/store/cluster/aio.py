"""Asynchronous access to a cluster, with one connection for each node. `topology` chooses the node."""

from __future__ import annotations

import asyncio
from collections.abc import Container, Sequence
from typing import Any

from idemgate.core.backoff import SOCKET_TIMEOUT
from idemgate.core.clock import monotonic
from idemgate.store.clients import async_pool
from idemgate.store.cluster.topology import CLUSTER_SLOTS, Address, Route, RoutedBatch, Topology, node_endpoint
from idemgate.store.connection_aio import AsyncConnection, ReconnectingConnection, raise_if_error
from idemgate.store.endpoint import Endpoint
from idemgate.store.retry import FAILURES

__all__ = ["AsyncCluster"]


class AsyncCluster:
    """Sends each request to the node that serves its key, and follows redirects. It belongs to one event loop.

    The requests of all tasks to one node travel together in one tick.
    """

    def __init__(self, endpoint: Endpoint, seconds: float) -> None:
        self._endpoint = endpoint
        self._seconds = seconds
        self._topology = Topology(endpoint.nodes)
        self._nodes: dict[Address, ReconnectingConnection] = {}
        self._refresh_task: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()

    def ready_connection(self, key: bytes) -> AsyncConnection | None:
        """Return the connection for a key if it accepts writes at once, else None.

        After an error on it, call `report_error`, and send the request again with `execute`.
        """
        node = None if self._topology.stale else self._topology.find_owner(key)
        known = node and self._nodes.get(node)
        return known.ready_connection() if known else None

    def report_error(self, connection: AsyncConnection, error: Exception) -> Exception:
        """Update the slot table from an error on a connection of `ready_connection`. Return the error to raise."""
        for node, known in self._nodes.items():
            if known.owns(connection):
                known.report_error(connection, error)
                self._topology.redirect(error, Route(node))
        self._refresh_if_due()
        return error

    async def execute(self, key: bytes, request: bytes, seconds: float | None = None) -> Any:
        """Send a request to the node of its key and return the reply, as `SyncCluster.execute` does."""
        route = Route(await self._owner(key))
        known = self._connection(route.node)
        try:
            connection = await known.acquire()
            try:
                return await (connection.send(request) if seconds is None else connection.send_within(request, seconds))
            except FAILURES as error:
                known.report_error(connection, error)
                raise
        except FAILURES as error:
            target = self._topology.redirect(error, route)
            self._refresh_if_due()
            if target is None:
                raise
        (reply,) = await self._dispatch(RoutedBatch(self._topology, [key], target), [request], seconds)
        return raise_if_error(reply)

    async def execute_all(
        self, keys: Sequence[bytes], requests: Sequence[bytes], seconds: float | None = None
    ) -> list[Any]:
        """Send each request to the node of its key and return the replies, as `SyncCluster.execute_all` does."""
        await self._wait_for_table()
        return await self._dispatch(RoutedBatch(self._topology, keys), requests, seconds)

    async def execute_dedicated(self, key: bytes, request: bytes) -> Any:
        """Execute a request that blocks on the server, over a dedicated connection without a reply timeout.

        Cancelling the caller drops the connection.
        """
        batch = RoutedBatch(self._topology, [key], Route(await self._owner(key)))
        while batch.pending:
            (route,) = batch.pending
            try:
                known = self._connection(route.node)
                async with known.dedicated_connection() as connection:
                    sent = [connection.send(one) for one in route.with_asking([request])]
                    replies = route.drop_asking(await asyncio.gather(*sent, return_exceptions=True))
                    known.report_errors(connection, replies)
            except FAILURES as error:
                replies = [error]
            batch.add_replies({route: replies})
            self._refresh_if_due()
        return raise_if_error(batch.replies[0])

    async def _dispatch(self, batch: RoutedBatch, requests: Sequence[bytes], seconds: float | None) -> list[Any]:
        while batch.pending:
            outgoing = {
                route: [requests[position] for position in positions] for route, positions in batch.pending.items()
            }
            replies = await asyncio.gather(
                *(self._send_batch(route, part, seconds) for route, part in outgoing.items())
            )
            batch.add_replies(dict(zip(outgoing, replies, strict=True)))
            self._refresh_if_due()
        return batch.replies

    async def _send_batch(self, route: Route, requests: Sequence[bytes], seconds: float | None) -> Sequence[Any]:
        known = self._connection(route.node)
        try:
            connection = await known.acquire()
        except FAILURES as error:
            return [error] * len(requests)
        # Without an await between them the requests stay adjacent, as ASKING requires.
        sent = connection.send_each(route.with_asking(requests), seconds)
        replies = route.drop_asking(await asyncio.gather(*sent, return_exceptions=True))
        known.report_errors(connection, replies)
        return replies

    # -- nodes --------------------------------------------------------------------------------------------------------

    def _connection(self, node: Address) -> ReconnectingConnection:
        known = self._nodes.get(node)
        if known is None:
            pool = async_pool(node_endpoint(self._endpoint, node), self._seconds)
            known = self._nodes[node] = ReconnectingConnection(pool, min(self._seconds, SOCKET_TIMEOUT))
        return known

    async def _owner(self, key: bytes) -> Address:
        if self._topology.stale:
            await self._wait_for_table()
        return self._topology.require_owner(key)

    async def _wait_for_table(self) -> None:
        """Wait for the slot table while no node is known."""
        self._refresh_if_due()
        if self._refresh_task is not None and not self._topology.primaries:
            await asyncio.shield(self._refresh_task)

    def _refresh_if_due(self) -> None:
        if self._refresh_task is None and self._topology.is_refresh_due(monotonic()):
            self._refresh_task = asyncio.get_running_loop().create_task(self._refresh())
            self._refresh_task.add_done_callback(self._finish_refresh)

    def _finish_refresh(self, refresh: asyncio.Task[None]) -> None:
        self._refresh_task = None
        if not refresh.cancelled():
            refresh.exception()  # mark the exception as retrieved: perhaps no caller waits any more

    async def _refresh(self) -> None:
        last_error: Exception | None = None
        for node in self._topology.start_refresh(monotonic()):
            try:
                if self._topology.apply_slots(node, await (await self._connection(node).acquire()).send(CLUSTER_SLOTS)):
                    break
            except FAILURES as error:
                self._topology.mark_unreachable(node)
                last_error = error
        else:
            self._topology.fail_refresh(last_error)
        self._close_others(self._topology.primaries)

    def _close_others(self, nodes: Container[Address]) -> None:
        """Close the connections to all nodes but these, after their outstanding replies."""
        for node in [one for one in self._nodes if one not in nodes]:
            closing = asyncio.get_running_loop().create_task(self._nodes.pop(node).close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def drain(self) -> None:
        for connection in tuple(self._nodes.values()):
            await connection.drain()

    async def close(self) -> None:
        if self._refresh_task is not None:
            self._refresh_task.cancel()
            await asyncio.wait([self._refresh_task])
        self._close_others(())
        if self._closing:
            await asyncio.wait(self._closing)
