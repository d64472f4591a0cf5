"""The statements that create the tables, as a command prints them."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from idemgate_sql import ddl, sqlite
from idemgate_sql.__main__ import main
from sqlalchemy import create_engine, inspect

from idemgate import Gate, InvalidArgument
from integrations.sql.tests.flavours import Flavour

DIALECTS = ("postgresql", "sqlite")
pytestmark = pytest.mark.one_in(3)

ENVIRONMENT = """
from alembic import context
from sqlalchemy import NullPool, create_engine

url = context.config.get_main_option("sqlalchemy.url")
with create_engine(url, poolclass=NullPool).connect() as connection:
    context.configure(connection=connection)
    with context.begin_transaction():
        context.run_migrations()
"""


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_command_prints_the_statements(dialect: str) -> None:
    words = [sys.executable, "-m", "idemgate_sql", "ddl", dialect, "--table", "shop"]
    printed = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert printed == ddl(dialect, "shop")  # type: ignore[arg-type]
    assert {"shop_inbox", "shop_outbox"} <= set(printed.split())


def test_the_statements_create_the_tables_and_may_run_again(tmp_path: Path, postgres_url: str) -> None:
    with closing(sqlite3.connect(tmp_path / "db")) as database:
        for _ in range(2):
            database.executescript(ddl("sqlite", "a"))
        names = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    assert {"a_inbox", "a_outbox"} <= set(names)
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("CREATE SCHEMA shop")
        for _ in range(2):
            connection.execute(ddl("postgresql", "shop.a"))
        found = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'shop'").fetchall()
    assert sorted(found) == [("a_inbox",), ("a_outbox",)]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_alembic_functions_create_and_drop_the_tables(
    dialect: str, tmp_path: Path, capsys: Any, request: pytest.FixtureRequest
) -> None:
    from alembic.migration import MigrationContext
    from alembic.operations import Operations

    # Given a database of SQLAlchemy
    url = f"sqlite:///{tmp_path / 'db'}"
    if dialect == "postgresql":
        url = request.getfixturevalue("postgres_url").replace("postgresql:", "postgresql+psycopg:", 1)
    assert main(["alembic", dialect]) == 0
    printed = capsys.readouterr().out
    engine = create_engine(url)
    # When the printed functions run as those of a revision
    with engine.begin() as connection, Operations.context(MigrationContext.configure(connection)):
        revision: dict[str, Any] = {}
        exec(printed, revision)
        revision["upgrade"]()
        assert {"idemgate_inbox", "idemgate_outbox"} <= set(inspect(connection).get_table_names())
        revision["downgrade"]()
        assert not {"idemgate_inbox", "idemgate_outbox"} & set(inspect(connection).get_table_names())
    engine.dispose()


async def test_the_command_deletes_expired_rows(gate: Gate, flavour: Flavour, inbox: Any, capsys: Any) -> None:
    # Given expired rows and one that is not
    async def pay(handle: Any, key: str) -> None:
        await handle.credit(key)

    call = flavour.decorate(gate, inbox, pay)
    for number in range(6):
        await call(f"p{number}")
    past = "now() - interval '1 second'" if flavour.dialect == "postgresql" else "datetime('now', '-1 second')"
    flavour.look(f"UPDATE idemgate_inbox SET expires_at = {past} WHERE key <> 'p0'")
    # When the command deletes them in batches
    assert main(["purge", flavour.url, "--batch", "2"]) == 0
    # Then it prints their number, and the other row is left
    assert capsys.readouterr().out == "5\n"
    assert [key for _, key, _ in flavour.rows()] == ["p0"]


def test_a_purge_with_bad_arguments_is_refused(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "missing.db"
    assert main(["purge", str(path)]) == 2
    assert "database" in capsys.readouterr().err
    assert not path.exists()
    path.touch()
    assert main(["purge", str(path), "--batch", "0"]) == 2
    assert "batch" in capsys.readouterr().err


@pytest.mark.parametrize("dialect", DIALECTS)
def test_alembic_runs_a_revision_with_the_printed_functions(
    dialect: str, tmp_path: Path, capsys: Any, request: pytest.FixtureRequest
) -> None:
    from alembic import command
    from alembic.config import Config

    # Given a revision with what the command prints
    url = f"sqlite:///{tmp_path / 'db'}"
    if dialect == "postgresql":
        url = request.getfixturevalue("postgres_url").replace("postgresql:", "postgresql+psycopg:", 1)
    config = Config()
    config.set_main_option("script_location", str(tmp_path / "migrations"))
    config.set_main_option("sqlalchemy.url", url.replace("%", "%%"))
    (tmp_path / "migrations/versions").mkdir(parents=True)
    (tmp_path / "migrations/env.py").write_text(ENVIRONMENT)
    assert main(["alembic", dialect, "--table", "shop"]) == 0
    head = "revision = 'a1'\ndown_revision = branch_labels = depends_on = None\n"
    (tmp_path / "migrations/versions/a1_outbox.py").write_text(head + capsys.readouterr().out)
    # When alembic upgrades and downgrades the database
    engine = create_engine(url)
    command.upgrade(config, "head")
    assert {"shop_inbox", "shop_outbox"} <= set(inspect(engine).get_table_names())
    command.downgrade(config, "base")
    assert not {"shop_inbox", "shop_outbox"} & set(inspect(engine).get_table_names())
    engine.dispose()


def test_a_schema_is_refused_in_sqlite(tmp_path: Path, capsys: Any) -> None:
    """A commit in several attached databases is not atomic in WAL mode."""
    for build in (lambda: ddl("sqlite", "main.shop"), lambda: sqlite.Inbox(tmp_path / "db", table="main.shop")):
        with pytest.raises(InvalidArgument, match=r"table='main.shop': .*SQLite"):
            build()
    assert main(["alembic", "sqlite", "--table", "main.shop"]) == 2
    assert "SQLite" in capsys.readouterr().err


@pytest.mark.parametrize("table", ["", "Shop", "a b", "a;drop", "a.b.c", "x" * 42, "1a"])
def test_a_prefix_that_is_no_name_is_refused(table: str, capsys: Any) -> None:
    with pytest.raises(InvalidArgument, match="table"):
        ddl("sqlite", table)
    assert main(["ddl", "sqlite", "--table", table]) == 2
    assert "prefix of a table" in capsys.readouterr().err
