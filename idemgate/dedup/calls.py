"""Seen-sets: which ids came within a window, in 20 to 25 bytes an id (`lua/lib/page.lua` says how), or in 40 to 48 with
a small value that was kept for it.

An id is a digest of 69 bits: five of them name one of 32 shards, 64 are stored. So with n ids in the window, an id that
is new is taken for one of them with a probability of n / 2^69.
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
from idemgate.core.validation import each
from idemgate.dedup import value as small
from idemgate.dedup.value import Small
from idemgate.errors import InvalidArgument

__all__ = ["DedupCalls", "DedupValue"]

SHARDS = 32
"""Never another number: ids that were marked would be looked for elsewhere. Enough to spread over the nodes of a
cluster, few enough that a batch is few calls."""
AT_ONCE = 250
"""Ids in one call: some 2 ms of the server."""
T = TypeVar("T")
V = TypeVar("V", bound=Small)
Id = tuple[int, bytes]
"""The shard and the digest of an id."""


@dataclass(frozen=True, slots=True)
class DedupValue(Generic[V]):
    """The value of an id. `first`: this call stored it."""

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
        shard, digest = _id(key)
        return self._add(shard, _check(), [digest], _new)

    def add_many(self, many: Iterable[keys.Key]) -> Batch[list[bool]]:
        """Build a call for each shard and 250 of its ids. Equal ids are sent once."""
        check = _check()
        ids = [_id(key) for key in each(many, "keys", "Pass a list of keys")]
        parts = _parts(ids)
        calls = [self._add(shard, check, digests, _news) for shard, digests in parts]

        def join(answers: list[list[bool]]) -> list[bool]:
            return _firsts(ids, {one for one, is_new in _answers(parts, answers).items() if is_new})

        return Batch(calls, join)

    def get_or_set(self, key: keys.Key, value: V) -> Call[DedupValue[V]]:
        """Build the call that stores a value for an id unless it has one."""
        shard, digest = _id(key)
        return self._set(shard, _check(), [(digest, small.packed(value))], lambda reply: _values(reply)[0])

    def get_or_set_many(self, many: Iterable[tuple[keys.Key, V]]) -> Batch[list[DedupValue[V]]]:
        """Build the calls that store many values, as `add_many` does. Equal ids are sent once."""
        check = _check()
        pairs = [(_id(key), small.packed(value)) for key, value in map(_pair, each(many, "pairs", _PAIRS))]
        ids, values = [one for one, _ in pairs], dict(reversed(pairs))
        parts = _parts(ids)
        calls = [
            self._set(shard, check, [(one, values[shard, one]) for one in digests], _values) for shard, digests in parts
        ]

        def join(answers: list[list[DedupValue[V]]]) -> list[DedupValue[V]]:
            found = _answers(parts, answers)
            firsts = _firsts(ids, {one for one, answer in found.items() if answer.first})
            return [DedupValue(first, found[one].value) for one, first in zip(ids, firsts, strict=True)]

        return Batch(calls, join)

    def get(self, key: keys.Key) -> Call[Small | None]:
        """Build the call that reads the value of an id; None if it has none."""
        shard, digest = _id(key)
        args = (stamp(self.clock), digest)
        return call("dedup/get", keys.dedup_values(self.namespace, self.scope, shard), args, _value)

    def _add(self, shard: int, check: bytes, digests: Sequence[bytes], read: Callable[[Reply], T]) -> Call[T]:
        args: tuple[Arg, ...] = (stamp(self.clock), self.retention, check, *digests)
        return call("dedup/add", keys.dedup_ids(self.namespace, self.scope, shard), args, read)

    def _set(
        self, shard: int, check: bytes, pairs: Sequence[tuple[bytes, bytes]], read: Callable[[Reply], T]
    ) -> Call[T]:
        words = (word for pair in pairs for word in pair)
        args: tuple[Arg, ...] = (stamp(self.clock), self.retention, check, *words)
        return call("dedup/get_or_set", keys.dedup_values(self.namespace, self.scope, shard), args, read)


def _id(key: keys.Key) -> Id:
    digest = blake2b(keys.raw(key), digest_size=9).digest()
    return digest[8] % SHARDS, digest[:8]


def _check() -> bytes:
    """What tells a copy of this request from another request: 40 bits."""
    return blake2b(token(), digest_size=5).digest()


def _parts(ids: list[Id]) -> list[tuple[int, list[bytes]]]:
    shards: defaultdict[int, list[bytes]] = defaultdict(list)
    for shard, digest in dict.fromkeys(ids):
        shards[shard].append(digest)
    return [
        (shard, digests[i : i + AT_ONCE]) for shard, digests in shards.items() for i in range(0, len(digests), AT_ONCE)
    ]


def _pair(pair: Any) -> tuple[keys.Key, Any]:
    if pair.__class__ is not tuple or len(pair) != 2:  # a text of two letters would pass for one
        raise InvalidArgument("pairs", pair, "not a key and its value", _PAIRS)
    return pair


_PAIRS = "Pass (key, value) tuples, such as the items() of a dict"


def _answers(parts: list[tuple[int, list[bytes]]], answers: list[list[T]]) -> dict[Id, T]:
    """What was answered, by id."""
    return {
        (shard, digest): one
        for (shard, digests), answer in zip(parts, answers, strict=True)
        for digest, one in zip(digests, answer, strict=True)
    }


def _firsts(ids: list[Id], new: set[Id]) -> list[bool]:
    answers: list[bool] = []
    for one in ids:
        answers.append(one in new)
        new.discard(one)
    return answers


def _new(reply: Reply) -> bool:
    return bool(reply[2] == 1)


def _news(reply: Reply) -> list[bool]:
    return [new == 1 for new in reply[2:]]


def _values(reply: Reply) -> list[DedupValue[Any]]:
    return [DedupValue(reply[at] == 1, small.unpacked(reply[at + 1])) for at in range(2, len(reply), 2)]


def _value(reply: Reply) -> Small | None:
    return small.unpacked(reply[2]) if reply[2] else None
