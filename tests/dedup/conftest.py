"""A server of its own for the tests that measure memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from idemgate.store.embedded.server import start


@pytest.fixture(scope="module")
def alone() -> Iterator[str]:
    """The URL of a server that no other test uses, without rewrites of its append-only file: they took 10 MB before
    Redis 7.0."""
    with start() as server:
        with redis.Redis.from_url(server.url) as raw:
            raw.config_set("auto-aof-rewrite-percentage", 0)
        yield server.url
