"""What an error of a client library means. SQLAlchemy and Django wrap the error of the driver."""

from __future__ import annotations

import sqlite3
from collections.abc import Generator, Iterator
from contextlib import contextmanager

__all__ = ["ends_transaction", "explain_missing_table", "is_lock_timeout", "is_missing_table"]

_LOCK_NOT_AVAILABLE = "55P03"
_UNDEFINED_TABLE = "42P01"
_CODES = ("sqlstate", "pgcode")
"""The attribute of the SQLSTATE in psycopg 3 and asyncpg, and in psycopg2."""


def is_lock_timeout(error: BaseException) -> bool:
    """Return True if a statement waited for a lock until its time-out."""
    return any(
        _has_code(one, _LOCK_NOT_AVAILABLE)
        or (isinstance(one, sqlite3.OperationalError) and one.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY)
        for one in _unwrap(error)
    )


def is_missing_table(error: BaseException) -> bool:
    """Return True if a statement named a table that does not exist."""
    return any(
        _has_code(one, _UNDEFINED_TABLE)
        or (isinstance(one, sqlite3.OperationalError) and str(one).startswith("no such table"))
        for one in _unwrap(error)
    )


@contextmanager
def explain_missing_table(table: str) -> Generator[None]:
    """Add a note to the error of a missing table."""
    try:
        yield
    except Exception as error:
        if is_missing_table(error):
            error.add_note(f"Create the tables of the outbox: idemgate_sql.ddl(..., table={table!r}) returns the SQL")
        raise


def ends_transaction(error: BaseException) -> bool:
    """Return True if SQLite refused a COMMIT or ROLLBACK (`refuse_ends`)."""
    return any(
        isinstance(one, sqlite3.OperationalError) and str(one) == "authorizer malfunction" for one in _unwrap(error)
    )


def _has_code(error: BaseException, code: str) -> bool:
    return any(getattr(error, name, None) == code for name in _CODES)


def _unwrap(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and the errors that it wraps."""
    while error is not None:
        yield error
        inner = getattr(error, "orig", None)
        error = inner if isinstance(inner, BaseException) else error.__cause__
