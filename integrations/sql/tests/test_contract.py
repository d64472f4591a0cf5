"""The consumer contract for a stream whose handler runs in a transaction of an inbox."""

from __future__ import annotations

import inspect
import itertools
import os
from collections.abc import AsyncIterator
from typing import Any

import psycopg as driver
import pytest
import redis
from idemgate_sql import psycopg

from idemgate import Gate
from idemgate.testing import ConsumerContract, Transport, audit
from idemgate.testing.contract import ContractConsumer, Handler
from tests.contract.transports import StreamTransport

_numbers = itertools.count()


class InboxConsumer:
    """A consumer whose death also ends its connections to the database, as that of a process would."""

    def __init__(self, consumer: ContractConsumer, database: str, name: str) -> None:
        self._consumer = consumer
        self._database = database
        self._name = name

    async def stop(self) -> None:
        await self._consumer.stop()

    async def kill(self) -> None:
        with driver.connect(self._database) as connection:
            ended = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = %s"
            connection.execute(ended, (self._name,))
        await self._consumer.kill()


class InboxTransport(StreamTransport):
    """A stream, and an inbox in PostgreSQL for each consumer."""

    def __init__(self, gate: Gate, url: str, raw: Any, database: str) -> None:
        super().__init__(gate, url, raw)
        self.database = database
        psycopg.Inbox(database).create_tables()

    async def start(self, handler: Handler, *, acknowledges: bool = True) -> ContractConsumer:
        self.consumer = f"contract-{next(_numbers)}"
        return InboxConsumer(await super().start(handler, acknowledges=acknowledges), self.database, self.consumer)

    def build_options(self, handler: Handler) -> dict[str, Any]:
        kind = psycopg.AsyncInbox if inspect.iscoroutinefunction(handler) else psycopg.Inbox
        return {"sink": kind(f"{self.database}&application_name={self.consumer}", lock_timeout="500ms")}


@pytest.fixture(autouse=True)
def prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a read short: a stop waits for it."""
    monkeypatch.setattr("idemgate.subscribers.reader.BLOCK", 50)


@pytest.fixture
async def live(url: str) -> AsyncIterator[Gate]:
    """A gate on the server's clock. Its namespace is audited at the end."""
    made = Gate(url, namespace=f"contract{os.getpid()}-{next(_numbers)}")
    yield made
    report = audit(made)
    await made.aio.close()
    made.close()
    assert report.sound, str(report)


@pytest.mark.slow
class TestInboxes(ConsumerContract):
    @pytest.fixture
    def transport(self, live: Gate, url: str, postgres_url: str) -> Transport:
        return InboxTransport(live, url, redis.Redis.from_url(url), postgres_url)
