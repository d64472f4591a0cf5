"""Choose the node of a cluster for each key: the slot table, and the redirects of nodes. No I/O.

The table is the last CLUSTER SLOTS reply, corrected slot by slot by MOVED. Every hint of an error in it marks it stale.
The callers (`cluster.sync`, `cluster.aio`) then refresh it, at most every `REFRESH_INTERVAL` seconds.
"""

from __future__ import annotations

import re
from binascii import crc_hqx
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, partial
from random import sample
from typing import Any, NamedTuple

import redis.exceptions as rx

from idemgate.core.codec.decoding import DECODE_ERRORS
from idemgate.store.endpoint import Endpoint
from idemgate.store.resp import pack_command
from idemgate.store.retry import is_transient

__all__ = [
    "ASKING",
    "CLUSTER_SLOTS",
    "Address",
    "Route",
    "RoutedBatch",
    "Topology",
    "hash_slot_of",
    "node_endpoint",
    "primaries_of",
]

Address = tuple[str, int]
ASKING = pack_command(("ASKING",))
CLUSTER_SLOTS = pack_command(("CLUSTER", "SLOTS"))
SLOTS = 16_384
REFRESH_INTERVAL = 0.25
"""The least seconds between two refreshes of the slot table."""
MAX_ROUNDS = 4
"""The most redirects of one request within one try. The caller's deadline bounds the tries."""


def hash_slot_of(key: bytes) -> int:
    """Return the slot of a key: the hash of its hash tag, or of the whole key."""
    start = key.find(b"{") + 1
    if start:
        end = key.find(b"}", start)
        if end > start:
            key = key[start:end]
    return crc_hqx(key, 0) % SLOTS


def node_endpoint(endpoint: Endpoint, address: Address) -> Endpoint:
    """Return a node as a separate endpoint, with the cluster's credentials and TLS."""
    return Endpoint("single", endpoint.settings | {"host": address[0], "port": address[1]})


class Route(NamedTuple):
    """The node for a request. With `asking`, ASKING precedes it, because the slot is being migrated to that node."""

    node: Address
    asking: bool = False

    def with_asking(self, requests: Sequence[bytes]) -> Sequence[bytes]:
        """Return the requests to send, with the ASKING requests."""
        return [part for request in requests for part in (ASKING, request)] if self.asking else requests

    def drop_asking(self, replies: Sequence[Any]) -> Sequence[Any]:
        """Drop the replies to ASKING; return one reply per request."""
        return replies[1::2] if self.asking else replies


class Topology:
    """The slot table. Threads share it without a lock.

    Each change is one assignment. A thread that reads the previous state gets a redirect.
    """

    __slots__ = ("_hint", "_refreshed_at", "_replicas", "_seeds", "_table", "_unreachable", "primaries", "stale")

    def __init__(self, seeds: Sequence[Address]) -> None:
        self._seeds = seeds
        self._table: list[Address | None] = [None] * SLOTS
        self._replicas: list[Address] = []
        self._unreachable: set[Address] = set()
        self._hint: Address | None = None
        self._refreshed_at = -REFRESH_INTERVAL
        self.primaries: frozenset[Address] = frozenset()
        self.stale: bool = True

    def find_owner(self, key: bytes) -> Address | None:
        """Return the node that serves the key, or None when none is known."""
        return self._table[hash_slot_of(key)]

    def require_owner(self, key: bytes) -> Address:
        """Return the node that serves the key.

        Raises:
            ClusterDownError: no node is known. The table is marked stale.
        """
        owner = self._table[hash_slot_of(key)]
        if owner is None:
            self.stale = True
            raise rx.ClusterDownError(f"CLUSTERDOWN no known node serves slot {hash_slot_of(key)}")
        return owner

    # -- refreshing the table ------------------------------------------------------------------------------------------

    def is_refresh_due(self, now: float) -> bool:
        """Return whether to refresh the table. `now` is in monotonic seconds."""
        return self.stale and now >= self._refreshed_at + REFRESH_INTERVAL

    def start_refresh(self, now: float) -> list[Address]:
        """Start a refresh and return the nodes to ask, one after the other.

        The order is: the node of the last MOVED, the primaries, the replicas, the nodes of the URL. Nodes that failed
        since the last refresh come last.
        """
        self.stale, self._refreshed_at = False, now
        first = [self._hint] if self._hint else []
        candidates = [*first, *_shuffle(self.primaries), *_shuffle(self._replicas), *self._seeds]
        return sorted(dict.fromkeys(candidates), key=self._unreachable.__contains__)

    def apply_slots(self, source: Address, reply: Sequence[Any]) -> bool:
        """Replace the table with a CLUSTER SLOTS reply. Return False when the reply names no node."""
        try:
            table, replicas = _table_of(source, reply)
        except DECODE_ERRORS:
            return False
        primaries = frozenset(one for one in table if one is not None)
        if primaries:
            self._table, self.primaries, self._replicas = table, primaries, replicas
            self._unreachable, self._hint = set(), None
        return bool(primaries)

    def fail_refresh(self, error: Exception | None) -> None:
        """End a refresh in which no node returned the table. `error` is the last error. A known table stays in use.

        Raises:
            RedisError: `error`, when it is permanent. The request was not sent.
            ClusterDownError: no node is known at all. The request was not sent.
        """
        self.stale = True
        if error is not None and not is_transient(error):
            raise error
        if not self.primaries:
            raise rx.ClusterDownError(f"CLUSTERDOWN no node returned the slot table: {error}") from error

    def mark_unreachable(self, node: Address) -> None:
        """Record that a node did not answer, and mark the table stale."""
        self._unreachable.add(node)
        self.stale = True

    # -- errors of nodes -----------------------------------------------------------------------------------------------

    def redirect(self, error: object, route: Route) -> Route | None:
        """Return the route to retry a request after `error`, or None. Update the table from the error."""
        if not isinstance(error, rx.ResponseError):
            if isinstance(error, rx.RedisError):
                self.mark_unreachable(route.node)
            return None
        match = _REDIRECT.fullmatch(str(error))
        if match is None or int(match["slot"]) >= SLOTS:
            self.stale = self.stale or str(error).partition(" ")[0] in _STALE_WORDS
            return None
        node = (route.node[0] if match["host"] in _NO_HOST else match["host"], int(match["port"]))
        if match["word"] == "ASK":
            return Route(node, asking=True)
        self._table[int(match["slot"])] = self._hint = node
        self.stale = True
        return Route(node)


_STALE_WORDS = frozenset({"CLUSTERDOWN", "READONLY", "MASTERDOWN", "LOADING", "UNBLOCKED"})
"""First words of errors that suggest a new owner of the node's slots."""
_NO_HOST = frozenset({"", "?"})
_REDIRECT = re.compile(r"(?P<word>MOVED|ASK) (?P<slot>[0-9]{1,5}) (?P<host>\S*):(?P<port>[0-9]{1,5})(?: .*)?")


def _shuffle(nodes: Iterable[Address]) -> list[Address]:
    candidates = list(nodes)
    return sample(candidates, len(candidates))


def _table_of(source: Address, reply: Sequence[Any]) -> tuple[list[Address | None], list[Address]]:
    """Return the primary of each slot, and all replicas."""
    table: list[Address | None] = [None] * SLOTS
    all_replicas: list[Address] = []
    for first, last, primary, *replicas in reply:
        if not 0 <= first <= last < SLOTS:
            raise ValueError(f"invalid slot range: {first} to {last}")
        table[first : last + 1] = [_address(primary, source)] * (last + 1 - first)
        all_replicas += [_address(one, source) for one in replicas]
    return table, all_replicas


def _address(node: Sequence[Any], source: Address) -> Address:
    """Return the address of a node in a CLUSTER SLOTS reply.

    A node without a host has the host of the node that replied. A host of "?" may come with an IP address.
    """
    host, port, *rest = node
    if host == b"?" and len(rest) > 1:
        facts = dict(zip(rest[1][::2], rest[1][1::2], strict=True))
        host = facts.get(b"ip")
    return (host.decode() if host and host != b"?" else source[0], int(port))


def primaries_of(source: Address, reply: Sequence[Any]) -> list[Address]:
    """Return the primaries with slots in a CLUSTER SLOTS reply."""
    return list(dict.fromkeys(_address(primary, source) for _first, _last, primary, *_ in reply))


class RoutedBatch:
    """A batch of requests on its way through redirects. Send those of `pending` until it is empty.

    `pending` maps each route to the positions of its requests; pass the replies to `add_replies`. Requests of one key
    keep their order: those behind a redirected request follow it over the same connection.
    """

    __slots__ = ("_keys", "_rounds", "_topology", "pending", "replies")

    def __init__(self, topology: Topology, keys: Sequence[bytes], route: Route | None = None) -> None:
        """Route all requests to `route`; None: each to the owner of its key."""
        self._topology = topology
        self._keys = keys
        self._rounds = 0
        self.replies: list[Any] = [None] * len(keys)
        self.pending: dict[Route, list[int]] = _group_by_route(
            {position: route or Route(topology.require_owner(key)) for position, key in enumerate(keys)}
        )

    def add_replies(self, replies: Mapping[Route, Sequence[Any]]) -> None:
        """Add the replies of all routes. Errors are values among them."""
        routes: dict[int, Route] = {}
        redirected: dict[bytes, Route] = {}
        for route, positions in self.pending.items():
            redirect = cache(partial(self._topology.redirect, route=route))  # many replies carry the same error
            for position, reply in zip(positions, replies[route], strict=True):
                self.replies[position] = reply
                key = self._keys[position]
                target = redirected.get(key) or (redirect(reply) if isinstance(reply, Exception) else None)
                if target is not None:
                    routes[position] = redirected[key] = target
        self._rounds += 1
        self.pending = _group_by_route(routes if self._rounds <= MAX_ROUNDS else {})


def _group_by_route(routes: Mapping[int, Route]) -> dict[Route, list[int]]:
    """Group positions by route, in the order of nodes.

    Callers that need connections to several nodes take them in that order. So no two callers wait for each other.
    """
    grouped: defaultdict[Route, list[int]] = defaultdict(list)
    for position in sorted(routes):
        grouped[routes[position]].append(position)
    return dict(sorted(grouped.items()))
