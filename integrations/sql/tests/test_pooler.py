"""Inboxes behind PgBouncer in transaction mode: each transaction gets some connection of the server."""

from __future__ import annotations

import asyncio
import os
import pwd
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit
from uuid import uuid4

import psycopg as driver
import pytest
from idemgate_sql import psycopg, sqlalchemy
from psycopg_pool import AsyncConnectionPool, ConnectionPool
from sqlalchemy.ext.asyncio import create_async_engine

from idemgate import Gate
from integrations.sql.tests.flavours import AsyncPsycopg, AsyncSQLAlchemy, Flavour, Handle, Psycopg
from integrations.sql.tests.test_inbox import forget
from integrations.sql.tests.test_outbox import _await, eventually, running, send
from tests.needs import report_missing

pytestmark = pytest.mark.slow  # it starts processes or servers of its own

DIRECT = {"prepare_threshold": None}
"""Without it a later transaction names a prepared statement that its connection of the server does not have."""


@pytest.fixture
def pooled_url(postgres_url: str) -> Iterator[str]:
    """The URL of the empty database by way of a PgBouncer that has two connections of the server."""
    program = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if program is None:
        report_missing("pgbouncer")
    parts = urlsplit(postgres_url)
    query = parse_qs(parts.query)
    home, server = Path(tempfile.mkdtemp(prefix="idemgate-pgbouncer-")), query["host"][0]
    config, log = home / "pgbouncer.ini", home / "log"
    config.write_text(
        f"[databases]\n* = host={server} user={query['user'][0]}\n"
        f"[pgbouncer]\nunix_socket_dir = {home}\nauth_type = any\npool_mode = transaction\ndefault_pool_size = 2\n"
    )
    options: dict[str, Any] = {}
    if os.geteuid() == 0:  # it refuses to run as root, and must reach the socket of the server
        user = pwd.getpwuid(Path(server).stat().st_uid)
        os.chown(home, user.pw_uid, user.pw_gid)
        options = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    with log.open("wb") as out:
        process = subprocess.Popen([program, config], stdout=out, stderr=out, cwd=home, **options)
    url = f"postgresql://{parts.path}?host={home}&port=6432&user={query['user'][0]}"
    try:
        for _ in range(1000):
            try:
                driver.connect(url, **DIRECT, connect_timeout=5).close()  # type: ignore[arg-type]
                break
            except driver.OperationalError:
                assert process.poll() is None, f"PgBouncer ended: {log.read_text()}"
                time.sleep(0.02)
        else:
            raise AssertionError(f"PgBouncer does not answer: {log.read_text()}")
        yield url
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(home)


async def check_payments(gate: Gate, flavour: Flavour, inbox: Any) -> None:
    """Check that key, result and effect of payments that run at once commit together, and that two that fail do not."""
    await _await(inbox.create_tables())
    failures = {"p03", "p11"}

    async def body(db: Handle, key: str) -> str:
        await db.credit(key)
        if key in failures:
            failures.remove(key)
            raise ZeroDivisionError
        return key

    pay = flavour.decorate(gate, inbox, body)
    keys = [f"p{number:02}" for number in range(40)]
    # When they run at once, so that each statement is executed more often than psycopg prepares it
    first: Any = await asyncio.gather(*map(pay, keys), return_exceptions=True)
    # Then what raised is rolled back, with its row, and the others are committed
    failed = {key for key, value in zip(keys, first, strict=True) if isinstance(value, ZeroDivisionError)}
    assert failed == {"p03", "p11"}
    assert [value for value in first if not isinstance(value, ZeroDivisionError)] == sorted({*keys} - failed)
    assert flavour.credits() == sorted({*keys} - failed)
    # And the rows answer when Redis has lost the keys
    for key in keys:
        forget(gate, key)
    assert await asyncio.gather(*map(pay, keys)) == keys
    assert flavour.credits() == keys
    assert gate.counters["once.sink_replayed"] == len(keys) - len(failed)


@pytest.mark.parametrize("flavour_of", [Psycopg, AsyncPsycopg])
async def test_key_result_and_effect_commit_together_behind_a_pooler(
    gate: Gate, postgres_url: str, pooled_url: str, flavour_of: type[Flavour]
) -> None:
    # Given more connections of clients than of the server
    flavour = flavour_of(postgres_url)
    kind = AsyncConnectionPool if flavour.awaiting else ConnectionPool
    pool: Any = kind(pooled_url, min_size=4, max_size=4, open=False, kwargs=DIRECT)
    await _await(pool.open())
    try:
        await check_payments(gate, flavour, (psycopg.AsyncInbox if flavour.awaiting else psycopg.Inbox)(pool))
    finally:
        await _await(pool.close())


UNNAMED: dict[str, Any] = {
    "statement_cache_size": 0,
    "prepared_statement_cache_size": 0,
    "prepared_statement_name_func": lambda: f"__{uuid4()}__",
}
"""The same for asyncpg below SQLAlchemy. Each statement has a name that no connection of the server knows."""


async def test_asyncpg_behind_a_pooler(gate: Gate, postgres_url: str, pooled_url: str) -> None:
    # Given more connections of clients than of the server
    engine = create_async_engine(
        pooled_url.replace("postgresql://", "postgresql+asyncpg://"), pool_size=4, connect_args=UNNAMED
    )
    try:
        await check_payments(gate, AsyncSQLAlchemy(postgres_url), sqlalchemy.AsyncInbox(engine))
    finally:
        await engine.dispose()


async def test_a_trigger_behind_a_pooler_wakes_a_relay_that_is_connected_to_the_server(
    gate: Gate, postgres_url: str, pooled_url: str
) -> None:
    topic = gate.topic("t", merge="append")
    behind = psycopg.Inbox(lambda: driver.connect(pooled_url, **DIRECT))  # type: ignore[arg-type]
    behind.create_tables()
    async with running(psycopg.Inbox(postgres_url).relay(gate, poll="1h")):
        for number in range(3):
            await send(behind, topic, ("k", number))
            await eventually(lambda number=number: gate.counters["sql.relayed"] == number + 1)
