"""The consumer contract for FastStream: on NATS JetStream, and as slow tests on the other brokers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from idemgate import Gate
from idemgate.testing import ConsumerContract, Transport
from integrations.faststream.tests.transports import (
    FastStreamTransport,
    KafkaTransport,
    NatsTransport,
    RabbitTransport,
    RedisTransport,
)
from integrations.rabbitmq.tests.conftest import broker  # noqa: F401 - a fixture


@asynccontextmanager
async def opened(transport: FastStreamTransport) -> AsyncIterator[Transport]:
    await transport.open()
    yield transport
    await transport.close()


class TestNats(ConsumerContract):
    @pytest.fixture
    async def transport(self, gate: Gate, store: str, nats_server: Any) -> AsyncIterator[Transport]:
        async with opened(NatsTransport(gate, store, nats_server.url)) as made:
            yield made


@pytest.mark.slow
class TestRabbit(ConsumerContract):
    @pytest.fixture
    async def transport(self, gate: Gate, store: str, broker: Any) -> AsyncIterator[Transport]:  # noqa: F811
        async with opened(RabbitTransport(gate, store, broker.url)) as made:
            yield made


@pytest.mark.slow
class TestRedis(ConsumerContract):
    @pytest.fixture
    async def transport(self, gate: Gate, store: str) -> AsyncIterator[Transport]:
        async with opened(RedisTransport(gate, store, store)) as made:
            yield made


@pytest.mark.slow
class TestKafka(ConsumerContract):
    @pytest.fixture
    async def transport(self, gate: Gate, store: str, kafka_url: str) -> AsyncIterator[Transport]:
        async with opened(KafkaTransport(gate, store, kafka_url)) as made:
            yield made
