"""The SQL of an outbox, one place for all client libraries."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from idemgate_sql.database import Dialect, Params, Placeholders, Rows, read_text
from idemgate_sql.names import check_table, format_sql, shorten_channel

__all__ = ["Backlog", "OutboxRow", "OutboxStatements", "RefusedRow"]

_COLUMNS = ("event_id", "topic", "key", "body")
_INSERT = "INSERT INTO {table}_outbox (event_id, topic, key, body) VALUES {values}"
_NOTIFY = "WITH inserted AS ({insert} RETURNING 1) SELECT pg_notify(:channel, :topic_a)"
# PostgreSQL executes the INSERT although nothing reads it. The rows of one INSERT have one topic.

_READ = """
SELECT id, event_id, topic, key, body, {age} FROM (
    SELECT found.*, sum(length(body)) OVER (ORDER BY id) - length(body) AS before FROM ({oldest}) AS found
) AS sized WHERE before < :bytes ORDER BY id
"""
_ROW = "id, event_id, topic, key, body, created_at"
_OF_TOPIC = """
SELECT {columns} FROM {table}_outbox AS waiting
WHERE refused_at IS NULL AND (topic, id) >= (served.value, 0) AND topic <= served.value AND NOT EXISTS (
    SELECT 1 FROM {table}_outbox AS refused WHERE refused.refused_at IS NOT NULL
    AND refused.topic = waiting.topic AND refused.key = waiting.key AND refused.id < waiting.id LIMIT 1 OFFSET 0
) ORDER BY topic, id LIMIT {rows}
"""
# The oldest rows of one topic. Rows behind a refused one of their key wait: sent later, it would put an old payload
# over a new one. PostgreSQL must walk the index of topics up to the limit. With `topic =` it may walk the primary key,
# so all rows of other topics. Without OFFSET it may join and sort all rows of the topic.
_DELETE = "DELETE FROM {table}_outbox WHERE id IN ({ids}) RETURNING 1"
_REFUSE = "UPDATE {table}_outbox SET refused_at = {now}, error = :error WHERE id = :id RETURNING 1"
_REDRIVE = """
UPDATE {table}_outbox SET refused_at = NULL, error = NULL WHERE id IN (
    SELECT id FROM {table}_outbox WHERE refused_at IS NOT NULL ORDER BY id LIMIT :batch
) RETURNING 1
"""
_DELETE_REFUSED = "DELETE FROM {table}_outbox WHERE refused_at IS NOT NULL AND id IN ({ids}) RETURNING 1"
_REFUSED = """
SELECT id, topic, key, error, created_at FROM {table}_outbox WHERE refused_at IS NOT NULL ORDER BY id LIMIT :batch
"""
_BACKLOG = """
SELECT waiting, refused, {age} FROM (
    SELECT count(*) - count(refused_at) AS waiting, count(refused_at) AS refused,
           min(CASE WHEN refused_at IS NULL THEN created_at END) AS created_at FROM {table}_outbox
) AS counted
"""
_WAITING = """
SELECT topic, count(*) FROM {table}_outbox WHERE refused_at IS NULL AND topic NOT IN ({topics}) GROUP BY topic
"""
_POSTGRESQL = {
    "now": "now()", "age": "extract(epoch FROM clock_timestamp() - created_at)",
    "topics": "SELECT unnest(string_to_array(:topics, ','))",
    "ids": "SELECT CAST(unnest(string_to_array(:ids, ',')) AS bigint)",
    "oldest": """
        SELECT own.* FROM (
            SELECT served.value FROM unnest(string_to_array(:topics, ',')) AS served (value)
            CROSS JOIN LATERAL ({first}) AS first ORDER BY first.id
        ) AS served CROSS JOIN LATERAL ({rows}) AS own LIMIT :batch
    """,
    "first": _OF_TOPIC.format(columns="id", rows=1, table="{table}"),
    "rows": _OF_TOPIC.format(columns=_ROW, rows=":batch", table="{table}"),
}  # fmt: skip
_SQLITE = {
    "now": "strftime('%Y-%m-%d %H:%M:%f', 'now')", "age": "(julianday('now') - julianday(created_at)) * 86400",
    "topics": "SELECT value FROM json_each(:topics)",
    "ids": "SELECT value FROM json_each(:ids)",
    "oldest": """
        SELECT {row} FROM {table}_outbox WHERE id IN (
            SELECT own.value FROM (
                SELECT value FROM json_each(:topics) AS served ORDER BY ({first}) LIMIT -1
            ) AS served CROSS JOIN json_each((SELECT json_group_array(id) FROM ({rows}))) AS own LIMIT :batch
        )
    """,  # SQLite has no LATERAL. It keeps the order of a CROSS JOIN, and stops at the limit.
    "first": _OF_TOPIC.format(columns="id", rows=1, table="{table}"),
    "rows": _OF_TOPIC.format(columns="id", rows=":batch", table="{table}"), "row": _ROW,
}  # fmt: skip


class OutboxRow(NamedTuple):
    """A row to send.

    Attributes:
        id: its number, which decides the order.
        event_id: the id of its event, unique among all databases.
        topic: the namespace and the name of its topic: `shop:images`.
        key: the key of the trigger as text, cut off at 200 characters.
        body: the packed trigger.
        age: seconds since it was written, by the clock of the database.
    """

    id: int
    event_id: str
    topic: str
    key: str
    body: bytes
    age: float


class RefusedRow(NamedTuple):
    """A row that its topic refused.

    Attributes:
        id: its number.
        topic: the namespace and the name of its topic: `shop:images`.
        key: the key of the trigger as text, cut off at 200 characters.
        error: why it was refused.
        created_at: when it was written, as the client library returns it.
    """

    id: int
    topic: str
    key: str
    error: str
    created_at: object


class Backlog(NamedTuple):
    """The rows of an outbox.

    Attributes:
        rows: the number of rows to send, with those that wait behind a refused row of their key.
        refused: the number of rows that their topics refused.
        age: the age of the oldest row to send, seconds; 0.0 without any.
    """

    rows: int
    refused: int
    age: float


@dataclass(frozen=True, slots=True)
class OutboxStatements:
    """The statements of one outbox."""

    dialect: Dialect
    placeholders: Placeholders
    table: str
    read: str
    delete: str
    refuse: str
    redrive: str
    delete_refused: str
    refused: str
    backlog: str
    waiting: str

    @classmethod
    def build(cls, dialect: Dialect, placeholders: Placeholders, table: str) -> OutboxStatements:
        """Build the statements for a dialect and a form of parameters. Raise InvalidArgument for a bad name."""
        check_table(table, dialect)
        words = _POSTGRESQL if dialect == "postgresql" else _SQLITE
        texts = (_READ, _DELETE, _REFUSE, _REDRIVE, _DELETE_REFUSED, _REFUSED, _BACKLOG, _WAITING)
        formatted = (format_sql(_fill(text, words), placeholders, table) for text in texts)
        return cls(dialect, placeholders, table, *formatted)

    @property
    def channel(self) -> str:
        """The name of the table, which the channel of NOTIFY and the lock of the relay are named after."""
        return f"{self.table}_outbox"

    def insert(self, rows: Sequence[tuple[str, str, str, bytes]], notify: bool) -> tuple[str, Params]:
        """Return the statement that inserts rows (event id, topic, key, body), and its parameters."""
        notify = notify and self.dialect == "postgresql"
        params: dict[str, object] = {
            f"{column}_{_letters(n)}": value
            for n, row in enumerate(rows)
            for column, value in zip(_COLUMNS, row, strict=True)
        }
        if notify:
            params["channel"] = shorten_channel(self.channel)
        return _build_insert(self.placeholders, self.table, len(rows), notify), params

    def pack_names(self, names: Iterable[object]) -> str:
        """Return names or numbers as the parameter of an IN."""
        texts = [str(name) for name in names]
        return ",".join(texts) if self.dialect == "postgresql" else json.dumps(texts)


def read_rows(rows: Rows) -> list[OutboxRow]:
    """Return the rows that `read` found."""
    return [
        OutboxRow(int(number), read_text(event_id), read_text(topic), read_text(key), bytes(body), float(age))
        for number, event_id, topic, key, body, age in rows
    ]


def read_refused(rows: Rows) -> list[RefusedRow]:
    """Return the rows that `refused` found."""
    return [
        RefusedRow(int(number), read_text(topic), read_text(key), read_text(error), created_at)
        for number, topic, key, error, created_at in rows
    ]


def read_backlog(rows: Rows) -> Backlog:
    """Return the row that `backlog` found."""
    ((waiting, refused, age),) = rows
    return Backlog(int(waiting), int(refused), max(0.0, float(age or 0)))


def _fill(sql: str, words: dict[str, str]) -> str:
    for name, text in words.items():
        sql = sql.replace(f"{{{name}}}", text.strip())
    return sql


@cache
def _build_insert(placeholders: Placeholders, table: str, rows: int, notify: bool) -> str:
    values = ", ".join("(" + ", ".join(f":{column}_{_letters(n)}" for column in _COLUMNS) + ")" for n in range(rows))
    insert = _INSERT.replace("{values}", values)
    return format_sql(_NOTIFY.replace("{insert}", insert) if notify else insert, placeholders, table)


def _letters(n: int) -> str:
    """Return a number as letters, because parameters have no digits."""
    return f"{n}".translate(str.maketrans("0123456789", "abcdefghij"))
