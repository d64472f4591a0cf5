"""A transport of the consumer contract for each broker of FastStream."""

from __future__ import annotations

import asyncio
import inspect
from abc import abstractmethod
from contextlib import suppress
from typing import Any

import aio_pika
import nats
import redis.asyncio
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from faststream import AckPolicy
from faststream.kafka import KafkaBroker, KafkaMessage
from faststream.nats import JStream, NatsBroker, NatsMessage
from faststream.rabbit import Channel, RabbitBroker, RabbitMessage, RabbitQueue
from faststream.redis import RedisBroker, RedisStreamMessage, StreamSub
from idemgate_faststream import Once
from nats.js.api import ConsumerConfig

from idemgate import Gate
from idemgate.testing import Transport
from idemgate.testing.contract import LEASE, MAX_ATTEMPTS, SCOPE, Handler
from idemgate.testing.proxy import Proxy

ACK_WAIT = 1.2
WORKERS = 4


class FastStreamTransport(Transport):
    """The part of a transport that all brokers have. `name` is that of its queue, stream or topic."""

    message: type[Any]
    acknowledgement = b""
    """The bytes of an acknowledgement on its way to the broker."""

    def __init__(self, gate: Gate, store: str, url: str) -> None:
        super().__init__(gate)
        self.store, self.url, self.name = store, url, gate.namespace
        self.started = 0

    @abstractmethod
    async def open(self) -> None:
        """Make what the messages wait in."""

    @abstractmethod
    async def close(self) -> None:
        """Delete that."""

    @abstractmethod
    async def keep_dead_letter(self, body: bytes) -> None:
        """Publish the body of a rejected message."""

    @abstractmethod
    def make_app(self, consumer: FastStreamConsumer, once: Once) -> tuple[Any, list[Any]]:
        """Return the broker of an app with the middleware, and its subscribers."""

    async def start(self, handler: Handler, *, acknowledges: bool = True) -> FastStreamConsumer:
        self.started += 1
        consumer = FastStreamConsumer(self)
        await consumer.start(handler, acknowledges)
        return consumer

    def lose_acknowledgements(self, consumer: FastStreamConsumer) -> None:
        consumer.proxy.drop_request(self.acknowledgement, times=1_000_000)


class FastStreamConsumer:
    """An app of FastStream, with connections that can be cut."""

    def __init__(self, transport: FastStreamTransport) -> None:
        self.transport = transport
        self.proxy, self.redis = Proxy(transport.url, remember=False), Proxy(transport.store, remember=False)
        self.gate = Gate(self.redis.url, namespace=transport.gate.namespace, timeout="3s")

    async def start(self, handler: Handler, acknowledges: bool) -> None:
        transport = self.transport

        async def on_reject(message: Any, _: Exception) -> None:
            await transport.keep_dead_letter(message.body)

        once = Once(
            self.gate, key=lambda message: transport.count(message.headers["event-id"]), scope=SCOPE, backoff="100ms",
            hold="2s", on_reject=on_reject, lease=LEASE, max_attempts=MAX_ATTEMPTS,
        )  # fmt: skip
        self.broker, self.subscribers = transport.make_app(self, once)
        call: Any = adapt(handler, transport.message)
        for subscriber in self.subscribers:
            call = subscriber(call)
        await self.broker.start()
        if not acknowledges:
            transport.lose_acknowledgements(self)

    async def stop(self) -> None:
        await self.broker.stop()
        await self.close()

    async def kill(self) -> None:
        self.redis.close()
        self.proxy.close()
        self.broker.config.broker_config.graceful_timeout = 0.05  # a killed process does not wait for its handlers
        connection = self.broker._connection
        with suppress(Exception):
            await asyncio.wait_for(self.broker.stop(), 2)
        if isinstance(connection, nats.NATS):  # one that is about to connect again cannot be drained, and would go on
            with suppress(OSError):
                await connection.close()
        await self.close()

    async def close(self) -> None:
        await self.gate.aio.close()
        self.gate.close()
        self.redis.close()
        self.proxy.close()


def adapt(handler: Handler, kind: type[Any]) -> Any:
    """Return a handler for FastStream, async if that of the contract is. It replies what that returns."""
    if inspect.iscoroutinefunction(handler):

        async def on_message_async(message: Any) -> Any:
            return await handler(message.headers["event-id"], message.body)

        on_message_async.__annotations__["message"] = kind
        return on_message_async

    def on_message(message: Any) -> Any:
        return handler(message.headers["event-id"], message.body)

    on_message.__annotations__["message"] = kind
    return on_message


class NatsTransport(FastStreamTransport):
    """A stream, a durable pull consumer, and a stream of dead letters."""

    visibility = ACK_WAIT
    message = NatsMessage
    acknowledgement = b"$JS.ACK."

    async def open(self) -> None:
        self.client = await nats.connect(self.url)
        self.jetstream = self.client.jetstream()
        await self.jetstream.add_stream(name=self.name, subjects=[f"{self.name}.>"])
        await self.jetstream.add_stream(name=f"{self.name}-dead", subjects=[f"{self.name}-dead"])
        config = ConsumerConfig(durable_name="billing", ack_wait=ACK_WAIT, max_ack_pending=100)
        await self.jetstream.add_consumer(self.name, config)

    async def close(self) -> None:
        for name in (self.name, f"{self.name}-dead"):
            await self.jetstream.delete_stream(name)
        await self.client.close()

    def make_app(self, consumer: FastStreamConsumer, once: Once) -> tuple[Any, list[Any]]:
        broker = NatsBroker(
            consumer.proxy.url, middlewares=[once], reconnect_time_wait=0.1, error_cb=ignore, graceful_timeout=20,
            logger=None,
        )  # fmt: skip
        subscriber = broker.subscriber(
            f"{self.name}.>", stream=JStream(self.name, declare=False), durable="billing", pull_sub=True,
            max_workers=WORKERS, config=ConsumerConfig(ack_wait=ACK_WAIT, max_ack_pending=100),
        )  # fmt: skip
        return broker, [subscriber]

    async def publish(self, message_id: str, body: bytes) -> None:
        await self.jetstream.publish(f"{self.name}.x", body, headers={"event-id": message_id})

    async def is_empty(self) -> bool:
        info = await self.jetstream.consumer_info(self.name, "billing")
        return not info.num_pending and not info.num_ack_pending

    async def keep_dead_letter(self, body: bytes) -> None:
        await self.jetstream.publish(f"{self.name}-dead", body)

    async def list_dead_letters(self) -> list[bytes]:
        state = (await self.jetstream.stream_info(f"{self.name}-dead")).state
        return [
            (await self.jetstream.get_msg(f"{self.name}-dead", number)).data or b""
            for number in range(1, state.last_seq + 1)
        ]


async def ignore(_: Exception) -> None:
    """Drop the errors of a connection that a test cut."""


class RabbitTransport(FastStreamTransport):
    """A durable queue, and a queue of dead letters."""

    message = RabbitMessage
    acknowledgement = b"\x00\x3c\x00\x50"  # class 60 and method 80 of AMQP 0-9-1

    async def open(self) -> None:
        self.connection = await aio_pika.connect(self.url)
        self.channel = await self.connection.channel()
        self.queue = await self.channel.declare_queue(self.name, durable=True)
        self.dead = await self.channel.declare_queue(f"{self.name}-dead", durable=True)
        self.dead_letters: list[bytes] = []

    async def close(self) -> None:
        await self.queue.delete(if_unused=False, if_empty=False)
        await self.dead.delete(if_unused=False, if_empty=False)
        await self.connection.close()

    def make_app(self, consumer: FastStreamConsumer, once: Once) -> tuple[Any, list[Any]]:
        url = f"amqp://guest:guest@127.0.0.1:{consumer.proxy.port}/?heartbeat=5"
        broker = RabbitBroker(
            url, middlewares=[once], graceful_timeout=20, logger=None, reconnect_interval=0.1,
            default_channel=Channel(prefetch_count=WORKERS),
        )  # fmt: skip
        return broker, [broker.subscriber(RabbitQueue(self.name, durable=True))]

    async def publish(self, message_id: str, body: bytes) -> None:
        message = aio_pika.Message(body, headers={"event-id": message_id}, delivery_mode=2)
        await self.channel.default_exchange.publish(message, self.name)

    async def is_empty(self) -> bool:
        declared = await self.channel.declare_queue(self.name, passive=True)
        return not declared.declaration_result.message_count

    async def keep_dead_letter(self, body: bytes) -> None:
        await self.channel.default_exchange.publish(aio_pika.Message(body), f"{self.name}-dead")

    async def list_dead_letters(self) -> list[bytes]:
        while (found := await self.dead.get(no_ack=True, fail=False)) is not None:
            self.dead_letters.append(found.body)
        return self.dead_letters


class RedisTransport(FastStreamTransport):
    """A stream with a group: one subscriber reads from it, another one claims what was given back."""

    message = RedisStreamMessage
    acknowledgement = b"XACK"

    async def open(self) -> None:
        self.client = redis.asyncio.Redis.from_url(self.url)
        self.publisher = RedisBroker(self.url, logger=None)
        await self.publisher.connect()
        await self.client.xgroup_create(self.name, "billing", mkstream=True)

    async def close(self) -> None:
        await self.publisher.stop()
        await self.client.delete(self.name, f"{self.name}-dead")
        await self.client.aclose()

    def make_app(self, consumer: FastStreamConsumer, once: Once) -> tuple[Any, list[Any]]:
        broker = RedisBroker(consumer.proxy.url, middlewares=[once], graceful_timeout=20, logger=None)
        group = {"group": "billing", "consumer": f"c{self.started}", "polling_interval": 50}
        subscribers = [
            broker.subscriber(stream=StreamSub(self.name, **group, **more), max_workers=WORKERS)
            for more in ({}, {"min_idle_time": 300})
        ]
        return broker, subscribers

    async def publish(self, message_id: str, body: bytes) -> None:
        await self.publisher.publish(body, stream=self.name, headers={"event-id": message_id})

    async def is_empty(self) -> bool:
        (group,) = await self.client.xinfo_groups(self.name)
        return not group["pending"] and not group["lag"]

    async def keep_dead_letter(self, body: bytes) -> None:
        await self.client.xadd(f"{self.name}-dead", {"body": body})

    async def list_dead_letters(self) -> list[bytes]:
        return [fields[b"body"] for _, fields in await self.client.xrange(f"{self.name}-dead")]


class KafkaTransport(FastStreamTransport):
    """A topic with one partition, whose messages run one after the other, and a topic of dead letters.

    The broker tells clients its own address, so nothing runs through the proxy: a killed consumer leaves its group.
    """

    is_concurrent = False
    is_ordered = True
    message = KafkaMessage

    async def open(self) -> None:
        self.producer = AIOKafkaProducer(bootstrap_servers=self.url)
        await self.producer.start()
        self.reader = AIOKafkaConsumer(bootstrap_servers=self.url, group_id=self.name, enable_auto_commit=False)
        await self.reader.start()
        admin = AIOKafkaAdminClient(bootstrap_servers=self.url)
        await admin.start()
        await admin.create_topics([NewTopic(self.name, 1, 1), NewTopic(f"{self.name}-dead", 1, 1)])
        await admin.close()

    async def close(self) -> None:
        await self.producer.stop()
        await self.reader.stop()

    def make_app(self, consumer: FastStreamConsumer, once: Once) -> tuple[Any, list[Any]]:
        broker = KafkaBroker(self.url, middlewares=[once], graceful_timeout=20, logger=None)
        subscriber = broker.subscriber(
            self.name, group_id=self.name, ack_policy=AckPolicy.NACK_ON_ERROR, auto_offset_reset="earliest",
            session_timeout_ms=6000, heartbeat_interval_ms=500,
        )  # fmt: skip
        return broker, [subscriber]

    def lose_acknowledgements(self, consumer: FastStreamConsumer) -> None:
        (subscriber,) = consumer.subscribers
        subscriber.consumer.commit = lambda *_: asyncio.sleep(0)

    async def publish(self, message_id: str, body: bytes) -> None:
        await self.producer.send_and_wait(self.name, body, headers=[("event-id", message_id.encode())])

    async def is_empty(self) -> bool:
        partition = TopicPartition(self.name, 0)
        end = (await self.reader.end_offsets([partition]))[partition]
        return (await self.reader.committed(partition) or 0) >= end

    async def keep_dead_letter(self, body: bytes) -> None:
        await self.producer.send_and_wait(f"{self.name}-dead", body)

    async def list_dead_letters(self) -> list[bytes]:
        reader, partition = AIOKafkaConsumer(bootstrap_servers=self.url), TopicPartition(f"{self.name}-dead", 0)
        await reader.start()
        try:
            reader.assign([partition])
            await reader.seek_to_beginning(partition)
            end, found = (await reader.end_offsets([partition]))[partition], []
            while len(found) < end:
                for records in (await reader.getmany(timeout_ms=200)).values():
                    found += [record.value for record in records]
            return found
        finally:
            await reader.stop()
