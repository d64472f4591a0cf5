"""The inbox in SQLite by the standard library, for blocking functions."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager, suppress
from functools import partial
from operator import eq
from os import PathLike, fspath
from typing import TypeAlias

from idemgate import InvalidArgument
from idemgate.types import Duration, SinkEntry, StoredResult, milliseconds
from idemgate_sql.database import Dialect, Params, Placeholders, Rows
from idemgate_sql.errors import ConnectionInUse
from idemgate_sql.inbox import BaseInbox
from idemgate_sql.polling import PollingConnection, poll

__all__ = ["NESTED_FIX", "Inbox", "Source", "SqliteDatabase"]

Source: TypeAlias = str | PathLike[str] | Callable[[], sqlite3.Connection]
"""The path of a database, or a function that opens a new connection. The inbox closes it after the run."""
NESTED_FIX = "SQLite has one writer: call the function after the outer one"


class SqliteDatabase:
    """Connections to one SQLite database. A transaction has the write lock from its beginning."""

    dialect: Dialect = "sqlite"
    placeholders: Placeholders = "named"

    def __init__(self, source: Source, lock_timeout_ms: int) -> None:
        _check_source(source)
        self._source = source
        self._lock_timeout_ms = lock_timeout_ms

    def _open(self) -> sqlite3.Connection:
        source = self._source
        # Not in autocommit mode: there, what follows an INSERT OR ROLLBACK of the handler would stay.
        return source() if callable(source) else sqlite3.connect(fspath(source))

    @contextmanager
    def transaction(self) -> Generator[sqlite3.Connection]:
        """Open a connection and begin a transaction; see `Database.transaction`."""
        with closing(self._open()) as connection:
            if connection.in_transaction:
                raise ConnectionInUse("in_transaction")
            before = connection.execute("PRAGMA busy_timeout").fetchone()[0]
            connection.execute(f"PRAGMA busy_timeout = {self._lock_timeout_ms}")
            connection.execute("BEGIN IMMEDIATE")
            connection.execute(f"PRAGMA busy_timeout = {before}")
            try:
                with refuse_ends(connection):
                    yield connection
            except BaseException:
                with suppress(sqlite3.Error):  # closed, or SQLite has rolled back
                    connection.execute("ROLLBACK")
                raise
            connection.execute("COMMIT")  # `commit()` does nothing where autocommit=True

    def execute(self, connection: sqlite3.Connection, sql: str, params: Params) -> Rows:
        """Execute a statement."""
        cursor = connection.cursor()
        cursor.row_factory = None
        return cursor.execute(sql, params).fetchall()

    def connect_relay(self, channel: str) -> PollingConnection:  # noqa: ARG002 - see `Database.connect_relay`
        """Return the connection of a relay, which polls. Several relays of a database all work."""
        return poll(self)


def _check_source(source: object) -> None:
    """Raise InvalidArgument if the source is neither a path nor a function."""
    is_connection = isinstance(source, sqlite3.Connection)  # which is callable, too
    if is_connection or not (callable(source) or isinstance(source, str | PathLike)):
        fix = "Pass the path of a database, or a function that opens a connection"
        raise InvalidArgument("source", source, "not a source of connections", fix)
    if source == ":memory:":
        fix = "Pass the path of a file: each connection of ':memory:' is a database of its own"
        raise InvalidArgument("source", source, "gone with its connection", fix)


@contextmanager
def refuse_ends(connection: sqlite3.Connection) -> Generator[None]:
    """Refuse COMMIT and ROLLBACK inside the block: SQLite answers "authorizer malfunction".

    A signal handler may raise after any call. So the first call after `try` and after `finally` is the one that counts.
    """
    try:
        connection.set_authorizer(_authorize)
        yield
    finally:
        try:  # noqa: SIM105 - `suppress` is a call
            connection.set_authorizer(None)
        except sqlite3.ProgrammingError:  # the block has closed it
            pass


_authorize = partial(max, sqlite3.SQLITE_OK, key=partial(eq, sqlite3.SQLITE_TRANSACTION))
"""Return SQLITE_OK, or SQLITE_TRANSACTION, which SQLite takes for a malfunction and refuses, as all other values.

It runs no Python code. The sqlite3 module drops what a signal handler raises inside a function of Python.
"""


class Inbox(BaseInbox[sqlite3.Connection]):
    """The inbox of blocking functions in SQLite: `@gate.once(key=..., sink=inbox)`.

    The function runs in a transaction, whose connection `inbox.connection()` returns. Threads can share an inbox, which
    opens a connection for each run. Runs of one database follow one another, because SQLite has one writer.

    Args:
        source: the path of a database, or a function that opens a connection.
        table: the prefix of the tables.
        lock_timeout: how long a run waits for other writers of the database. Then it raises RowLocked.

    Raises:
        InvalidArgument: an argument is invalid.
    """

    def __init__(self, source: Source, *, table: str = "idemgate", lock_timeout: Duration = "5s") -> None:
        super().__init__(SqliteDatabase(source, milliseconds(lock_timeout, "lock_timeout")), table, lock_timeout)

    def apply(self, entry: SinkEntry, work: Callable[[], StoredResult]) -> StoredResult | None:
        """Run `work` and store its result in one transaction; see `idemgate.types.Sink`.

        Raises:
            ConnectionInUse: a function that is guarded with this inbox runs in this thread. It holds the write lock.
            EndedByHandler: the handler tried to end the transaction. It was rolled back.
        """
        if self.is_running:
            raise ConnectionInUse("write lock of the outer run", NESTED_FIX)
        return super().apply(entry, work)
