"""Calls of a dedup set: the ids that arrived within a retention.

An id takes 20 to 25 bytes (`lua/lib/dedup/pages.lua`), and 40 to 48 with a small value. It is a digest of 69 bits: five
bits select one of 32 shards, and 64 are stored. With n ids in the set, a new id is mistaken for a known one with a
probability of n / 2^69.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Generic, TypeVar

from idemgate.core import keys
from idemgate.core.calls import Arg, Batch, Call, Reply, call
from idemgate.core.clock import Clock, stamp
from idemgate.core.tokens import token
from idemgate.core.validation import check_iterable
from idemgate.dedup import value as small
from idemgate.dedup.value import Small
from idemgate.errors import InvalidArgument

__all__ = ["DedupCalls", "DedupValue"]

SHARDS = 32
"""The number of shards. It must never change, since stored ids would be looked up in another shard.

32 shards spread over the nodes of a cluster, and a batch still needs few calls.
"""
AT_ONCE = 250
"""The maximum number of ids in one call, which blocks the server for about 2 ms."""
T = TypeVar("T")
V = TypeVar("V", bound=Small)
Id = tuple[int, bytes]
"""The shard and the digest of an id."""


@dataclass(frozen=True, slots=True)
class DedupValue(Generic[V]):
    """The value of an id. `first` is True if this call stored it."""

    first: bool
    value: V


class DedupCalls:
    """Builds the calls of one scope. `retention` is in ms."""

    __slots__ = ("clock", "namespace", "retention", "scope")

    def __init__(self, namespace: str, clock: Clock | None, scope: str, retention: int) -> None:
        self.namespace = namespace
        self.clock = clock
        self.scope = scope
        self.retention = retention

    def add(self, key: keys.Key) -> Call[bool]:
        """Build the call that adds an id and answers whether it is new."""
        shard, digest = _digest_id(key)
        return self._add(shard, _request_id(), [digest], _read_new)

    def add_many(self, entries: Iterable[keys.Key]) -> Batch[list[bool]]:
        """Build a call for each shard and 250 of its ids. Equal ids are sent once."""
        request_id = _request_id()
        ids = [_digest_id(key) for key in check_iterable(entries, "keys", "Pass a list of keys")]
        parts = _split_by_shard(ids)
        calls = [self._add(shard, request_id, digests, _read_news) for shard, digests in parts]

        def join(answers: list[list[bool]]) -> list[bool]:
            return _mark_first(ids, {one for one, is_new in _answers_by_id(parts, answers).items() if is_new})

        return Batch(calls, join)

    def get_or_set(self, key: keys.Key, value: V) -> Call[DedupValue[V]]:
        """Build the call that stores a value for an id unless it has one."""
        shard, digest = _digest_id(key)
        return self._set(shard, _request_id(), [(digest, small.pack(value))], lambda reply: _read_values(reply)[0])

    def get_or_set_many(self, entries: Iterable[tuple[keys.Key, V]]) -> Batch[list[DedupValue[V]]]:
        """Build the calls that store many values, as `add_many` does. Equal ids are sent once."""
        request_id = _request_id()
        pairs = [
            (_digest_id(key), small.pack(value))
            for key, value in map(_check_pair, check_iterable(entries, "pairs", _PAIRS_FIX))
        ]
        ids, values = [one for one, _ in pairs], dict(reversed(pairs))
        parts = _split_by_shard(ids)
        calls = [
            self._set(shard, request_id, [(one, values[shard, one]) for one in digests], _read_values)
            for shard, digests in parts
        ]

        def join(answers: list[list[DedupValue[V]]]) -> list[DedupValue[V]]:
            found = _answers_by_id(parts, answers)
            firsts = _mark_first(ids, {one for one, answer in found.items() if answer.first})
            return [DedupValue(first, found[one].value) for one, first in zip(ids, firsts, strict=True)]

        return Batch(calls, join)

    def get(self, key: keys.Key) -> Call[Small | None]:
        """Build the call that reads the value of an id; None if it has none."""
        shard, digest = _digest_id(key)
        args = (stamp(self.clock), digest)
        return call("dedup/get", keys.dedup_values(self.namespace, self.scope, shard), args, _read_value)

    def _add(self, shard: int, request_id: bytes, digests: Sequence[bytes], read: Callable[[Reply], T]) -> Call[T]:
        args: tuple[Arg, ...] = (stamp(self.clock), self.retention, request_id, *digests)
        return call("dedup/add", keys.dedup_ids(self.namespace, self.scope, shard), args, read)

    def _set(
        self, shard: int, request_id: bytes, pairs: Sequence[tuple[bytes, bytes]], read: Callable[[Reply], T]
    ) -> Call[T]:
        words = (word for pair in pairs for word in pair)
        args: tuple[Arg, ...] = (stamp(self.clock), self.retention, request_id, *words)
        return call("dedup/get_or_set", keys.dedup_values(self.namespace, self.scope, shard), args, read)


def _digest_id(key: keys.Key) -> Id:
    digest = blake2b(keys.raw(key), digest_size=9).digest()
    return digest[8] % SHARDS, digest[:8]


def _request_id() -> bytes:
    """Return a request id of 40 bits, by which the server recognizes a repeated request."""
    return blake2b(token(), digest_size=5).digest()


def _split_by_shard(ids: list[Id]) -> list[tuple[int, list[bytes]]]:
    shards: defaultdict[int, list[bytes]] = defaultdict(list)
    for shard, digest in dict.fromkeys(ids):
        shards[shard].append(digest)
    return [
        (shard, digests[i : i + AT_ONCE]) for shard, digests in shards.items() for i in range(0, len(digests), AT_ONCE)
    ]


def _check_pair(pair: Any) -> tuple[keys.Key, Any]:
    if pair.__class__ is not tuple or len(pair) != 2:  # a str of length 2 could be unpacked, too
        raise InvalidArgument("pairs", pair, "not a key and its value", _PAIRS_FIX)
    return pair


_PAIRS_FIX = "Pass (key, value) tuples, such as the items() of a dict"


def _answers_by_id(parts: list[tuple[int, list[bytes]]], answers: list[list[T]]) -> dict[Id, T]:
    """Return the answers by id."""
    return {
        (shard, digest): one
        for (shard, digests), answer in zip(parts, answers, strict=True)
        for digest, one in zip(digests, answer, strict=True)
    }


def _mark_first(ids: list[Id], new: set[Id]) -> list[bool]:
    answers: list[bool] = []
    for one in ids:
        answers.append(one in new)
        new.discard(one)
    return answers


def _read_new(reply: Reply) -> bool:
    return bool(reply[2] == 1)


def _read_news(reply: Reply) -> list[bool]:
    return [new == 1 for new in reply[2:]]


def _read_values(reply: Reply) -> list[DedupValue[Any]]:
    return [DedupValue(reply[at] == 1, small.unpack(reply[at + 1])) for at in range(2, len(reply), 2)]


def _read_value(reply: Reply) -> Small | None:
    return small.unpack(reply[2]) if reply[2] else None
