"""The inboxes that each test runs with. A body is written once, as a coroutine.

For a blocking inbox the body never suspends, because the methods of its handle return at once. So it runs as a plain
function. To add a flavour, write a subclass of `Flavour` and add it to `FLAVOURS`.
"""

from __future__ import annotations

import asyncio
import functools
import os
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path
from threading import Event
from typing import Any
from urllib.parse import parse_qs, urlsplit

import psycopg as driver
import pytest
from django.db import DatabaseError
from idemgate_sql import psycopg, sqlalchemy, sqlite
from sqlalchemy import NullPool, create_engine, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import create_async_engine

from idemgate import Gate
from tests import postgres

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

    `errors` are the errors of the client library for a statement that fails. `dialect` is that of the inbox. `listens`:
    relays use LISTEN and a lock of the database.
    """

    dialect = "postgresql"
    awaiting = False
    errors: tuple[type[Exception], ...] = (driver.Error,)
    handle: type[Handle] = Handle
    serves_nested = True
    listens = False
    survives_signals = False

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
        """Execute a statement with another connection, and commit."""
        return postgres.execute(self.url, sql)

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

    listens = survives_signals = True


class AsyncPsycopg(Flavour):
    """Async psycopg."""

    awaiting = True
    listens = True
    handle = AioHandle

    def open_inbox(self, **options: Any) -> Any:
        return psycopg.AsyncInbox(self.url, **options)


class Sqlite(Flavour):
    """SQLite of the standard library."""

    survives_signals = True

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


class TextHandle(Handle):
    """A connection of SQLAlchemy."""

    async def execute(self, sql: str) -> list[Any]:
        found = self.connection.execute(text(sql))
        return [tuple(row) for row in found] if found.returns_rows else []


class AioTextHandle(AioHandle):
    """An async connection of SQLAlchemy."""

    async def execute(self, sql: str) -> list[Any]:
        found = await self.connection.execute(text(sql))
        return [tuple(row) for row in found] if found.returns_rows else []


class CursorHandle(Handle):
    """A connection of Django."""

    async def execute(self, sql: str) -> list[Any]:
        with self.connection.cursor() as cursor:
            cursor.execute(sql)
            return list(cursor.fetchall()) if cursor.description else []


@functools.cache
def find_engine(url: str, awaiting: bool) -> Any:
    """Return the engine of a URL. Its connections are closed after each run, so that none outlives its event loop."""
    is_postgresql = url.startswith("postgresql:")
    url = url.replace("postgresql:", "postgresql+psycopg:", 1) if is_postgresql else f"sqlite:///{url}"
    return (create_async_engine if awaiting else create_engine)(url, poolclass=NullPool)


class SQLAlchemy(Flavour):
    """Blocking SQLAlchemy on PostgreSQL."""

    errors = (SQLAlchemyError,)
    handle = TextHandle

    def open_inbox(self, **options: Any) -> Any:
        kind = sqlalchemy.AsyncInbox if self.awaiting else sqlalchemy.Inbox
        return kind(find_engine(self.url, self.awaiting), **options)


class AsyncSQLAlchemy(SQLAlchemy):
    """Async SQLAlchemy on PostgreSQL."""

    awaiting = True
    handle = AioTextHandle


class SQLAlchemyOnSqlite(SQLAlchemy):
    """Blocking SQLAlchemy on SQLite."""

    dialect = "sqlite"
    serves_nested = False
    look = Sqlite.look
    hold = Sqlite.hold


class Django(Flavour):
    """Django on PostgreSQL."""

    errors = (DatabaseError,)
    handle = CursorHandle
    serves_nested = False

    def open_inbox(self, **options: Any) -> Any:
        from idemgate_sql.django import Inbox

        return Inbox(configure_django(self.dialect, self.url), **options)


class DjangoOnSqlite(Django):
    """Django on SQLite."""

    dialect = "sqlite"
    look = Sqlite.look
    hold = Sqlite.hold


def configure_django(dialect: str, url: str) -> str:
    """Add a database to the settings of Django. Return its alias."""
    import django
    from django.apps import apps
    from django.conf import settings
    from django.db import connections

    os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = "1"  # the tests create tables and look at rows in their event loop
    if not settings.configured:
        settings.configure(DATABASES={"default": {}}, USE_TZ=True)
    if not apps.ready:
        django.setup()
    engine = {"ENGINE": f"django.db.backends.{'postgresql' if dialect == 'postgresql' else 'sqlite3'}"}
    if dialect == "postgresql":
        parts = urlsplit(url)
        query = parse_qs(parts.query)
        engine |= {"NAME": parts.path[1:], "HOST": query["host"][0], "USER": query["user"][0]}
    else:
        engine |= {"NAME": url, "OPTIONS": {"timeout": 5}}
    connections.settings[url] = connections.configure_settings({"default": {}, url: engine})[url]
    return url


FLAVOURS: dict[str, type[Flavour]] = {
    "psycopg": Psycopg, "psycopg-async": AsyncPsycopg, "sqlite": Sqlite,
    "sqlalchemy": SQLAlchemy, "sqlalchemy-async": AsyncSQLAlchemy, "django": Django,
    "sqlalchemy-sqlite": SQLAlchemyOnSqlite, "django-sqlite": DjangoOnSqlite,
}  # fmt: skip
SLOW = dict.fromkeys(("sqlalchemy", "sqlalchemy-sqlite", "django-sqlite"), pytest.mark.slow)
"""The flavours that only the slow tests run with: their library, and their way to call it, run with the others."""


def with_flavours(wanted: Callable[[type[Flavour]], bool]) -> pytest.MarkDecorator:
    """Run a test with these flavours only: `@with_flavours(lambda kind: kind.awaiting)`."""
    names = [pytest.param(name, marks=SLOW.get(name, ())) for name, kind in FLAVOURS.items() if wanted(kind)]
    return pytest.mark.parametrize("flavour", names, indirect=True)


FEW = ("psycopg", "psycopg-async", "sqlite")
with_few = pytest.mark.parametrize(
    "flavour", [pytest.param(name, marks=() if name in FEW else pytest.mark.slow) for name in FLAVOURS], indirect=True
)
"""Run a test of what a relay does with rows, however they were read: with few flavours, and slowly with all."""
on_postgresql = with_flavours(lambda kind: kind.dialect == "postgresql")


def find_url(flavour: type[Flavour], folder: Path, postgres_url: Callable[[], str]) -> str:
    """Return the URL or the path of an empty database of this flavour."""
    return postgres_url() if flavour.dialect == "postgresql" else str(folder / "shop.db")
