"""The outbox: triggers that are stored in the user's transaction, and sent after its commit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime
from itertools import islice
from typing import Any, Generic, Protocol, TypedDict, TypeVar
from uuid import uuid4

from idemgate import InvalidArgument, Topic, Trigger
from idemgate.types import AioTopic, Duration
from idemgate_sql.database import AioDatabase, Database, Params, Rows
from idemgate_sql.failures import explain_missing_table
from idemgate_sql.outbox_statements import Backlog, OutboxStatements, RefusedRow, read_backlog, read_refused
from idemgate_sql.relay_connection import Wakeups
from idemgate_sql.statements import check_rows

__all__ = ["AioOutbox", "Outbox", "TriggerOptions", "pack_rows"]

C = TypeVar("C")
Key = str | int | bytes
Sent = TypeVar("Sent")
AnyTopic = Topic[Sent, Any] | AioTopic[Sent, Any]
BATCH = 100
"""Rows of one INSERT."""


class TriggerOptions(TypedDict, total=False):
    """The options of a trigger; `Topic.trigger` documents them. A delay counts from the call."""

    priority: int | None
    group: Key | None
    delay: Duration | None
    at: datetime | None
    version: int | None
    event_id: Key | None


class _Outbox(Protocol):
    statements: OutboxStatements
    notify: bool
    wakeups: Wakeups


def pack_rows(
    topic: AnyTopic[Sent], triggers: Iterable[Trigger | tuple[Key, Sent]]
) -> list[tuple[str, str, str, bytes]]:
    """Check triggers and return their rows: event id, topic, key and body. Raise InvalidArgument."""
    if not isinstance(topic, Topic | AioTopic):
        raise InvalidArgument("topic", topic, "not a topic", "Pass the object that gate.topic(...) returned")
    rows, name = list[tuple[str, str, str, bytes]](), name_topic(topic)
    for one in triggers:
        trigger = one if isinstance(one, Trigger) else Trigger(*one)
        rows.append((uuid4().hex, name, _show_key(trigger.key), topic.pack_trigger(trigger)))
    return rows


def name_topic(topic: AnyTopic[Any]) -> str:
    """Return a topic with its namespace: services that share a table may have topics of one name."""
    return f"{topic.namespace}:{topic.name}"


def _show_key(key: object) -> str:
    """Return a key for people who look at the table. The body has the key itself."""
    text = key.decode(errors="backslashreplace") if isinstance(key, bytes) else str(key)
    return text.encode(errors="backslashreplace").decode().replace("\0", "\\0")[:200]


def build_inserts(outbox: _Outbox, rows: list[tuple[str, str, str, bytes]]) -> Iterator[tuple[str, Params]]:
    """Return the statements that insert rows. The last one wakes the relay."""
    rest = iter(rows)
    while part := list(islice(rest, BATCH)):
        yield outbox.statements.insert(part, outbox.notify)


class Outbox(Generic[C]):
    """The outbox of blocking functions, `inbox.outbox`."""

    def __init__(self, database: Database[C], table: str, notify: bool) -> None:
        self.database = database
        self.statements: OutboxStatements = OutboxStatements.build(database.dialect, database.placeholders, table)
        self.notify = notify
        self.wakeups: Wakeups = Wakeups()

    def trigger_many(
        self, connection: C, topic: AnyTopic[Sent], triggers: Iterable[Trigger | tuple[Key, Sent]]
    ) -> None:
        """Insert triggers in the caller's transaction, in order. See `Inbox.trigger`."""
        with explain_missing_table(self.statements.table):
            for sql, params in build_inserts(self, pack_rows(topic, triggers)):
                self.database.execute(connection, sql, params)
        self.wakeups.wake(name_topic(topic))

    def run(self, sql: str, params: Params) -> Rows:
        """Execute a statement in a transaction of its own."""
        with explain_missing_table(self.statements.table), self.database.transaction() as connection:
            return self.database.execute(connection, sql, params)

    def backlog(self) -> Backlog:
        """Return the number of rows and the age of the oldest. It counts all rows of the table."""
        return read_backlog(self.run(self.statements.backlog, {}))

    def list_refused(self, n: int = 50) -> list[RefusedRow]:
        """Return the oldest rows that their topics refused, at most `n`."""
        return read_refused(self.run(self.statements.refused, {"batch": check_rows(n, "n")}))

    def redrive_refused(self, n: int = 1000) -> int:
        """Send the oldest refused rows again, at most `n`. Return their number."""
        return len(self.run(self.statements.redrive, {"batch": check_rows(n, "n")}))

    def delete_refused(self, ids: Iterable[int]) -> int:
        """Delete the refused rows of these numbers, so that those behind them are sent. Return their number."""
        return len(self.run(self.statements.delete_refused, {"ids": self.statements.pack_names(map(int, ids))}))


class AioOutbox(Generic[C]):
    """The outbox of async functions; see `Outbox`."""

    def __init__(self, database: AioDatabase[C], table: str, notify: bool) -> None:
        self.database = database
        self.statements: OutboxStatements = OutboxStatements.build(database.dialect, database.placeholders, table)
        self.notify = notify
        self.wakeups: Wakeups = Wakeups()

    async def trigger_many(
        self, connection: C, topic: AnyTopic[Sent], triggers: Iterable[Trigger | tuple[Key, Sent]]
    ) -> None:
        """Insert triggers in the caller's transaction, in order. See `Inbox.trigger`."""
        with explain_missing_table(self.statements.table):
            for sql, params in build_inserts(self, pack_rows(topic, triggers)):
                await self.database.execute(connection, sql, params)
        self.wakeups.wake(name_topic(topic))

    async def run(self, sql: str, params: Params) -> Rows:
        """Execute a statement in a transaction of its own."""
        with explain_missing_table(self.statements.table):
            async with self.database.transaction() as connection:
                return await self.database.execute(connection, sql, params)

    async def backlog(self) -> Backlog:
        """Return the number of rows and the age of the oldest; see `Outbox.backlog`."""
        return read_backlog(await self.run(self.statements.backlog, {}))

    async def list_refused(self, n: int = 50) -> list[RefusedRow]:
        """Return the oldest rows that their topics refused, at most `n`."""
        return read_refused(await self.run(self.statements.refused, {"batch": check_rows(n, "n")}))

    async def redrive_refused(self, n: int = 1000) -> int:
        """Send the oldest refused rows again, at most `n`. Return their number."""
        return len(await self.run(self.statements.redrive, {"batch": check_rows(n, "n")}))

    async def delete_refused(self, ids: Iterable[int]) -> int:
        """Delete the refused rows of these numbers; see `Outbox.delete_refused`."""
        return len(await self.run(self.statements.delete_refused, {"ids": self.statements.pack_names(map(int, ids))}))
