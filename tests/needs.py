"""Programs that the system installs: a test without one is skipped, or fails if IDEMGATE_NEED names it.

`IDEMGATE_NEED=postgresql,rabbitmq` is for continuous integration, where a skip could hide a broken installation.
"""

from __future__ import annotations

import os
from typing import NoReturn

import pytest

__all__ = ["PACKAGES", "report_missing"]

PACKAGES = {
    "postgresql": "postgresql",
    "rabbitmq": "rabbitmq-server",
    "zookeeper": "zookeeper default-jre-headless",
    "pgbouncer": "pgbouncer",
    "luacheck": "lua-check",
    "prometheus": "prometheus",
    "chromium": "chromium fonts-dejavu-core",
}
"""The Debian packages of each program. `.ci/brokers` installs them."""


def report_missing(server: str) -> NoReturn:
    """Skip the test, or fail if IDEMGATE_NEED names the server. Both tell how to install it."""
    packages = PACKAGES[server]
    text = f"no {server} on this machine: apt-get install -y --no-install-recommends {packages}"
    if server in os.environ.get("IDEMGATE_NEED", "").split(","):
        pytest.fail(text, pytrace=False)
    pytest.skip(text)
