"""The consumer contract for `KafkaConsumer` on Tansu: with both libraries, by record key and by partition."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from time import monotonic
from typing import Any

import pytest
from idemgate_kafka import KafkaConsumer, KafkaMessage

from idemgate import Gate
from idemgate.testing import ConsumerContract, ContractConsumer, Proxy, Transport, adapt_handler
from idemgate.testing.contract import LEASE, MAX_ATTEMPTS, SCOPE, Handler
from integrations.kafka.tests.kafka_topics import PARTITIONS, Topics


def read(message: KafkaMessage) -> tuple[str, bytes]:
    return message.headers["id"], message.value or b""


class KafkaTransport(Transport):
    """A topic whose records have their message id as record key. A record that waits holds up its key."""

    def __init__(self, gate: Gate, store: str, topics: Topics, library: str) -> None:
        super().__init__(gate)
        pytest.importorskip("aiokafka" if library == "aiokafka" else "confluent_kafka")
        self.store, self.topics, self.library = store, topics, library

    async def publish(self, message_id: str, body: bytes) -> None:
        if self.is_ordered:
            await self.topics.send(body, id=message_id)
        else:
            partition = sum(message_id.encode()) % PARTITIONS
            await self.topics.send(body, partition=partition, key=message_id.encode(), id=message_id)

    async def start(self, handler: Handler, *, acknowledges: bool = True) -> ContractConsumer:
        consumer = KafkaContractConsumer(self)
        await consumer.start(handler, acknowledges)
        return consumer

    async def is_empty(self) -> bool:
        return await self.topics.lag() == 0

    async def list_dead_letters(self) -> list[bytes]:
        return [record.value for record in await self.topics.list_dead_letters()]


class OrderedTransport(KafkaTransport):
    """A topic with one partition in use. A record that waits holds up all that follow."""

    is_concurrent = False
    is_ordered = True


class KafkaContractConsumer:
    def __init__(self, transport: KafkaTransport) -> None:
        self.transport, self.stopping = transport, asyncio.Event()
        self.redis = Proxy(transport.store, remember=False)
        self.gate = Gate(self.redis.url, namespace=transport.gate.namespace, timeout="3s")

    async def start(self, handler: Handler, acknowledges: bool) -> None:
        transport, ready = self.transport, asyncio.Event()

        def key(message: KafkaMessage) -> str:
            return transport.count(read(message)[0])

        consumer = KafkaConsumer(
            self.gate, transport.topics.settings(transport.library), transport.topics.name,
            adapt_handler(handler, read), key=key, dead_topic=transport.topics.dead, scope=SCOPE, lease=LEASE,
            max_attempts=MAX_ATTEMPTS, backoff="100ms", order="partition" if transport.is_ordered else "key",
        )  # fmt: skip
        if not acknowledges:
            lose_commits(consumer)
        self.task = asyncio.create_task(consumer.run(self.stopping, ready=ready.set))
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait({self.task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if self.task.done():
            await self.task

    async def stop(self) -> None:
        """Stop gracefully, but not while a record of this consumer was still running elsewhere when it last asked.

        Such a record would be left to the next consumer, and the contract has none then.
        """
        if self.gate.counters["consumer.in_progress"]:
            end = monotonic() + 5
            while await self.transport.topics.lag() and monotonic() < end:
                await asyncio.sleep(0.05)
        self.stopping.set()
        await self.task
        await self.close()

    async def kill(self) -> None:
        self.redis.close()
        self.task.cancel()
        with suppress(asyncio.CancelledError):
            await self.task
        await self.close()

    async def close(self) -> None:
        await self.gate.aio.close()
        self.gate.close()
        self.redis.close()


def lose_commits(consumer: Any) -> None:
    """Let no commit of a consumer reach the broker."""
    make = consumer._make_consumer

    async def commit(_: object) -> None:
        """Lose it."""

    def make_deaf() -> Any:
        client = make()
        client.commit = commit
        return client

    consumer._make_consumer = make_deaf


class TestAiokafka(ConsumerContract):
    kinds = ("async",)

    @pytest.fixture
    def transport(self, gate: Gate, store: str, topics: Topics) -> Transport:
        return OrderedTransport(gate, store, topics, "aiokafka")


class TestConfluent(ConsumerContract):
    kinds = ("sync",)

    @pytest.fixture
    def transport(self, gate: Gate, store: str, topics: Topics) -> Transport:
        return KafkaTransport(gate, store, topics, "confluent")


@pytest.mark.slow
class TestAiokafkaByKey(ConsumerContract):
    @pytest.fixture
    def transport(self, gate: Gate, store: str, topics: Topics) -> Transport:
        return KafkaTransport(gate, store, topics, "aiokafka")


@pytest.mark.slow
class TestConfluentByPartition(ConsumerContract):
    @pytest.fixture
    def transport(self, gate: Gate, store: str, topics: Topics) -> Transport:
        return OrderedTransport(gate, store, topics, "confluent")
