"""Where an inbox gets its connections from, and the consumers that it works with."""

from __future__ import annotations

import asyncio
import inspect
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from threading import Event
from typing import Any

import psycopg as driver
import pytest
from idemgate_sql import ConnectionInUse, psycopg, psycopg_relay, sqlite
from psycopg.rows import dict_row
from psycopg_pool import AsyncConnectionPool, ConnectionPool, PoolTimeout

from idemgate import Gate
from idemgate.errors import InvalidArgument
from idemgate.testing import Clock
from integrations.sql.tests.flavours import AsyncPsycopg, Flavour, Handle, Psycopg, run_now
from integrations.sql.tests.test_inbox import credit, forget
from integrations.sql.tests.test_outbox import _await, eventually, running
from integrations.sql.tests.test_relay import take_payloads, write_refused
from tests.postgres import Postgres

pytestmark = pytest.mark.one_in(3)


async def run_twice(gate: Gate, flavour: Flavour, inbox: Any) -> None:
    """Run a key, lose its record, and run it again."""
    created = inbox.create_tables()
    if inspect.isawaitable(created):
        await created
    pay = flavour.decorate(gate, inbox, credit)
    for _ in range(2):
        assert await pay("p1") == {"receipt": "p1"}
        forget(gate, "p1")
    assert flavour.credits() == ["p1"]


async def test_a_pool(gate: Gate, postgres_url: str) -> None:
    flavour = Psycopg(postgres_url)
    with ConnectionPool(postgres_url, min_size=1, max_size=2) as pool:
        await run_twice(gate, flavour, psycopg.Inbox(pool))
        pool.check()
        assert pool.get_stats()["pool_size"] <= 2


async def test_an_async_pool(gate: Gate, postgres_url: str) -> None:
    flavour = AsyncPsycopg(postgres_url)
    async with AsyncConnectionPool(postgres_url, min_size=1, max_size=2, open=False) as pool:
        await run_twice(gate, flavour, psycopg.AsyncInbox(pool))
        forget(gate, "p1")


@pytest.mark.parametrize("awaiting", [False, True])
async def test_a_relay_that_cannot_listen_returns_its_connection_as_it_was(
    gate: Gate, postgres_url: str, monkeypatch: pytest.MonkeyPatch, awaiting: bool
) -> None:
    def refuse(channel: str) -> None:
        raise ConnectionRefusedError(channel)

    monkeypatch.setattr(psycopg_relay, "_listen", refuse)
    if awaiting:
        async with AsyncConnectionPool(postgres_url, min_size=1, max_size=1, open=False) as aio_pool:
            with pytest.raises(ConnectionRefusedError):
                await psycopg.AsyncInbox(aio_pool).relay(gate).relay_once()
            async with aio_pool.connection() as connection:
                assert not connection.autocommit
    else:
        with ConnectionPool(postgres_url, min_size=1, max_size=1) as pool:
            with pytest.raises(ConnectionRefusedError):
                await psycopg.Inbox(pool).relay(gate).relay_once()
            with pool.connection() as blocking:
                assert not blocking.autocommit


async def test_a_pool_without_a_free_connection_frees_the_key(gate: Gate, postgres_url: str) -> None:
    flavour = Psycopg(postgres_url)
    with ConnectionPool(postgres_url, min_size=1, max_size=1, timeout=0.2) as pool:
        inbox = psycopg.Inbox(pool)
        inbox.create_tables()
        started, go_on = Event(), Event()

        async def body(db: Handle, key: str) -> str:
            started.set()
            await db.wait(go_on)
            return key

        pay = flavour.guard(gate, inbox, body)
        first = asyncio.create_task(pay("p1"))  # type: ignore[arg-type]
        await asyncio.to_thread(started.wait, 30)
        second = await pay("p2")
        assert (second.outcome, second.ran, type(second.error)) == ("failed", False, PoolTimeout)
        assert gate.inspect("p2", scope="pay").state == "released"
        go_on.set()
        assert (await first).value == "p1"
        assert (await pay("p2")).value == "p2"


@pytest.mark.parametrize(
    "options",
    [{}, {"autocommit": True}, {"row_factory": dict_row}, {"cursor_factory": driver.ClientCursor}],
    ids=["plain", "autocommit", "dict_row", "ClientCursor"],
)
async def test_a_function_that_opens_connections(gate: Gate, postgres_url: str, options: Any) -> None:
    flavour = Psycopg(postgres_url)
    await run_twice(gate, flavour, psycopg.Inbox(lambda: driver.connect(postgres_url, **options)))


@pytest.mark.parametrize("options", [{}, {"autocommit": True}], ids=["plain", "autocommit"])
async def test_an_async_function_that_opens_connections(gate: Gate, postgres_url: str, options: Any) -> None:
    flavour = AsyncPsycopg(postgres_url)
    inbox = psycopg.AsyncInbox(lambda: driver.AsyncConnection.connect(postgres_url, **options))
    await run_twice(gate, flavour, inbox)


async def test_a_relay_on_a_pool_of_one_connection(gate: Gate, postgres_url: str) -> None:
    # Given a pool of one connection, whose session has a time-out of its own
    topic = gate.topic("t", merge="append")
    with ConnectionPool(postgres_url, min_size=1, max_size=1, timeout=60, open=True) as pool:
        inbox = psycopg.Inbox(pool)
        inbox.create_tables()
        with pool.connection() as connection:
            connection.execute("SET idle_session_timeout = '1h'")
            inbox.trigger(connection, topic, "k", 1)
        # When a relay runs, then it sends the row
        async with running(inbox.relay(gate, poll="20ms")):
            await eventually(lambda: gate.counters["sql.relayed"] == 1)
        # And the pool gets its connection back as it was
        with pool.connection() as connection:
            assert not connection.autocommit
            assert connection.execute("SHOW idle_session_timeout").fetchone() == ("1h",)
            assert connection.execute("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'").fetchone() == (0,)
    assert await take_payloads(topic) == {"k": [1]}


async def test_slow_calls_of_the_application_do_not_delay_a_blocking_relay(gate: Gate, postgres_url: str) -> None:
    # Given an event loop all of whose threads are busy
    done = Event()
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    slow = asyncio.ensure_future(asyncio.to_thread(done.wait, 60))
    try:
        inbox, topic = psycopg.Inbox(postgres_url), gate.topic("t", merge="append")
        inbox.create_tables()
        async with running(inbox.relay(gate)):
            with driver.connect(postgres_url) as connection:
                inbox.trigger(connection, topic, "k", 1)
            # Then a relay sends rows meanwhile
            await eventually(lambda: gate.counters["sql.relayed"] == 1)
        assert not slow.done()
    finally:
        done.set()
        await slow


@pytest.mark.parametrize("kind", [Psycopg, AsyncPsycopg])
async def test_a_database_whose_encoding_is_sql_ascii(
    gate: Gate, url: str, clock: Clock, postgres: Postgres, kind: type[Flavour]
) -> None:
    # Given a database from which psycopg reads text as bytes
    flavour = kind(postgres.create_database("ENCODING 'SQL_ASCII' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0"))
    inbox = await flavour.create()

    async def body(db: Handle, key: str) -> str:
        await db.credit("p1")
        return key

    pay = flavour.decorate(gate, inbox, body)
    # When a key that is no ASCII comes twice, and Redis loses its record
    for _ in range(2):
        assert await pay("é") == "é"
        forget(gate, "é")
    assert flavour.look("SELECT count(*) FROM effects") == [(1,)]
    # And a relay reads a row, and one that its topic refuses
    topic = await write_refused(gate, url, clock, inbox, ("é", 1), ("é", "x"))
    assert await inbox.relay(gate).relay_once() == 2
    assert await take_payloads(topic) == {"é": 1}
    (refused,) = await _await(inbox.outbox.list_refused())
    assert (refused.topic, refused.key) == (f"{gate.namespace}:t", "é")


async def test_a_connection_in_a_transaction_is_refused(gate: Gate, postgres_url: str) -> None:
    flavour = Psycopg(postgres_url)
    psycopg.Inbox(postgres_url).create_tables()
    with driver.connect(postgres_url) as shared:
        shared.execute("SELECT 1")
        pay = flavour.guard(gate, psycopg.Inbox(lambda: shared), credit)
        verdict = await pay("p1")
        assert isinstance(verdict.error, ConnectionInUse)
        assert (verdict.outcome, verdict.ran) == ("failed", False)
    assert flavour.credits() == []


async def test_sqlite_paths_and_functions(gate: Gate, tmp_path: Path) -> None:
    from integrations.sql.tests.flavours import Sqlite

    flavour = Sqlite(str(tmp_path / "shop.db"))
    await run_twice(gate, flavour, sqlite.Inbox(tmp_path / "shop.db"))
    gate.forget("p1", scope="pay", force=True)
    flavour.look("DELETE FROM effects")
    flavour.look("DELETE FROM idemgate_inbox")

    def connect() -> sqlite3.Connection:
        connection = sqlite3.connect(tmp_path / "shop.db")  # with implicit transactions
        connection.row_factory = sqlite3.Row
        return connection

    await run_twice(gate, flavour, sqlite.Inbox(connect))


async def test_sqlite_connections_are_closed(gate: Gate, tmp_path: Path) -> None:
    opened: list[sqlite3.Connection] = []

    def connect() -> sqlite3.Connection:
        opened.append(sqlite3.connect(tmp_path / "shop.db"))
        return opened[-1]

    inbox = sqlite.Inbox(connect)
    inbox.create_tables()
    gate.guard("pay", sink=inbox).run("p1", lambda: None)
    assert len(opened) == 2
    for connection in opened:
        with pytest.raises(sqlite3.ProgrammingError, match="closed"):
            connection.execute("SELECT 1")


@pytest.mark.parametrize(
    ("build", "source"),
    [
        (sqlite.Inbox, ":memory:"),
        (sqlite.Inbox, 7),
        (psycopg.Inbox, 7),
        (psycopg.AsyncInbox, None),
    ],
)
def test_something_else_is_no_source(build: Any, source: Any) -> None:
    with pytest.raises(InvalidArgument, match="source"):
        build(source)


def test_an_open_connection_is_no_source(postgres_url: str, tmp_path: Path) -> None:
    with driver.connect(postgres_url) as connection, pytest.raises(InvalidArgument, match="function that returns"):
        psycopg.Inbox(connection)  # type: ignore[arg-type]
    with closing(sqlite3.connect(tmp_path / "x.db")) as other, pytest.raises(InvalidArgument, match="function that"):
        sqlite.Inbox(other)  # type: ignore[arg-type]


def test_a_pool_of_the_other_kind_is_refused(postgres_url: str) -> None:
    with ConnectionPool(postgres_url, min_size=0, max_size=1, open=False) as pool, pytest.raises(InvalidArgument):
        psycopg.AsyncInbox(pool)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="AsyncConnectionPool to AsyncInbox"):
        psycopg.Inbox(AsyncConnectionPool(postgres_url, open=False))  # type: ignore[arg-type]


async def test_missing_tables_are_named_and_free_the_key(gate: Gate, flavour: Flavour) -> None:
    inbox = flavour.open_inbox(table="shop")
    pay = flavour.guard(gate, inbox, credit)
    verdict = await pay("p1")
    assert (verdict.outcome, verdict.ran) == ("failed", False)
    assert isinstance(verdict.error, flavour.errors)
    assert "shop_inbox" in str(verdict.error)
    assert "ddl(..., table='shop')" in verdict.error.__notes__[0]
    await flavour.create(table="shop")
    assert (await pay("p1")).outcome == "handled"


# Consumers


async def test_a_redelivery_of_a_topic_runs_once(gate: Gate, clock: Clock, flavour: Flavour, inbox: Any) -> None:
    """The worker dies after the commit, before the completion and the acknowledgement. The delivery comes again."""
    topic = gate.topic("payments", lease="30s", backoff=0)
    handler = flavour.decorate_directly(
        gate, inbox, lambda db, delivery: credit(db, delivery.key), key=lambda key: key.id
    )

    async def handle(delivery: Any) -> Any:
        return await handler(delivery) if flavour.awaiting else await asyncio.to_thread(handler, delivery)

    topic.trigger("ann", 5)
    [delivery] = topic.take()
    assert await handle(delivery) == {"receipt": "ann"}
    gate.forget(delivery.id, scope="pay", force=True)  # as if the completion was not sent
    clock.advance("30s")
    [again] = topic.take()
    assert (again.id, again.attempt) == (delivery.id, 2)
    assert await handle(again) == {"receipt": "ann"}
    assert topic.ack(again) == "ok"
    assert flavour.credits() == ["ann"]


async def test_a_handler_of_a_worker_runs_in_its_transaction(gate: Gate, flavour: Flavour, inbox: Any) -> None:
    topic = gate.topic("payments", backoff=0)
    fails = [True]

    async def body(db: Handle, delivery: Any) -> None:
        await db.credit(delivery.key)
        if fails:
            fails.clear()
            raise ConnectionError("the bank is closed")

    topic.handler(flavour.decorate_directly(gate, inbox, body, key=lambda key: key.id))
    topic.trigger("ann", 5)
    async with gate.aio.worker():
        for _ in range(500):
            if gate.counters["worker.acked"]:
                break
            await asyncio.sleep(0.02)
    assert gate.counters["worker.acked"] == 1
    assert flavour.credits() == ["ann"]


async def test_a_batch_runs_message_by_message(gate: Gate, flavour: Flavour, inbox: Any) -> None:
    guard = gate.guard("pay", sink=inbox)
    messages = [("p1", "p1"), ("p2", "p2"), ("p1", "p1")]
    if flavour.awaiting:

        async def pay_async(key: str) -> str:
            await flavour.handle(inbox.connection()).credit(key)
            return key

        verdicts = await guard.aio.run_many(messages, pay_async, concurrency=3)
    else:

        def pay(key: str) -> str:
            run_now(flavour.handle(inbox.connection()).credit(key))
            return key

        verdicts = await asyncio.to_thread(guard.run_many, messages, pay)
    assert [verdict.outcome for verdict in verdicts] == ["handled", "handled", "duplicate"]
    assert flavour.credits() == ["p1", "p2"]


async def test_a_cached_result_needs_neither_redis_nor_the_database(gate: Gate, flavour: Flavour, inbox: Any) -> None:
    pay = flavour.decorate(gate, inbox, credit, cache_size=10)
    await pay("p1")
    flavour.look("DROP TABLE idemgate_inbox")
    assert await pay("p1") == {"receipt": "p1"}
    assert gate.counters["once.remembered"] == 1
