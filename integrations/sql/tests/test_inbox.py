"""What a guard with an inbox does: with a row, without one, with another fingerprint, and when the handler raises."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest
import tenacity

from idemgate import Gate
from idemgate.errors import AlreadyDone, InvalidArgument, KeyReused, NoCurrentExecution, ResultUnavailable
from idemgate.testing import Clock
from integrations.sql.tests.flavours import Flavour, Handle, run_now
from tests.for_each import for_each

pytestmark = pytest.mark.one_in(3)


async def credit(db: Handle, key: str) -> dict[str, str]:
    await db.credit(key)
    return {"receipt": key}


def forget(gate: Gate, key: str) -> None:
    """Lose the record in Redis, as after a crash before the completion."""
    gate.forget(key, scope="pay", force=True)


async def test_the_effect_the_key_and_the_result_are_committed_together(
    gate: Gate, flavour: Flavour, inbox: Any
) -> None:
    pay = flavour.decorate(gate, inbox, credit)
    assert await pay("p1") == {"receipt": "p1"}
    assert flavour.credits() == ["p1"]
    assert flavour.rows() == [(f"{gate.namespace}:pay", "p1", "value")]
    # And a duplicate is answered by Redis
    assert await pay("p1") == {"receipt": "p1"}
    assert gate.counters["once.done"] == 1
    assert gate.counters["once.sink_replayed"] == 0


async def test_a_row_is_replayed_and_completes_redis(gate: Gate, flavour: Flavour, inbox: Any) -> None:
    pay = flavour.decorate(gate, inbox, credit)
    await pay("p1")
    forget(gate, "p1")
    # When Redis has no record, the row answers
    assert await pay("p1") == {"receipt": "p1"}
    assert flavour.credits() == ["p1"]
    assert gate.counters["once.sink_replayed"] == 1
    # And Redis has the result again
    record = gate.inspect("p1", scope="pay")
    assert (record.state, record.value) == ("done", {"receipt": "p1"})
    assert await pay("p1") == {"receipt": "p1"}
    assert gate.counters["once.sink_replayed"] == 1


async def test_a_replay_is_a_duplicate(gate: Gate, flavour: Flavour, inbox: Any) -> None:
    replays: list[Any] = []
    pay = flavour.guard(gate, inbox, credit, on_replay=lambda key, verdict: replays.append((key, verdict.outcome)))
    first = await pay("p1")
    assert (first.outcome, first.value, first.ran) == ("handled", {"receipt": "p1"}, True)
    forget(gate, "p1")
    again = await pay("p1")
    assert (again.outcome, again.value, again.ran, again.replayed) == ("duplicate", {"receipt": "p1"}, False, True)
    assert replays == [("p1", "duplicate")]


@dataclass
class Receipt:
    key: str


async def test_a_replayed_result_is_rebuilt_from_the_annotation(gate: Gate, flavour: Flavour, inbox: Any) -> None:
    async def body(db: Handle, key: str) -> Receipt:
        return Receipt(key)

    if flavour.awaiting:

        @gate.once(key="{key}", sink=inbox)
        async def pay(key: str) -> Receipt:
            return Receipt(key)
    else:

        @gate.once(key="{key}", sink=inbox)
        def pay(key: str) -> Receipt:  # type: ignore[misc]
            return Receipt(key)

    async def call() -> object:
        return await pay("p1") if flavour.awaiting else await asyncio.to_thread(pay, "p1")

    assert await call() == Receipt("p1")
    gate.forget("p1", scope=pay.scope)
    assert await call() == Receipt("p1")


async def test_on_done_applies_to_a_row(gate: Gate, flavour: Flavour, inbox: Any) -> None:
    for on_done in ("skip", "raise"):
        pay = flavour.guard(gate, inbox, credit, on_done=on_done)
        await pay(on_done)
        forget(gate, on_done)
        again = await pay(on_done)
        assert (again.outcome, again.ran) == ("duplicate", False)
        assert type(again.error) is (AlreadyDone if on_done == "raise" else type(None))
        assert again.value == ({"receipt": "raise"} if on_done == "raise" else None)


async def test_another_fingerprint_in_the_row_is_refused(gate: Gate, flavour: Flavour, inbox: Any) -> None:
    guard = gate.guard("pay", sink=inbox)

    async def pay(amount: int) -> Any:
        if flavour.awaiting:

            async def work() -> int:
                await flavour.handle(inbox.connection()).credit("p1")
                return amount

            return await guard.aio.run("p1", work, fingerprint=amount)

        def work_now() -> int:
            run_now(flavour.handle(inbox.connection()).credit("p1"))
            return amount

        return await asyncio.to_thread(guard.run, "p1", work_now, fingerprint=amount)

    assert (await pay(5)).outcome == "handled"
    forget(gate, "p1")
    refused = await pay(6)
    assert (refused.outcome, type(refused.error), refused.ran) == ("rejected", KeyReused, False)
    # And the claim is free, so that the right payload is answered
    assert (await pay(5)).value == 5
    assert flavour.credits() == ["p1"]


async def test_an_exception_rolls_back_and_frees_the_key(gate: Gate, flavour: Flavour, inbox: Any) -> None:
    fails = [True]

    async def body(db: Handle, key: str) -> str:
        await db.credit(key)
        if fails.pop() if fails else False:
            raise ConnectionError("the bank is closed")
        return "paid"

    pay = flavour.decorate(gate, inbox, body)
    with pytest.raises(ConnectionError):
        await pay("p1")
    assert (flavour.credits(), flavour.rows()) == ([], [])
    assert gate.inspect("p1", scope="pay").state == "released"
    assert await pay("p1") == "paid"
    assert flavour.credits() == ["p1"]


@pytest.mark.parametrize(("policy", "state"), [("keep", "in_progress"), ("release", "released"), ("share", "released")])
async def test_on_error_applies_after_the_rollback(
    gate: Gate, flavour: Flavour, inbox: Any, policy: Any, state: str
) -> None:
    async def body(db: Handle, key: str) -> None:
        await db.credit(key)
        raise ConnectionError("the bank is closed")

    pay = flavour.decorate(gate, inbox, body, on_error=policy)
    with pytest.raises(ConnectionError):
        await pay("p1")
    assert gate.inspect("p1", scope="pay").state == state
    assert (flavour.credits(), flavour.rows()) == ([], [])


async def test_a_callable_that_wants_to_store_a_failure_releases(gate: Gate, flavour: Flavour, inbox: Any) -> None:
    async def body(db: Handle, key: str) -> None:
        raise ConnectionError("the bank is closed")

    pay = flavour.decorate(gate, inbox, body, on_error=lambda error: "store")
    with pytest.raises(ConnectionError):
        await pay("p1")
    assert gate.inspect("p1", scope="pay").state == "released"
    assert gate.counters["once.hook_failed"] == 1


async def test_a_result_that_cannot_be_stored_is_done_without_it(gate: Gate, flavour: Flavour, inbox: Any) -> None:
    async def body(db: Handle, key: str) -> object:
        await db.credit(key)
        return object()

    pay = flavour.decorate(gate, inbox, body)
    assert type(await pay("p1")) is object
    assert flavour.rows() == [(f"{gate.namespace}:pay", "p1", "none")]
    for lose in (False, True):
        if lose:
            forget(gate, "p1")
        with pytest.raises(ResultUnavailable, match="object"):
            await pay("p1")
    assert flavour.credits() == ["p1"]


async def test_a_result_that_is_too_large_is_done_without_it(gate: Gate, flavour: Flavour, inbox: Any) -> None:
    async def body(db: Handle, key: str) -> str:
        await db.credit(key)
        return "x" * 1000

    pay = flavour.decorate(gate, inbox, body, max_result_bytes=100)
    assert await pay("p1") == "x" * 1000
    forget(gate, "p1")
    with pytest.raises(ResultUnavailable, match="max_result_bytes"):
        await pay("p1")
    assert flavour.credits() == ["p1"]


async def test_any_key_has_a_row(gate: Gate, flavour: Flavour, inbox: Any) -> None:
    async def body(db: Handle, key: str) -> str:
        return key

    pay = flavour.guard(gate, inbox, body)
    keys = ["p 1", "ключ", "a\0b", "k" * 5000, "k" * 5001, "a:b", "%", "%25", "'); DROP TABLE effects; --"]
    for key in keys:
        assert (await pay(key)).ran
    for key in keys:
        forget(gate, key)
        again = await pay(key)
        assert (again.ran, again.value) == (False, key)
    assert len(flavour.rows()) == len(keys)


async def test_namespaces_and_scopes_have_rows_of_their_own(
    gate: Gate, url: str, flavour: Flavour, inbox: Any, clock: Clock
) -> None:
    with Gate(url, namespace=f"{gate.namespace}-b", clock=clock) as other:
        for one, scope in ((gate, "pay"), (other, "pay"), (gate, "refund")):
            assert await flavour.decorate(one, inbox, credit, scope=scope)("p1") == {"receipt": "p1"}
        await other.aio.close()
    assert flavour.credits() == ["p1"] * 3


async def test_the_connection_is_there_only_during_the_run(gate: Gate, flavour: Flavour, inbox: Any) -> None:
    with pytest.raises(NoCurrentExecution, match="sink=inbox"):
        inbox.connection()
    tasks: list[asyncio.Task[Any]] = []

    async def late() -> None:
        await asyncio.sleep(0.05)
        with pytest.raises(NoCurrentExecution):
            inbox.connection()

    async def body(db: Handle, key: str) -> None:
        assert inbox.connection() is db.connection
        if flavour.awaiting:
            tasks.append(asyncio.create_task(late()))

    await flavour.decorate(gate, inbox, body)("p1")
    await asyncio.gather(*tasks)
    with pytest.raises(NoCurrentExecution):
        inbox.connection()


# Retries


def policy(flavour: Flavour, *errors: type[Exception]) -> tenacity.BaseRetrying:
    kind = tenacity.AsyncRetrying if flavour.awaiting else tenacity.Retrying
    return kind(stop=tenacity.stop_after_attempt(5), retry=tenacity.retry_if_exception_type(errors), reraise=True)


async def test_each_attempt_of_a_retry_policy_is_a_transaction(gate: Gate, flavour: Flavour, inbox: Any) -> None:
    seen: list[int] = []

    async def body(db: Handle, key: str) -> int:
        await db.credit(key)
        seen.append(len(await db.execute("SELECT * FROM effects")))
        if len(seen) < 3:
            raise ConnectionError("the bank is closed")
        return len(seen)

    pay = flavour.decorate(gate, inbox, body, retry=policy(flavour, ConnectionError))
    assert await pay("p1") == 3
    assert seen == [1, 1, 1]
    assert flavour.credits() == ["p1"]
    forget(gate, "p1")
    assert await pay("p1") == 3


# Refusals


@for_each(
    "options",
    [{"at_most_once": True}, {"shadow": True}, {"on_error": "store"}, {"retry": tenacity.Retrying(
        retry=tenacity.retry_if_exception_type() | tenacity.retry_if_result(bool))}],
    ids=["at_most_once", "shadow", "on_error", "retry"],
)  # fmt: skip
async def test_options_without_a_meaning_are_refused(gate: Gate, flavour: Flavour, options: Any) -> None:
    inbox = flavour.open_inbox()
    with pytest.raises(InvalidArgument, match=next(iter(options))):
        flavour.decorate(gate, inbox, credit, **options)
    with pytest.raises(InvalidArgument, match=next(iter(options))):
        gate.guard("pay", sink=inbox, **options)


async def test_an_inbox_of_the_other_kind_is_refused(gate: Gate, flavour: Flavour) -> None:
    inbox = flavour.open_inbox()

    async def run_async(key: str) -> None: ...
    def run(key: str) -> None: ...

    with pytest.raises(InvalidArgument, match="AsyncInbox is for async ones"):
        gate.once(key="{key}", scope="s", sink=inbox)(run if flavour.awaiting else run_async)  # type: ignore[arg-type]
    guard = gate.guard("s", sink=inbox)
    if flavour.awaiting:
        with pytest.raises(InvalidArgument, match=r"guard\.aio"):
            guard.run("k", run, "k")
        with pytest.raises(InvalidArgument, match=r"guard\.aio"):
            guard.run_many([("k", "k")], run)
    else:
        with pytest.raises(InvalidArgument, match=r"guard\.run"):
            guard.aio.run("k", run_async, "k")


def test_something_else_is_no_sink(gate: Gate) -> None:
    with pytest.raises(InvalidArgument, match="sink"):
        gate.guard("s", sink="postgresql:///shop")  # type: ignore[arg-type]


@for_each("options", [{"table": "a b"}, {"table": "a;b"}, {"table": ""}, {"lock_timeout": 0}])
async def test_bad_options_of_an_inbox_are_refused(flavour: Flavour, options: Any) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(options))):
        flavour.open_inbox(**options)


async def test_other_tables_are_used(gate: Gate, flavour: Flavour) -> None:
    inbox = await flavour.create(table="shop")
    await flavour.decorate(gate, inbox, credit)("p1")
    assert flavour.look("SELECT key FROM shop_inbox") == [("p1",)]


# Retention


async def test_an_expired_row_answers_until_it_is_purged(gate: Gate, flavour: Flavour, inbox: Any) -> None:
    async def purge(batch: int) -> int:
        purged = inbox.purge(batch)
        return int(await purged if flavour.awaiting else purged)

    pay = flavour.decorate(gate, inbox, credit)
    for key in ("p1", "p2", "p3", "p4"):
        await pay(key)
    assert await purge(10) == 0
    flavour.look("UPDATE idemgate_inbox SET expires_at = '2020-01-01 00:00:00.000' WHERE key <> 'p4'")
    forget(gate, "p1")
    assert await pay("p1") == {"receipt": "p1"}
    assert [await purge(2), await purge(2), await purge(2)] == [2, 1, 0]
    assert [key for _, key, _ in flavour.rows()] == ["p4"]
    with pytest.raises(InvalidArgument, match="batch"):
        await purge(0)


async def test_a_key_whose_row_and_record_are_deleted_runs_again(gate: Gate, flavour: Flavour, inbox: Any) -> None:
    async def delete(key: Any) -> Any:
        deleted = inbox.delete_row(gate, key, scope="pay")
        return await deleted if flavour.awaiting else deleted

    pay = flavour.decorate(gate, inbox, credit)
    # Given keys that are escaped or hashed in the row
    for key in ("a:b {c} é", "x" * 500):
        await pay(key)
        await pay(key + "2")
        # When the row of one is deleted
        assert [await delete(key), await delete(key)] == [True, False]
        # Then Redis still answers, until its record is deleted, too
        await pay(key)
        assert flavour.credits().count(key) == 1
        gate.forget(key, scope="pay")
        await pay(key)
        assert flavour.credits().count(key) == 2
        assert flavour.credits().count(key + "2") == 1
    with pytest.raises(InvalidArgument, match="key"):
        await delete("")


async def test_rows_expire_after_the_retention(gate: Gate, flavour: Flavour, inbox: Any) -> None:
    for retention in ("1h", "36500d"):
        await flavour.decorate(gate, inbox, credit, retention=retention)(retention)
    if flavour.dialect == "sqlite":
        hours = "(julianday(expires_at) - julianday(created_at)) * 24"
    else:
        hours = "extract(epoch FROM expires_at - created_at) / 3600"
    [(hour,), (years,)] = flavour.look(f"SELECT {hours} FROM idemgate_inbox ORDER BY expires_at")
    assert (round(hour), round(years)) == (1, 36_500 * 24)
