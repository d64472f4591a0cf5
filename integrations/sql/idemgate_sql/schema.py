"""The tables of an inbox and an outbox, as SQL."""

from __future__ import annotations

from idemgate import InvalidArgument
from idemgate_sql.database import Dialect
from idemgate_sql.names import check_table

__all__ = ["build_migration", "ddl", "split_ddl"]

_POSTGRESQL = """
CREATE TABLE IF NOT EXISTS {table}_inbox (
    scope text COLLATE "C" NOT NULL,
    key text COLLATE "C" NOT NULL,
    fingerprint bytea NOT NULL,
    token bigint NOT NULL,
    kind text NOT NULL,
    result bytea NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    expires_at timestamptz NOT NULL,
    PRIMARY KEY (scope, key)
);
CREATE INDEX IF NOT EXISTS {name}_inbox_expires ON {table}_inbox (expires_at);
CREATE TABLE IF NOT EXISTS {table}_outbox (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    event_id text NOT NULL,
    topic text COLLATE "C" NOT NULL,
    key text COLLATE "C" NOT NULL,
    body bytea NOT NULL,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    refused_at timestamptz,
    error text
);
CREATE INDEX IF NOT EXISTS {name}_outbox_waiting ON {table}_outbox (topic, id) WHERE refused_at IS NULL;
CREATE INDEX IF NOT EXISTS {name}_outbox_refused ON {table}_outbox (topic, key, id) WHERE refused_at IS NOT NULL;
"""
_SQLITE = """
CREATE TABLE IF NOT EXISTS {table}_inbox (
    scope TEXT NOT NULL,
    key TEXT NOT NULL,
    fingerprint BLOB NOT NULL,
    token INTEGER NOT NULL,
    kind TEXT NOT NULL,
    result BLOB NOT NULL,
    created_at TEXT NOT NULL DEFAULT (strftime('%Y-%m-%d %H:%M:%f', 'now')),
    expires_at TEXT NOT NULL,
    PRIMARY KEY (scope, key)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS {name}_inbox_expires ON {table}_inbox (expires_at);
CREATE TABLE IF NOT EXISTS {table}_outbox (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    event_id TEXT NOT NULL,
    topic TEXT NOT NULL,
    key TEXT NOT NULL,
    body BLOB NOT NULL,
    created_at TEXT NOT NULL DEFAULT (strftime('%Y-%m-%d %H:%M:%f', 'now')),
    refused_at TEXT,
    error TEXT
);
CREATE INDEX IF NOT EXISTS {name}_outbox_waiting ON {table}_outbox (topic, id) WHERE refused_at IS NULL;
CREATE INDEX IF NOT EXISTS {name}_outbox_refused ON {table}_outbox (topic, key, id) WHERE refused_at IS NOT NULL;
"""
_DIALECTS: dict[str, str] = {"postgresql": _POSTGRESQL, "sqlite": _SQLITE}


def ddl(dialect: Dialect, table: str = "idemgate") -> str:
    """Return the statements that create the tables. They change nothing if the tables exist.

    Args:
        dialect: "postgresql" or "sqlite".
        table: the prefix of the names: `idemgate_inbox`, `idemgate_outbox`.

    Raises:
        InvalidArgument: the dialect is unknown, or the prefix is not a name.
    """
    if dialect not in _DIALECTS:
        raise InvalidArgument("dialect", dialect, "unknown", "Use 'postgresql' or 'sqlite'")
    name = check_table(table, dialect).rpartition(".")[2]
    return _DIALECTS[dialect].replace("{table}", table).replace("{name}", name).lstrip()


def split_ddl(dialect: Dialect, table: str) -> list[str]:
    """Return the statements of `ddl`, one by one."""
    return [sql for statement in ddl(dialect, table).split(";") if (sql := statement.strip())]


def build_migration(dialect: Dialect, table: str = "idemgate") -> str:
    """Return the functions `upgrade` and `downgrade` of an Alembic revision. See `ddl`."""
    creates = "".join(f'    op.execute("""\n{_indent(sql)}\n    """)\n' for sql in split_ddl(dialect, table))
    drops = "".join(f'    op.execute("DROP TABLE {table}_{name}")\n' for name in ("outbox", "inbox"))
    return f"from alembic import op\n\n\ndef upgrade():\n{creates}\n\ndef downgrade():\n{drops}"


def _indent(sql: str) -> str:
    return "\n".join(f"        {line}" for line in sql.splitlines())
