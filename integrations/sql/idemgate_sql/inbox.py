"""The inbox: one row for each key, inserted in the transaction of the effect and committed with it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from typing import Generic, TypeVar, Unpack

from idemgate import Gate, Trigger
from idemgate.errors import NoCurrentExecution
from idemgate.types import Duration, SinkEntry, StoredResult, check_gate, milliseconds, row_name
from idemgate_sql.database import AioDatabase, Database, Dialect, Placeholders
from idemgate_sql.errors import EndedByHandler, RowLocked
from idemgate_sql.failures import ends_transaction, is_lock_timeout, is_missing_table
from idemgate_sql.outbox import AioOutbox, AnyTopic, Key, Outbox, Sent, TriggerOptions
from idemgate_sql.relay import Relay, check_relay_options
from idemgate_sql.schema import split_ddl
from idemgate_sql.statements import InboxStatements, check_rows, entry_params, name_params, read_result, result_params

__all__ = ["BaseAioInbox", "BaseInbox"]

C = TypeVar("C")
_TRIES = 5
"""How often a row that exists, and is gone when it is read, is inserted again."""


class _Run(Generic[C]):
    """The connection of a run, until it ends. A task that outlives the handler must not use it.

    A signal handler may raise after any call. So `apply` makes a run current inside the `try` that ends it. The `try`
    first takes the connection away, which is no call, and then restores the run before it.
    """

    __slots__ = ("connection",)

    def __init__(self, connection: C) -> None:
        self.connection: C | None = connection


class _Rows(Generic[C]):
    """What blocking and async inboxes share: their statements, and the connection of the current run."""

    def __init__(self, dialect: Dialect, placeholders: Placeholders, table: str, lock_timeout: Duration) -> None:
        self.table = table
        self.statements: InboxStatements = InboxStatements.build(dialect, placeholders, table)
        self.lock_timeout_ms: int = milliseconds(lock_timeout, "lock_timeout")
        self._current: ContextVar[_Run[C] | None] = ContextVar(f"{table}_inbox", default=None)

    def connection(self) -> C:
        """Return the open connection of the guarded function that runs, in its transaction.

        Raises:
            NoCurrentExecution: the caller is not part of a function that is guarded with this inbox.
        """
        run = self._current.get()
        if run is None or run.connection is None:
            raise NoCurrentExecution(
                "inbox.connection() works inside a function that is guarded with sink=inbox, while it runs. "
                "Decorate the function with @gate.once(key=..., sink=inbox)"
            )
        return run.connection

    @property
    def is_running(self) -> bool:
        """True inside a function that is guarded with this inbox."""
        run = self._current.get()
        return run is not None and run.connection is not None

    def is_end(self, error: Exception) -> bool:
        """Return True if an error of the handler means that it ended its transaction, or tried to."""
        return ends_transaction(error)

    def explain(self, error: Exception, entry: SinkEntry) -> None:
        """Raise RowLocked if the error is a lock time-out. Add a note to the error of a missing table."""
        if is_missing_table(error):
            error.add_note(
                f"Create the tables of the inbox: `python -m idemgate_sql ddl` prints the SQL, and "
                f"idemgate_sql.ddl(..., table={self.table!r}) returns it"
            )
        if is_lock_timeout(error):
            raise self.build_locked(entry) from error

    def build_locked(self, entry: SinkEntry) -> RowLocked:
        """Return the error of a row that belongs to another transaction."""
        return RowLocked(entry.key, self.lock_timeout_ms / 1000, entry.scope)


class BaseInbox(_Rows[C]):
    """The inbox of blocking functions on any `Database`."""

    def __init__(self, database: Database[C], table: str, lock_timeout: Duration, notify: bool = True) -> None:
        super().__init__(database.dialect, database.placeholders, table, lock_timeout)
        self.database = database
        self.outbox: Outbox[C] = Outbox(database, table, notify)

    def trigger(
        self,
        connection: C,
        topic: AnyTopic[Sent],
        key: Key,
        payload: Sent | None = None,
        **options: Unpack[TriggerOptions],
    ) -> None:
        """Write a trigger into the outbox, in the open transaction of a connection. A relay sends it after the commit.

        Args:
            connection: the connection of the transaction, such as `inbox.connection()`.
            topic: the topic, from `gate.topic(...)`.
            key: the key of the trigger.
            payload: its payload.
            **options: see `Topic.trigger`. A delay counts from this call.

        Raises:
            InvalidArgument: the topic would refuse the trigger. Nothing was written.
        """
        self.outbox.trigger_many(connection, topic, [Trigger(key, payload, **options)])

    def trigger_many(
        self, connection: C, topic: AnyTopic[Sent], triggers: Iterable[Trigger | tuple[Key, Sent]]
    ) -> None:
        """Write many triggers into the outbox, in order; see `trigger`. One statement for 100 of them.

        Args:
            connection: the connection of the transaction.
            topic: the topic.
            triggers: `Trigger` objects, or (key, payload) tuples.
        """
        self.outbox.trigger_many(connection, topic, triggers)

    def relay(self, gate: Gate, *, batch: int = 500, poll: Duration = "1s", purge: bool = True) -> Relay:
        """Return the relay of the outbox, for `gate.add_subscriber(...)`.

        Args:
            gate: the gate whose topics get the rows. Rows of other topics stay.
            batch: the most rows that it sends together, 1 to 10,000.
            poll: the time between two looks for rows. NOTIFY of PostgreSQL makes it look at once.
            purge: whether it deletes expired rows of the inbox, too.
        """
        return Relay(
            gate, self.outbox.statements, self.outbox.wakeups, self.database.connect_relay,
            self.statements.purge if purge else None, *check_relay_options(batch, poll),
        )  # fmt: skip

    def create_tables(self) -> None:
        """Create the tables if they do not exist. For development and tests; a deployment runs `ddl`."""
        with self.database.transaction() as connection:
            for statement in split_ddl(self.database.dialect, self.table):
                self.database.execute(connection, statement, {})

    def delete_row(self, gate: Gate, key: Key, *, scope: str) -> bool:
        """Delete the row of a key, in one transaction. Call `gate.forget` after it: then the key may run again.

        It waits while a run holds the row.

        Args:
            gate: the gate that guards the function. Its namespace is part of the name of the row.
            key: the key, as `gate.forget` takes it.
            scope: the scope of the guard.

        Returns:
            False if there was no row.

        Raises:
            InvalidArgument: no guard would accept the key or the scope.
        """
        check_gate(gate)
        params = name_params(*row_name(gate.namespace, scope, key))
        with self.database.transaction() as connection:
            return bool(self.database.execute(connection, self.statements.delete, params))

    def purge(self, batch: int = 1000) -> int:
        """Delete rows whose retention has ended, at most `batch`, in one transaction.

        Until then a row answers duplicates. Call it again while it returns `batch`, for example every hour.

        Returns:
            the number of deleted rows.
        """
        params = {"batch": check_rows(batch, "batch")}
        with self.database.transaction() as connection:
            return len(self.database.execute(connection, self.statements.purge, params))

    def apply(self, entry: SinkEntry, work: Callable[[], StoredResult]) -> StoredResult | None:
        """Run `work` and store its result in one transaction; see `idemgate.types.Sink`.

        Raises:
            EndedByHandler: the handler ended the transaction, or tried to.
        """
        with self._begin(entry) as (connection, found):
            if isinstance(found, StoredResult):
                return found
            run, previous = _Run(connection), self._current.get()
            try:
                self._current.set(run)
                result = work()
            except Exception as error:
                if self.is_end(error):
                    raise EndedByHandler(entry.key, entry.scope) from error
                raise
            finally:
                run.connection = None
                self._current.set(previous)
            self._store(connection, entry, result, found)
        return None

    @contextmanager
    def _begin(self, entry: SinkEntry) -> Generator[tuple[C, StoredResult | str]]:
        """Begin a transaction and insert the entry. Yield the stored result, or else the id of the transaction."""
        started = False
        try:
            with self.database.transaction() as connection:
                found = self._insert(connection, entry)
                started = True
                yield connection, found
        except Exception as error:
            if not started:
                self.explain(error, entry)
            raise

    def _insert(self, connection: C, entry: SinkEntry) -> StoredResult | str:
        """Insert the entry and return the id of the transaction, or return the stored result."""
        params = entry_params(entry, self.lock_timeout_ms)
        for _ in range(_TRIES):
            rows = self.database.execute(connection, self.statements.insert, params)
            if rows and rows[0][0]:
                return str(rows[0][1])
            stored = read_result(
                self.database.execute(connection, self.statements.find, name_params(entry.scope, entry.key))
            )
            if stored is not None:
                return stored  # else the row was deleted in between
        raise self.build_locked(entry)

    def _store(self, connection: C, entry: SinkEntry, result: StoredResult, transaction: str) -> None:
        params = result_params(entry, result, transaction)
        if not self.database.execute(connection, self.statements.store, params):
            raise EndedByHandler(entry.key, entry.scope)


class BaseAioInbox(_Rows[C]):
    """The inbox of async functions on any `AioDatabase`; see `BaseInbox`."""

    def __init__(self, database: AioDatabase[C], table: str, lock_timeout: Duration, notify: bool = True) -> None:
        super().__init__(database.dialect, database.placeholders, table, lock_timeout)
        self.database = database
        self.outbox: AioOutbox[C] = AioOutbox(database, table, notify)

    async def trigger(
        self,
        connection: C,
        topic: AnyTopic[Sent],
        key: Key,
        payload: Sent | None = None,
        **options: Unpack[TriggerOptions],
    ) -> None:
        """Write a trigger into the outbox, in an open transaction; see `BaseInbox.trigger`."""
        await self.outbox.trigger_many(connection, topic, [Trigger(key, payload, **options)])

    async def trigger_many(
        self, connection: C, topic: AnyTopic[Sent], triggers: Iterable[Trigger | tuple[Key, Sent]]
    ) -> None:
        """Write many triggers into the outbox, in order; see `BaseInbox.trigger_many`."""
        await self.outbox.trigger_many(connection, topic, triggers)

    def relay(self, gate: Gate, *, batch: int = 500, poll: Duration = "1s", purge: bool = True) -> Relay:
        """Return the relay of the outbox, for `gate.add_subscriber(...)`; see `BaseInbox.relay`."""
        return Relay(
            gate, self.outbox.statements, self.outbox.wakeups, self.database.connect_relay,
            self.statements.purge if purge else None, *check_relay_options(batch, poll),
        )  # fmt: skip

    async def create_tables(self) -> None:
        """Create the tables if they do not exist; see `BaseInbox.create_tables`."""
        async with self.database.transaction() as connection:
            for statement in split_ddl(self.database.dialect, self.table):
                await self.database.execute(connection, statement, {})

    async def delete_row(self, gate: Gate, key: Key, *, scope: str) -> bool:
        """Delete the row of a key; see `BaseInbox.delete_row`."""
        check_gate(gate)
        params = name_params(*row_name(gate.namespace, scope, key))
        async with self.database.transaction() as connection:
            return bool(await self.database.execute(connection, self.statements.delete, params))

    async def purge(self, batch: int = 1000) -> int:
        """Delete rows whose retention has ended; see `BaseInbox.purge`."""
        params = {"batch": check_rows(batch, "batch")}
        async with self.database.transaction() as connection:
            return len(await self.database.execute(connection, self.statements.purge, params))

    async def apply(self, entry: SinkEntry, work: Callable[[], Awaitable[StoredResult]]) -> StoredResult | None:
        """Run `work` and store its result in one transaction; see `idemgate.types.AioSink`."""
        async with self._begin(entry) as (connection, found):
            if isinstance(found, StoredResult):
                return found
            run, previous = _Run(connection), self._current.get()
            try:
                self._current.set(run)
                result = await work()
            except Exception as error:
                if self.is_end(error):
                    raise EndedByHandler(entry.key, entry.scope) from error
                raise
            finally:
                run.connection = None
                self._current.set(previous)
            await self._store(connection, entry, result, found)
        return None

    @asynccontextmanager
    async def _begin(self, entry: SinkEntry) -> AsyncGenerator[tuple[C, StoredResult | str]]:
        """Begin a transaction and insert the entry; see `BaseInbox._begin`."""
        started = False
        try:
            async with self.database.transaction() as connection:
                found = await self._insert(connection, entry)
                started = True
                yield connection, found
        except Exception as error:
            if not started:
                self.explain(error, entry)
            raise

    async def _insert(self, connection: C, entry: SinkEntry) -> StoredResult | str:
        """Insert the entry and return the id of the transaction, or return the stored result."""
        params = entry_params(entry, self.lock_timeout_ms)
        for _ in range(_TRIES):
            rows = await self.database.execute(connection, self.statements.insert, params)
            if rows and rows[0][0]:
                return str(rows[0][1])
            stored = read_result(
                await self.database.execute(connection, self.statements.find, name_params(entry.scope, entry.key))
            )
            if stored is not None:
                return stored  # else the row was deleted in between
        raise self.build_locked(entry)

    async def _store(self, connection: C, entry: SinkEntry, result: StoredResult, transaction: str) -> None:
        params = result_params(entry, result, transaction)
        if not await self.database.execute(connection, self.statements.store, params):
            raise EndedByHandler(entry.key, entry.scope)
