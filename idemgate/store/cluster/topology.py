"""Which node of a cluster is asked for which key: the table of slots, and what nodes say when it is wrong. No I/O.

The table is what a node said last (CLUSTER SLOTS), put right slot by slot by MOVED. Whatever hints that it is wrong
makes it stale: the drivers (`cluster`, `cluster_aio`) then read it again, at most every `REST` seconds.
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

from idemgate.core.codec.decoding import BROKEN
from idemgate.store.endpoint import Endpoint
from idemgate.store.resp import pack
from idemgate.store.retry import is_passing

__all__ = [
    "ASKING",
    "WHO_SERVES",
    "Address",
    "Topology",
    "Trip",
    "Way",
    "key_of",
    "node_of",
    "primaries_of",
    "slot_of",
]

Address = tuple[str, int]
ASKING = pack(("ASKING",))
WHO_SERVES = pack(("CLUSTER", "SLOTS"))
SLOTS = 16_384
REST = 0.25
"""Seconds between two readings of the table, however much is wrong with it."""
REDIRECTIONS = 4
"""Of one request within one try; further tries are bounded by the caller's deadline."""


def slot_of(key: bytes) -> int:
    """The slot of a key: of what stands within its first braces, if anything does."""
    start = key.find(b"{") + 1
    if start:
        end = key.find(b"}", start)
        if end > start:
            key = key[start:end]
    return crc_hqx(key, 0) % SLOTS


def key_of(words: Sequence[Any]) -> bytes:
    """The first key of a command. A command without a key goes to any node, and so it may be anything."""
    name = words[0]
    if name in ("EVAL", "EVALSHA"):
        found = words[3]
    elif name in ("XREAD", "XREADGROUP"):
        found = words[words.index("STREAMS") + 1]
    else:
        found = words[2 if name in ("XGROUP", "XINFO") else 1] if len(words) > 1 else b""
    return found if isinstance(found, bytes) else str(found).encode()


def node_of(endpoint: Endpoint, address: Address) -> Endpoint:
    """A node as an endpoint of its own, with the cluster's credentials and TLS."""
    return Endpoint("single", endpoint.settings | {"host": address[0], "port": address[1]})


class Way(NamedTuple):
    """Where a request goes; `asking`: with ASKING directly before it, since the slot is still on its way there."""

    node: Address
    asking: bool = False

    def carry(self, requests: Sequence[bytes]) -> Sequence[bytes]:
        """What is sent for these requests."""
        return [part for request in requests for part in (ASKING, request)] if self.asking else requests

    def bring(self, replies: Sequence[Any]) -> Sequence[Any]:
        """Of the replies to what was sent those to the requests."""
        return replies[1::2] if self.asking else replies


class Topology:
    """The table. Shared by threads: each change is one assignment, and a reader who sees the former state is
    redirected."""

    __slots__ = ("_doubted", "_hint", "_others", "_read", "_seeds", "_table", "primaries", "stale")

    def __init__(self, seeds: Sequence[Address]) -> None:
        self._seeds = seeds
        self._table: list[Address | None] = [None] * SLOTS
        self._others: list[Address] = []
        self._doubted: set[Address] = set()
        self._hint: Address | None = None
        self._read = -REST
        self.primaries: frozenset[Address] = frozenset()
        self.stale = True

    def serving(self, key: bytes) -> Address | None:
        """Who serves the key; None where nobody does, as far as known."""
        return self._table[slot_of(key)]

    def owner(self, key: bytes) -> Address:
        """As `serving`; raises ClusterDownError rather than None."""
        found = self._table[slot_of(key)]
        if found is None:
            self.stale = True
            raise rx.ClusterDownError(f"CLUSTERDOWN no known node serves slot {slot_of(key)}")
        return found

    # -- reading the table --------------------------------------------------------------------------------------------

    def due(self, now: float) -> bool:
        """Whether to read it again; `now` in seconds, monotonic."""
        return self.stale and now >= self._read + REST

    def begin(self, now: float) -> list[Address]:
        """Who is asked for it, one after the other: whom a MOVED named, other primaries, replicas, seeds; those
        that failed since the last reading come last."""
        self.stale, self._read = False, now
        first = [self._hint] if self._hint else []
        known = [*first, *_shuffled(self.primaries), *_shuffled(self._others), *self._seeds]
        return sorted(dict.fromkeys(known), key=self._doubted.__contains__)

    def read(self, asked: Address, reply: Sequence[Any]) -> bool:
        """Takes over what a node answered to CLUSTER SLOTS; False if that is nothing."""
        try:
            table, others = _table_of(asked, reply)
        except BROKEN:
            return False
        found = frozenset(one for one in table if one is not None)
        if found:
            self._table, self.primaries, self._others = table, found, others
            self._doubted, self._hint = set(), None
        return bool(found)

    def unread(self, failed: Exception | None) -> None:
        """Of all who were asked none had an answer; the last one failed so. Raises what that means for a request, which
        was not sent; without an exception the former table goes on to be used."""
        self.stale = True
        if failed is not None and not is_passing(failed):
            raise failed
        if not self.primaries:
            raise rx.ClusterDownError(f"CLUSTERDOWN no node says who serves which slots: {failed}") from failed

    def doubt(self, node: Address) -> None:
        """It could not be asked."""
        self._doubted.add(node)
        self.stale = True

    # -- what nodes answer --------------------------------------------------------------------------------------------

    def follow(self, error: object, way: Way) -> Way | None:
        """Where else to send a request that got this error; None if nowhere. Notes what that says of the table."""
        if not isinstance(error, rx.ResponseError):
            if isinstance(error, rx.RedisError):
                self.doubt(way.node)
            return None
        found = _ELSEWHERE.fullmatch(str(error))
        if found is None or int(found["slot"]) >= SLOTS:
            self.stale = self.stale or str(error).partition(" ")[0] in _ILL
            return None
        node = (way.node[0] if found["host"] in _UNNAMED else found["host"], int(found["port"]))
        if found["word"] == "ASK":
            return Way(node, asking=True)
        self._table[int(found["slot"])] = self._hint = node
        self.stale = True
        return Way(node)


_ILL = frozenset({"CLUSTERDOWN", "READONLY", "MASTERDOWN", "LOADING"})
"""With these a node says that another may serve its slots by now."""
_UNNAMED = frozenset({"", "?"})
_ELSEWHERE = re.compile(r"(?P<word>MOVED|ASK) (?P<slot>[0-9]{1,5}) (?P<host>\S*):(?P<port>[0-9]{1,5})(?: .*)?")


def _shuffled(nodes: Iterable[Address]) -> list[Address]:
    known = list(nodes)
    return sample(known, len(known))


def _table_of(asked: Address, reply: Sequence[Any]) -> tuple[list[Address | None], list[Address]]:
    """Who serves each slot, and all replicas."""
    table: list[Address | None] = [None] * SLOTS
    others: list[Address] = []
    for first, last, primary, *replicas in reply:
        if not 0 <= first <= last < SLOTS:
            raise ValueError(f"no slots: {first} to {last}")
        table[first : last + 1] = [_address(primary, asked)] * (last + 1 - first)
        others += [_address(one, asked) for one in replicas]
    return table, others


def _address(node: Sequence[Any], asked: Address) -> Address:
    """A node that does not tell its host is where it was asked; one that has no name ("?") may tell its address."""
    host, port, *rest = node
    if host == b"?" and len(rest) > 1:
        facts = dict(zip(rest[1][::2], rest[1][1::2], strict=True))
        host = facts.get(b"ip")
    return (host.decode() if host and host != b"?" else asked[0], int(port))


def primaries_of(asked: Address, reply: Sequence[Any]) -> list[Address]:
    """Primaries that serve slots, by an answer to CLUSTER SLOTS."""
    return list(dict.fromkeys(_address(primary, asked) for _first, _last, primary, *_ in reply))


class Trip:
    """Requests on their way: send those of `legs` (way: their places), tell `arrived` the replies, until `legs` is
    empty.

    Requests of one key keep their order: what follows a redirected one goes again behind it, so that it is executed
    behind it, on the same connection.
    """

    __slots__ = ("_hops", "_keys", "_topology", "legs", "replies")

    def __init__(self, topology: Topology, keys: Sequence[bytes], way: Way | None = None) -> None:
        """`way` is that of all of them; else each goes to the owner of its key, as far as known."""
        self._topology = topology
        self._keys = keys
        self._hops = 0
        self.replies: list[Any] = [None] * len(keys)
        self.legs = _legs({place: way or Way(topology.owner(key)) for place, key in enumerate(keys)})

    def arrived(self, replies: Mapping[Way, Sequence[Any]]) -> None:
        """The replies of all legs, errors among them."""
        ways: dict[int, Way] = {}
        behind: dict[bytes, Way] = {}
        for way, places in self.legs.items():
            follow = cache(partial(self._topology.follow, way=way))  # many have the same error
            for place, reply in zip(places, replies[way], strict=True):
                self.replies[place] = reply
                key = self._keys[place]
                there = behind.get(key) or (follow(reply) if isinstance(reply, Exception) else None)
                if there is not None:
                    ways[place] = behind[key] = there
        self._hops += 1
        self.legs = _legs(ways if self._hops <= REDIRECTIONS else {})


def _legs(ways: Mapping[int, Way]) -> dict[Way, list[int]]:
    """In the order of nodes: who needs connections to several takes them in that order, so that no two wait for each
    other."""
    found: defaultdict[Way, list[int]] = defaultdict(list)
    for place in sorted(ways):
        found[ways[place]].append(place)
    return dict(sorted(found.items()))
