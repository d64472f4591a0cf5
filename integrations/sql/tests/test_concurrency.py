"""Owners at the same time: a stalled one and its successor, a locked row, and a store that is away or empty."""

from __future__ import annotations

import asyncio
from threading import Event
from typing import Any

import pytest
import redis
import tenacity
from idemgate_sql import ConnectionInUse, RowLocked

from idemgate import AlreadyInProgress, Gate
from idemgate.testing import Clock
from integrations.sql.tests.flavours import Flavour, Handle, on_postgresql, with_flavours
from integrations.sql.tests.test_inbox import credit, forget, policy

pytestmark = pytest.mark.one_in(3)


class Stalled:
    """A body that stalls after its effect, in its first run only."""

    def __init__(self) -> None:
        self.reached, self.go_on = Event(), Event()
        self.runs = 0

    async def __call__(self, db: Handle, key: str) -> int:
        self.runs += 1
        await db.credit(key)
        if self.runs == 1:
            self.reached.set()
            await db.wait(self.go_on)
        return self.runs

    async def start(self, call: Any) -> asyncio.Task[Any]:
        task = asyncio.create_task(call)
        assert await asyncio.to_thread(self.reached.wait, 30)
        return task


async def test_a_successor_waits_for_the_row_of_a_stalled_owner(
    gate: Gate, clock: Clock, flavour: Flavour, inbox: Any
) -> None:
    body = Stalled()
    pay = flavour.guard(gate, inbox, body)
    # Given an owner that stalled beyond its lease, inside its transaction
    stalled = await body.start(pay("p1"))
    clock.advance("30s")
    # When its successor runs, it waits for the transaction
    successor = asyncio.create_task(pay("p1"))
    await asyncio.sleep(0.3)
    assert not successor.done()
    assert gate.counters["once.taken_over"] == 1
    body.go_on.set()
    # Then the first commits, and the second gets its result
    first, second = await stalled, await successor
    assert (first.outcome, first.value) == ("handled", 1)
    assert (second.outcome, second.value, second.ran) == ("duplicate", 1, False)
    assert flavour.credits() == ["p1"]
    assert gate.counters["once.lost"] == 1
    assert gate.inspect("p1", scope="pay").value == 1


async def test_a_successor_runs_if_the_stalled_owner_rolls_back(
    gate: Gate, clock: Clock, flavour: Flavour, inbox: Any
) -> None:
    body = Stalled()

    async def fail_first(db: Handle, key: str) -> int:
        if await body(db, key) == 1:
            raise ConnectionError("the bank is closed")
        return body.runs

    pay = flavour.guard(gate, inbox, fail_first)
    stalled = await body.start(pay("p1"))
    clock.advance("30s")
    successor = asyncio.create_task(pay("p1"))
    await asyncio.sleep(0.1)
    body.go_on.set()
    assert (await stalled).outcome == "failed"
    assert (await successor).value == 2
    assert flavour.credits() == ["p1"]


async def test_a_row_that_stays_locked_is_in_progress(gate: Gate, clock: Clock, flavour: Flavour) -> None:
    inbox, body = await flavour.create(lock_timeout="100ms"), Stalled()
    pay = flavour.guard(gate, inbox, body)
    stalled = await body.start(pay("p1"))
    clock.advance("30s")
    late = await pay("p1")
    assert (late.outcome, late.action, late.retry_after, late.ran) == ("in_progress", "retry", 0.1, False)
    assert isinstance(late.error, RowLocked)
    assert gate.counters["once.sink_busy"] == 1
    # And its claim is released, so that the row decides as soon as it is committed
    assert gate.inspect("p1", scope="pay").state == "released"
    body.go_on.set()
    assert (await stalled).outcome == "handled"
    assert (await pay("p1")).value == 1
    assert flavour.credits() == ["p1"]


async def test_a_lock_timeout_counts_as_no_attempt(gate: Gate, flavour: Flavour) -> None:
    inbox = await flavour.create(lock_timeout="50ms")
    pay = flavour.decorate(gate, inbox, credit, max_attempts=1)
    insert = (
        "INSERT INTO idemgate_inbox (scope, key, fingerprint, token, kind, result, expires_at) "
        f"VALUES ('{gate.namespace}:pay', 'p1', '', 1, 'none', '', '2100-01-01')"
    )
    async with flavour.hold(insert):
        for _ in range(2):
            with pytest.raises(AlreadyInProgress):
                await pay("p1")
    assert await pay("p1") == {"receipt": "p1"}


async def test_the_lock_timeout_does_not_apply_to_the_handler(gate: Gate, flavour: Flavour) -> None:
    inbox = await flavour.create(lock_timeout="123ms")
    seen: list[Any] = []

    async def body(db: Handle, key: str) -> None:
        setting = "SHOW lock_timeout" if flavour.dialect == "postgresql" else "PRAGMA busy_timeout"
        seen.extend(await db.execute(setting))

    await flavour.decorate(gate, inbox, body)("p1")
    assert seen == [("0",)] if flavour.dialect == "postgresql" else [(5000,)]


@with_flavours(lambda kind: not kind.awaiting)  # without a thread of its own the stall would block the successor
async def test_an_owner_that_stalled_before_its_insertion_finds_the_row(
    gate: Gate, clock: Clock, flavour: Flavour, inbox: Any
) -> None:
    stall, successor_done = Event(), Event()
    first = [True]
    pay = flavour.guard(gate, inbox, credit)
    transaction = inbox.database.transaction

    def late() -> Any:
        if first.pop() if first else False:
            stall.set()
            assert successor_done.wait(30)
        return transaction()

    inbox.database.transaction = late
    stalled = asyncio.create_task(pay("p1"))
    assert await asyncio.to_thread(stall.wait, 30)
    clock.advance("30s")
    assert (await pay("p1")).outcome == "handled"
    successor_done.set()
    late_verdict = await stalled
    assert (late_verdict.outcome, late_verdict.value) == ("duplicate", {"receipt": "p1"})
    assert flavour.credits() == ["p1"]


async def test_many_callers_of_one_key_credit_once_while_redis_forgets(
    gate: Gate, flavour: Flavour, inbox: Any
) -> None:
    pay = flavour.guard(gate, inbox, credit)
    done = asyncio.Event()

    async def lose_records() -> None:
        while not done.is_set():
            await asyncio.to_thread(forget, gate, "p1")
            await asyncio.sleep(0)

    losing = asyncio.create_task(lose_records())
    verdicts = await asyncio.gather(*(pay("p1") for _ in range(30)))
    done.set()
    await losing
    assert flavour.credits() == ["p1"]
    assert {verdict.outcome for verdict in verdicts} <= {"handled", "duplicate", "in_progress"}
    assert [verdict.outcome for verdict in verdicts].count("handled") == 1
    assert {verdict.value["receipt"] for verdict in verdicts if verdict.value} == {"p1"}


# The store


@pytest.mark.parametrize("choice", ["run", "local"])
async def test_without_the_store_the_row_decides(flavour: Flavour, inbox: Any, choice: Any) -> None:
    with Gate("redis://127.0.0.1:1", namespace="away", timeout="100ms") as gate:
        pay = flavour.guard(gate, inbox, credit, on_store_error=choice)
        first, second = await pay("p1"), await pay("p1")
        assert (first.outcome, first.ran, first.value) == ("unguarded", True, {"receipt": "p1"})
        assert (second.outcome, second.ran, second.value) == ("duplicate", False, {"receipt": "p1"})
        await gate.aio.close()
    assert flavour.credits() == ["p1"]
    assert flavour.look("SELECT token FROM idemgate_inbox") == [(0,)]


async def test_a_completion_that_is_lost_is_replayed_from_the_row(
    gate: Gate, clock: Clock, url: str, flavour: Flavour, inbox: Any
) -> None:
    # Given a handler after whose run Redis is empty
    async def body(db: Handle, key: str) -> str:
        await db.credit(key)
        with redis.Redis.from_url(url) as raw:
            for name in raw.scan_iter(f"*{gate.namespace}*"):
                raw.delete(name)
        return "paid"

    pay = flavour.guard(gate, inbox, body)
    assert (await pay("p1")).outcome == "handled"
    assert gate.counters["once.lost"] == 1
    # Then the row answers, and fills Redis
    assert (await pay("p1")).value == "paid"
    assert gate.inspect("p1", scope="pay").value == "paid"
    assert flavour.credits() == ["p1"]


# Nested calls


async def test_a_nested_call_has_a_transaction_of_its_own(gate: Gate, flavour: Flavour, inbox: Any) -> None:
    inner = flavour.decorate_directly(gate, inbox, credit, scope="inner")

    async def body(db: Handle, key: str) -> None:
        await db.credit(key)
        returned = inner("in")
        assert (await returned if flavour.awaiting else returned) == {"receipt": "in"}
        assert inbox.connection() is db.connection
        raise ConnectionError("the outer one fails")

    pay = flavour.decorate(gate, inbox, body)
    with pytest.raises(ConnectionError if flavour.serves_nested else ConnectionInUse):
        await pay("p1")
    # Then the inner effect stays, and the outer one is undone
    assert flavour.credits() == (["in"] if flavour.serves_nested else [])


# Conflicts of PostgreSQL


def make_serializable(flavour: Flavour) -> None:
    [(database,)] = flavour.look("SELECT current_database()")
    flavour.look(f"ALTER DATABASE {database} SET default_transaction_isolation = 'serializable'")


async def read_and_write(gate: Gate, flavour: Flavour, inbox: Any, **options: Any) -> list[Any]:
    """Run two handlers that read one row, both, and then write it."""
    flavour.look("INSERT INTO stock VALUES ('pen', 0)")
    both, seen = Event(), []

    async def body(db: Handle, key: str) -> int:
        [(n,)] = await db.execute("SELECT n FROM stock")
        seen.append(key)
        if len(seen) >= 2:
            both.set()
        await db.wait(both)
        await db.execute(f"UPDATE stock SET n = {n + 1}")
        return int(n)

    pay = flavour.guard(gate, inbox, body, **options)
    return list(await asyncio.gather(pay("a"), pay("b")))


@on_postgresql
async def test_a_serialization_failure_reaches_the_caller_and_frees_the_key(gate: Gate, flavour: Flavour) -> None:
    make_serializable(flavour)
    verdicts = await read_and_write(gate, flavour, await flavour.create())
    assert sorted(verdict.outcome for verdict in verdicts) == ["failed", "handled"]
    [failed] = [verdict.error for verdict in verdicts if verdict.outcome == "failed"]
    assert isinstance(failed, flavour.errors)
    assert "serialize" in str(failed)
    assert len(flavour.rows()) == 1
    assert {gate.inspect(key, scope="pay").state for key in "ab"} == {"done", "released"}


@on_postgresql
async def test_a_retry_policy_repeats_a_serialization_failure(gate: Gate, flavour: Flavour) -> None:
    make_serializable(flavour)
    retry: tenacity.BaseRetrying = policy(flavour, *flavour.errors)
    verdicts = await read_and_write(gate, flavour, await flavour.create(), retry=retry)
    assert [verdict.outcome for verdict in verdicts] == ["handled", "handled"]
    assert sorted(verdict.value for verdict in verdicts) == [0, 1]
    assert flavour.look("SELECT n FROM stock") == [(2,)]


@on_postgresql
async def test_a_deadlock_reaches_one_caller_and_frees_its_key(gate: Gate, flavour: Flavour, inbox: Any) -> None:
    flavour.look("INSERT INTO stock VALUES ('a', 0), ('b', 0)")
    both, seen = Event(), []

    async def body(db: Handle, key: str) -> None:
        await db.execute(f"UPDATE stock SET n = n + 1 WHERE item = '{key}'")
        seen.append(key)
        if len(seen) == 2:
            both.set()
        await db.wait(both)
        await db.execute(f"UPDATE stock SET n = n + 1 WHERE item = '{'a' if key == 'b' else 'b'}'")

    pay = flavour.guard(gate, inbox, body)
    verdicts = await asyncio.gather(pay("a"), pay("b"))
    assert sorted(verdict.outcome for verdict in verdicts) == ["failed", "handled"]
    [error] = [verdict.error for verdict in verdicts if verdict.error]
    assert "deadlock" in str(error)
    assert (await pay("a")).error is (await pay("b")).error is None
    assert sorted(flavour.look("SELECT n FROM stock")) == [(2,), (2,)]


@on_postgresql
async def test_a_successor_under_repeatable_read_calls_again(
    gate: Gate, clock: Clock, flavour: Flavour, inbox: Any
) -> None:
    body = Stalled()
    [(database,)] = flavour.look("SELECT current_database()")
    flavour.look(f"ALTER DATABASE {database} SET default_transaction_isolation = 'repeatable read'")
    pay = flavour.guard(gate, inbox, body)
    stalled = await body.start(pay("p1"))
    clock.advance("30s")
    successor = asyncio.create_task(pay("p1"))  # type: ignore[arg-type]
    await asyncio.sleep(0.3)
    body.go_on.set()
    assert (await stalled).outcome == "handled"
    # When the successor cannot see the row, PostgreSQL says so, and nothing runs
    failed = await successor
    assert (failed.outcome, failed.ran) == ("failed", False)
    assert "serialize" in str(failed.error)
    assert (await pay("p1")).value == 1
    assert flavour.credits() == ["p1"]


async def test_a_row_that_is_gone_when_it_is_read_is_inserted_again(gate: Gate, flavour: Flavour, inbox: Any) -> None:
    pay = flavour.guard(gate, inbox, credit)
    await pay("p1")
    forget(gate, "p1")
    database, find, looked = inbox.database, inbox.statements.find, list[str]()
    execute = database.execute

    def vanish(connection: Any, sql: str, params: Any) -> Any:
        if sql != find:
            return execute(connection, sql, params)
        looked.append(sql)
        return vanish_async() if flavour.awaiting else ()

    async def vanish_async() -> Any:
        return ()

    database.execute = vanish
    verdict = await pay("p1")
    assert (verdict.outcome, len(looked)) == ("in_progress", 5)
    database.execute = execute
    assert (await pay("p1")).value == {"receipt": "p1"}
