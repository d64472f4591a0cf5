"""Handlers that end their transaction, and callers that are cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import os
import random
import signal
import sqlite3
import sys
from contextlib import closing, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import idemgate_sql
import psycopg as driver
import pytest
from idemgate_sql import EndedByHandler, psycopg, sqlalchemy, sqlite
from psycopg_pool import AsyncConnectionPool
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import create_async_engine

from idemgate import Gate
from idemgate.errors import ResultUnavailable
from integrations.sql.tests.flavours import (
    FLAVOURS,
    AsyncPsycopg,
    Flavour,
    Handle,
    find_url,
    on_postgresql,
    with_flavours,
)
from integrations.sql.tests.test_inbox import credit, forget
from tests.guard.interrupts import Interrupter

pytestmark = pytest.mark.one_in(3)


async def test_a_commit_by_the_connection_is_refused(gate: Gate, flavour: Flavour, inbox: Any) -> None:
    async def body(db: Handle, key: str) -> None:
        await db.credit(key)
        await db.call("commit")

    pay = flavour.decorate(gate, inbox, body)
    with pytest.raises((EndedByHandler, *flavour.errors), match="commit"):
        await pay("p1")
    assert (flavour.credits(), flavour.rows()) == ([], [])


async def test_a_commit_in_sql_is_an_error_and_does_not_run_again(gate: Gate, flavour: Flavour, inbox: Any) -> None:
    runs: list[str] = []

    async def body(db: Handle, key: str) -> str:
        runs.append(key)
        await db.credit(key)
        await db.execute("COMMIT")
        await db.credit(key)
        return "paid"

    pay = flavour.decorate(gate, inbox, body)
    with pytest.raises(EndedByHandler, match=r"ended its transaction.*Leave out COMMIT"):
        await pay("p1")
    if flavour.dialect == "sqlite":  # refused before anything was committed
        assert (flavour.credits(), flavour.rows()) == ([], [])
        return
    assert len(flavour.rows()) == 1
    with pytest.raises(ResultUnavailable, match="ended the transaction"):
        await pay("p1")
    assert runs == ["p1"]


@pytest.mark.parametrize("then", ["credit", "nothing"])
async def test_a_rollback_in_sql_is_an_error(gate: Gate, flavour: Flavour, inbox: Any, then: str) -> None:
    async def body(db: Handle, key: str) -> str:
        await db.credit(key)
        await db.execute("ROLLBACK")
        if then == "credit":
            await db.credit(key)
        return "paid"

    pay = flavour.decorate(gate, inbox, body)
    with pytest.raises(EndedByHandler):
        await pay("p1")
    assert flavour.rows() == []
    assert gate.inspect("p1", scope="pay").state == "released"


def test_a_statement_that_makes_sqlite_roll_back_is_an_error_without_effect(gate: Gate, tmp_path: Path) -> None:
    """OR ROLLBACK and RAISE(ROLLBACK) of a trigger end the transaction without a ROLLBACK that could be refused."""
    # Given a function that catches the error of such a statement, and goes on
    path = tmp_path / "shop.db"
    inbox = sqlite.Inbox(path)
    inbox.create_tables()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE effects (key text PRIMARY KEY)")

    @gate.once(key="{key}", scope="pay", sink=inbox)
    def pay(key: str) -> None:
        inbox.connection().execute("INSERT INTO effects VALUES ('before')")
        with suppress(sqlite3.IntegrityError):
            inbox.connection().execute("INSERT OR ROLLBACK INTO effects VALUES ('before')")
        inbox.connection().execute("INSERT INTO effects VALUES ('after')")

    # When it runs
    with pytest.raises(EndedByHandler):
        pay("p1")
    # Then nothing is committed, also what came after the rollback
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT key FROM effects").fetchall() == []
        assert connection.execute("SELECT key FROM idemgate_inbox").fetchall() == []


async def test_a_handler_that_closes_its_connection_has_no_effect(gate: Gate, flavour: Flavour, inbox: Any) -> None:
    async def body(db: Handle, key: str) -> None:
        await db.credit(key)
        await db.call("close")

    with pytest.raises((EndedByHandler, *flavour.errors), match=r"closed|ended its transaction"):
        await flavour.decorate(gate, inbox, body)("p1")
    assert (flavour.credits(), flavour.rows()) == ([], [])


def _end_by_connection(connection: Any) -> Any:
    return connection.commit()


def _end_by_transaction(connection: Any) -> Any:
    return connection.get_transaction().commit()


def _close(connection: Any) -> Any:
    return connection.close()


@pytest.mark.parametrize("end", [_end_by_connection, _end_by_transaction, _close])
@pytest.mark.parametrize("dialect", ["postgresql", "sqlite"])
def test_a_refused_commit_leaves_no_transaction_in_the_pool(
    gate: Gate, request: pytest.FixtureRequest, tmp_path: Path, dialect: str, end: Any
) -> None:
    # Given an engine whose pool keeps one connection, and a handler that commits
    kind = FLAVOURS["sqlalchemy" if dialect == "postgresql" else "sqlalchemy-sqlite"]
    url = find_url(kind, tmp_path, lambda: str(request.getfixturevalue("postgres_url")))
    flavour = kind(url)
    engine = create_engine(
        url.replace("postgresql:", "postgresql+psycopg:", 1) if dialect == "postgresql" else f"sqlite:///{url}",
        pool_size=1, max_overflow=0,
    )  # fmt: skip
    inbox = sqlalchemy.Inbox(engine)
    inbox.create_tables()

    @gate.once(key="{key}", scope="pay", sink=inbox)
    def pay(key: str, ends: bool) -> str:
        inbox.connection().execute(text("INSERT INTO effects VALUES (:key)"), {"key": key})
        if ends:
            end(inbox.connection())
        return "paid"

    # When it has been refused
    with pytest.raises(EndedByHandler):
        pay("p1", True)
    # Then another transaction of the pool commits nothing of it
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO effects VALUES ('other')"))
    assert (flavour.credits(), flavour.rows()) == (["other"], [])
    # And the key is free
    assert pay("p1", False) == "paid"
    assert flavour.credits() == ["other", "p1"]
    engine.dispose()


@pytest.mark.parametrize("end", [_end_by_connection, lambda connection: connection.get_transaction().commit()])
async def test_a_refused_commit_leaves_no_transaction_in_an_async_pool(gate: Gate, postgres_url: str, end: Any) -> None:
    flavour = FLAVOURS["sqlalchemy-async"](postgres_url)
    engine = create_async_engine(postgres_url.replace("postgresql:", "postgresql+psycopg:", 1), pool_size=1)
    inbox = sqlalchemy.AsyncInbox(engine)
    await inbox.create_tables()

    @gate.once(key="{key}", scope="pay", sink=inbox)
    async def pay(key: str, ends: bool) -> str:
        await inbox.connection().execute(text("INSERT INTO effects VALUES (:key)"), {"key": key})
        if ends:
            await end(inbox.connection())
        return "paid"

    with pytest.raises(EndedByHandler):
        await pay("p1", True)
    async with engine.begin() as connection:
        await connection.execute(text("INSERT INTO effects VALUES ('other')"))
    assert (flavour.credits(), flavour.rows()) == (["other"], [])
    assert await pay("p1", False) == "paid"
    assert flavour.credits() == ["other", "p1"]
    await engine.dispose()


async def test_a_handler_that_rolls_back_by_its_connection_is_told_so(gate: Gate, flavour: Flavour, inbox: Any) -> None:
    async def body(db: Handle, key: str) -> str:
        await db.credit(key)
        await db.call("rollback")
        return "paid"

    with pytest.raises((EndedByHandler, *flavour.errors), match=r"ended its transaction|rollback"):
        await flavour.decorate(gate, inbox, body)("p1")
    assert (flavour.credits(), flavour.rows()) == ([], [])
    assert gate.inspect("p1", scope="pay").state == "released"


@pytest.mark.parametrize("name", ["psycopg", "psycopg-async"])
async def test_a_rollback_of_psycopg_is_no_success(gate: Gate, postgres_url: str, name: str) -> None:
    # Given a handler that rolls back as psycopg's documentation says, which its transaction takes for a regular end
    flavour = FLAVOURS[name](postgres_url)
    inbox = await flavour.create()
    rolls_back = [True]

    async def body(db: Handle, key: str) -> str:
        await db.credit(key)
        if rolls_back:
            raise driver.Rollback
        return "paid"

    pay = flavour.decorate(gate, inbox, body)
    # Then the caller gets an error, and the key is free
    with pytest.raises(EndedByHandler):
        await pay("p1")
    assert (flavour.credits(), flavour.rows()) == ([], [])
    assert gate.inspect("p1", scope="pay").state == "released"
    rolls_back.clear()
    assert await pay("p1") == "paid"


async def test_savepoints_of_the_handler_work(gate: Gate, flavour: Flavour, inbox: Any) -> None:
    async def body(db: Handle, key: str) -> str:
        await db.execute("SAVEPOINT one")
        await db.credit("undone")
        await db.execute("ROLLBACK TO SAVEPOINT one")
        await db.credit(key)
        return "paid"

    pay = flavour.decorate(gate, inbox, body)
    assert await pay("p1") == "paid"
    assert flavour.credits() == ["p1"]


async def test_a_handler_that_swallows_an_error_of_sql(gate: Gate, flavour: Flavour, inbox: Any) -> None:
    async def body(db: Handle, key: str) -> str:
        await db.credit(key)
        try:
            await db.execute("SELECT * FROM no_such_table")
        except flavour.errors:
            return "paid"
        raise AssertionError

    pay = flavour.decorate(gate, inbox, body)
    if flavour.dialect == "sqlite":
        assert await pay("p1") == "paid"
        assert flavour.credits() == ["p1"]
    else:  # PostgreSQL has aborted the transaction
        with pytest.raises(flavour.errors, match="aborted"):
            await pay("p1")
        assert (flavour.credits(), flavour.rows()) == ([], [])


# Cancellation


in_a_task = with_flavours(lambda kind: kind.awaiting)  # a thread cannot be cancelled


@in_a_task
async def test_a_cancelled_handler_rolls_back_and_frees_the_key(gate: Gate, flavour: Flavour, inbox: Any) -> None:
    started = asyncio.Event()

    async def body(db: Handle, key: str) -> str:
        await db.credit(key)
        if not started.is_set():
            started.set()
            await asyncio.sleep(30)
        return "paid"

    pay = flavour.decorate(gate, inbox, body)
    task = asyncio.create_task(pay("p1"))  # type: ignore[arg-type]
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (flavour.credits(), flavour.rows()) == ([], [])
    assert gate.inspect("p1", scope="pay").state == "released"
    assert await pay("p1") == "paid"


@pytest.mark.parametrize("step", ["insert", "store", "commit"])
@in_a_task
async def test_a_caller_that_is_cancelled_at_a_step_of_the_transaction(
    gate: Gate, flavour: Flavour, inbox: Any, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the step takes effect is not known. The row decides."""
    pay = flavour.decorate(gate, inbox, credit)
    statement = {"insert": inbox.statements.insert, "store": inbox.statements.store, "commit": inbox.statements.store}
    execute, tasks = inbox.database.execute, list[asyncio.Task[Any]]()

    async def cancelled(connection: Any, sql: str, params: Any) -> Any:
        found = None
        if sql == statement[step] and tasks:
            task = tasks.pop()
            if step == "commit":  # once this statement is answered, COMMIT is next
                found = await execute(connection, sql, params)
                asyncio.get_running_loop().call_soon(task.cancel)
                return found
            asyncio.get_running_loop().call_soon(task.cancel)
        return await execute(connection, sql, params)

    monkeypatch.setattr(inbox.database, "execute", cancelled)
    task = asyncio.create_task(pay("p1"))  # type: ignore[arg-type]
    tasks.append(task)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert gate.inspect("p1", scope="pay").state != "in_progress"
    assert len(flavour.credits()) == len(flavour.rows())
    assert await pay("p1") == {"receipt": "p1"}
    assert flavour.credits() == ["p1"]


@pytest.mark.slow
@in_a_task
async def test_callers_that_are_cancelled_at_random(
    gate: Gate, flavour: Flavour, inbox: Any, seed: int, drawn: random.Random
) -> None:
    pay = flavour.decorate(gate, inbox, credit, on_in_progress="wait")  # a release may be under way
    for number in range(40):
        key = f"p{number:02}"
        task = asyncio.create_task(pay(key))  # type: ignore[arg-type]
        await asyncio.sleep(drawn.uniform(0, 0.02))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert await pay(key) == {"receipt": key}
        forget(gate, key)
        assert await pay(key) == {"receipt": key}
    assert flavour.credits() == [f"p{number:02}" for number in range(40)], f"seed {seed}"


async def test_a_pool_survives_callers_that_are_cancelled(gate: Gate, postgres_url: str) -> None:
    flavour = AsyncPsycopg(postgres_url)
    drawn = random.Random(7)
    async with AsyncConnectionPool(postgres_url, min_size=1, max_size=3, open=False, timeout=20) as pool:
        inbox = psycopg.AsyncInbox(pool)
        await inbox.create_tables()
        pay = flavour.decorate(gate, inbox, credit, on_in_progress="wait")
        keys = [f"p{number:02}" for number in range(30)]

        async def cancel(key: str) -> None:
            task = asyncio.create_task(pay(key))  # type: ignore[arg-type]
            await asyncio.sleep(drawn.uniform(0, 0.03))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        await asyncio.gather(*map(cancel, keys))
        assert await asyncio.gather(*map(pay, keys)) == [{"receipt": key} for key in keys]
        stats = pool.get_stats()
        assert stats["pool_size"] <= 3
        assert stats.get("requests_waiting", 0) == 0
    assert flavour.credits() == keys


class Interrupted(BaseException):
    """What the signal handler of a test raises."""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # raised in a destructor
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::tests.plugins.open_sockets.LeftOpen")  # what an interrupt left of a connection
@with_flavours(lambda kind: kind.survives_signals or kind is AsyncPsycopg)
def test_an_interrupt_at_any_point_leaves_no_run_open(url: str, namespace: str, flavour: Flavour) -> None:
    # An event loop closes what an interrupt left of an async transaction at some later time
    package = Path(idemgate_sql.__file__).parent
    parts = (str(package / "inbox.py"),) if flavour.awaiting else (str(package), contextlib.__file__)
    points, keys, wrong = 0, list[str](), list[tuple[str, str]]()

    async def call(pay: Any, key: str, interrupter: Interrupter) -> None:
        try:
            made = pay(key)
            await made if flavour.awaiting else made
        except (Interrupted, EndedByHandler, *flavour.errors):
            # The traceback keeps the frames of the call, as that of an error that a framework stores
            if inbox.is_running:
                wrong.append((interrupter.where, "open"))

    with Gate(url, namespace=namespace) as gate, asyncio.Runner() as runner:
        inbox = runner.run(flavour.create())
        pay = flavour.decorate_directly(gate, inbox, credit, scope="pay")
        while True:
            points += 1
            keys.append(f"p{points:04}")
            interrupter = Interrupter(points, Interrupted, *parts)
            interrupter.run(functools.partial(runner.run, call(pay, keys[-1], interrupter)))
            if not interrupter.where:
                break
            if not flavour.awaiting and pay(keys[-1]) != {"receipt": keys[-1]}:
                wrong.append((interrupter.where, "no result"))
        runner.run(gate.aio.close())
    assert not wrong, f"{len(wrong)} of {points} interrupts, such as {wrong}"
    assert points > 40
    assert flavour.awaiting or flavour.credits() == keys


def test_an_interrupt_at_any_point_leaves_no_connection_that_refuses_to_commit() -> None:
    def run() -> None:
        with sqlite.refuse_ends(connection), pytest.raises(sqlite3.DatabaseError):
            connection.execute("COMMIT")

    points, refused, where = 0, list[str](), "before"
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        connection.execute("BEGIN")
        while where:
            points += 1
            interrupter = Interrupter(points, Interrupted, str(Path(sqlite.__file__)))
            with suppress(Interrupted, sqlite3.Error):
                interrupter.run(run)
            where = interrupter.where
            try:
                connection.execute("COMMIT")
            except sqlite3.DatabaseError:
                refused.append(where)
                connection.set_authorizer(None)
                connection.execute("COMMIT")
            connection.execute("BEGIN")
    assert not refused
    assert points > 4


@with_flavours(lambda kind: kind.dialect == "sqlite" and not kind.awaiting)
def test_a_signal_during_a_statement_is_not_lost(url: str, namespace: str, flavour: Flavour) -> None:
    """The sqlite3 module drops what a signal handler raises inside a function of Python that SQLite calls."""
    entered: list[str] = []

    def interrupt(frame: FrameType, event: str, _: object) -> None:
        if frame.f_code.co_filename == sqlite.__file__:
            entered.append(frame.f_code.co_name)
            raise Interrupted

    async def body(db: Handle, key: str) -> str:
        sys.settrace(interrupt)
        try:
            await db.credit(key)
        finally:
            sys.settrace(None)
        return "paid"

    inbox = flavour.open_inbox()
    inbox.create_tables()
    with Gate(url, namespace=namespace) as gate:
        assert flavour.decorate_directly(gate, inbox, body)("p1") == "paid"
    assert (entered, flavour.credits()) == ([], ["p1"])


@pytest.mark.slow
@with_flavours(lambda kind: kind.survives_signals)  # other libraries leave locks behind; a task is cancelled instead
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # connections that were not closed
def test_runs_that_a_signal_handler_interrupts_at_random(
    url: str, namespace: str, flavour: Flavour, seed: int, drawn: random.Random
) -> None:
    inbox = flavour.open_inbox()
    inbox.create_tables()

    def interrupt(*_: object) -> None:
        raise Interrupted

    previous = signal.signal(signal.SIGALRM, interrupt)
    many = int(os.environ.get("IDEMGATE_KILLS", "10"))
    keys = [f"p{number:04}" for number in range(many)]
    try:
        with Gate(url, namespace=namespace) as gate:
            pay = flavour.decorate_directly(gate, inbox, credit, on_in_progress="wait", lease="1s")
            pay("warm")
            for key in keys:
                with suppress(Interrupted, *(flavour.errors if flavour.dialect == "postgresql" else ())):
                    signal.setitimer(signal.ITIMER_REAL, drawn.uniform(0.0001, 0.02))
                    pay(key)
                    signal.setitimer(signal.ITIMER_REAL, 0)
                gc.collect()
                assert pay(key) == {"receipt": key}, f"seed {seed}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert flavour.credits() == [*keys, "warm"], f"seed {seed}"


@on_postgresql
async def test_a_connection_that_breaks_during_the_run_has_no_effect(gate: Gate, flavour: Flavour, inbox: Any) -> None:
    broken: list[str] = []

    async def body(db: Handle, key: str) -> str:
        await db.credit(key)
        if not broken:
            broken.append(key)
            flavour.look(f"SELECT pg_terminate_backend({(await db.execute('SELECT pg_backend_pid()'))[0][0]})")
        return "paid"

    pay = flavour.guard(gate, inbox, body)
    failed = await pay("p1")
    assert (failed.outcome, failed.ran) == ("failed", True)
    assert isinstance(failed.error, flavour.errors)
    assert (flavour.credits(), flavour.rows()) == ([], [])
    assert (await pay("p1")).value == "paid"
