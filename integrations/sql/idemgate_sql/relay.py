"""The relay: it sends the rows of an outbox to their topics, and deletes them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from time import monotonic
from typing import Any

from idemgate import Gate, InvalidArgument, Topic, Trigger
from idemgate.core.text import one_line
from idemgate.errors import DecodeError, PolicyChanged, UnexpectedData
from idemgate.types import Duration, check_gate, milliseconds
from idemgate_sql.database import read_text
from idemgate_sql.failures import explain_missing_table
from idemgate_sql.outages import Lag, Outages
from idemgate_sql.outbox_statements import OutboxRow, OutboxStatements, read_backlog, read_rows
from idemgate_sql.relay_connection import RelayConnection, Wakeups, wait_for_stop

__all__ = ["Relay", "check_relay_options"]

log: logging.Logger = logging.getLogger("idemgate.sql")
MOST_BYTES = 4 * 1024 * 1024
"""Bytes of packed triggers that one batch reads, but at least one row."""
LONGEST_PAUSE = 10.0
"""Seconds between two tries while the database or the store is unavailable, or the policy of a topic differs."""
PURGE_EVERY = 60.0
"""Seconds between two looks for expired rows of the inbox."""
PURGE_BATCH = 1000
"""Expired rows that one statement deletes."""
REPORT_EVERY = 60.0
"""Seconds between two looks for rows of topics that the gate does not have. It reads the whole table."""
UPKEEP = ""
"""The lock of the relay that deletes expired rows and reports rows of other topics. No topic has this name."""


class Relay:
    """A subscriber that sends the committed rows of an outbox: `gate.add_subscriber(inbox.relay(gate))`.

    Rows of one key are sent in the order of their ids. A row is deleted after its topic accepted it. If the process
    dies in between, the row is sent again, and the topic drops the copy by its event id. So several relays may run.
    On PostgreSQL with psycopg one relay serves a topic, and the others stand by. A relay serves a topic as long as it
    has the lock.
    """

    def __init__(
        self, gate: Gate, statements: OutboxStatements, wakeups: Wakeups,
        connect: Callable[[str], AbstractAsyncContextManager[RelayConnection]], purge: str | None, batch: int,
        poll: float,
    ) -> None:  # fmt: skip
        check_gate(gate)
        self._gate = gate
        self._statements = statements
        self._wakeups = wakeups
        self._connect = connect
        self._purge = purge
        self._batch = batch
        self._poll = poll
        self._purge_at = self._report_at = float("-inf")
        self._unserved: frozenset[str] = frozenset()
        self._skipped: dict[str, float] = {}
        """The topics that cannot be opened, and when to try again."""
        self._outages = Outages(gate)
        self._lag = Lag(gate, statements.channel)

    def __repr__(self) -> str:
        return f"<Relay {self._statements.channel!r}>"

    async def run(
        self,
        stop: asyncio.Event,
        *,
        grace: float = 30.0,  # noqa: ARG002 - a batch under way ends within the timeout of the gate
        ready: Callable[[], None] | None = None,
    ) -> None:
        """Send rows until `stop` is set. See `idemgate.types.Subscriber`.

        An error of the database or of the store is logged once for each outage, and the relay tries again.
        """
        pause = 0.1
        while not stop.is_set():
            try:
                async with self._connect(self._statements.channel) as connection:
                    with self._wakeups.listen(self._serves) as woken:
                        while not stop.is_set():
                            busy = await self._work(connection, await connection.lock([UPKEEP, *self._topics()]))
                            self._outages.end(self._statements.channel)
                            pause = 0.1
                            if ready is not None:
                                ready()
                            if not busy:
                                await connection.wait(stop, woken, self._poll, self._serves)
            except Exception as error:  # noqa: BLE001 - each client library has errors of its own
                self._outages.begin(self._statements.channel, error)
                if ready is not None:
                    ready()
                await wait_for_stop(stop, pause)
                pause = min(2 * pause, LONGEST_PAUSE)

    async def relay_once(self) -> int:
        """Send at most one batch of rows, whether or not another relay serves their topics.

        The topic with the oldest row comes first. The rows of a topic are sent in the order of their ids.

        Returns:
            the number of rows that it read.

        Raises:
            StoreError: the store did not accept them. The rows stay.
            Exception: an error of the client library.
        """
        async with self._connect(self._statements.channel) as connection:
            return await self._send_batch(connection, self._topics())

    async def drain_once(self) -> int:
        """Send a batch of rows; see `relay_once`. `gate.aio.drain` calls it."""
        return await self.relay_once()

    def _topics(self) -> list[str]:
        """Return the topics that can be opened, with their namespace."""
        now = monotonic()
        names = (f"{self._gate.namespace}:{name}" for name in self._gate.topics)
        return [name for name in names if self._skipped.get(name, now) <= now]

    def _serves(self, topic: str) -> bool:
        """Return True for a topic of the gate, given with its namespace."""
        namespace, _, name = topic.partition(":")
        return namespace == self._gate.namespace and name in self._gate.topics

    async def _work(self, connection: RelayConnection, locked: set[str]) -> bool:
        """Do what this relay has the locks for. Return True if there may be more to do."""
        topics = locked - {UPKEEP}
        busy = bool(topics) and await self._send_batch(connection, topics) > 0
        for topic in topics & self._skipped.keys():
            await connection.unlock(topic)  # another relay may be able to open it
        if UPKEEP in locked:
            busy = await self._clean_up(connection, busy) or busy
        return busy

    async def _clean_up(self, connection: RelayConnection, busy: bool) -> bool:
        """Report unserved rows and delete some expired rows of the inbox. Return True if there may be more of them."""
        if not busy and monotonic() >= self._report_at:
            await self._report_unserved(connection)
            self._report_at = monotonic() + REPORT_EVERY
        if self._purge is None or monotonic() < self._purge_at:
            return False
        purged = len(await connection.execute(self._purge, {"batch": PURGE_BATCH}))
        self._gate.counters.add("sql.purged", purged)
        if purged >= PURGE_BATCH:
            return True
        self._purge_at = monotonic() + PURGE_EVERY
        return False

    async def _send_batch(self, connection: RelayConnection, topics: Collection[str]) -> int:
        """Send at most one batch of rows of these topics. Return the number of rows that it read."""
        rows, accepted = await self._read(connection, topics), list[int]()
        try:
            for topic, of_topic in _by_topic(rows):
                accepted += await self._send_of_topic(connection, topic, of_topic)
        finally:
            if accepted:
                ids = self._statements.pack_names(accepted)
                deleted = await connection.execute(self._statements.delete, {"ids": ids})
                self._gate.counters.add("sql.relayed", len(deleted))
        return len(rows)

    async def _read(self, connection: RelayConnection, topics: Collection[str]) -> list[OutboxRow]:
        """Return at most one batch of rows: those of the topic with the oldest row, and then of the next topics."""
        params = {"topics": self._statements.pack_names(topics), "batch": self._batch, "bytes": MOST_BYTES}
        with explain_missing_table(self._statements.table):
            rows = read_rows(await connection.execute(self._statements.read, params))
        if self._lag.begins([row.age for row in rows]):
            self._lag.report(read_backlog(await connection.execute(self._statements.backlog, {})))
        return rows

    async def _send_of_topic(self, connection: RelayConnection, name: str, rows: Sequence[OutboxRow]) -> list[int]:
        """Send rows of one topic. Return the ids of those that it accepted, or skip the topic for a while."""
        topic = self._gate.topics[name.partition(":")[2]]
        try:
            await topic.aio.open()
            accepted = await self._send(connection, topic, rows)
        except (PolicyChanged, UnexpectedData, DecodeError) as error:  # of the topic, and of no key or row of it
            self._skipped[name] = monotonic() + LONGEST_PAUSE
            self._outages.begin(name, error)
            return []
        self._skipped.pop(name, None)
        self._outages.end(name)
        return accepted

    async def _send(self, connection: RelayConnection, topic: Topic, rows: Sequence[OutboxRow]) -> list[int]:
        """Send rows of one topic in order. Return the ids of those that it accepted."""
        ready, refused = list[tuple[OutboxRow, Trigger]](), set[str]()
        for row in rows:
            if row.key in refused:
                continue  # it keeps its place behind the refused one
            try:
                trigger = topic.unpack_trigger(row.body)
                topic.pack_trigger(trigger)  # the stored policy may have changed since the row was written
            except (InvalidArgument, DecodeError) as error:
                await self._refuse(connection, row, error)
                refused.add(row.key)
            else:
                event_id = row.event_id if trigger.event_id is None else trigger.event_id
                ready.append((row, replace(trigger, event_id=event_id)))
        try:
            return await self._trigger(topic, ready)
        except UnexpectedData:
            return await self._send_one_by_one(connection, topic, ready)

    async def _send_one_by_one(
        self, connection: RelayConnection, topic: Topic, ready: Iterable[tuple[OutboxRow, Trigger]]
    ) -> list[int]:
        """Send rows one by one, to find those that the store refuses because of damaged data of their key."""
        accepted, refused = list[int](), set[str]()
        for row, trigger in ready:
            if row.key in refused:
                continue
            try:
                accepted += await self._trigger(topic, [(row, trigger)])
            except UnexpectedData as error:
                await self._refuse(connection, row, error)
                refused.add(row.key)
        return accepted

    async def _trigger(self, topic: Topic, ready: Iterable[tuple[OutboxRow, Trigger]]) -> list[int]:
        """Trigger the topic. Return the ids of the rows."""
        rows, triggers = zip(*ready, strict=True) if ready else ((), ())
        receipts = await topic.aio.trigger_many(triggers)
        statuses = [one.status for one in receipts]
        self._gate.counters.add("sql.relay_duplicates", statuses.count("duplicate"))
        self._gate.counters.add("sql.relay_dropped", statuses.count("dropped"))
        return [row.id for row in rows]

    async def _refuse(self, connection: RelayConnection, row: OutboxRow, error: Exception) -> None:
        """Set a row aside that its topic refuses, so that rows of other keys go on."""
        self._gate.counters.add("sql.relay_refused")
        facts = {"topic": row.topic, "row": row.id}
        log.error("sql.relay_refused topic=%r row=%d: %s", *facts.values(), one_line(error),
                  extra=facts | {"error": str(error)})  # fmt: skip
        text = str(error).replace("\0", "\\0")[:500]
        await connection.execute(self._statements.refuse, {"id": row.id, "error": text})

    async def _report_unserved(self, connection: RelayConnection) -> None:
        """Log rows of topics that the gate of this relay does not have. Another program may send them."""
        names = [f"{self._gate.namespace}:{name}" for name in self._gate.topics]
        params = {"topics": self._statements.pack_names(names)}
        found = {read_text(topic): int(n) for topic, n in await connection.execute(self._statements.waiting, params)}
        if found.keys() - self._unserved:
            log.warning("sql.relay_unserved rows=%r: declare these topics on the gate of a relay", found,
                        extra={"rows": found})  # fmt: skip
        self._unserved = frozenset(found)


def _by_topic(rows: Iterable[OutboxRow]) -> list[tuple[str, list[OutboxRow]]]:
    """Return the rows of each topic, in their order, by its name with the namespace."""
    found: dict[str, list[OutboxRow]] = {}
    for row in rows:
        found.setdefault(row.topic, []).append(row)
    return list(found.items())


def check_relay_options(batch: Any, poll: Duration) -> tuple[int, float]:
    """Return the number of rows of a batch, and the seconds between two looks. Raise InvalidArgument."""
    if not isinstance(batch, int) or isinstance(batch, bool) or not 1 <= batch <= 10_000:
        raise InvalidArgument("batch", batch, "not a whole number from 1 to 10,000", "Pass an int, such as 500")
    return batch, milliseconds(poll, "poll") / 1000
