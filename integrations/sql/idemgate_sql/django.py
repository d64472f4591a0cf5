"""The inbox on a database of Django, for blocking functions. Models and cursors of that database need no more."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

from django.db import connections, transaction  # pyright: ignore[reportMissingTypeStubs]

from idemgate import InvalidArgument
from idemgate.types import Duration, milliseconds
from idemgate_sql.database import Dialect, Params, Placeholders, Rows
from idemgate_sql.errors import ConnectionInUse
from idemgate_sql.inbox import BaseInbox
from idemgate_sql.polling import PollingConnection, poll
from idemgate_sql.sqlite import refuse_ends

__all__ = ["DjangoDatabase", "Inbox"]


class DjangoDatabase:
    """The connections of one entry of DATABASES, one for each thread."""

    placeholders: Placeholders = "pyformat"

    def __init__(self, using: str, lock_timeout_ms: int) -> None:
        self._using = using
        self._lock_timeout_ms = lock_timeout_ms

    @property
    def dialect(self) -> Dialect:
        """The kind of the database. Raises InvalidArgument for one that is not supported."""
        vendor = connections[self._using].vendor
        if vendor not in ("postgresql", "sqlite"):
            raise InvalidArgument("using", self._using, f"a database of {vendor}", "Use PostgreSQL or SQLite")
        return cast(Dialect, vendor)

    @contextmanager
    def transaction(self) -> Generator[Any]:
        """Begin a transaction on the connection of this thread; see `Database.transaction`."""
        connection: Any = connections[self._using]
        if connection.in_atomic_block:
            raise ConnectionInUse("atomic", "Call the function outside of it. In tests use TransactionTestCase")
        if (
            self.dialect == "postgresql" and not connection.settings_dict["AUTOCOMMIT"]
        ):  # then `atomic` is a savepoint that nothing commits
            raise InvalidArgument("AUTOCOMMIT", False, "Django never commits", "Leave AUTOCOMMIT out of DATABASES")
        is_open = connection.connection is not None
        connection.close_if_unusable_or_obsolete()  # as before a request: a worker may have idled for hours
        try:
            if self.dialect == "postgresql":
                with transaction.atomic(using=self._using, durable=True):
                    yield connection
                return
            with (
                _use_timeout(connection, self._lock_timeout_ms),
                transaction.atomic(using=self._using, durable=True),
                refuse_ends(connection.connection),
            ):
                yield connection
        finally:
            if not is_open:  # as after a request: CONN_MAX_AGE says how long it stays open
                connection.close_if_unusable_or_obsolete()

    def execute(self, connection: Any, sql: str, params: Params) -> Rows:
        """Execute a statement."""
        with connection.cursor() as cursor:
            cursor.execute(sql, dict(params) or None)
            return cast(Rows, cursor.fetchall()) if cursor.description else ()

    def connect_relay(self, channel: str) -> PollingConnection:  # noqa: ARG002 - see `Database.connect_relay`
        """Return the connection of a relay, which polls. Several relays of a database all work."""
        return poll(self)


@contextmanager
def _use_timeout(connection: Any, lock_timeout_ms: int) -> Generator[None]:
    """Set the time-out for locks of SQLite inside the block."""
    with connection.cursor() as cursor:
        before = cursor.execute("PRAGMA busy_timeout").fetchone()[0]
    try:
        with connection.cursor() as cursor:
            cursor.execute(f"PRAGMA busy_timeout = {lock_timeout_ms}")
        yield
    finally:
        if connection.connection is not None:
            with connection.cursor() as cursor:
                cursor.execute(f"PRAGMA busy_timeout = {before}")


def _is_refused_end(error: Exception) -> bool:
    """Return True if Django refused a commit or rollback. A query after a failed one has an error of the same class."""
    return isinstance(error, transaction.TransactionManagementError) and "forbidden" in str(error)


class Inbox(BaseInbox[Any]):
    """The inbox in a database of Django: `@gate.once(key=..., sink=Inbox())`.

    The function runs in `transaction.atomic(durable=True)`, so models and cursors of this database take part.

    Args:
        using: the alias of the database in DATABASES.
        table: the prefix of the tables, with a schema if need be.
        lock_timeout: how long a run waits for another transaction that has inserted its key. Then it raises RowLocked.

    Raises:
        InvalidArgument: an argument is invalid.
    """

    def __init__(self, using: str = "default", *, table: str = "idemgate", lock_timeout: Duration = "5s") -> None:
        database = DjangoDatabase(using, milliseconds(lock_timeout, "lock_timeout"))
        super().__init__(database, table, lock_timeout, notify=False)

    def is_end(self, error: Exception) -> bool:
        """Return True if SQLite or Django refused a commit or rollback."""
        return super().is_end(error) or _is_refused_end(error)
