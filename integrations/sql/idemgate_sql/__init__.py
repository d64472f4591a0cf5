"""Inbox of idemgate in SQL: the key, the effect and the result of a guarded function commit in one transaction.

The inboxes are in the modules of their client libraries: `idemgate_sql.psycopg` and `idemgate_sql.sqlite`.
"""

from __future__ import annotations

from idemgate_sql.errors import ConnectionInUse, EndedByHandler, RowLocked
from idemgate_sql.schema import ddl

__all__ = ["ConnectionInUse", "EndedByHandler", "RowLocked", "ddl"]
