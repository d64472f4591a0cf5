"""The blocking wires to a cluster, node by node; which node is decided in `topology`."""

from __future__ import annotations

import threading
from collections.abc import Container, Sequence
from time import monotonic
from typing import Any

from idemgate.core.backoff import SOCKET_TIMEOUT
from idemgate.store.clients import CONNECTIONS, sync_client
from idemgate.store.cluster.topology import WHO_SERVES, Address, Topology, Trip, Way, node_of
from idemgate.store.connection import BlockingWire, Wires
from idemgate.store.endpoint import Endpoint
from idemgate.store.forks import forks
from idemgate.store.retry import FAILURES

__all__ = ["ClusterWires"]


class ClusterWires:
    """Asks for each key the node that serves it, and follows where nodes redirect.

    Safe to share between threads. A forked child makes its own connections, and keeps what is known of the cluster.
    """

    def __init__(self, endpoint: Endpoint, seconds: float) -> None:
        self._endpoint = endpoint
        self._seconds = seconds
        self._topology = Topology(endpoint.nodes)
        self._nodes: dict[Address, Wires] = {}
        self._looking = threading.Lock()
        self._forks = forks.count

    def ask(self, key: bytes, request: bytes, seconds: float | None = None) -> Any:
        """The reply, waited for at most `seconds` (None: as long as a connection allows); an error of the server is
        raised. Raises ConnectionError, TimeoutError, ClusterDownError of redis-py."""
        way = Way(self._owner(key))
        try:
            return self._wires(way.node).ask(request, seconds=seconds)
        except FAILURES as error:
            there = self._topology.follow(error, way)
            if there is None:
                raise
        (reply,) = self._travel(Trip(self._topology, [key], there), [request])
        if isinstance(reply, Exception):
            raise reply
        return reply

    def ask_all(self, keys: Sequence[bytes], requests: Sequence[bytes]) -> list[Any]:
        """The replies of requests, each of which goes where its key is, with errors among them: the server's, and
        those of the way to it. One write for each node; requests of one key go over one connection, in order."""
        if self._topology.stale:
            self._look()
        return self._travel(Trip(self._topology, keys), requests)

    def _travel(self, trip: Trip, requests: Sequence[bytes]) -> list[Any]:
        while trip.legs:
            legs = {way: [requests[place] for place in places] for way, places in trip.legs.items()}
            trip.arrived(self._carried(legs))
        return trip.replies

    def _carried(self, legs: dict[Way, list[bytes]]) -> dict[Way, Sequence[Any]]:
        """All is written before anything is read, so that the nodes work at the same time."""
        replies: dict[Way, Sequence[Any]] = {}
        sent: list[tuple[Way, Wires, BlockingWire]] = []
        try:
            for way, requests in legs.items():
                wires = self._wires(way.node)
                try:
                    sent.append((way, wires, wires.send(way.carry(requests))))
                except FAILURES as error:
                    replies[way] = [error] * len(requests)
            while sent:
                way, wires, wire = sent.pop()
                number = len(legs[way])
                try:
                    replies[way] = way.bring(wires.collect(wire, len(way.carry(legs[way]))))
                except FAILURES as error:
                    replies[way] = [error] * number
        finally:
            for _way, wires, wire in sent:
                wires.drop(wire)
        return replies

    # -- nodes --------------------------------------------------------------------------------------------------------

    def _wires(self, node: Address) -> Wires:
        found = self._nodes.get(node)
        if found is None:
            pool = sync_client(node_of(self._endpoint, node), self._seconds).connection_pool
            # Of two threads that make them at once one is heard; so far no connection was made.
            found = self._nodes.setdefault(node, Wires(pool, min(self._seconds, SOCKET_TIMEOUT), CONNECTIONS))
        return found

    def _owner(self, key: bytes) -> Address:
        if self._topology.stale:
            self._look()
        return self._topology.owner(key)

    def _look(self) -> None:
        """Reads the table again if that is due. Others do not wait for it, unless nothing is known yet."""
        if self._forks != forks.count:  # the thread that held the lock is not in this process
            self._forks, self._looking = forks.count, threading.Lock()
        if not self._looking.acquire(blocking=not self._topology.primaries):
            return
        try:
            if self._topology.due(monotonic()):
                self._read()
        finally:
            self._looking.release()

    def _read(self) -> None:
        failed: Exception | None = None
        for node in self._topology.begin(monotonic()):
            try:
                if self._topology.read(node, self._wires(node).ask(WHO_SERVES)):
                    break
            except FAILURES as error:
                self._topology.doubt(node)
                failed = error
        else:
            self._topology.unread(failed)
        self._keep(self._topology.primaries)

    def _keep(self, nodes: Container[Address]) -> None:
        """Closes the wires to all others."""
        for node in [one for one in self._nodes if one not in nodes]:
            self._nodes.pop(node).close()

    def close(self) -> None:
        self._keep(())
