"""What an inbox needs of a client library: a transaction, and a statement in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any, Literal, Protocol, TypeVar

from idemgate_sql.relay_connection import RelayConnection

__all__ = ["AioDatabase", "Database", "Dialect", "Params", "Placeholders", "Rows", "read_text"]

C = TypeVar("C")
Dialect = Literal["postgresql", "sqlite"]
Placeholders = Literal["named", "pyformat"]
"""The form of a parameter in a statement: `:name` or `%(name)s`."""
Params = Mapping[str, object]
Rows = Sequence[Sequence[Any]]


class Database(Protocol[C]):
    """A database of blocking functions. `C` is the type of its connections."""

    @property
    def dialect(self) -> Dialect:
        """The kind of the database."""
        ...

    @property
    def placeholders(self) -> Placeholders:
        """The form of parameters."""
        ...

    def transaction(self) -> AbstractContextManager[C]:
        """Open a connection and begin a transaction. Commit at the end of the block, or roll back if it raises."""
        ...

    def execute(self, connection: C, sql: str, params: Params) -> Rows:
        """Execute a statement. Return its rows, or nothing if it has none."""
        ...

    def connect_relay(self, channel: str) -> AbstractAsyncContextManager[RelayConnection]:
        """Return the connection of a relay, whose locks and NOTIFY have this name."""
        ...


class AioDatabase(Protocol[C]):
    """A database of async functions; see `Database`."""

    @property
    def dialect(self) -> Dialect:
        """The kind of the database."""
        ...

    @property
    def placeholders(self) -> Placeholders:
        """The form of parameters."""
        ...

    def transaction(self) -> AbstractAsyncContextManager[C]:
        """Open a connection and begin a transaction; see `Database.transaction`."""
        ...

    async def execute(self, connection: C, sql: str, params: Params) -> Rows:
        """Execute a statement; see `Database.execute`."""
        ...

    def connect_relay(self, channel: str) -> AbstractAsyncContextManager[RelayConnection]:
        """Return the connection of a relay; see `Database.connect_relay`."""
        ...


def read_text(value: str | bytes) -> str:
    """Return a text of a row. psycopg returns bytes from a database whose encoding is SQL_ASCII. It writes UTF-8."""
    return value.decode() if isinstance(value, bytes) else value
