"""Triggers that are stored with the effect, and sent by a relay after the commit."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest

from idemgate import Gate, InvalidArgument, Trigger, append
from idemgate.testing import Clock
from integrations.sql.tests.flavours import Flavour, with_few, with_flavours
from integrations.sql.tests.killed_relay import replace_execute
from tests.for_each import for_each
from tests.waiting import eventually

pytestmark = pytest.mark.one_in(3)


@pytest.fixture
def topic(gate: Gate) -> Any:
    return gate.topic("orders", merge="append")


async def _await(value: Any) -> Any:
    """Return the result of a call of a blocking or an async inbox."""
    return await value if hasattr(value, "__await__") else value


@asynccontextmanager
async def transaction(inbox: Any) -> AsyncIterator[Any]:
    """Begin a transaction of the user in the database of the inbox. Yield its connection."""
    manager = inbox.database.transaction()
    if hasattr(manager, "__aenter__"):
        async with manager as connection:
            yield connection
    else:
        with manager as connection:
            yield connection


async def send(inbox: Any, topic: Any, *triggers: Any) -> None:
    async with transaction(inbox) as connection:
        await _await(inbox.trigger_many(connection, topic, triggers))


@asynccontextmanager
async def running(relay: Any) -> AsyncIterator[None]:
    """Run a relay until the block ends."""
    stop, ready = asyncio.Event(), asyncio.Event()
    task = asyncio.create_task(relay.run(stop, ready=ready.set))
    await asyncio.wait_for(ready.wait(), 30)
    yield
    stop.set()
    await asyncio.wait_for(task, 30)


async def test_a_trigger_is_sent_after_the_commit_and_never_without(gate: Gate, inbox: Any, topic: Any) -> None:
    relay = inbox.relay(gate)
    # Given a transaction that commits and one that does not
    with pytest.raises(ZeroDivisionError):
        async with transaction(inbox) as connection:
            await _await(inbox.trigger(connection, topic, "a", {"n": 1}))
            raise ZeroDivisionError
    async with transaction(inbox) as connection:
        await _await(inbox.trigger(connection, topic, "b", {"n": 2}))
    # When the relay sends
    assert await relay.relay_once() == 1
    assert await relay.relay_once() == 0
    # Then only the committed one arrives
    assert [(one.key, one.payload) for one in await topic.aio.take(10)] == [("b", [{"n": 2}])]
    assert (await _await(inbox.outbox.backlog()))[:2] == (0, 0)
    assert gate.counters["sql.relayed"] == 1


async def test_a_guarded_function_commits_its_trigger_with_its_effect(
    gate: Gate, flavour: Flavour, inbox: Any, topic: Any
) -> None:
    # Given a guarded function that fails once after its effect and its trigger
    failures = [ZeroDivisionError()]

    async def pay(handle: Any, key: str) -> str:
        await handle.credit(key)
        await _await(inbox.trigger(inbox.connection(), topic, key, 5))
        if failures:
            raise failures.pop()
        return "done"

    call = flavour.decorate(gate, inbox, pay)
    with pytest.raises(ZeroDivisionError):
        await call("p1")
    assert await call("p1") == "done"
    assert await call("p1") == "done"
    # Then its trigger is sent once
    await inbox.relay(gate).relay_once()
    assert [one.payload for one in await topic.aio.take(10)] == [[5]]
    assert flavour.credits() == ["p1"]


async def test_options_and_types_arrive_as_they_were(gate: Gate, clock: Clock, inbox: Any) -> None:
    topic = gate.topic("t", priority=True)
    at = datetime.fromtimestamp(clock.microseconds() / 1e6, UTC) + timedelta(hours=1)
    payload = {"price": Decimal("1.50"), "at": at, "ids": (1, 2), "raw": b"\0\xff"}
    async with transaction(inbox) as connection:
        await _await(inbox.trigger(connection, topic, b"\xff\0", payload, priority=7, group="g", at=at, version=3))
        await _await(inbox.trigger(connection, topic, 7, None, delay="10m"))
    # A delay counts from the trigger, not from the moment in which it is sent
    clock.advance("9m")
    await inbox.relay(gate).relay_once()
    assert await topic.aio.take(10) == []
    clock.advance("1m")
    (one,) = await topic.aio.take(10)
    assert one.key == "7"
    await topic.aio.ack(one)
    clock.advance("50m")
    (one,) = await topic.aio.take(10)
    assert (one.raw_key, one.payload, one.priority, one.group) == (b"\xff\0", payload, 7, "g")
    # And the version counts
    assert (await topic.aio.trigger(b"\xff\0", None, group="g", version=2)).status == "dropped"


async def test_rows_of_a_key_are_sent_in_order_in_any_number_of_batches(gate: Gate, inbox: Any, topic: Any) -> None:
    await send(inbox, topic, *((f"k{n % 3}", n) for n in range(250)))
    relay, batches = inbox.relay(gate, batch=40), 0
    while await relay.relay_once():
        batches += 1
    assert batches == 7
    delivered = {one.key: one.payload for one in await topic.aio.take(10)}
    assert delivered == {f"k{k}": list(range(k, 250, 3)) for k in range(3)}


@with_few
async def test_a_row_that_is_sent_again_has_no_second_effect(gate: Gate, inbox: Any, topic: Any) -> None:
    # Given a relay that sent rows and died before it deleted them
    await send(inbox, topic, ("a", 1), ("a", 2))
    relay = inbox.relay(gate)

    async def die(execute: Any, sql: str, params: Any) -> Any:
        if sql.startswith("DELETE"):
            raise ConnectionResetError("killed here")
        return await execute(sql, params)

    replace_execute(relay, die)
    with pytest.raises(ConnectionResetError):
        await relay.relay_once()
    # When another one sends them again, behind a newer one
    await send(inbox, topic, ("a", 3))
    assert await inbox.relay(gate).relay_once() == 3
    # Then the topic has each of them once
    assert [one.payload for one in await topic.aio.take(10)] == [[1, 2, 3]]
    assert gate.counters["sql.relay_duplicates"] == 2


@with_few
async def test_rows_that_their_topic_drops_are_counted(gate: Gate, inbox: Any) -> None:
    full = gate.topic("full", merge=append(1))
    await send(inbox, full, ("a", 1), ("a", 2), ("b", 3))
    assert await inbox.relay(gate).relay_once() == 3
    assert sorted(one.payload for one in await full.aio.take(10)) == [[1], [3]]
    assert (gate.counters["sql.relayed"], gate.counters["sql.relay_dropped"]) == (3, 1)


@with_few
async def test_a_trigger_that_the_topic_would_refuse_is_refused_before_it_is_written(
    gate: Gate, inbox: Any, topic: Any
) -> None:
    sums = gate.topic("sums", merge="sum")
    for one, trigger, match in (
        (topic, ("k", object()), "payload"),
        (sums, ("k", "text"), "payload"),
        (topic, Trigger("k", 1, priority=3), "priority"),
        ("orders", ("k", 1), "topic"),
    ):
        with pytest.raises(InvalidArgument, match=match):
            async with transaction(inbox) as connection:
                await _await(inbox.trigger_many(connection, one, [("good", 1), trigger]))
    assert await _await(inbox.outbox.backlog()) == (0, 0, 0.0)


@with_few
async def test_a_row_that_its_topic_refuses_now_is_set_aside(
    gate: Gate, url: str, clock: Clock, inbox: Any, caplog: pytest.LogCaptureFixture
) -> None:
    # Given rows that were written for a topic that any payload suits, and a program whose topic adds numbers
    other = Gate(url, namespace=gate.namespace, clock=clock)
    await send(inbox, other.topic("t", merge="append"), ("a", 4), ("b", "text"))
    other.close()
    topic = gate.topic("t", merge="sum")
    # When they are sent
    assert await inbox.relay(gate).relay_once() == 2
    # Then the one that suits arrives, and the other one is counted, logged and listed
    assert [one.payload for one in await topic.aio.take(10)] == [4]
    (refused,) = await _await(inbox.outbox.list_refused())
    assert (refused.topic, refused.key) == (f"{gate.namespace}:t", "b")
    assert "payload" in refused.error
    assert gate.counters["sql.relay_refused"] == 1
    assert [record.getMessage().split()[0] for record in caplog.records] == ["sql.relay_refused"]
    assert (await _await(inbox.outbox.backlog()))[:2] == (0, 1)
    # And it is sent again on request
    assert await _await(inbox.outbox.redrive_refused()) == 1
    assert (await _await(inbox.outbox.backlog()))[:2] == (1, 0)


@with_few
async def test_rows_of_topics_that_the_relay_does_not_have_stay_and_are_logged_once(
    gate: Gate, url: str, clock: Clock, inbox: Any, topic: Any, caplog: pytest.LogCaptureFixture
) -> None:
    other = Gate(url, namespace=gate.namespace, clock=clock)
    await send(inbox, other.topic("unknown", merge="sum"), ("a", 1), ("b", 2))
    other.close()
    await send(inbox, topic, ("c", 3))
    async with running(inbox.relay(gate, poll="10ms")):
        await eventually(lambda: gate.counters["sql.relayed"] == 1)
        await asyncio.sleep(0.1)
    assert [record.getMessage() for record in caplog.records] == [
        f"sql.relay_unserved rows={{'{gate.namespace}:unknown': 2}}: declare these topics on the gate of a relay"
    ]
    assert (await _await(inbox.outbox.backlog()))[:2] == (2, 0)


async def test_a_relay_is_woken_by_a_commit_or_looks_at_intervals(
    gate: Gate, flavour: Flavour, inbox: Any, topic: Any
) -> None:
    # Given a relay that with LISTEN would look only every hour
    poll = "1h" if flavour.listens else "20ms"
    async with running(inbox.relay(gate, poll=poll)):
        for number in range(5):
            await send(inbox, topic, ("k", number))
            await eventually(lambda number=number: gate.counters["sql.relayed"] == number + 1)


@with_flavours(lambda kind: kind.listens)
async def test_without_notify_the_relay_polls(gate: Gate, flavour: Flavour, inbox: Any, topic: Any) -> None:
    quiet = flavour.open_inbox(notify=False)
    async with running(inbox.relay(gate, poll="20ms")):
        await send(quiet, topic, ("k", 1))
        await eventually(lambda: gate.counters["sql.relayed"] == 1)


@with_flavours(lambda kind: kind.listens)
async def test_one_relay_works_and_another_one_takes_over(
    gate: Gate, flavour: Flavour, inbox: Any, topic: Any, url: str, clock: Clock
) -> None:
    second = Gate(url, namespace=gate.namespace, clock=clock)
    second.topic("orders", merge="append")
    async with running(inbox.relay(second, poll="20ms")), running(inbox.relay(gate, poll="20ms")):
        await send(inbox, topic, *((n, n) for n in range(20)))
        await eventually(lambda: second.counters["sql.relayed"] == 20)
        # When the connection of the first one is cut
        flavour.look("SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory'")
        await eventually(lambda: second.counters["sql.relay_failed"] >= 1)
        await send(inbox, topic, *((n, n) for n in range(20, 40)))
        # Then one of them goes on, and nothing is sent twice
        total = lambda: gate.counters["sql.relayed"] + second.counters["sql.relayed"]  # noqa: E731
        await eventually(lambda: total() == 40)
    assert gate.counters["sql.relay_duplicates"] == second.counters["sql.relay_duplicates"] == 0
    assert sorted(one.payload for one in await topic.aio.take(100)) == [[n] for n in range(40)]
    await second.aio.close()
    second.close()


@with_few
async def test_an_outage_is_logged_once_and_so_is_its_end(
    gate: Gate, flavour: Flavour, inbox: Any, topic: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "idemgate.sql")
    await send(inbox, topic, ("k", 1))
    flavour.look("ALTER TABLE idemgate_outbox RENAME TO hidden")
    async with running(inbox.relay(gate, poll="10ms")):
        await eventually(lambda: gate.counters["sql.relay_failed"] >= 2)
        flavour.look("ALTER TABLE hidden RENAME TO idemgate_outbox")
        await eventually(lambda: gate.counters["sql.relayed"] == 1)
    events = [record.getMessage().split()[0] for record in caplog.records]
    assert events == ["sql.relay_stalled", "sql.relay_resumed"]


@with_few
async def test_while_the_store_is_away_rows_stay(
    gate: Gate, inbox: Any, topic: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from idemgate import StoreUnavailable

    await send(inbox, topic, ("k", 1))
    away, trigger_many = [True], type(topic.aio).trigger_many

    async def refuse(self: Any, triggers: Any) -> Any:
        if away[0]:
            raise StoreUnavailable("away", "no")
        return await trigger_many(self, triggers)

    monkeypatch.setattr(type(topic.aio), "trigger_many", refuse)
    async with running(inbox.relay(gate, poll="10ms")):
        await eventually(lambda: gate.counters["sql.relay_failed"] >= 2)
        assert (await _await(inbox.outbox.backlog()))[:2] == (1, 0)
        away[0] = False
        await eventually(lambda: gate.counters["sql.relayed"] == 1)


async def test_the_backlog_has_the_number_and_the_age(flavour: Flavour, inbox: Any, topic: Any) -> None:
    assert await _await(inbox.outbox.backlog()) == (0, 0, 0.0)
    await send(inbox, topic, ("a", 1), ("b", 2))
    earlier = "now() - interval '90 seconds'" if flavour.dialect == "postgresql" else "datetime('now', '-90 seconds')"
    flavour.look(f"UPDATE idemgate_outbox SET created_at = {earlier} WHERE key = 'a'")
    backlog = await _await(inbox.outbox.backlog())
    assert (backlog.rows, backlog.refused) == (2, 0)
    assert 89 < backlog.age < 120


async def test_the_relay_deletes_expired_rows_of_the_inbox(gate: Gate, flavour: Flavour, inbox: Any) -> None:
    async def pay(handle: Any, key: str) -> None:
        await handle.credit(key)

    await flavour.decorate(gate, inbox, pay)("p1")
    past = "now() - interval '1 second'" if flavour.dialect == "postgresql" else "datetime('now', '-1 second')"
    flavour.look(f"UPDATE idemgate_inbox SET expires_at = {past}")
    async with running(inbox.relay(gate, purge=False)):
        pass
    assert len(flavour.rows()) == 1
    async with running(inbox.relay(gate)):
        await eventually(lambda: gate.counters["sql.purged"] == 1)
    assert flavour.rows() == []


async def test_large_rows_come_in_smaller_batches(
    gate: Gate, inbox: Any, topic: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from idemgate_sql import relay

    monkeypatch.setattr(relay, "MOST_BYTES", 100_000)
    await send(inbox, topic, *((n, b"x" * 60_000) for n in range(5)))
    counts = []
    one = inbox.relay(gate)
    while n := await one.relay_once():
        counts.append(n)
    assert counts == [2, 2, 1]


@for_each(("option", "value"), [("batch", 0), ("batch", True), ("batch", 10_001), ("poll", "soon")])
@with_few
async def test_options_of_the_relay_are_checked(gate: Gate, inbox: Any, option: str, value: Any) -> None:
    with pytest.raises(InvalidArgument, match=option):
        inbox.relay(gate, **{option: value})


@with_few
async def test_a_gate_runs_the_relay_with_its_subscribers(gate: Gate, inbox: Any, topic: Any) -> None:
    gate.add_subscriber(inbox.relay(gate, poll="10ms"))
    async with gate.aio.subscribers():
        await send(inbox, topic, ("k", 1))
        await eventually(lambda: gate.counters["sql.relayed"] == 1)
