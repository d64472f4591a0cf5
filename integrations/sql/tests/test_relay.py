"""Relays that share an outbox with other programs, and rows that a topic or the store refuses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from idemgate_sql import psycopg_relay
from psycopg import OperationalError

from idemgate import Gate, Trigger
from idemgate.testing import Clock, Drained, Ran
from integrations.sql.tests.flavours import Flavour, on_postgresql
from integrations.sql.tests.killed_relay import replace_execute
from integrations.sql.tests.test_outbox import _await, eventually, running, send, transaction

pytestmark = pytest.mark.one_in(3)


@contextmanager
def another_gate(url: str, namespace: str, clock: Clock) -> Iterator[Gate]:
    """Open the gate of another program."""
    with Gate(url, namespace=namespace, clock=clock) as gate:
        yield gate


async def take_payloads(topic: Any) -> dict[str, Any]:
    """Take all messages. Return their payloads by key."""
    return {one.key: one.payload for one in await topic.aio.take(100)}


def events(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage().split()[0] for record in caplog.records if record.name == "idemgate.sql"]


# Programs that share the tables


async def test_relays_of_two_programs_send_the_rows_of_their_own_topics(
    gate: Gate, url: str, clock: Clock, inbox: Any
) -> None:
    # Given two programs with different topics, one table, and a relay each
    with another_gate(url, gate.namespace, clock) as other:
        images, mails = gate.topic("images", merge="append"), other.topic("mails", merge="append")
        async with running(inbox.relay(gate, poll="20ms")), running(inbox.relay(other, poll="20ms")):
            # When both write rows
            await send(inbox, images, ("a", 1))
            await send(inbox, mails, ("b", 2))
            # Then each relay sends its own, although one started first
            await eventually(lambda: gate.counters["sql.relayed"] == other.counters["sql.relayed"] == 1)
        assert await take_payloads(images) == {"a": [1]}
        assert await take_payloads(mails) == {"b": [2]}
        await other.aio.close()


async def test_a_topic_that_is_declared_while_the_relay_stands_by_gets_its_rows(
    gate: Gate, url: str, clock: Clock, inbox: Any
) -> None:
    gate.topic("images", merge="append")
    with another_gate(url, gate.namespace, clock) as other:
        other.topic("images", merge="append")
        async with running(inbox.relay(gate, poll="20ms")), running(inbox.relay(other, poll="20ms")):
            await send(inbox, other.topic("mails", merge="append"), ("b", 2))
            await eventually(lambda: other.counters["sql.relayed"] == 1)
        await other.aio.close()


async def test_a_row_goes_to_the_namespace_of_its_topic_only(gate: Gate, url: str, clock: Clock, inbox: Any) -> None:
    # Given two services with a topic of the same name, and one table
    with another_gate(url, f"{gate.namespace}-other", clock) as other:
        ours, theirs = gate.topic("mails", merge="append"), other.topic("mails", merge="append")
        await send(inbox, ours, ("a", 1))
        await send(inbox, theirs, ("b", 2))
        # When both relays send
        assert await inbox.relay(gate).relay_once() == 1
        assert await inbox.relay(other).relay_once() == 1
        # Then none has the row of the other one
        assert await take_payloads(ours) == {"a": [1]}
        assert await take_payloads(theirs) == {"b": [2]}
        await other.aio.close()


# Rows that are refused


async def write_refused(gate: Gate, url: str, clock: Clock, inbox: Any, *triggers: Any) -> Any:
    """Write triggers for a topic that any payload suits. Return a topic of the same name, which adds numbers."""
    with another_gate(url, gate.namespace, clock) as other:
        await send(inbox, other.topic("t", merge="append"), *triggers)
    return gate.topic("t", merge="sum")


async def test_rows_behind_a_refused_one_of_their_key_wait_and_keep_their_order(
    gate: Gate, url: str, clock: Clock, flavour: Flavour, inbox: Any
) -> None:
    topic = await write_refused(gate, url, clock, inbox, ("a", 1), ("a", "x"), ("b", 10), ("a", 3))
    await send(inbox, topic, ("a", 4), ("b", 20))
    relay = inbox.relay(gate)
    # When a row in the middle is refused
    while await relay.relay_once():
        pass
    # Then the rows before it, and those of other keys, are sent, and those behind it wait
    assert await take_payloads(topic) == {"a": 1, "b": 30}
    assert (await _await(inbox.outbox.backlog()))[:2] == (2, 1)
    # And when it is sent again while it is still refused, nothing passes it
    await _await(inbox.outbox.redrive_refused())
    while await relay.relay_once():
        pass
    assert (await _await(inbox.outbox.backlog()))[:2] == (2, 1)
    assert gate.counters["sql.relay_refused"] == 2
    # And when it is deleted, the rows behind it are sent
    (refused,) = await _await(inbox.outbox.list_refused())
    assert await _await(inbox.outbox.delete_refused([refused.id])) == 1
    while await relay.relay_once():
        pass
    assert (await _await(inbox.outbox.backlog())) == (0, 0, 0.0)
    assert (await topic.aio.stats()).counters["accepted"] == 5


async def test_only_refused_rows_are_deleted(gate: Gate, url: str, clock: Clock, inbox: Any) -> None:
    topic = await write_refused(gate, url, clock, inbox, ("a", "x"))
    await inbox.relay(gate).relay_once()
    await send(inbox, topic, ("b", 1))
    assert await _await(inbox.outbox.delete_refused(range(1, 100))) == 1
    assert await _await(inbox.outbox.delete_refused([])) == 0
    assert (await _await(inbox.outbox.backlog()))[:2] == (1, 0)


async def test_a_key_that_the_store_refuses_does_not_stop_the_others(
    gate: Gate, inbox: Any, caplog: pytest.LogCaptureFixture
) -> None:
    # Given a topic with a damaged slot
    topic = gate.topic("t", merge="append", slots=4)
    await topic.aio.open()
    calls = topic.definition.calls
    assert calls is not None
    spoiled = next(n for n in range(100) if calls.slot_of(b"%d" % n) == 0)
    healthy = next(n for n in range(100) if calls.slot_of(b"%d" % n) == 1)
    from idemgate.core import keys

    damaged = next(name for name in keys.slot(gate.namespace, "t", 0, 4) if name.endswith(b"messages"))
    gate.context.link.command(b"SET", damaged, b"no hash")
    await send(inbox, topic, (spoiled, 1), (healthy, 2), (spoiled, 3))
    # When the relay sends
    relay = inbox.relay(gate)
    while await relay.relay_once():
        pass
    # Then the other key is sent; the first row of the damaged one is set aside, and the one behind it waits
    assert (await topic.aio.peek(healthy)).pending.payload == [2]
    (refused,) = await _await(inbox.outbox.list_refused())
    assert refused.key == str(spoiled)
    assert (await _await(inbox.outbox.backlog()))[:2] == (1, 1)
    # And after the repair both are sent in order
    gate.context.link.command(b"DEL", damaged)
    await _await(inbox.outbox.redrive_refused())
    assert await relay.relay_once() == 2
    assert (await topic.aio.peek(spoiled)).pending.payload == [1, 3]


async def test_a_topic_whose_policy_differs_does_not_stop_the_others(
    gate: Gate, url: str, clock: Clock, inbox: Any, caplog: pytest.LogCaptureFixture
) -> None:
    # Given a topic with a stored policy, and a program that declares another one
    with another_gate(url, gate.namespace, clock) as other:
        await other.topic("t", merge="append").aio.trigger("z", 1)
        await other.aio.close()
    wrong, right = gate.topic("t", merge="first"), gate.topic("right", merge="append")
    await send(inbox, wrong, *((n, n) for n in range(20)))
    await send(inbox, right, ("a", 1))
    # When a relay sends small batches
    async with running(inbox.relay(gate, batch=5, poll="10ms")):
        # Then the rows of the other topic are sent
        await eventually(lambda: gate.counters["sql.relayed"] == 1)
        assert (await _await(inbox.outbox.backlog()))[:2] == (20, 0)
    # And the failure is logged once, with the topic
    assert events(caplog) == ["sql.relay_stalled"]
    (record,) = caplog.records
    assert f"{gate.namespace}:t" in record.getMessage()
    assert "another policy" in record.getMessage()


async def test_a_topic_whose_stored_policy_cannot_be_read_does_not_stop_the_others(
    gate: Gate, url: str, clock: Clock, inbox: Any, caplog: pytest.LogCaptureFixture
) -> None:
    # Given two topics, of which one has damaged data in the store
    entry = (b"HSET", f"ig2:{{{gate.namespace}:topics}}", "broken", b"\xc1")
    with another_gate(url, gate.namespace, clock) as other:
        broken, right = other.topic("broken", merge="append"), other.topic("right", merge="append")
        await send(inbox, broken, *((n, n) for n in range(20)))
        await send(inbox, right, ("a", 1))
    gate.topic("broken", merge="append")
    gate.topic("right", merge="append")
    gate.context.link.command(*entry)
    # When a relay sends small batches
    relay = inbox.relay(gate, batch=5, poll="10ms")
    async with running(relay):
        # Then the row of the other topic is sent
        await eventually(lambda: gate.counters["sql.relayed"] == 1)
        assert (await _await(inbox.outbox.backlog()))[:2] == (20, 0)
        assert events(caplog) == ["sql.relay_stalled"]
        assert f"{gate.namespace}:broken" in caplog.records[0].getMessage()
        # And after the repair those of the first are sent
        gate.context.link.command(b"HDEL", *entry[1:3])
        relay._skipped.clear()
        await eventually(lambda: gate.counters["sql.relayed"] == 21)


async def test_a_relay_that_cannot_open_a_topic_leaves_it_to_another_one(
    gate: Gate, url: str, clock: Clock, inbox: Any
) -> None:
    # Given a topic with a stored policy, and an older program that declares another one and has the locks
    gate.topic("t", merge="append")
    with another_gate(url, gate.namespace, clock) as older:
        older.topic("t", merge="first")
        await gate.topics["t"].aio.open()
        async with running(inbox.relay(older, poll="20ms")):
            await send(inbox, gate.topics["t"], ("a", 1))
            await eventually(lambda: older.counters["sql.relay_failed"])
            # When a program starts that declares the stored policy, then its relay sends the row
            async with running(inbox.relay(gate, poll="20ms")):
                await eventually(lambda: gate.counters["sql.relayed"] == 1)
        await older.aio.close()
    assert await take_payloads(gate.topics["t"]) == {"a": [1]}


@pytest.mark.parametrize("flavour", ["psycopg", "psycopg-async"], indirect=True)
async def test_the_locks_of_a_relay_that_stops_responding_end(
    gate: Gate, inbox: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a relay that has the locks and does nothing more, as a stopped process
    topic = gate.topic("t", merge="append")
    monkeypatch.setattr(psycopg_relay, "SESSION_TIMEOUT", 300)
    async with inbox.database.connect_relay(inbox.outbox.statements.channel) as stopped:
        assert await stopped.lock([f"{gate.namespace}:t"])
        # When another one runs, then it sends the rows as soon as the server has ended the session of the first
        async with running(inbox.relay(gate, poll="20ms")):
            await send(inbox, topic, ("a", 1))
            await eventually(lambda: gate.counters["sql.relayed"] == 1)
        with pytest.raises(OperationalError):
            await stopped.lock([f"{gate.namespace}:t"])


async def test_rows_of_one_topic_are_deleted_although_another_one_fails(
    gate: Gate, inbox: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from idemgate import StoreUnavailable

    first, second = gate.topic("first", merge="append"), gate.topic("second", merge="append")
    await send(inbox, first, ("a", 1))
    await send(inbox, second, ("b", 2))
    trigger_many = type(first.aio).trigger_many

    async def refuse(self: Any, triggers: Any) -> Any:
        if self.name == "second":
            raise StoreUnavailable("away", "no")
        return await trigger_many(self, triggers)

    monkeypatch.setattr(type(first.aio), "trigger_many", refuse)
    with pytest.raises(StoreUnavailable):
        await inbox.relay(gate).relay_once()
    assert (await _await(inbox.outbox.backlog()))[:2] == (1, 0)


async def test_an_event_id_of_zero_is_kept(gate: Gate, inbox: Any) -> None:
    topic = gate.topic("t", merge="append")
    await topic.aio.trigger("k", 1, event_id=0)
    await send(inbox, topic, Trigger("k", 1, event_id=0))
    await inbox.relay(gate).relay_once()
    assert await take_payloads(topic) == {"k": [1]}


# Waking, lag and chores


async def test_a_row_of_another_program_does_not_wake_the_relay(
    gate: Gate, url: str, clock: Clock, flavour: Flavour, inbox: Any
) -> None:
    topic, looks = gate.topic("t", merge="append"), list[str]()

    async def count(execute: Any, sql: str, params: Any) -> Any:
        looks.append(sql)
        return await execute(sql, params)

    relay = inbox.relay(gate, poll="1h", purge=False)
    replace_execute(relay, count)
    with another_gate(url, gate.namespace, clock) as other:
        foreign = other.topic("foreign", merge="append")
        async with running(relay):
            looks.clear()
            for number in range(3):
                await send(inbox, foreign, ("a", number))
            await asyncio.sleep(0.2)
            assert looks == []
            # And one of its own does, although the others come first
            await send(inbox, topic, ("a", 1))
            await eventually(lambda: gate.counters["sql.relayed"] == 1)


async def test_rows_that_nobody_serves_are_not_read(gate: Gate, flavour: Flavour, inbox: Any) -> None:
    # Given many rows of other programs before those of three topics, and statistics that do not know of them
    topics = [gate.topic(f"t{n}", merge="append") for n in range(3)]
    numbers = "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 5000)"
    columns = "idemgate_outbox (event_id, topic, key, body)"
    body = "'x'" if flavour.dialect == "postgresql" else "x'78'"
    flavour.look(f"INSERT INTO {columns} {numbers} SELECT 'e' || i, 'x:foreign' || i % 3, 'k', {body} FROM n")
    for number in range(9):
        await send(inbox, topics[number % 3], ("k", number))
    # Then a look finds those of the topics, each in order, whatever the statistics say
    relay = inbox.relay(gate, batch=7)
    assert [await relay.relay_once() for _ in range(3)] == [7, 2, 0]
    assert [await take_payloads(one) for one in topics] == [{"k": [n, n + 3, n + 6]} for n in range(3)]
    # And the topic whose row is the oldest comes first
    for number in (2, 0, 1):
        await send(inbox, topics[number], ("z", number))
    relay = inbox.relay(gate, batch=1)
    for number in (2, 0, 1):
        assert await relay.relay_once() == 1
        assert await take_payloads(topics[number]) == {"z": [number]}
    # And the database uses an index of topics for it, with and without statistics
    statements = inbox.outbox.statements
    sql = statements.read
    if statements.placeholders == "pyformat":
        sql = sql.replace("%(", ":").replace(")s", "")
    names = statements.pack_names(f"{gate.namespace}:{one.name}" for one in topics)
    for name, value in {"topics": f"'{names}'", "batch": "500", "bytes": "1000"}.items():
        sql = sql.replace(f":{name}", value)
    explain = "EXPLAIN" if flavour.dialect == "postgresql" else "EXPLAIN QUERY PLAN"
    for _ in range(2):
        plan = "\n".join(str(row) for row in flavour.look(f"{explain} {sql}"))
        assert plan.count("idemgate_outbox_waiting") == 2, plan
        assert "Seq Scan" not in plan, plan
        assert "pkey" not in plan, plan
        flavour.look("ANALYZE")


async def test_without_listen_a_trigger_of_the_same_process_wakes_the_relay(
    gate: Gate, flavour: Flavour, inbox: Any
) -> None:
    topic = gate.topic("t", merge="append")
    async with running(inbox.relay(gate, poll="1h")):
        for number in range(3):
            # A row that is committed a while after the trigger
            async with transaction(inbox) as connection:
                await _await(inbox.trigger(connection, topic, "k", number))
                await asyncio.sleep(0.05)
            await eventually(lambda number=number: gate.counters["sql.relayed"] == number + 1)


async def test_a_late_row_is_counted_and_logged_once(
    gate: Gate, flavour: Flavour, inbox: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "idemgate.sql")
    topic = gate.topic("t", merge="append")
    await send(inbox, topic, *((n, n) for n in range(6)))
    earlier = "now() - interval '90 seconds'" if flavour.dialect == "postgresql" else "datetime('now', '-90 seconds')"
    flavour.look(f"UPDATE idemgate_outbox SET created_at = {earlier} WHERE id <= 4")
    relay = inbox.relay(gate, batch=2)
    assert [await relay.relay_once() for _ in range(4)] == [2, 2, 2, 0]
    assert gate.counters["sql.relay_late"] == 4
    assert events(caplog) == ["sql.relay_behind", "sql.relay_caught_up"]
    record = caplog.records[0]
    assert (record.rows, round(record.seconds, -1)) == (6, 90)  # type: ignore[attr-defined]


async def test_many_expired_rows_do_not_keep_the_relay_from_sending(
    gate: Gate, flavour: Flavour, inbox: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a purge that always finds more
    purges: list[int] = []

    async def purge(execute: Any, sql: str, params: Any) -> Any:
        if sql != inbox.statements.purge:
            return await execute(sql, params)
        purges.append(1)
        return range(1000)

    topic = gate.topic("t", merge="append")
    relay = inbox.relay(gate, poll="10ms")
    replace_execute(relay, purge)
    async with running(relay):
        await eventually(lambda: len(purges) > 3)
        # When a row is written, it is sent; and the relay stops on request
        await send(inbox, topic, ("k", 1))
        await eventually(lambda: gate.counters["sql.relayed"] == 1)
    assert gate.counters["sql.purged"] == 1000 * len(purges)


async def test_the_error_of_a_missing_outbox_says_how_to_create_it(gate: Gate, flavour: Flavour) -> None:
    inbox = flavour.open_inbox()
    with pytest.raises(flavour.errors) as caught:
        await send(inbox, gate.topic("t"), ("k", 1))
    assert "ddl" in str(getattr(caught.value, "__notes__", ""))


@on_postgresql
async def test_a_schema_with_a_long_name(gate: Gate, flavour: Flavour) -> None:
    # NOTIFY refuses names of 64 bytes and more
    schema = "s" * 60
    flavour.look(f"CREATE SCHEMA {schema}")
    inbox = await flavour.create(table=f"{schema}.{'t' * 41}")
    topic = gate.topic("t", merge="append")
    poll = "1h" if flavour.listens else "20ms"
    async with running(inbox.relay(gate, poll=poll)):
        await send(inbox, topic, ("k", 1))
        await eventually(lambda: gate.counters["sql.relayed"] == 1)


# Tests of programs


async def test_a_drain_sends_what_was_committed_and_delivers_it_once(gate: Gate, inbox: Any) -> None:
    # Given a handler that writes a row itself
    topic, mails = gate.topic("images", merge="count"), gate.topic("mails")
    delivered: list[tuple[str, str]] = []

    @topic.handler
    async def render(delivery: Any) -> None:
        delivered.append((delivery.topic, delivery.key))
        await send(inbox, mails, (delivery.key, "rendered"))

    mails.handler(lambda delivery: delivered.append((delivery.topic, delivery.key)))
    gate.add_subscriber(inbox.relay(gate))
    await send(inbox, topic, ("a", None), ("b", None))
    # When the gate is drained, without a worker and a relay that runs
    ran = await gate.aio.drain()
    # Then each row arrived once, also those that the handler wrote
    assert sorted(delivered) == [("images", "a"), ("images", "b"), ("mails", "a"), ("mails", "b")]
    assert (ran.delivered, ran.subscribers, ran.errors) == (4, 4, [])
    assert await gate.aio.drain() == Drained(topics={"images": Ran(), "mails": Ran()})
