"""The compact set of ids: `gate.dedup(scope, retention)`.

An id takes 20 to 25 bytes (`scripts/lib/pages.lua`), and 40 to 48 with a small value. It is a digest of 69 bits: five
bits select one of 32 shards, and 64 are stored. With n ids in the set, a new id is mistaken for a known one with a
probability of n / 2^69.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any, Generic, TypeVar
from uuid import UUID

from idemgate.core import keys
from idemgate.core.calls import Arg, Batch, Call, Reply, call, new_id, stamp
from idemgate.core.clock import Clock
from idemgate.core.durations import Duration, milliseconds
from idemgate.core.keys import Key, check_scope
from idemgate.core.validation import check_iterable
from idemgate.errors import InvalidArgument
from idemgate.store.context import Context

__all__ = ["AioDedup", "Dedup", "DedupCalls", "DedupValue", "Small", "unpack_value"]

SHARDS = 32
"""The number of shards. It must never change, since stored ids would be looked up in another shard.

32 shards spread over the nodes of a cluster, and a batch still needs few calls.
"""
AT_ONCE = 250
"""The maximum number of ids in one call, which blocks the server for about 2 ms."""
Small = str | bytes | int | UUID
T = TypeVar("T")
V = TypeVar("V", bound=Small)
Id = tuple[int, bytes]
"""The shard and the digest of an id."""
MAX_BYTES = 16
_KINDS = (bytes, str, int, UUID)
"""The types by their stored number. The first stored byte is the number times 32, plus the length of the value."""


@dataclass(frozen=True, slots=True)
class DedupValue(Generic[V]):
    """The value of an id. `first` is True if this call stored it."""

    first: bool
    value: V


class Dedup:
    """A set of the ids that arrived within `retention`. `gate.dedup` creates it; `dedup.aio` is its async form.

    An id takes 20 to 25 bytes, and 40 to 48 with a value. A record of `once` or `first` takes about 180.

    The set shares no keys with records: `claim`, `first`, `inspect` and `forget` do not read or change it. The ids of
    `add` and those of `get_or_set` are separate, too.

    A new id is mistaken for a known one with a probability of n / 2^69, where n is the number of ids in the set.
    """

    def __init__(self, context: Context, scope: str, retention: Duration) -> None:
        check_scope(scope)
        self.scope = scope
        self._context = context
        self._retention = milliseconds(retention, "retention")

    @cached_property
    def _calls(self) -> DedupCalls:
        """The builder of the calls, made at the first call: `configure` may still change the namespace before."""
        self._context.bound.add(self)
        return DedupCalls(self._context.namespace, self._context.clock, self.scope, self._retention)

    def _rebind(self) -> None:
        """Forget the calls of the former namespace; see `Context.override`."""
        self.__dict__.pop("_calls", None)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.scope!r}>"

    @cached_property
    def aio(self) -> AioDedup:
        """The async form: `await dedup.aio.add(id)`."""
        return AioDedup(self)

    def add(self, key: Key) -> bool:
        """Add an id. Atomic, one round trip.

        Returns:
            True for the first caller within the retention, False for all others.

        Raises:
            InvalidArgument: the id is not a str, bytes or int.
            StoreError: the server did not answer. A retry may then return False.
        """
        return self._context.link.run(self._calls.add(key))

    def add_many(self, keys: Iterable[Key]) -> list[bool]:
        """Add many ids in one round trip. Each id is added atomically, the batch is not.

        Returns:
            True or False for each id, in order. Of equal ids only the first can be new.
        """
        return self._context.link.run_all(self._calls.add_many(keys))

    def get_or_set(self, key: Key, value: V) -> DedupValue[V]:
        """Store a small value for an id, unless it has one. Atomic, one round trip.

        Args:
            key: the id.
            value: text or bytes of at most 16 bytes, an int of 128 bits or a UUID. Use one type in a scope.

        Returns:
            The value of the first caller, and whether that was this one.

        Raises:
            InvalidArgument: the value has another type, or is longer.
            StoreError: the server did not answer. A retry returns the same value.
        """
        return self._context.link.run(self._calls.get_or_set(key, value))

    def get_or_set_many(self, pairs: Iterable[tuple[Key, V]]) -> list[DedupValue[V]]:
        """Store small values for many (id, value) pairs, in one round trip, each as `get_or_set`."""
        return self._context.link.run_all(self._calls.get_or_set_many(pairs))

    def get(self, key: Key) -> Small | None:
        """Return the value of an id, None if it has none. One round trip; nothing is written."""
        return self._context.link.run(self._calls.get(key))


class AioDedup:
    """The async form of a `Dedup`."""

    def __init__(self, dedup: Dedup) -> None:
        self._dedup = dedup

    async def add(self, key: Key) -> bool:
        """Add an id; see `Dedup.add`."""
        return await self._dedup._context.aio_link.run(self._dedup._calls.add(key))

    async def add_many(self, keys: Iterable[Key]) -> list[bool]:
        """Add many ids; see `Dedup.add_many`."""
        return await self._dedup._context.aio_link.run_all(self._dedup._calls.add_many(keys))

    async def get_or_set(self, key: Key, value: V) -> DedupValue[V]:
        """Store a small value for an id, unless it has one; see `Dedup.get_or_set`."""
        return await self._dedup._context.aio_link.run(self._dedup._calls.get_or_set(key, value))

    async def get_or_set_many(self, pairs: Iterable[tuple[Key, V]]) -> list[DedupValue[V]]:
        """Store small values for many pairs; see `Dedup.get_or_set_many`."""
        return await self._dedup._context.aio_link.run_all(self._dedup._calls.get_or_set_many(pairs))

    async def get(self, key: Key) -> Small | None:
        """Return the value of an id; see `Dedup.get`."""
        return await self._dedup._context.aio_link.run(self._dedup._calls.get(key))


# -- calls ------------------------------------------------------------------------------------------------------------


class DedupCalls:
    """Builds the calls of one scope. `retention` is in ms."""

    __slots__ = ("clock", "namespace", "retention", "scope")

    def __init__(self, namespace: str, clock: Clock | None, scope: str, retention: int) -> None:
        self.namespace: str = namespace
        self.clock: Clock | None = clock
        self.scope: str = scope
        self.retention: int = retention

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
        return self._set(shard, _request_id(), [(digest, pack_value(value))], lambda reply: _read_values(reply)[0])

    def get_or_set_many(self, entries: Iterable[tuple[keys.Key, V]]) -> Batch[list[DedupValue[V]]]:
        """Build the calls that store many values, as `add_many` does. Equal ids are sent once."""
        request_id = _request_id()
        pairs = [
            (_digest_id(key), pack_value(value))
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
    return blake2b(new_id(), digest_size=5).digest()


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
    return [DedupValue(reply[at] == 1, unpack_value(reply[at + 1])) for at in range(2, len(reply), 2)]


def _read_value(reply: Reply) -> Small | None:
    return unpack_value(reply[2]) if reply[2] else None


# -- values -----------------------------------------------------------------------------------------------------------


def pack_value(value: object) -> bytes:
    """Return the value in 17 bytes. Raises InvalidArgument for another type or a longer value."""
    if isinstance(value, bool) or not isinstance(value, _KINDS):
        raise InvalidArgument("value", value, f"a {type(value).__name__} cannot be stored", f"Store {_SUPPORTED}")
    raw = _value_bytes(value)
    if len(raw) > MAX_BYTES:
        raise InvalidArgument(
            "value", value, f"{len(raw)} bytes long", f"Store {_SUPPORTED}, or a larger value with `once` or `claim`"
        )
    kind = next(number for number, known in enumerate(_KINDS) if isinstance(value, known))
    return bytes([kind * 32 + len(raw)]) + raw.ljust(MAX_BYTES, b"\0")


def unpack_value(data: bytes) -> Small:
    """Return the packed value. Raises ValueError for anything else."""
    if len(data) != MAX_BYTES + 1 or data[0] // 32 >= len(_KINDS) or data[0] % 32 > MAX_BYTES:
        raise ValueError("it is not a value of a dedup set")
    kind, raw = _KINDS[data[0] // 32], data[1 : 1 + data[0] % 32]
    if kind is str:
        return raw.decode()
    if kind is int:
        return int.from_bytes(raw, signed=True)
    return UUID(bytes=raw) if kind is UUID else raw


_SUPPORTED = f"text or bytes of at most {MAX_BYTES} bytes, a whole number of 128 bits, or a UUID"


def _value_bytes(value: Small) -> bytes:
    if isinstance(value, str):
        try:
            return value.encode()
        except UnicodeEncodeError as error:
            problem = f"not valid Unicode ({error.reason})"
            raise InvalidArgument("value", value, problem, "Pass bytes, or repair the text") from None
    if isinstance(value, int):
        return value.to_bytes((8 + (value + (value < 0)).bit_length()) // 8, signed=True)
    return value.bytes if isinstance(value, UUID) else value
