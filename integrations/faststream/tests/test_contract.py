"""The consumer contract for FastStream on NATS JetStream."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import nats
import pytest
from faststream.nats import JStream, NatsBroker, NatsMessage
from idemgate_faststream import Once
from nats.js.api import ConsumerConfig

from idemgate import Gate
from idemgate.testing import ConsumerContract, Transport
from idemgate.testing.contract import LEASE, MAX_ATTEMPTS, SCOPE, Handler
from idemgate.testing.proxy import Proxy

ACK_WAIT = 1.2
ACKNOWLEDGEMENT = b"$JS.ACK."


async def ignore(_: Exception) -> None:
    """Drop the errors of a connection that a test cut."""


class NatsTransport(Transport):
    """A stream, a durable pull consumer, and a stream of dead letters."""

    visibility = ACK_WAIT

    def __init__(self, gate: Gate, store: str, url: str) -> None:
        super().__init__(gate)
        self.store, self.url, self.name = store, url, gate.namespace

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

    async def publish(self, message_id: str, body: bytes) -> None:
        await self.jetstream.publish(f"{self.name}.x", body, headers={"event-id": message_id})

    async def start(self, handler: Handler, *, acknowledges: bool = True) -> NatsConsumer:
        consumer = NatsConsumer(self)
        if not acknowledges:
            consumer.nats.drop_request(ACKNOWLEDGEMENT, times=1_000_000)
        await consumer.start(handler)
        return consumer

    async def is_empty(self) -> bool:
        info = await self.jetstream.consumer_info(self.name, "billing")
        return not info.num_pending and not info.num_ack_pending

    async def list_dead_letters(self) -> list[bytes]:
        state = (await self.jetstream.stream_info(f"{self.name}-dead")).state
        return [
            (await self.jetstream.get_msg(f"{self.name}-dead", number)).data or b""
            for number in range(1, state.last_seq + 1)
        ]


class NatsConsumer:
    """An app of FastStream, with connections that can be cut."""

    def __init__(self, transport: NatsTransport) -> None:
        self.transport = transport
        self.nats, self.redis = Proxy(transport.url, remember=False), Proxy(transport.store, remember=False)
        self.gate = Gate(self.redis.url, namespace=transport.gate.namespace, timeout="500ms")

    async def start(self, handler: Handler) -> None:
        transport = self.transport

        async def on_reject(message: Any, _: Exception) -> None:
            await transport.jetstream.publish(f"{transport.name}-dead", message.body)

        once = Once(
            self.gate, key=lambda message: transport.count(message.headers["event-id"]), scope=SCOPE, backoff="100ms",
            on_reject=on_reject, lease=LEASE, max_attempts=MAX_ATTEMPTS,
        )  # fmt: skip
        self.broker = NatsBroker(
            self.nats.url,
            middlewares=[once],
            reconnect_time_wait=0.1,
            error_cb=ignore,
            graceful_timeout=20,
            logger=None,
        )
        subscriber = self.broker.subscriber(
            f"{transport.name}.>", stream=JStream(transport.name, declare=False), durable="billing", pull_sub=True,
            max_workers=4, config=ConsumerConfig(ack_wait=ACK_WAIT, max_ack_pending=100),
        )  # fmt: skip
        subscriber(adapt(handler, NatsMessage))
        await self.broker.start()

    async def stop(self) -> None:
        await self.broker.stop()
        await self.close()

    async def kill(self) -> None:
        self.redis.close()
        self.nats.close()
        self.broker.config.broker_config.graceful_timeout = 0.05  # a killed process does not wait for its handlers
        with suppress(Exception):
            await asyncio.wait_for(self.broker.stop(), 2)
        await self.close()

    async def close(self) -> None:
        await self.gate.aio.close()
        self.gate.close()
        self.redis.close()
        self.nats.close()


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


class TestNats(ConsumerContract):
    @pytest.fixture
    async def transport(self, gate: Gate, store: str, nats_server: Any) -> AsyncIterator[Transport]:
        made = NatsTransport(gate, store, nats_server.url)
        await made.open()
        yield made
        await made.close()
