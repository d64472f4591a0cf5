"""Blocking access to a cluster, with one connection pool for each node. `topology` chooses the node."""

from __future__ import annotations

import threading
from collections.abc import Container, Sequence
from typing import Any

from idemgate.core.backoff import SOCKET_TIMEOUT
from idemgate.core.clock import monotonic
from idemgate.core.forks import fork_counter
from idemgate.store.clients import sync_pool
from idemgate.store.cluster.topology import CLUSTER_SLOTS, Address, Route, RoutedBatch, Topology, node_endpoint
from idemgate.store.connection import Connection, ConnectionPool
from idemgate.store.endpoint import Endpoint
from idemgate.store.retry import FAILURES

__all__ = ["SyncCluster"]


class SyncCluster:
    """Sends each request to the node that serves its key, and follows redirects.

    Safe to share between threads. A forked child opens its own connections and keeps the slot table.
    """

    def __init__(self, endpoint: Endpoint, seconds: float) -> None:
        self._endpoint = endpoint
        self._seconds = seconds
        self._topology = Topology(endpoint.nodes)
        self._nodes: dict[Address, ConnectionPool] = {}
        self._refresh_lock = threading.Lock()
        self._forks = fork_counter.count

    def execute(self, key: bytes, request: bytes, seconds: float | None = None) -> Any:
        """Send a request to the node of its key and return the reply.

        Args:
            key: the key that chooses the node.
            request: the packed request.
            seconds: the longest wait for the reply; None: the timeout of the connection.

        Raises:
            ResponseError: the server returned an error.
            ConnectionError: a connection was lost.
            TimeoutError: the reply did not arrive in time.
            ClusterDownError: no known node serves the slot.
        """
        route = Route(self._owner(key))
        try:
            return self._pool(route.node).execute(request, seconds=seconds)
        except FAILURES as error:
            target = self._topology.redirect(error, route)
            if target is None:
                raise
        (reply,) = self._dispatch(RoutedBatch(self._topology, [key], target), [request], seconds)
        if isinstance(reply, Exception):
            raise reply
        return reply

    def execute_all(self, keys: Sequence[bytes], requests: Sequence[bytes], seconds: float | None = None) -> list[Any]:
        """Send each request to the node of its key and return the replies. All errors are values among them.

        Each node gets one write. Requests of one key use one connection, in order. `seconds` as for `execute`.
        """
        if self._topology.stale:
            self._refresh_if_due()
        return self._dispatch(RoutedBatch(self._topology, keys), requests, seconds)

    def _dispatch(self, batch: RoutedBatch, requests: Sequence[bytes], seconds: float | None) -> list[Any]:
        while batch.pending:
            outgoing = {
                route: [requests[position] for position in positions] for route, positions in batch.pending.items()
            }
            batch.add_replies(self._send_batches(outgoing, seconds))
        return batch.replies

    def _send_batches(self, outgoing: dict[Route, list[bytes]], seconds: float | None) -> dict[Route, Sequence[Any]]:
        """Write all requests before reading any reply, so that the nodes work in parallel."""
        replies: dict[Route, Sequence[Any]] = {}
        sent: list[tuple[Route, ConnectionPool, Connection]] = []
        try:
            for route, requests in outgoing.items():
                pool = self._pool(route.node)
                try:
                    sent.append((route, pool, pool.send(route.with_asking(requests), seconds)))
                except FAILURES as error:
                    replies[route] = [error] * len(requests)
            while sent:
                route, pool, connection = sent.pop()
                number = len(outgoing[route])
                try:
                    replies[route] = route.drop_asking(
                        pool.collect(connection, len(route.with_asking(outgoing[route])), seconds)
                    )
                except FAILURES as error:
                    replies[route] = [error] * number
        finally:
            for _route, pool, connection in sent:
                pool.discard(connection)
        return replies

    # -- nodes --------------------------------------------------------------------------------------------------------

    def _pool(self, node: Address) -> ConnectionPool:
        known = self._nodes.get(node)
        if known is None:
            pool = sync_pool(node_endpoint(self._endpoint, node), self._seconds)
            # Of two threads that create a pool one wins. Neither pool has connections yet.
            known = self._nodes.setdefault(node, ConnectionPool(pool, min(self._seconds, SOCKET_TIMEOUT)))
        return known

    def _owner(self, key: bytes) -> Address:
        if self._topology.stale:
            self._refresh_if_due()
        return self._topology.require_owner(key)

    def _refresh_if_due(self) -> None:
        """Refresh the slot table if that is due. Other threads wait for it only while no node is known."""
        if self._forks != fork_counter.count:  # the thread that held the lock does not exist in this process
            self._forks, self._refresh_lock = fork_counter.count, threading.Lock()
        if not self._refresh_lock.acquire(blocking=not self._topology.primaries):
            return
        try:
            if self._topology.is_refresh_due(monotonic()):
                self._refresh()
        finally:
            self._refresh_lock.release()

    def _refresh(self) -> None:
        last_error: Exception | None = None
        for node in self._topology.start_refresh(monotonic()):
            try:
                if self._topology.apply_slots(node, self._pool(node).execute(CLUSTER_SLOTS)):
                    break
            except FAILURES as error:
                self._topology.mark_unreachable(node)
                last_error = error
        else:
            self._topology.fail_refresh(last_error)
        self._close_others(self._topology.primaries)

    def _close_others(self, nodes: Container[Address]) -> None:
        """Close the connections to all nodes but these."""
        for node in [one for one in self._nodes if one not in nodes]:
            self._nodes.pop(node).close()

    def close(self) -> None:
        self._close_others(())
