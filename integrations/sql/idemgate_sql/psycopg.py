"""The inbox in PostgreSQL by psycopg 3, blocking and async."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, contextmanager
from inspect import isawaitable, iscoroutinefunction
from typing import TYPE_CHECKING, Any, TypeAlias, Union

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from idemgate import InvalidArgument
from idemgate.types import Duration
from idemgate_sql.database import Dialect, Params, Placeholders, Rows
from idemgate_sql.errors import ConnectionInUse
from idemgate_sql.inbox import BaseAioInbox, BaseInbox
from idemgate_sql.psycopg_relay import connect, connect_async
from idemgate_sql.relay_connection import RelayConnection

if TYPE_CHECKING:
    from psycopg_pool import AsyncConnectionPool, ConnectionPool

__all__ = ["AioSource", "AsyncConnection", "AsyncInbox", "AsyncPsycopgDatabase", "Connection", "Inbox",
           "PsycopgDatabase", "Source"]  # fmt: skip

Connection: TypeAlias = psycopg.Connection[Any]
AsyncConnection: TypeAlias = psycopg.AsyncConnection[Any]
Source: TypeAlias = Union[str, "ConnectionPool[Any]", Callable[[], AbstractContextManager[Connection]]]
"""A connection string, a pool, or a function that returns a new connection, such as `pool.connection`."""
AioSource: TypeAlias = Union[
    str,
    "AsyncConnectionPool[Any]",
    Callable[[], AbstractAsyncContextManager[AsyncConnection] | Awaitable[AsyncConnection]],
]
"""The same for async functions. The function may return an awaitable, as `AsyncConnection.connect` does."""


class PsycopgDatabase:
    """Blocking connections of psycopg."""

    dialect: Dialect = "postgresql"
    placeholders: Placeholders = "pyformat"

    def __init__(self, source: Source) -> None:
        self._open = _opener(source, False, lambda: psycopg.connect(source))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]

    @contextmanager
    def transaction(self) -> Generator[Connection]:
        """Open a connection and begin a transaction; see `Database.transaction`."""
        with self._open() as connection:
            _check_idle(connection)
            with connection.transaction():
                yield connection

    def execute(self, connection: Connection, sql: str, params: Params) -> Rows:
        """Execute a statement, whatever kind of cursor and rows the connection is set to."""
        with psycopg.Cursor(connection, row_factory=tuple_row) as cursor:
            cursor.execute(sql.encode(), params)
            return cursor.fetchall() if cursor.description else ()

    def connect_relay(self, channel: str) -> AbstractAsyncContextManager[RelayConnection]:
        """Return the connection of a relay: LISTEN, advisory locks and its statements."""
        return connect(self._open, channel)


class AsyncPsycopgDatabase:
    """Async connections of psycopg."""

    dialect: Dialect = "postgresql"
    placeholders: Placeholders = "pyformat"

    def __init__(self, source: AioSource) -> None:
        self._open = _opener(source, True, lambda: psycopg.AsyncConnection.connect(source))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]

    @asynccontextmanager
    async def transaction(self) -> AsyncGenerator[AsyncConnection]:
        """Open a connection and begin a transaction; see `Database.transaction`."""
        opened = self._open()
        async with await opened if isawaitable(opened) else opened as connection:
            _check_idle(connection)
            async with connection.transaction():
                yield connection

    async def execute(self, connection: AsyncConnection, sql: str, params: Params) -> Rows:
        """Execute a statement; see `PsycopgDatabase.execute`."""
        async with psycopg.AsyncCursor(connection, row_factory=tuple_row) as cursor:
            await cursor.execute(sql.encode(), params)
            return await cursor.fetchall() if cursor.description else ()

    def connect_relay(self, channel: str) -> AbstractAsyncContextManager[RelayConnection]:
        """Return the connection of a relay; see `PsycopgDatabase.connect_relay`."""
        return connect_async(self._open, channel)


class Inbox(BaseInbox[Connection]):
    """The inbox of blocking functions in PostgreSQL: `@gate.once(key=..., sink=inbox)`.

    The function runs in a transaction, whose connection `inbox.connection()` returns. Threads can share an inbox.

    Args:
        source: a connection string, a `psycopg_pool.ConnectionPool`, or a function that returns a new connection. A
            connection string opens one for each run. Nothing is opened before the first run.
        table: the prefix of the tables, with a schema if need be.
        lock_timeout: how long a run waits for another transaction that has inserted its key. Then it raises RowLocked.
        notify: whether a trigger wakes the relay at its commit. NOTIFY takes a lock of the whole server for a moment.

    Raises:
        InvalidArgument: an argument is invalid.
    """

    def __init__(
        self, source: Source, *, table: str = "idemgate", lock_timeout: Duration = "5s", notify: bool = True
    ) -> None:
        super().__init__(PsycopgDatabase(source), table, lock_timeout, notify)

    def is_end(self, error: Exception) -> bool:
        """Return True for `psycopg.Rollback`. The transaction of psycopg would end as if nothing was raised."""
        return isinstance(error, psycopg.Rollback)


class AsyncInbox(BaseAioInbox[AsyncConnection]):
    """The inbox of async functions in PostgreSQL; see `Inbox`. `source` may be an `AsyncConnectionPool`."""

    def __init__(
        self, source: AioSource, *, table: str = "idemgate", lock_timeout: Duration = "5s", notify: bool = True
    ) -> None:
        super().__init__(AsyncPsycopgDatabase(source), table, lock_timeout, notify)

    def is_end(self, error: Exception) -> bool:
        """Return True for `psycopg.Rollback`; see `Inbox.is_end`."""
        return isinstance(error, psycopg.Rollback)


def _opener(source: Any, awaits: bool, connect: Callable[[], Any]) -> Callable[[], Any]:
    """Return a function that opens a connection. Raise InvalidArgument if the source is none."""
    if isinstance(source, str):
        return connect
    get = getattr(source, "getconn", None)  # of a pool
    if get is not None and iscoroutinefunction(get) != awaits:
        fix = "Pass a ConnectionPool to Inbox, and an AsyncConnectionPool to AsyncInbox"
        raise InvalidArgument("source", source, "a pool for functions of the other kind", fix)
    opener = getattr(source, "connection", source)
    if isinstance(source, psycopg.Connection | psycopg.AsyncConnection) or not callable(opener):
        fix = "Pass a connection string, a pool of psycopg_pool, or a function that returns a new connection"
        raise InvalidArgument("source", source, "not a source of connections", fix)
    return opener  # type: ignore[no-any-return]


def _check_idle(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> None:
    """Raise ConnectionInUse if the connection is in a transaction, which would end with the caller's."""
    status = connection.info.transaction_status
    if status is not TransactionStatus.IDLE:
        raise ConnectionInUse(status.name)
