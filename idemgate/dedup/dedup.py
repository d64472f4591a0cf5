"""The compact set of ids: `gate.dedup(scope, retention)`."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import TypeVar

from idemgate.core.durations import Duration, milliseconds
from idemgate.core.keys import Key, check_scope
from idemgate.dedup.calls import DedupCalls, DedupValue
from idemgate.dedup.value import Small
from idemgate.store.context import Context

__all__ = ["AioDedup", "Dedup"]

V = TypeVar("V", bound=Small)


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
        return DedupCalls(self._context.namespace, self._context.clock, self.scope, self._retention)

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
