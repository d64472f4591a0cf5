"""Relays whose database or store is restarted while they run, and whose store loses its data.

Each committed row is delivered once, in the order of its key.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from idemgate_sql import psycopg
from psycopg_pool import ConnectionPool

from idemgate import Gate
from idemgate.testing import audit
from integrations.sql.tests.flavours import on_postgresql
from integrations.sql.tests.test_outbox import _await, eventually, running, send
from tests.postgres import Postgres
from tests.resilience.servers import Server

pytestmark = pytest.mark.slow  # it starts processes or servers of its own

KEYS = 5
BATCH = 7


class Rows:
    """Rows that are committed, and what became of them."""

    def __init__(self, inbox: Any, gate: Gate, seed: int) -> None:
        self.inbox, self.gate, self.drawn = inbox, gate, random.Random(seed)
        self.topic = gate.topic("orders", merge="append", slots=2)
        self.committed: defaultdict[str, list[int]] = defaultdict(list)
        self.delivered: defaultdict[str, list[int]] = defaultdict(list)
        self.number = 0

    async def commit(self, transactions: int) -> None:
        for _ in range(transactions):
            rows = [(f"k{self.drawn.randrange(KEYS)}", self.number + n) for n in range(self.drawn.randint(1, 5))]
            self.number += len(rows)
            await send(self.inbox, self.topic, *rows)
            for key, value in rows:
                self.committed[key].append(value)

    async def relay_in_part(self) -> None:
        """Wait until the relay has sent some of the rows that it has not sent yet."""
        done = self.gate.counters["sql.relayed"]
        some = self.drawn.randint(1, max(1, (self.number - done) // 2))
        await eventually(lambda: self.gate.counters["sql.relayed"] >= done + some)

    async def relay_all(self) -> None:
        async def is_done() -> bool:
            return (await _await(self.inbox.outbox.backlog())).rows == 0

        await eventually(is_done)

    async def take_all(self) -> None:
        """Take the messages and acknowledge them. Nothing is triggered meanwhile."""
        for delivery in await self.topic.aio.take(100):
            self.delivered[delivery.key] += delivery.payload
            await self.topic.aio.ack(delivery)

    def judge(self, *known: str) -> None:
        assert self.delivered == self.committed
        report = audit(self.gate)
        assert report.by_kind.keys() <= {*known}, str(report)


@pytest.fixture
def restart_database(postgres: Postgres) -> Callable[[], None]:
    return postgres.restart


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Server]:
    """A store that keeps its data when it is killed."""
    with Server(tmp_path / "store", "--appendonly", "yes", "--appendfsync", "always") as server:
        yield server


@on_postgresql
async def test_the_database_is_restarted(
    gate: Gate, inbox: Any, restart_database: Callable[[], None], seed: int
) -> None:
    # Given a relay with more rows than it sends at once
    rows = Rows(inbox, gate, seed)
    await rows.commit(20)
    async with running(inbox.relay(gate, batch=BATCH, poll="20ms")):
        for _ in range(2):
            # When the database ends without a checkpoint while the relay works, and new rows come after
            await rows.relay_in_part()
            await asyncio.to_thread(restart_database)
            await rows.commit(20)
        await rows.relay_all()
    # Then each row was sent once, and the outage was counted
    await rows.take_all()
    rows.judge()
    assert gate.counters["sql.relay_failed"] > 0


@pytest.mark.slow
async def test_the_connections_of_a_pool_are_lost(gate: Gate, postgres: Postgres, seed: int) -> None:
    # Given a relay on a pool, whose idle connections a restart closes
    url = postgres.create_database()
    rows = Rows(psycopg.Inbox(url), gate, seed)
    rows.inbox.create_tables()
    await rows.commit(20)
    with ConnectionPool(url, min_size=4, max_size=4, open=True, timeout=60) as pool:
        async with running(psycopg.Inbox(pool).relay(gate, batch=BATCH, poll="20ms")):
            await rows.relay_in_part()
            await asyncio.to_thread(postgres.restart)
            await rows.commit(20)
            # Then the relay goes on, on new connections
            await rows.relay_all()
    await rows.take_all()
    rows.judge()


@pytest.mark.slow
async def test_the_store_is_killed_and_started_again(inbox: Any, store: Server, seed: int) -> None:
    gate = Gate(store.url, namespace="outages", timeout="500ms")
    rows = Rows(inbox, gate, seed)
    await rows.commit(20)
    async with running(inbox.relay(gate, batch=BATCH, poll="20ms")):
        for _ in range(2):
            # When the store is killed while the relay works, and transactions go on
            await rows.relay_in_part()
            await asyncio.to_thread(store.kill)
            await rows.commit(10)
            await eventually(lambda: gate.counters["sql.relay_failed"] > 0)
            # And comes back with its data
            await asyncio.to_thread(store.start)
        await rows.relay_all()
    # Then each row was sent once
    await rows.take_all()
    rows.judge()
    await gate.aio.close()
    gate.close()


@pytest.mark.slow
async def test_the_store_loses_its_data_while_a_relay_runs(inbox: Any, store: Server, seed: int) -> None:
    gate = Gate(store.url, namespace="outages")
    rows = Rows(inbox, gate, seed)
    async with running(inbox.relay(gate, batch=BATCH, poll="20ms")):
        for _ in range(3):
            # When the rows were delivered and the store lost everything, policies and scripts included
            await rows.commit(10)
            await rows.relay_all()
            await rows.take_all()
            store.client.flushall()
            store.client.script_flush()
        # Then the relay goes on with the next rows
        await rows.commit(10)
        await rows.relay_all()
        await rows.take_all()
    rows.judge("unregistered")  # the topic, until a process opens it again
    await gate.aio.close()
    gate.close()
