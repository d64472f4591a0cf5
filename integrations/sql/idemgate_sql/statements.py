"""The SQL of an inbox, one place for all client libraries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from idemgate import InvalidArgument
from idemgate.types import SinkEntry, StoredResult
from idemgate_sql.database import Dialect, Params, Placeholders, Rows, read_text
from idemgate_sql.names import check_table, format_sql

__all__ = ["InboxStatements", "check_rows", "entry_params", "name_params", "read_result", "result_params"]

UNFINISHED = b"its handler ended the transaction before it returned"
"""The reason that a row has until its result is stored. It remains if the handler commits."""
LONGEST_RETENTION = 100 * 366 * 86_400
"""Seconds. A timestamp beyond the year 294276 is an error in PostgreSQL."""

_INSERT_POSTGRESQL = """
WITH setting AS MATERIALIZED (
    SELECT current_setting('lock_timeout') AS before,
           set_config('lock_timeout', CAST(:lock_timeout AS text), true) AS during
), inserted AS (
    INSERT INTO {table}_inbox (scope, key, fingerprint, token, kind, result, created_at, expires_at)
    SELECT CAST(:scope AS text), CAST(:key AS text), CAST(:fingerprint AS bytea), CAST(:token AS bigint), 'none',
           CAST(:unfinished AS bytea), now(), now() + make_interval(secs => CAST(:retention AS double precision))
    FROM setting
    ON CONFLICT (scope, key) DO NOTHING RETURNING 1
), counted AS MATERIALIZED (SELECT count(*) AS n FROM inserted)
SELECT n, txid_current(), set_config('lock_timeout', before, true) FROM counted, setting
"""
# One round trip: the INSERT reads the first query, so it waits with the time-out. The last line resets it.

_INSERT_SQLITE = """
INSERT INTO {table}_inbox (scope, key, fingerprint, token, kind, result, created_at, expires_at)
VALUES (:scope, :key, :fingerprint, :token, 'none', :unfinished, strftime('%Y-%m-%d %H:%M:%f', 'now'),
        strftime('%Y-%m-%d %H:%M:%f', 'now', :retention || ' seconds'))
ON CONFLICT (scope, key) DO NOTHING RETURNING 1, ''
"""

_FIND = "SELECT kind, result, fingerprint FROM {table}_inbox WHERE scope = :scope AND key = :key"

_STORE = "UPDATE {table}_inbox SET kind = :kind, result = :result WHERE scope = :scope AND key = :key"
# The transaction is still the one that inserted the row.
_SAME_TRANSACTION = " AND CAST(txid_current() AS text) = CAST(:transaction AS text)"

_DELETE = "DELETE FROM {table}_inbox WHERE scope = :scope AND key = :key RETURNING 1"

_PURGE = """
DELETE FROM {table}_inbox WHERE (scope, key) IN (
    SELECT scope, key FROM {table}_inbox WHERE expires_at < {now} ORDER BY expires_at LIMIT :batch {lock}
) RETURNING 1
"""
_PURGE_POSTGRESQL = _PURGE.replace("{now}", "now()").replace("{lock}", "FOR UPDATE SKIP LOCKED")
_PURGE_SQLITE = _PURGE.replace("{now}", "strftime('%Y-%m-%d %H:%M:%f', 'now')").replace("{lock}", "")


@dataclass(frozen=True, slots=True)
class InboxStatements:
    """The statements of one inbox."""

    insert: str
    find: str
    store: str
    delete: str
    purge: str

    @classmethod
    def build(cls, dialect: Dialect, placeholders: Placeholders, table: str) -> InboxStatements:
        """Build the statements for a dialect and a form of parameters. Raise InvalidArgument for a bad name."""
        check_table(table, dialect)
        is_postgresql = dialect == "postgresql"
        insert = _INSERT_POSTGRESQL if is_postgresql else _INSERT_SQLITE
        store = _STORE + (_SAME_TRANSACTION if is_postgresql else "") + " RETURNING 1"
        purge = _PURGE_POSTGRESQL if is_postgresql else _PURGE_SQLITE
        return cls(*(format_sql(sql, placeholders, table) for sql in (insert, _FIND, store, _DELETE, purge)))


def check_rows(number: int, name: str) -> int:
    """Return a number of rows. Raise InvalidArgument if it is not from 1 to 100,000."""
    if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number <= 100_000:
        raise InvalidArgument(name, number, "not a whole number from 1 to 100,000", "Pass an int, such as 1000")
    return number


def entry_params(entry: SinkEntry, lock_timeout_ms: int) -> Params:
    """Return the parameters of the insertion."""
    return {
        "scope": entry.scope,
        "key": entry.key,
        "fingerprint": entry.fingerprint,
        "token": entry.token,
        "unfinished": UNFINISHED,
        "retention": min(entry.retention, LONGEST_RETENTION),
        "lock_timeout": str(lock_timeout_ms),
    }


def name_params(scope: str, key: str) -> Params:
    """Return the parameters that name the row."""
    return {"scope": scope, "key": key}


def result_params(entry: SinkEntry, result: StoredResult, transaction: str) -> Params:
    """Return the parameters of the update. `transaction` is what the insertion returned."""
    named = {**name_params(entry.scope, entry.key), "kind": result.kind, "result": result.data}
    return {**named, "transaction": transaction} if transaction else named


def read_result(rows: Rows) -> StoredResult | None:
    """Return the stored result, or None if there is no row."""
    if not rows:
        return None
    kind, result, fingerprint = rows[0]
    return StoredResult(cast(Any, read_text(kind)), bytes(result), bytes(fingerprint))
