"""The inboxes that each test runs with. A body is written once, as a coroutine.

For a blocking inbox the body never suspends, because the methods of its handle return at once. So it runs as a plain
function. To add a flavour, write a subclass of `Flavour` and add it to `FLAVOURS`.
"""

from __future__ import annotations

import asyncio
import functools
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path
from threading import Event
from typing import Any

import psycopg as driver
from idemgate_sql import psycopg, sqlite

from idemgate import Gate

__all__ = ["FLAVOURS", "Flavour", "Handle", "run_now"]

Body = Callable[..., Coroutine[Any, Any, Any]]
TABLES = ("CREATE TABLE effects (key text NOT NULL)", "CREATE TABLE stock (item text PRIMARY KEY, n integer NOT NULL)")


def run_now(body: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine that never suspends."""
    try:
        body.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("the body of a blocking handler has to wait")


class Handle:
    """The connection of a handler. Its methods are awaited, also those of a blocking connection."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection

    async def execute(self, sql: str) -> list[Any]:
        cursor = self.connection.execute(sql)
        return list(cursor.fetchall()) if cursor.description else []

    async def credit(self, key: str) -> None:
        await self.execute(f"INSERT INTO effects VALUES ('{key}')")

    async def call(self, name: str) -> None:
        """Call a method of the connection, such as `commit`."""
        getattr(self.connection, name)()

    async def wait(self, event: Event) -> None:
        assert event.wait(30)


class AioHandle(Handle):
    """The connection of an async handler."""

    async def execute(self, sql: str) -> list[Any]:
        cursor = await self.connection.execute(sql)
        return list(await cursor.fetchall()) if cursor.description else []

    async def call(self, name: str) -> None:
        await getattr(self.connection, name)()

    async def wait(self, event: Event) -> None:
        assert await asyncio.to_thread(event.wait, 30)


class Flavour:
    """An inbox in an empty database, and the tables of the tests.

    `errors` are the errors of the client library for a statement that fails. `dialect` is that of the inbox.
    """

    dialect = "postgresql"
    awaiting = False
    errors: tuple[type[Exception], ...] = (driver.Error,)
    handle: type[Handle] = Handle
    serves_nested = True

    def __init__(self, url: str) -> None:
        self.url = url
        for table in TABLES:
            self.look(table)

    def open_inbox(self, **options: Any) -> Any:
        """Return a new inbox."""
        return psycopg.Inbox(self.url, **options)

    async def create(self, **options: Any) -> Any:
        """Return a new inbox whose tables exist."""
        inbox = self.open_inbox(**options)
        made = inbox.create_tables()
        if made is not None:
            await made
        return inbox

    def decorate_directly(self, gate: Gate, inbox: Any, body: Body, **options: Any) -> Callable[..., Any]:
        """Guard a body `async def body(handle, key)` with an inbox: a function of the key, blocking or async."""
        options = {"key": "{key}", "scope": "pay", "sink": inbox, **options}
        if self.awaiting:

            @gate.once(**options)
            async def run_async(key: str) -> Any:
                return await body(self.handle(inbox.connection()), key)

            return run_async

        @gate.once(**options)
        def run(key: str) -> Any:
            return run_now(body(self.handle(inbox.connection()), key))

        return run

    def decorate(self, gate: Gate, inbox: Any, body: Body, **options: Any) -> Callable[..., Awaitable[Any]]:
        """Guard a body with an inbox. Return a function of the key to await."""
        guarded = self.decorate_directly(gate, inbox, body, **options)
        return guarded if self.awaiting else functools.partial(asyncio.to_thread, guarded)

    def guard(self, gate: Gate, inbox: Any, body: Body, **options: Any) -> Callable[[str], Awaitable[Any]]:
        """Guard a body as a consumer does. Return a function of the key that returns a verdict."""
        guard = gate.guard("pay", sink=inbox, **options)
        if self.awaiting:

            async def run_async(key: str) -> Any:
                return await body(self.handle(inbox.connection()), key)

            return lambda key: guard.aio.run(key, run_async, key)

        def run(key: str) -> Any:
            return run_now(body(self.handle(inbox.connection()), key))

        return lambda key: asyncio.to_thread(guard.run, key, run, key)

    # From outside

    def look(self, sql: str) -> Sequence[Any]:
        """Execute a statement with a connection of its own, and commit."""
        with driver.connect(self.url, autocommit=True) as connection:
            cursor = connection.execute(sql)
            return cursor.fetchall() if cursor.description else ()

    @asynccontextmanager
    async def hold(self, sql: str) -> AsyncIterator[None]:
        """Execute a statement in a transaction that is open during the block, and roll back."""
        with driver.connect(self.url) as connection:
            connection.execute(sql)
            yield
            connection.rollback()

    def credits(self) -> list[str]:
        return [key for (key,) in self.look("SELECT key FROM effects ORDER BY key")]

    def rows(self) -> list[Any]:
        return [*self.look("SELECT scope, key, kind FROM idemgate_inbox ORDER BY scope, key")]


class Psycopg(Flavour):
    """Blocking psycopg."""


class AsyncPsycopg(Flavour):
    """Async psycopg."""

    awaiting = True
    handle = AioHandle

    def open_inbox(self, **options: Any) -> Any:
        return psycopg.AsyncInbox(self.url, **options)


class Sqlite(Flavour):
    """SQLite of the standard library."""

    dialect = "sqlite"
    errors = (sqlite3.Error,)
    serves_nested = False

    def open_inbox(self, **options: Any) -> Any:
        return sqlite.Inbox(self.url, **options)

    def look(self, sql: str) -> Sequence[Any]:
        with closing(sqlite3.connect(self.url, isolation_level=None, timeout=30)) as connection:
            return connection.execute(sql).fetchall()

    @asynccontextmanager
    async def hold(self, sql: str) -> AsyncIterator[None]:
        with closing(sqlite3.connect(self.url, isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute(sql)
            yield


FLAVOURS: dict[str, type[Flavour]] = {"psycopg": Psycopg, "psycopg-async": AsyncPsycopg, "sqlite": Sqlite}


def find_url(flavour: type[Flavour], folder: Path, postgres_url: Callable[[], str]) -> str:
    """Return the URL or the path of an empty database of this flavour."""
    return postgres_url() if flavour.dialect == "postgresql" else str(folder / "shop.db")
