"""The relay: it sends the rows of an outbox to their topics, and deletes them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from time import monotonic
from typing import Any

from idemgate import Gate, InvalidArgument, Topic, Trigger
from idemgate.errors import DecodeError, PolicyChanged, UnexpectedData
from idemgate.types import Duration, milliseconds
from idemgate_sql.database import Params, Rows, read_text
from idemgate_sql.outages import Lag, Outages
from idemgate_sql.outbox_statements import OutboxRow, OutboxStatements, read_backlog, read_rows
from idemgate_sql.watch import Wakeups, Watch, wait_for_stop

__all__ = ["PURGE_BATCH", "Relay", "check_relay_options"]

log = logging.getLogger("idemgate.sql")
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


class Relay:
    """A subscriber that sends the committed rows of an outbox: `gate.add_subscriber(inbox.relay(gate))`.

    Rows of one key are sent in the order of their ids. A row is deleted after its topic accepted it. If the process
    dies in between, the row is sent again, and the topic drops the copy by its event id. So several relays may run.
    On PostgreSQL one works and the others stand by.
    """

    def __init__(
        self, gate: Gate, statements: OutboxStatements, wakeups: Wakeups,
        execute: Callable[[str, Params], Awaitable[Rows]], open_watch: Callable[[], AbstractAsyncContextManager[Watch]],
        purge: Callable[[], Awaitable[int]] | None, batch: int, poll: float,
    ) -> None:  # fmt: skip
        self._gate = gate
        self._statements = statements
        self._wakeups = wakeups
        self._execute = execute
        self._open_watch = open_watch
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
                async with self._open_watch() as watch:
                    with self._wakeups.listen() as woken:
                        while not stop.is_set():
                            busy = await watch.try_lock(self._name) and await self._work()
                            self._outages.end(self._statements.channel)
                            pause = 0.1
                            if ready is not None:
                                ready()
                            if not busy:
                                await watch.wait(stop, woken, self._poll)
            except Exception as error:  # noqa: BLE001 - each client library has errors of its own
                self._outages.begin(self._statements.channel, error)
                if ready is not None:
                    ready()
                await wait_for_stop(stop, pause)
                pause = min(2 * pause, LONGEST_PAUSE)

    @property
    def _name(self) -> str:
        """The topics whose rows this relay sends. Relays of the same topics take turns."""
        return f"{self._gate.namespace}:{','.join(sorted(self._gate.topics))}"

    async def relay_once(self) -> int:
        """Send the oldest rows, at most one batch. Return the number of rows that it read.

        Raises:
            StoreError: the store did not accept them. The rows stay.
            Exception: an error of the client library.
        """
        rows, accepted = await self._read(), list[int]()
        try:
            for topic, of_topic in _by_topic(rows):
                accepted += await self._send_of_topic(topic, of_topic)
        finally:
            if accepted:
                ids = self._statements.pack_names(accepted)
                deleted = await self._execute(self._statements.delete, {"ids": ids})
                self._gate.counters.add("sql.relayed", len(deleted))
        return len(rows)

    async def _read(self) -> list[OutboxRow]:
        """Return the oldest rows of the topics that can be opened."""
        now, namespace = monotonic(), self._gate.namespace
        names = [f"{namespace}:{name}" for name in self._gate.topics if self._skipped.get(name, now) <= now]
        params = {"topics": self._statements.pack_names(names), "batch": self._batch, "bytes": MOST_BYTES}
        rows = read_rows(await self._execute(self._statements.read, params))
        if self._lag.begins([row.age for row in rows]):
            self._lag.report(read_backlog(await self._execute(self._statements.backlog, {})))
        return rows

    async def _work(self) -> bool:
        """Send a batch, and delete some expired rows of the inbox. Return True if there may be more to do."""
        busy = await self.relay_once() > 0
        if not busy and monotonic() >= self._report_at:
            await self._report_unserved()
            self._report_at = monotonic() + REPORT_EVERY
        if self._purge is not None and monotonic() >= self._purge_at:
            purged = await self._purge()
            self._gate.counters.add("sql.purged", purged)
            if purged >= PURGE_BATCH:
                return True
            self._purge_at = monotonic() + PURGE_EVERY
        return busy

    async def _send_of_topic(self, name: str, rows: Sequence[OutboxRow]) -> list[int]:
        """Send rows of one topic. Return the ids of those that it accepted, or skip the topic for a while."""
        try:
            await self._gate.topics[name].aio.open()
        except PolicyChanged as error:
            self._skipped[name] = monotonic() + LONGEST_PAUSE
            self._outages.begin(f"{self._gate.namespace}:{name}", error)
            return []
        self._outages.end(f"{self._gate.namespace}:{name}")
        return await self._send(self._gate.topics[name], rows)

    async def _send(self, topic: Topic, rows: Sequence[OutboxRow]) -> list[int]:
        """Send rows of one topic in order. Return the ids of those that it accepted."""
        ready, refused = list[tuple[OutboxRow, Trigger]](), set[str]()
        for row in rows:
            if row.key in refused:
                continue  # it keeps its place behind the refused one
            try:
                trigger = topic.unpack_trigger(row.body)
                topic.pack_trigger(trigger)  # the stored policy may have changed since the row was written
            except (InvalidArgument, DecodeError) as error:
                await self._refuse(row, error)
                refused.add(row.key)
            else:
                event_id = row.event_id if trigger.event_id is None else trigger.event_id
                ready.append((row, replace(trigger, event_id=event_id)))
        try:
            return await self._trigger(topic, ready)
        except UnexpectedData:
            return await self._send_one_by_one(topic, ready)

    async def _send_one_by_one(self, topic: Topic, ready: Iterable[tuple[OutboxRow, Trigger]]) -> list[int]:
        """Send rows one by one, to find those that the store refuses because of damaged data of their key."""
        accepted, refused = list[int](), set[str]()
        for row, trigger in ready:
            if row.key in refused:
                continue
            try:
                accepted += await self._trigger(topic, [(row, trigger)])
            except UnexpectedData as error:
                await self._refuse(row, error)
                refused.add(row.key)
        return accepted

    async def _trigger(self, topic: Topic, ready: Iterable[tuple[OutboxRow, Trigger]]) -> list[int]:
        """Trigger the topic. Return the ids of the rows."""
        rows, triggers = zip(*ready, strict=True) if ready else ((), ())
        receipts = await topic.aio.trigger_many(triggers)
        self._gate.counters.add("sql.relay_duplicates", sum(one.status == "duplicate" for one in receipts))
        return [row.id for row in rows]

    async def _refuse(self, row: OutboxRow, error: Exception) -> None:
        """Set a row aside that its topic refuses, so that rows of other keys go on."""
        self._gate.counters.add("sql.relay_refused")
        facts = {"topic": row.topic, "row": row.id}
        log.error("sql.relay_refused topic=%r row=%d: %s", *facts.values(), error, extra=facts | {"error": str(error)})
        text = str(error).replace("\0", "\\0")[:500]
        await self._execute(self._statements.refuse, {"id": row.id, "error": text})

    async def _report_unserved(self) -> None:
        """Log rows of topics that the gate of this relay does not have. Another program may send them."""
        names = [f"{self._gate.namespace}:{name}" for name in self._gate.topics]
        params = {"topics": self._statements.pack_names(names)}
        found = {read_text(topic): int(n) for topic, n in await self._execute(self._statements.waiting, params)}
        if found.keys() - self._unserved:
            log.warning("sql.relay_unserved rows=%r: declare these topics on the gate of a relay", found,
                        extra={"rows": found})  # fmt: skip
        self._unserved = frozenset(found)


def _by_topic(rows: Iterable[OutboxRow]) -> list[tuple[str, list[OutboxRow]]]:
    """Return the rows of each topic, in their order, by its name in the namespace."""
    found: dict[str, list[OutboxRow]] = {}
    for row in rows:
        found.setdefault(row.topic.partition(":")[2], []).append(row)
    return list(found.items())


def check_relay_options(batch: Any, poll: Duration) -> tuple[int, float]:
    """Return the number of rows of a batch, and the seconds between two looks. Raise InvalidArgument."""
    if not isinstance(batch, int) or isinstance(batch, bool) or not 1 <= batch <= 10_000:
        raise InvalidArgument("batch", batch, "not a whole number from 1 to 10,000", "Pass an int, such as 500")
    return batch, milliseconds(poll, "poll") / 1000
