"""A store and a PostgreSQL server of this test process, and the inboxes of each test in an empty database."""

from __future__ import annotations

import os
import warnings
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from weakref import WeakSet

import psycopg
import pytest
import redis

from idemgate import Gate
from idemgate.store.embedded.server import start
from idemgate.testing import Clock, audit
from integrations.sql.tests.flavours import FEW, FLAVOURS, SLOW, Flavour, find_url
from tests.needs import report_missing
from tests.plugins.open_sockets import LeftOpen
from tests.postgres import Postgres, find_programs

_make, _made = psycopg.AsyncConnection.__init__, WeakSet[Any]()


def _make_noted(connection: Any, *args: Any, **options: Any) -> None:
    _make(connection, *args, **options)
    _made.add(connection)


psycopg.AsyncConnection.__init__ = _make_noted  # type: ignore[method-assign]


@pytest.fixture(autouse=True)
def no_open_connection() -> Iterator[None]:
    """Close what a test left open. psycopg leaves a connection open whose commit or rollback is cancelled.

    The garbage collector would report it in the middle of another test. The event loop does not know of it.
    """
    yield
    if left := [one for one in _made if not one.closed]:
        for one in left:
            one.pgconn.finish()
        warnings.warn(LeftOpen(f"{os.environ.get('PYTEST_CURRENT_TEST')}: {left}"), stacklevel=2)


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    """The URL of the store of this test process."""
    with start() as server:
        yield server.url


@pytest.fixture(scope="session")
def raw(url: str) -> Iterator[Any]:
    """A plain client of the store."""
    with redis.Redis.from_url(url) as client:
        yield client


@pytest.fixture
async def gate(url: str, raw: Any, clock: Clock, namespace: str) -> AsyncIterator[Gate]:
    """A gate on a namespace of its own, whose time is `clock`. It is audited at the end.

    An audit scans the whole server, so the keys of the test are deleted after it.
    """
    made = Gate(url, namespace=namespace, clock=clock)
    yield made
    report = audit(made) if raw.dbsize() else None
    await made.aio.close()
    made.close()
    raw.flushdb()
    assert report is None or not report.by_kind, str(report)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """The PostgreSQL server of this test process, or a skip that says how to install it."""
    programs = find_programs()
    if programs is None:
        report_missing("postgresql")
    server = Postgres(programs)
    yield server
    server.stop()


@pytest.fixture
def postgres_url(postgres: Postgres) -> Iterator[str]:
    """The URL of an empty PostgreSQL database."""
    with postgres.lend_database() as url:
        yield url


@pytest.fixture(params=[pytest.param(name, marks=SLOW.get(name, ())) for name in FLAVOURS])  # see with_flavours
def flavour(request: pytest.FixtureRequest, tmp_path: Path) -> Flavour:
    """One of the flavours, whose database has the tables of the tests but not those of the inbox."""
    kind = FLAVOURS[request.param]
    return kind(find_url(kind, tmp_path, lambda: str(request.getfixturevalue("postgres_url"))))


@pytest.fixture
async def inbox(flavour: Flavour) -> Any:
    """An inbox of the flavour, with its tables."""
    return await flavour.create()


USUAL = {
    # Each process of SQLAlchemy and Django takes seconds.
    **dict.fromkeys(("test_kills", "test_relay_outages"), ("psycopg", "sqlite")),
    "test_relay_kills": ("psycopg",),
    **dict.fromkeys(("test_relay", "test_concurrency"), FEW),
}
"""The flavours with which the tests of a file run. With the others they are slow."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent and item.path.stem in USUAL:
            name = getattr(item, "callspec", None) and item.callspec.params.get("flavour", "")  # type: ignore[attr-defined]
            if name and name not in USUAL[item.path.stem]:
                item.add_marker(pytest.mark.slow)
