"""Seen-sets: which ids came within a window, in 20 to 24 bytes an id (`lua/lib/page.lua` says how).

An id is a digest of 69 bits: five of them name one of 32 shards, 64 are stored. So with n ids in the window, an id that
is new is taken for one of them with a probability of n / 2^69.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from typing import TypeVar

from idemgate.core import keys
from idemgate.core.calls import Arg, Batch, Call, Reply, call
from idemgate.core.clock import Clock, stamp
from idemgate.core.durations import Duration, milliseconds
from idemgate.core.tokens import token

__all__ = ["SeenSets"]

SHARDS = 32
"""Never another number: ids that were marked would be looked for elsewhere. Enough to spread over the nodes of a
cluster, few enough that a batch is few calls."""
AT_ONCE = 250
"""Ids in one call: some 2 ms of the server."""
T = TypeVar("T")
Id = tuple[int, bytes]
"""The shard and the digest of an id."""


class SeenSets:
    """Builds the calls of one namespace."""

    __slots__ = ("clock", "namespace")

    def __init__(self, namespace: str, clock: Clock | None) -> None:
        self.namespace = namespace
        self.clock = clock

    def first(self, scope: str, key: keys.Key, window: Duration) -> Call[bool]:
        """Whether this id is new."""
        shard, digest = _id(key)
        return self._see(scope, shard, milliseconds(window, "retention"), _check(), [digest], _new)

    def first_many(self, scope: str, many: Iterable[keys.Key], window: Duration) -> Batch[list[bool]]:
        """Which ids are new, in their order: a call for each shard and 250 of its ids. Of equal ones only the first is
        asked for."""
        kept, check = milliseconds(window, "retention"), _check()
        ids = [_id(key) for key in many]
        parts = _parts(ids)
        calls = [self._see(scope, shard, kept, check, digests, _news) for shard, digests in parts]

        def join(answers: list[list[bool]]) -> list[bool]:
            new = {
                (shard, digest)
                for (shard, digests), answer in zip(parts, answers, strict=True)
                for digest, is_new in zip(digests, answer, strict=True)
                if is_new
            }
            return _firsts(ids, new)

        return Batch(calls, join)

    def _see(
        self, scope: str, shard: int, window: int, check: bytes, digests: Sequence[bytes], read: Callable[[Reply], T]
    ) -> Call[T]:
        args: tuple[Arg, ...] = (stamp(self.clock), window, check, *digests)
        return call("once/see", keys.seen(self.namespace, scope, shard), args, read)


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
