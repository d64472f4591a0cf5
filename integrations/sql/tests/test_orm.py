"""Sessions of SQLAlchemy, and models of Django, in the transaction of a guarded function."""

from __future__ import annotations

import sqlite3
from contextlib import closing, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
from idemgate_sql import sqlalchemy as inboxes
from idemgate_sql.errors import ConnectionInUse, EndedByHandler, RowLocked
from sqlalchemy import create_engine, event, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from idemgate import Gate, InvalidArgument
from idemgate.errors import NoCurrentExecution
from integrations.sql.tests.flavours import (
    AsyncSQLAlchemy,
    Django,
    SQLAlchemy,
    SQLAlchemyOnSqlite,
    find_engine,
    find_url,
)

pytestmark = pytest.mark.one_in(3)


class Base(DeclarativeBase):
    """The models of this file."""


class Effect(Base):
    """A row of the table of the tests."""

    __tablename__ = "effects"
    key: Mapped[str] = mapped_column(primary_key=True)


@pytest.fixture
def shop(postgres_url: str) -> SQLAlchemy:
    return SQLAlchemy(postgres_url)


async def test_a_session_is_committed_with_the_row(gate: Gate, shop: SQLAlchemy) -> None:
    inbox, failing = await shop.create(), [True]

    @gate.once(key="{key}", scope="pay", sink=inbox)
    def pay(key: str) -> str:
        inbox.session().add(Effect(key=key))
        assert inbox.session() is inbox.session()
        if failing:
            failing.pop()
            raise ZeroDivisionError
        return key

    # Given a run that fails: what the session holds is gone, and so is the session
    with pytest.raises(ZeroDivisionError):
        pay("p1")
    assert shop.credits() == []
    # Then the next one commits, without an explicit flush
    assert pay("p1") == "p1"
    assert pay("p1") == "p1"
    assert shop.credits() == ["p1"]
    with pytest.raises(NoCurrentExecution):
        inbox.session()


async def test_an_async_session_is_committed_with_the_row(gate: Gate, postgres_url: str) -> None:
    shop = AsyncSQLAlchemy(postgres_url)
    inbox = await shop.create()

    @gate.once(key="{key}", scope="pay", sink=inbox)
    async def pay(key: str) -> str:
        inbox.session().add(Effect(key=key))
        return key

    assert [await pay("p1"), await pay("p1"), await pay("p2")] == ["p1", "p1", "p2"]
    assert shop.credits() == ["p1", "p2"]


@pytest.mark.parametrize("kind", [SQLAlchemy, AsyncSQLAlchemy])
async def test_a_session_in_a_with_block_is_committed_too(
    gate: Gate, postgres_url: str, kind: type[SQLAlchemy]
) -> None:
    shop = kind(postgres_url)
    inbox = await shop.create()

    async def add(_: Any, key: str) -> str:
        if shop.awaiting:
            async with inbox.session() as session:
                session.add(Effect(key=key))
        else:
            with inbox.session() as session:
                session.add(Effect(key=key))
        return key

    pay = shop.decorate(gate, inbox, add)
    assert [await pay("p1"), await pay("p1")] == ["p1", "p1"]
    assert shop.credits() == ["p1"]


@pytest.mark.parametrize("what", ["session", "connection"])
async def test_a_commit_is_refused(gate: Gate, shop: SQLAlchemy, what: str) -> None:
    inbox = await shop.create()

    @gate.once(key="{key}", scope="pay", sink=inbox)
    def pay(key: str) -> None:
        inbox.session().add(Effect(key=key))
        getattr(inbox, what)().commit()

    with pytest.raises(EndedByHandler):
        pay("p1")
    assert (shop.credits(), shop.rows()) == ([], [])


@pytest.mark.parametrize("is_flushed", [True, False], ids=["flushed", "not flushed"])
@pytest.mark.parametrize("kind", [SQLAlchemy, AsyncSQLAlchemy, SQLAlchemyOnSqlite])
async def test_a_rollback_of_a_session_is_no_success(
    gate: Gate, postgres_url: str, tmp_path: Path, kind: type[SQLAlchemy], is_flushed: bool
) -> None:
    shop = kind(find_url(kind, tmp_path, lambda: postgres_url))
    inbox = await shop.create()

    async def add(_: Any, key: str) -> str:
        session = inbox.session()
        session.add(Effect(key=key))
        for step in ("flush", "rollback") if is_flushed else ("rollback",):
            done = getattr(session, step)()
            if shop.awaiting:
                await done
        return key

    pay = shop.decorate(gate, inbox, add)
    # Then the caller is told that what it added is gone, and the key is not done
    for _ in range(2):
        with pytest.raises(EndedByHandler):
            await pay("p1")
    assert (shop.credits(), shop.rows()) == ([], [])


async def test_savepoints_of_a_session_work(gate: Gate, shop: SQLAlchemy) -> None:
    inbox = await shop.create()

    @gate.once(key="{key}", scope="pay", sink=inbox)
    def pay(key: str) -> str:
        session = inbox.session()
        with session.begin_nested():
            session.add(Effect(key=key))
        with pytest.raises(ZeroDivisionError), session.begin_nested():
            session.add(Effect(key="undone"))
            raise ZeroDivisionError
        return key

    assert [pay("p1"), pay("p1")] == ["p1", "p1"]
    assert shop.credits() == ["p1"]


async def test_savepoints_of_an_async_session_work(gate: Gate, postgres_url: str) -> None:
    shop = AsyncSQLAlchemy(postgres_url)
    inbox = await shop.create()

    @gate.once(key="{key}", scope="pay", sink=inbox)
    async def pay(key: str) -> str:
        async with inbox.session().begin_nested():
            inbox.session().add(Effect(key=key))
        return key

    assert [await pay("p1"), await pay("p1")] == ["p1", "p1"]
    assert shop.credits() == ["p1"]


async def test_a_commit_inside_a_savepoint_is_refused(gate: Gate, shop: SQLAlchemy) -> None:
    inbox = await shop.create()

    @gate.once(key="{key}", scope="pay", sink=inbox)
    def pay(key: str) -> None:
        inbox.session().begin_nested()
        inbox.session().add(Effect(key=key))
        inbox.session().commit()

    with pytest.raises(EndedByHandler):
        pay("p1")
    assert (shop.credits(), shop.rows()) == ([], [])


@pytest.fixture(params=[SQLAlchemy, SQLAlchemyOnSqlite])
def any_shop(request: pytest.FixtureRequest, tmp_path: Path) -> SQLAlchemy:
    kind: type[SQLAlchemy] = request.param
    return kind(find_url(kind, tmp_path, lambda: request.getfixturevalue("postgres_url")))


@pytest.mark.parametrize("flushes", [False, True])
async def test_a_failed_flush_rolls_back(gate: Gate, any_shop: SQLAlchemy, flushes: bool) -> None:
    inbox = await any_shop.create()
    any_shop.look("CREATE UNIQUE INDEX one ON effects (key)")

    @gate.once(key="{number}", scope="pay", sink=inbox)
    def pay(number: int) -> None:
        inbox.session().add(Effect(key="same"))
        if flushes:
            inbox.session().flush()

    pay(1)
    with pytest.raises(IntegrityError, match=r"(?i)unique"):
        pay(2)
    assert (any_shop.credits(), len(any_shop.rows())) == (["same"], 1)


@pytest.mark.parametrize("nested", [False, True])
async def test_a_failed_flush_that_is_caught_needs_a_savepoint(gate: Gate, any_shop: SQLAlchemy, nested: bool) -> None:
    inbox = await any_shop.create()
    any_shop.look("CREATE UNIQUE INDEX one ON effects (key)")

    @gate.once(key="{number}", scope="pay", sink=inbox)
    def pay(number: int) -> int:
        session = inbox.session()
        with suppress(IntegrityError), session.begin_nested() if nested else nullcontext():
            session.add(Effect(key="same"))
            session.flush()
        session.add(Effect(key=str(number)))
        return number

    assert pay(1) == 1
    if nested:
        assert pay(2) == 2
        assert any_shop.credits() == ["1", "2", "same"]
        return
    # Without one the session has rolled back, and the error says so
    with pytest.raises(EndedByHandler, match="savepoint"):
        pay(2)
    assert (any_shop.credits(), len(any_shop.rows())) == (["1", "same"], 1)


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
def test_the_drivers_of_sqlalchemy(gate: Gate, shop: SQLAlchemy, driver: str) -> None:
    # Given a driver, whose errors have attributes of their own
    engine = create_engine(shop.url.replace("postgresql:", f"postgresql+{driver}:", 1))
    inbox = inboxes.Inbox(engine, lock_timeout="50ms")

    @gate.once(key="{key}", scope="pay", sink=inbox)
    def pay(key: str) -> str:
        inbox.session().add(Effect(key=key))
        return key

    # When the tables are missing, then the error says how to create them
    with pytest.raises(shop.errors) as missing:
        pay("p1")
    assert "Create the tables" in str(missing.value.__notes__)
    # And when another transaction holds the row of a key, that key is in progress
    inbox.create_tables()
    with engine.connect() as other:
        other.execute(insert_row(gate, "p1"))
        with pytest.raises(RowLocked):
            pay("p1")
    # And a row answers after Redis has lost the record
    assert pay("p1") == "p1"
    pay.forget("p1")
    assert pay("p1") == "p1"
    assert shop.credits() == ["p1"]
    engine.dispose()


@pytest.mark.parametrize("begin", ["BEGIN", "BEGIN IMMEDIATE"])
def test_an_engine_of_sqlite_whose_listener_begins_transactions(gate: Gate, tmp_path: Path, begin: str) -> None:
    # Given the listeners that the documentation of SQLAlchemy advises for SQLite
    engine = create_engine(f"sqlite:///{tmp_path / 'shop.db'}")
    event.listen(engine, "connect", lambda connection, _: setattr(connection, "isolation_level", None))
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql(begin))
    inbox = inboxes.Inbox(engine, lock_timeout="50ms")
    inbox.create_tables()

    @gate.once(key="{key}", scope="pay", sink=inbox)
    def pay(key: str) -> str:
        return key

    # When another transaction has the write lock, then the key is in progress
    with closing(sqlite3.connect(tmp_path / "shop.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(RowLocked):
            pay("p1")
    # And after it has ended, the row is written
    assert pay("p1") == "p1"
    gate.forget("p1", scope="pay")
    assert pay("p1") == "p1"
    with engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA busy_timeout").scalar() == 5000
    engine.dispose()


async def test_an_async_driver_of_sqlalchemy(gate: Gate, shop: SQLAlchemy) -> None:
    # asyncpg, beside psycopg of the other tests
    engine = create_async_engine(shop.url.replace("postgresql:", "postgresql+asyncpg:", 1))
    inbox = inboxes.AsyncInbox(engine, lock_timeout="50ms")

    @gate.once(key="{key}", scope="pay", sink=inbox)
    async def pay(key: str) -> str:
        inbox.session().add(Effect(key=key))
        return key

    await inbox.create_tables()
    async with engine.connect() as other:
        await other.execute(insert_row(gate, "p1"))
        with pytest.raises(RowLocked):
            await pay("p1")
    assert await pay("p1") == "p1"
    gate.forget("p1", scope="pay")
    assert await pay("p1") == "p1"
    assert shop.credits() == ["p1"]
    await engine.dispose()


def insert_row(gate: Gate, key: str) -> Any:
    """Return the statement that inserts the row of a key."""
    columns = "scope, key, fingerprint, token, kind, result, expires_at"
    row = f"'{gate.namespace}:pay', '{key}', '', 1, 'none', '', '2100-01-01'"
    return text(f"INSERT INTO idemgate_inbox ({columns}) VALUES ({row})")


def test_other_databases_are_refused(gate: Gate) -> None:
    for kind, engine, name in (
        (inboxes.Inbox, create_engine("postgresql+psycopg://"), "mysql"),
        (inboxes.AsyncInbox, create_async_engine("postgresql+psycopg://"), "sqlite"),
    ):
        engine.dialect.name = name
        with pytest.raises(InvalidArgument, match=f"'{name}': not supported"):
            kind(engine)  # type: ignore[operator]


def test_engines_that_cannot_work_are_refused(gate: Gate, shop: SQLAlchemy) -> None:
    for kind, engine in (
        (inboxes.Inbox, create_async_engine("postgresql+psycopg://")),
        (inboxes.AsyncInbox, create_engine("postgresql+psycopg://")),
        (inboxes.Inbox, "postgresql://"),
    ):
        with pytest.raises(InvalidArgument, match="engine"):
            kind(engine)  # type: ignore[operator]
    automatic = find_engine(shop.url, False).execution_options(isolation_level="AUTOCOMMIT")
    with pytest.raises(ConnectionInUse, match="AUTOCOMMIT"):
        inboxes.Inbox(automatic).create_tables()


@pytest.fixture
async def django_shop(postgres_url: str) -> tuple[Django, Any]:
    shop = Django(postgres_url)
    return shop, await shop.create()


def test_cursors_and_atomic_blocks_of_django_take_part(gate: Gate, django_shop: tuple[Django, Any]) -> None:
    from django.db import connections, transaction

    shop, inbox = django_shop

    @gate.once(key="{key}", scope="pay", sink=inbox)
    def pay(key: str) -> str:
        cursor = connections[shop.url].cursor()
        cursor.execute("INSERT INTO effects VALUES (%s)", [key])
        with pytest.raises(ZeroDivisionError), transaction.atomic(using=shop.url):
            cursor.execute("INSERT INTO effects VALUES ('undone')")
            raise ZeroDivisionError
        return key

    assert [pay("p1"), pay("p1")] == ["p1", "p1"]
    assert shop.credits() == ["p1"]


def test_a_database_without_autocommit_is_refused(
    gate: Gate, django_shop: tuple[Django, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from django.db import connections

    shop, inbox = django_shop
    connection = connections[shop.url]
    # Given the setting with which `atomic` is a savepoint inside a transaction that nothing commits
    monkeypatch.setitem(connection.settings_dict, "AUTOCOMMIT", False)

    @gate.once(key="{key}", scope="pay", sink=inbox)
    def pay(key: str) -> None:
        raise AssertionError("it must not run")

    with pytest.raises(InvalidArgument, match=r"AUTOCOMMIT.*never commits"):
        pay("a")


def test_a_call_inside_an_atomic_block_is_refused(gate: Gate, django_shop: tuple[Django, Any]) -> None:
    from django.db import transaction

    shop, inbox = django_shop

    @gate.once(key="{key}", scope="pay", sink=inbox)
    def pay(key: str) -> None:
        raise AssertionError("it must not run")

    # Given an atomic block of the caller, whose rollback would undo the row behind the back of Redis
    with transaction.atomic(using=shop.url), pytest.raises(ConnectionInUse, match=r"atomic.*TransactionTestCase"):
        pay("p1")


def test_an_error_of_the_database_that_the_function_catches_is_no_end_of_its_transaction(
    gate: Gate, django_shop: tuple[Django, Any]
) -> None:
    """Django refuses queries after a failed `save`, with the error that it also has for a commit."""
    from django.db import IntegrityError, connections, transaction

    shop, inbox = django_shop
    shop.look("ALTER TABLE effects ADD PRIMARY KEY (key)")

    @gate.once(key="{key}", scope="pay", sink=inbox)
    def pay(key: str, nested: bool) -> None:
        cursor = connections[shop.url].cursor()
        with transaction.atomic(using=shop.url, savepoint=nested):
            try:
                with transaction.atomic(using=shop.url, savepoint=False):  # as `Model.save` does
                    cursor.execute("INSERT INTO effects VALUES ('p0'), ('p0')")
            except IntegrityError:
                cursor.execute("SELECT 1")

    # When a function goes on after such an error, then it gets Django's error, with its advice
    for nested in (False, True):
        with pytest.raises(transaction.TransactionManagementError, match="until the end of the 'atomic' block"):
            pay("p1", nested)
    # And a commit is the end of its transaction

    @gate.once(key="{key}", scope="commit", sink=inbox)
    def commit(key: str) -> None:
        transaction.commit(using=shop.url)

    with pytest.raises(EndedByHandler):
        commit("p1")
    assert (shop.credits(), shop.rows()) == ([], [])


def test_hooks_on_commit_run_after_the_commit(gate: Gate, django_shop: tuple[Django, Any]) -> None:
    from django.db import transaction

    shop, inbox = django_shop
    seen: list[list[str]] = []

    @gate.once(key="{key}", scope="pay", sink=inbox)
    def pay(key: str) -> None:
        transaction.on_commit(lambda: seen.append(shop.credits()), using=shop.url)
        inbox.connection().cursor().execute("INSERT INTO effects VALUES (%s)", [key])

    pay("p1")
    assert seen == [["p1"]]


def test_the_idle_connection_of_a_worker_is_replaced(gate: Gate, django_shop: tuple[Django, Any]) -> None:
    from django.db import connections

    shop, inbox = django_shop
    # Given a connection that the thread keeps, and that the server has closed
    connections[shop.url].settings_dict["CONN_MAX_AGE"] = None
    connections[shop.url].settings_dict["CONN_HEALTH_CHECKS"] = True
    connections[shop.url].connect()
    shop.look("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND datname <> ''")

    @gate.once(key="{key}", scope="pay", sink=inbox)
    def pay(key: str) -> str:
        return key

    connections[shop.url].health_check_done = False
    assert pay("p1") == "p1"
    connections[shop.url].close()
