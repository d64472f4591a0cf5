"""Tansu and a Redis of this test process, and topics of its own for each test."""

from __future__ import annotations

import itertools
import os
from collections.abc import AsyncIterator, Iterator
from importlib.util import find_spec

import pytest

from idemgate import Gate
from idemgate.store.embedded.server import start
from integrations.kafka.tests.topics import Topics
from tests.conftest import pytest_collection_modifyitems, pytest_runtest_makereport, record_fault  # noqa: F401 - of rows
from tests.tansu import running_tansu

_numbers = itertools.count()
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


@pytest.fixture(scope="session")
def store() -> Iterator[str]:
    """The store of this test process."""
    with start() as server:
        yield server.url


@pytest.fixture
def namespace() -> str:
    return f"k{os.getpid()}-{next(_numbers)}"


@pytest.fixture
async def gate(store: str, namespace: str) -> AsyncIterator[Gate]:
    made = Gate(store, namespace=namespace)
    yield made
    await made.aio.close()
    made.close()


@pytest.fixture
async def topics(kafka: str, namespace: str) -> AsyncIterator[Topics]:
    """A topic with four partitions, one for dead letters and one for retries."""
    async with Topics(kafka, namespace) as made:
        yield made
