"""The inbox by SQLAlchemy 2: PostgreSQL for blocking and async functions, and SQLite for blocking ones."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, cast
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, Engine, event, text
from sqlalchemy.exc import InvalidRequestError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

from idemgate import InvalidArgument
from idemgate.types import Duration, SinkEntry, StoredResult, milliseconds
from idemgate_sql.database import Dialect, Params, Placeholders, Rows
from idemgate_sql.errors import ConnectionInUse
from idemgate_sql.inbox import BaseAioInbox, BaseInbox
from idemgate_sql.polling import PollingConnection, poll, poll_async
from idemgate_sql.sqlite import NESTED_FIX, refuse_ends

__all__ = ["AsyncInbox", "AsyncSQLAlchemyDatabase", "Inbox", "SQLAlchemyDatabase"]


class SQLAlchemyDatabase:
    """Blocking connections of an engine."""

    placeholders: Placeholders = "named"

    def __init__(self, engine: Engine, lock_timeout_ms: int) -> None:
        self.dialect: Dialect = _check_engine(engine, Engine)
        self._engine = engine
        self._lock_timeout_ms = lock_timeout_ms

    @contextmanager
    def transaction(self) -> Generator[Connection]:
        """Open a connection and begin a transaction; see `Database.transaction`."""
        with self._engine.connect() as connection:
            _check_isolation(connection)
            try:
                with (
                    connection.begin(),
                    _lock(connection, self.dialect, self._lock_timeout_ms),
                    _refuse_commit(connection),
                    _refuse_ends(connection, self.dialect),
                ):
                    yield connection
            except BaseException:
                _roll_back(connection)
                raise

    def execute(self, connection: Connection, sql: str, params: Params) -> Rows:
        """Execute a statement."""
        found = connection.execute(text(sql), dict(params))
        return cast(Rows, found.fetchall()) if found.returns_rows else ()

    def connect_relay(self, channel: str) -> PollingConnection:  # noqa: ARG002 - see `Database.connect_relay`
        """Return the connection of a relay, which polls. Several relays of a database all work."""
        return poll(self)


class AsyncSQLAlchemyDatabase:
    """Async connections of an engine."""

    placeholders: Placeholders = "named"

    def __init__(self, engine: AsyncEngine) -> None:
        self.dialect: Dialect = _check_engine(engine, AsyncEngine)
        self._engine = engine

    @asynccontextmanager
    async def transaction(self) -> AsyncGenerator[AsyncConnection]:
        """Open a connection and begin a transaction; see `Database.transaction`."""
        async with self._engine.connect() as connection:
            await connection.run_sync(_check_isolation)
            try:
                async with connection.begin():
                    with _refuse_commit(connection.sync_connection):
                        yield connection
            except BaseException:
                await connection.run_sync(_roll_back)
                raise

    async def execute(self, connection: AsyncConnection, sql: str, params: Params) -> Rows:
        """Execute a statement; see `SQLAlchemyDatabase.execute`."""
        found = await connection.execute(text(sql), dict(params))
        return cast(Rows, found.fetchall()) if found.returns_rows else ()

    def connect_relay(self, channel: str) -> PollingConnection:  # noqa: ARG002 - see `Database.connect_relay`
        """Return the connection of a relay; see `SQLAlchemyDatabase.connect_relay`."""
        return poll_async(self)


class Inbox(BaseInbox[Connection]):
    """The inbox of blocking functions by an `Engine`: `@gate.once(key=..., sink=inbox)`.

    The function runs in a transaction. `inbox.connection()` returns its connection, `inbox.session()` its session.

    Args:
        engine: an engine of PostgreSQL or SQLite.
        table: the prefix of the tables, with a schema if need be.
        lock_timeout: how long a run waits for another transaction that has inserted its key. Then it raises RowLocked.

    Raises:
        InvalidArgument: an argument is invalid.
    """

    def __init__(self, engine: Engine, *, table: str = "idemgate", lock_timeout: Duration = "5s") -> None:
        database = SQLAlchemyDatabase(engine, milliseconds(lock_timeout, "lock_timeout"))
        super().__init__(database, table, lock_timeout, notify=False)
        self._sessions: WeakKeyDictionary[Connection, Session] = WeakKeyDictionary()

    def session(self) -> Session:
        """Return the ORM session of the run. It is flushed when the function returns, and committed with the row.

        Raises:
            NoCurrentExecution: the caller is not part of a function that is guarded with this inbox.
        """
        connection = self.connection()
        if (session := self._sessions.get(connection)) is None:
            session = self._sessions[connection] = _RunSession(connection, join_transaction_mode="rollback_only")
            event.listen(session, "before_commit", _refuse_commit_of_session)
        return session

    def apply(self, entry: SinkEntry, work: Any) -> StoredResult | None:
        """Run `work` and store its result in one transaction; see `idemgate.types.Sink`.

        Raises:
            ConnectionInUse: the caller runs with this inbox on SQLite, and so holds the write lock.
            EndedByHandler: the handler ended the transaction. A commit was refused.
        """
        if self.database.dialect == "sqlite" and self.is_running:
            raise ConnectionInUse("write lock of the outer run", NESTED_FIX)

        def run() -> StoredResult:
            connection = self.connection()
            try:
                result: StoredResult = work()
                if (session := self._sessions.get(connection)) is not None:
                    session.flush()
            except Exception as error:
                _check_open(connection, error)
                raise
            finally:
                if (session := self._sessions.pop(connection, None)) is not None:
                    session.close()  # without influence on the transaction
            _check_open(connection)
            return result

        return super().apply(entry, run)

    def is_end(self, error: Exception) -> bool:
        """Return True if a commit was refused, or if the handler rolled back or closed its connection."""
        return isinstance(error, _Ended) or super().is_end(error)


class AsyncInbox(BaseAioInbox[AsyncConnection]):
    """The inbox of async functions by an `AsyncEngine` of PostgreSQL; see `Inbox`."""

    def __init__(self, engine: AsyncEngine, *, table: str = "idemgate", lock_timeout: Duration = "5s") -> None:
        super().__init__(AsyncSQLAlchemyDatabase(engine), table, lock_timeout, notify=False)
        self._sessions: WeakKeyDictionary[AsyncConnection, AsyncSession] = WeakKeyDictionary()

    def session(self) -> AsyncSession:
        """Return the ORM session of the run; see `Inbox.session`."""
        connection = self.connection()
        if (session := self._sessions.get(connection)) is None:
            session = self._sessions[connection] = _AsyncRunSession(connection, join_transaction_mode="rollback_only")
            event.listen(session.sync_session, "before_commit", _refuse_commit_of_session)
        return session

    async def apply(self, entry: SinkEntry, work: Any) -> StoredResult | None:
        """Run `work` and store its result in one transaction; see `idemgate.types.AioSink`."""

        async def run() -> StoredResult:
            connection = self.connection()
            try:
                result: StoredResult = await work()
                if (session := self._sessions.get(connection)) is not None:
                    await session.flush()
            except Exception as error:
                _check_open(connection, error)
                raise
            finally:
                if (session := self._sessions.pop(connection, None)) is not None:
                    session.sync_session.close()  # without influence on the transaction
            _check_open(connection)
            return result

        return await super().apply(entry, run)

    def is_end(self, error: Exception) -> bool:
        """Return True if the handler ended the transaction, or tried to; see `Inbox.is_end`."""
        return isinstance(error, _Ended) or super().is_end(error)


class _Ended(Exception):
    """The handler ended its transaction, or tried to commit it."""


def _check_open(connection: Connection | AsyncConnection, error: Exception | None = None) -> None:
    """Raise _Ended if the transaction has ended. `error`: what the handler raised, if it did.

    A transaction that the database has aborted is open, and so is one whose connection was lost.
    """
    may_have_ended = error is None or isinstance(error, InvalidRequestError)
    if may_have_ended and not connection.invalidated and not connection.in_transaction():
        raise _Ended from error


def _refuse(_: object) -> None:
    raise _Ended


class _RunSession(Session):
    """The session of a run. A `with` block flushes it and leaves it open: closing it would discard the objects."""

    def rollback(self) -> None:
        """Roll back also a transaction of which the session has used nothing: what was added to it is lost."""
        super().rollback()
        cast("Connection", self.bind).rollback()

    def __exit__(self, type_: object, value: object, traceback: object) -> None:
        if type_ is None:
            self.flush()


class _AsyncRunSession(AsyncSession):
    """As `_RunSession`."""

    sync_session_class = _RunSession

    async def __aexit__(self, type_: object, value: object, traceback: object) -> None:
        if type_ is None:
            await self.flush()


def _refuse_commit_of_session(session: Session) -> None:
    """Refuse the commit of a session, but not the end of its savepoint."""
    if not session.in_nested_transaction():
        raise _Ended


@contextmanager
def _refuse_commit(connection: Any) -> Generator[None]:
    """Refuse `connection.commit()` inside the block."""
    event.listen(connection, "commit", _refuse)
    try:
        yield
    finally:
        event.remove(connection, "commit", _refuse)


def _roll_back(connection: Connection) -> None:
    """Roll back by the driver's connection.

    SQLAlchemy takes a transaction whose commit was refused for ended. It would return the connection to its pool with
    the transaction still open, and the next commit would commit it.
    """
    if connection.closed or connection.invalidated:
        return
    try:
        connection.connection.rollback()
    except Exception:  # noqa: BLE001 - of any driver
        connection.invalidate()  # closed, so that the server rolls back


@contextmanager
def _refuse_ends(connection: Connection, dialect: Dialect) -> Generator[None]:
    """Refuse COMMIT and ROLLBACK as text inside the block, where SQLite would execute them unnoticed.

    A rollback by SQLAlchemy is let through, as by other databases: it notices. A session rolls back after a failed
    flush, and the error of the flush would be lost.
    """
    driver: Any = connection.connection.driver_connection
    if dialect != "sqlite" or not hasattr(driver, "set_authorizer"):
        yield
        return

    def allow_rollback(_: object) -> None:
        driver.set_authorizer(None)

    event.listen(connection, "rollback", allow_rollback)
    try:
        with refuse_ends(driver):
            yield
    finally:
        event.remove(connection, "rollback", allow_rollback)


@contextmanager
def _lock(connection: Connection, dialect: Dialect, lock_timeout_ms: int) -> Generator[None]:
    """Take the write lock of SQLite. The INSERT of PostgreSQL has a time-out of its own.

    A listener of the engine may have executed BEGIN, as the documentation of SQLAlchemy advises. Then the INSERT takes
    the lock, with the same time-out.
    """
    if dialect != "sqlite":
        yield
        return
    driver: Any = connection.connection.driver_connection
    before = driver.execute("PRAGMA busy_timeout").fetchone()[0]
    try:
        driver.execute(f"PRAGMA busy_timeout = {lock_timeout_ms}")
        if not driver.in_transaction:
            connection.exec_driver_sql("BEGIN IMMEDIATE")
        yield
    finally:
        with suppress(Exception):  # closed by the function
            driver.execute(f"PRAGMA busy_timeout = {before}")


def _check_engine(engine: Any, kind: type[Any]) -> Dialect:
    """Return the dialect of an engine. Raise InvalidArgument for another object or database."""
    if not isinstance(engine, kind):
        name = "create_engine" if kind is Engine else "create_async_engine"
        raise InvalidArgument("engine", engine, "not an engine of this inbox", f"Pass what {name}(...) returned")
    supported = ("postgresql", "sqlite") if kind is Engine else ("postgresql",)
    if engine.dialect.name not in supported:
        raise InvalidArgument("engine", engine.dialect.name, "not supported", f"Use {' or '.join(supported)}")
    return cast(Dialect, engine.dialect.name)


def _check_isolation(connection: Connection) -> None:
    """Raise ConnectionInUse if each statement would commit."""
    if getattr(connection.connection.dbapi_connection, "autocommit", False) is True:
        raise ConnectionInUse("AUTOCOMMIT", "Pass an engine with another isolation level")
