"""Names of tables, and the form of parameters in statements."""

from __future__ import annotations

import re
from hashlib import sha256

from idemgate import InvalidArgument
from idemgate_sql.database import Dialect, Placeholders

__all__ = ["check_table", "format_sql", "shorten_channel"]

_TABLE = re.compile(r"(?:[a-z_][a-z0-9_]{0,62}\.)?[a-z_][a-z0-9_]{0,40}")
_PARAMETER = re.compile(r"(?<![:\w]):([a-z_]+)")


def check_table(table: str, dialect: Dialect) -> str:
    """Return the prefix of the tables. Raise InvalidArgument for a name that a statement cannot hold unquoted.

    A schema of SQLite is an attached database. A commit in several of them is not atomic in WAL mode.
    """
    if not isinstance(table, str) or not _TABLE.fullmatch(table):
        fix = "Use a-z, 0-9 and _, at most 41 characters, with or without a schema, such as 'shop.idemgate'"
        raise InvalidArgument("table", table, "not the prefix of a table", fix)
    if dialect == "sqlite" and "." in table:
        raise InvalidArgument("table", table, "has a schema, and SQLite has none", "Leave it out")
    return table


def shorten_channel(name: str) -> str:
    """Return a name that NOTIFY accepts: fewer than 64 bytes."""
    return name if len(name) < 64 else f"idemgate_{sha256(name.encode()).hexdigest()[:32]}"


def format_sql(sql: str, placeholders: Placeholders, table: str) -> str:
    """Return a statement with the name of its table and the parameters of a client library."""
    named = sql.replace("{table}", table).strip()
    return named if placeholders == "named" else _PARAMETER.sub(r"%(\1)s", named.replace("%", "%%"))
