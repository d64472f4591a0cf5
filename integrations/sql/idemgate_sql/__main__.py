"""Commands of idemgate-sql: print the tables of an inbox and an outbox, or delete expired rows."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from idemgate import InvalidArgument
from idemgate_sql.schema import build_migration, ddl
from idemgate_sql.statements import check_rows

BATCH = 1000
"""Rows that one statement deletes."""


def main(words: list[str] | None = None) -> int:
    """Do what the command line asks for. Return the exit code."""
    options = _parser().parse_args(words)
    try:
        print(options.run(options), end="")  # noqa: T201 - this is the command
    except InvalidArgument as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m idemgate_sql", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, build, text in (
        ("ddl", ddl, "print the statements that create the tables"),
        ("alembic", build_migration, "print the functions of an Alembic revision"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("dialect", choices=("postgresql", "sqlite"))
        command.set_defaults(run=lambda options, build=build: build(options.dialect, options.table))
        _add_table(command)
    purge = commands.add_parser("purge", help="delete the expired rows of the inbox, and print their number")
    purge.add_argument("database", help="a connection string (postgresql://...), or the path of a SQLite database")
    purge.add_argument("--batch", type=int, default=BATCH, help="rows of one statement (default: %(default)s)")
    purge.set_defaults(run=lambda options: f"{_purge(options.database, options.table, options.batch)}\n")
    _add_table(purge)
    return parser


def _add_table(command: argparse.ArgumentParser) -> None:
    text = "prefix of the names (default: %(default)s)"
    command.add_argument("--table", default="idemgate", metavar="PREFIX", help=text)


def _purge(database: str, table: str, batch: int) -> int:
    """Delete expired rows in batches. Return their number."""
    check_rows(batch, "batch")
    inbox, deleted = _open_inbox(database, table), 0
    while purged := inbox.purge(batch):
        deleted += purged
        if purged < batch:
            break
    return deleted


def _open_inbox(database: str, table: str) -> Any:
    if database.startswith(("postgresql:", "postgres:")):
        from idemgate_sql import psycopg  # the client library is an extra

        return psycopg.Inbox(database, table=table)
    from idemgate_sql import sqlite

    return sqlite.Inbox(_check_file(database), table=table)


def _check_file(path: str) -> str:
    """Return the path of a SQLite database. Raise InvalidArgument if there is none, which SQLite would create."""
    try:
        with Path(path).open("rb"):
            return path
    except OSError as error:
        fix = "Pass postgresql://... or the path of an existing database"
        raise InvalidArgument("database", path, f"no file that can be read ({error.strerror})", fix) from None


if __name__ == "__main__":
    sys.exit(main())
