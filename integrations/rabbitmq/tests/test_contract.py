"""The consumer contract for aio-pika and pika."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import aio_pika
import pika
import pytest
from idemgate_rabbitmq import guarded
from pika.exceptions import AMQPError

from idemgate import Gate
from idemgate.testing import ConsumerContract, ContractConsumer, Transport, adapt_handler
from idemgate.testing.contract import LEASE, MAX_ATTEMPTS, SCOPE, Handler
from idemgate.testing.proxy import Proxy

BASIC_ACK = b"\x00\x3c\x00\x50"
"""Class 60 and method 80 of AMQP 0-9-1, as they stand in the frame of an acknowledgement."""
OPTIONS: dict[str, Any] = {"scope": SCOPE, "lease": LEASE, "pause": "100ms", "max_attempts": MAX_ATTEMPTS}
PREFETCH = 4


class RabbitTransport(Transport):
    """A queue with a dead-letter exchange. Each consumer has its own connections, which run through proxies."""

    def __init__(self, gate: Gate, store: str, broker: Any, queue: Any, dead: Any) -> None:
        super().__init__(gate)
        self.store, self.broker, self.queue, self.dead = store, broker, queue, dead
        self._dead_letters: list[bytes] = []

    async def publish(self, message_id: str, body: bytes) -> None:
        properties = pika.BasicProperties(message_id=message_id, delivery_mode=2)
        self.queue.channel.basic_publish("", self.queue.name, body, properties)

    async def start(self, handler: Handler, *, acknowledges: bool = True) -> ContractConsumer:
        consumer = self.make_consumer()
        if not acknowledges:
            consumer.broker_proxy.drop_request(BASIC_ACK, times=1_000_000)
        await consumer.start(handler)
        return consumer

    def make_consumer(self) -> AioConsumer | BlockingConsumer:
        raise NotImplementedError

    async def is_empty(self) -> bool:
        with suppress(AMQPError):
            return not self.queue.channel.queue_declare(self.queue.name, passive=True).method.message_count
        return False  # the connection was idle for too long; the contract asks again

    async def list_dead_letters(self) -> list[bytes]:
        with suppress(AMQPError):
            self._dead_letters += [body for _, _, body in await asyncio.to_thread(self.dead.all)]
        return self._dead_letters


class RabbitConsumer:
    """The connections of one consumer."""

    def __init__(self, transport: RabbitTransport) -> None:
        self.transport = transport
        self.store_proxy = Proxy(transport.store, remember=False)
        self.gate = Gate(self.store_proxy.url, namespace=transport.gate.namespace, timeout="3s")
        self.broker_proxy = Proxy(f"amqp://127.0.0.1:{transport.broker.port}", remember=False)
        self.url = f"amqp://guest:guest@127.0.0.1:{self.broker_proxy.port}/?heartbeat=5"

    async def close(self) -> None:
        await self.gate.aio.close()
        self.gate.close()
        self.store_proxy.close()
        self.broker_proxy.close()


class AioConsumer(RabbitConsumer):
    async def start(self, handler: Handler) -> None:
        run = guarded(self.gate, **OPTIONS)(adapt_handler(handler, lambda message: (message.message_id, message.body)))
        self.running: set[object] = set()

        async def on_message(message: Any) -> None:
            self.transport.count(message.message_id)
            self.running.add(message)
            try:
                await run(message)
            finally:
                self.running.discard(message)

        self.connection = await aio_pika.connect(self.url)
        channel = await self.connection.channel()
        await channel.set_qos(PREFETCH)
        self.queue = await channel.get_queue(self.transport.queue.name)
        self.tag = await self.queue.consume(on_message)

    async def stop(self) -> None:
        await self.queue.cancel(self.tag)
        while self.running:
            await asyncio.sleep(0.005)
        await self.connection.close()
        await self.close()

    async def kill(self) -> None:
        self.store_proxy.close()
        self.broker_proxy.close()
        while self.running:  # aio-pika cancels the callbacks of a closed channel
            await asyncio.sleep(0.005)
        with suppress(*aio_pika.exceptions.CONNECTION_EXCEPTIONS):
            await self.connection.close()


class BlockingConsumer(RabbitConsumer):
    async def start(self, handler: Handler) -> None:
        await asyncio.to_thread(self._start, handler)

    def _start(self, handler: Handler) -> None:
        @guarded(self.gate, **OPTIONS)
        def run(channel: Any, method: Any, properties: Any, body: bytes) -> None:
            handler(properties.message_id, body)

        def on_message(channel: Any, method: Any, properties: Any, body: bytes) -> None:
            self.transport.count(properties.message_id)
            run(channel, method, properties, body)

        self.connection = pika.BlockingConnection(pika.URLParameters(self.url))
        self.channel = self.connection.channel()
        self.channel.basic_qos(prefetch_count=PREFETCH)
        self.channel.basic_consume(self.transport.queue.name, on_message)
        self.thread = threading.Thread(target=self._consume)
        self.thread.start()

    def _consume(self) -> None:
        with suppress(AMQPError):  # the connection was cut
            self.channel.start_consuming()
            self.connection.close()

    async def stop(self) -> None:
        self.connection.add_callback_threadsafe(self.channel.stop_consuming)
        await asyncio.to_thread(self.thread.join, 20)
        await self.close()

    async def kill(self) -> None:
        self.store_proxy.close()
        self.broker_proxy.close()


class AioTransport(RabbitTransport):
    def make_consumer(self) -> AioConsumer:
        return AioConsumer(self)


class BlockingTransport(RabbitTransport):
    is_concurrent = False

    def make_consumer(self) -> BlockingConsumer:
        return BlockingConsumer(self)


@pytest.fixture
async def contract_gate(store: str, namespace: str) -> Any:
    """A gate on the server's clock."""
    made = Gate(store, namespace=namespace)
    yield made
    await made.aio.close()
    made.close()


@pytest.fixture
def make_transport(contract_gate: Gate, store: str, broker: Any, queue: Any, make_queue: Any) -> Callable[..., Any]:
    """Return a function that builds a transport on a queue with a dead-letter exchange."""
    dead = make_queue()
    queue.channel.queue_delete(queue.name)
    arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": dead.name}
    queue.channel.queue_declare(queue.name, durable=True, arguments=arguments)
    return lambda kind: kind(contract_gate, store, broker, queue, dead)


class TestAioPika(ConsumerContract):
    kinds = ("async",)

    @pytest.fixture
    def transport(self, make_transport: Any) -> Transport:
        return make_transport(AioTransport)


class TestPika(ConsumerContract):
    kinds = ("sync",)
    test_two_messages_run_at_once = None  # a consumer of pika runs one message after the other

    @pytest.fixture
    def transport(self, make_transport: Any) -> Transport:
        return make_transport(BlockingTransport)
