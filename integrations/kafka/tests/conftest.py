"""Tansu, one of this test process, and topics of its own for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from importlib.util import find_spec

import pytest

from integrations.kafka.tests.kafka_topics import Topics
from tests.tansu import running_tansu

HAS_CONFLUENT = find_spec("confluent_kafka") is not None
collect_ignore = (
    [] if HAS_CONFLUENT else [f"test_{name}.py" for name in ("clients", "consuming", "kills", "sending", "soak")]
)
"""There is no confluent-kafka for Python 3.15 yet. The contract runs with aiokafka."""


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The bootstrap server of a Tansu."""
    with running_tansu(tmp_path_factory.mktemp("kafka")) as servers:
        yield servers


@pytest.fixture
async def topics(kafka: str, namespace: str) -> AsyncIterator[Topics]:
    """A topic with four partitions, one for dead letters and one for retries."""
    async with Topics(kafka, namespace) as made:
        yield made
