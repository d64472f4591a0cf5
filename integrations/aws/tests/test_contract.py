"""The consumer contract: `SqsConsumer` with both clients and on a FIFO queue, and `lambda_batch`."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, suppress
from typing import Any

import pytest
from idemgate_aws import SqsConsumer, SqsMessage

from idemgate import Gate
from idemgate.testing import ConsumerContract, ContractConsumer, Proxy, Transport, adapt_handler
from idemgate.testing.contract import LEASE, MAX_ATTEMPTS, SCOPE, Handler
from integrations.aws.tests.clients import make_client, open_aio_client
from integrations.aws.tests.conftest import Queue
from tests.waiting import eventually

OPTIONS: dict[str, Any] = {
    "scope": SCOPE, "key": "{message.attributes[id]}", "lease": LEASE, "max_attempts": MAX_ATTEMPTS, "backoff": 0,
}  # fmt: skip


def read(message: SqsMessage) -> tuple[str, bytes]:
    return str(message.attributes["id"]), message.body.encode()


class SqsTransport(Transport):
    """A queue. Each consumer has its own connections, which run through proxies."""

    visibility = 1.0
    is_aio = False

    def __init__(self, gate: Gate, store: str, endpoint: str, queue: Queue) -> None:
        super().__init__(gate)
        self.store, self.endpoint, self.queue = store, endpoint, queue
        self._dead_letters: list[bytes] = []

    async def publish(self, message_id: str, body: bytes) -> None:
        await asyncio.to_thread(self.queue.send, body.decode(), id=message_id)

    async def start(self, handler: Handler, *, acknowledges: bool = True) -> ContractConsumer:
        consumer = SqsContractConsumer(self)
        if not acknowledges:
            consumer.broker.drop_request(b"AmazonSQS.DeleteMessageBatch", times=1_000_000)
        await consumer.start(handler)
        return consumer

    async def is_empty(self) -> bool:
        return await asyncio.to_thread(self.queue.count) == (0, 0)

    async def list_dead_letters(self) -> list[bytes]:
        found = await asyncio.to_thread(self.queue.take_dead_letters)
        self._dead_letters += [each["Body"].encode() for each in found]
        return self._dead_letters


class SqsContractConsumer:
    def __init__(self, transport: SqsTransport) -> None:
        self.transport = transport
        self.broker, self.redis = Proxy(transport.endpoint, remember=False), Proxy(transport.store, remember=False)
        self.gate = Gate(self.redis.url, namespace=transport.gate.namespace, timeout="3s")
        self.stopping, self.clients = asyncio.Event(), AsyncExitStack()

    async def start(self, handler: Handler) -> None:
        if self.transport.is_aio:
            client = await self.clients.enter_async_context(open_aio_client(self.broker.url))
        else:
            client = make_client(self.broker.url)

        def key(message: SqsMessage) -> str:
            return self.transport.count(read(message)[0])

        consumer = SqsConsumer(
            self.gate, client, self.transport.queue.url, adapt_handler(handler, read), concurrency=4, poll="1s",
            **{**OPTIONS, "key": key},
        )  # fmt: skip
        ready = asyncio.Event()
        self.task = asyncio.create_task(consumer.run(self.stopping, ready=ready.set))
        await eventually(lambda: ready.is_set() or self.task.done(), 240)
        if self.task.done():
            self.task.result()  # what it could not start by

    async def stop(self) -> None:
        self.stopping.set()
        await self.task
        await self.close()

    async def kill(self) -> None:
        self.broker.close()
        self.redis.close()
        self.task.cancel()
        with suppress(asyncio.CancelledError):
            await self.task
        await self.close()

    async def close(self) -> None:
        await self.clients.aclose()
        await self.gate.aio.close()
        self.gate.close()
        self.broker.close()
        self.redis.close()


class AioTransport(SqsTransport):
    is_aio = True


class FifoTransport(SqsTransport):
    is_concurrent = False
    is_ordered = True
    is_aio = True


class TestBoto3(ConsumerContract):
    kinds = ("sync",)

    @pytest.fixture
    def transport(self, gate: Gate, store: str, endpoint: str, make_queue: Any) -> SqsTransport:
        return SqsTransport(gate, store, endpoint, make_queue())


class TestAiobotocore(ConsumerContract):
    kinds = ("async",)

    @pytest.fixture
    def transport(self, gate: Gate, store: str, endpoint: str, make_queue: Any) -> SqsTransport:
        return AioTransport(gate, store, endpoint, make_queue())


@pytest.mark.slow
class TestFifo(ConsumerContract):
    kinds = ("sync",)

    @pytest.fixture
    def transport(self, gate: Gate, store: str, endpoint: str, make_queue: Any) -> SqsTransport:
        return FifoTransport(gate, store, endpoint, make_queue(fifo=True))
