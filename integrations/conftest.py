"""The store of the tests of all packages: one Redis a test process, and a namespace a test."""

from __future__ import annotations

import itertools
import os
from collections.abc import AsyncIterator, Iterator

import pytest

from idemgate import Gate
from idemgate.store import sync
from idemgate.store.embedded.server import start
from idemgate.testing import Clock

_numbers = itertools.count()
# A process warns once of a blocking call in an event loop: by chance in a test that reads the log.
sync._has_warned = True


@pytest.fixture(scope="session")
def store() -> Iterator[str]:
    """The URL of the Redis of this test process, for other processes too."""
    with start() as server:
        yield server.url


@pytest.fixture
def namespace() -> str:
    return f"i{os.getpid()}-{next(_numbers)}"


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def gate(store: str, namespace: str) -> AsyncIterator[Gate]:
    """A gate on the server's clock."""
    made = Gate(store, namespace=namespace)
    yield made
    await made.aio.close()
    made.close()
