"""The protocol of a sink: a database that stores a key and its result in the transaction of the handler's effect.

A sink knows bytes only: neither codecs nor the store. `integrations/sql` has sinks for PostgreSQL and SQLite.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Literal, NamedTuple, Protocol

__all__ = ["AioSink", "Sink", "SinkEntry", "StoredKind", "StoredResult"]

StoredKind = Literal["value", "none", "failure"]
"""The kind of a stored result. "none": the work is done, and `data` is the reason why it has no value."""


class SinkEntry(NamedTuple):
    """The run of a key.

    `scope` and `key` name it together. The scope begins with the namespace. Both have the form that they have in Redis:
    special characters are escaped, and long keys are hashed. `token` is the fencing token of the run, or 0 if it runs
    without the store. `retention` is the time in seconds for which the key stays done.
    """

    scope: str
    key: str
    fingerprint: bytes
    token: int
    retention: float


class StoredResult(NamedTuple):
    """The result of a run, as a sink stores it, and the fingerprint of the call that stored it."""

    kind: StoredKind
    data: bytes
    fingerprint: bytes


class Sink(Protocol):
    """A database of a blocking handler."""

    def apply(self, entry: SinkEntry, work: Callable[[], StoredResult]) -> StoredResult | None:
        """Run `work` and store its result in one transaction, unless the entry was stored before.

        Begin a transaction and insert the entry. If it was inserted, call `work`, store what it returns beside the
        entry, commit and return None. Else return the stored result. If `work` raises, roll back and raise.

        Raises:
            AlreadyInProgress: another transaction has inserted the entry, and did not end in time.
        """
        ...


class AioSink(Protocol):
    """A database of an async handler."""

    async def apply(self, entry: SinkEntry, work: Callable[[], Awaitable[StoredResult]]) -> StoredResult | None:
        """Run `work` and store its result in one transaction; see `Sink.apply`."""
        ...
