"""The relay: it sends the rows of an outbox to their topics, and deletes them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from time import monotonic
from typing import Any

from idemgate import Gate, InvalidArgument, Trigger
from idemgate.errors import DecodeError
from idemgate.types import Duration, milliseconds
from idemgate_sql.database import Params, Rows
from idemgate_sql.failures import is_lock_timeout
from idemgate_sql.outbox_statements import OutboxRow, OutboxStatements, read_rows
from idemgate_sql.watch import Watch, wait_for_stop

__all__ = ["Relay", "check_relay_options"]

log = logging.getLogger("idemgate.sql")
MOST_BYTES = 4 * 1024 * 1024
"""Bytes of packed triggers that one batch reads, but at least one row."""
LONGEST_PAUSE = 10.0
"""Seconds between two tries while the database or the store is unavailable."""
PURGE_EVERY = 60.0
"""Seconds between two looks for expired rows of the inbox."""


class Relay:
    """A subscriber that sends the committed rows of an outbox: `gate.add_subscriber(inbox.relay(gate))`.

    Rows of one key are sent in the order of their ids. A row is deleted after its topic accepted it. If the process
    dies in between, the row is sent again, and the topic drops the copy by its event id. So several relays may run.
    On PostgreSQL one works and the others stand by.
    """

    def __init__(
        self, gate: Gate, statements: OutboxStatements, execute: Callable[[str, Params], Awaitable[Rows]],
        open_watch: Callable[[], AbstractAsyncContextManager[Watch]], purge: Callable[[], Awaitable[int]] | None,
        batch: int, poll: float,
    ) -> None:  # fmt: skip
        self._gate = gate
        self._statements = statements
        self._execute = execute
        self._open_watch = open_watch
        self._purge = purge
        self._batch = batch
        self._poll = poll
        self._purged_at = float("-inf")
        self._unserved: frozenset[str] = frozenset()
        self._stalled_since: float | None = None

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
                    while not stop.is_set():
                        busy = await watch.try_lock() and await self._work()
                        self._end_outage()
                        pause = 0.1
                        if ready is not None:
                            ready()
                        if not busy:
                            await watch.wait(stop, self._poll)
            except Exception as error:  # noqa: BLE001 - each client library has errors of its own
                self._begin_outage(error)
                if ready is not None:
                    ready()
                await wait_for_stop(stop, pause)
                pause = min(2 * pause, LONGEST_PAUSE)

    async def relay_once(self) -> int:
        """Send the oldest rows, at most one batch. Return the number of rows that left the outbox or were refused.

        Raises:
            StoreError: the store did not accept them. The rows stay.
            Exception: an error of the client library.
        """
        names = self._statements.pack_names(self._gate.topics)
        params = {"topics": names, "batch": self._batch, "bytes": MOST_BYTES}
        rows = read_rows(await self._execute(self._statements.read, params))
        accepted = [id for topic, of_topic in _by_topic(rows) for id in await self._send(topic, of_topic)]  # noqa: A001
        if accepted:
            ids = self._statements.pack_names(accepted)
            deleted = await self._execute(self._statements.delete, {"ids": ids})
            self._gate.counters.add("sql.relayed", len(deleted))
        return len(rows)

    async def _work(self) -> bool:
        """Send a batch. Return True if there may be more. Without rows look for expired ones of the inbox."""
        if await self.relay_once():
            return True
        await self._report_unserved()
        if self._purge is not None and monotonic() - self._purged_at > PURGE_EVERY:
            while purged := await self._purge():
                self._gate.counters.add("sql.purged", purged)
            self._purged_at = monotonic()
        return False

    async def _send(self, name: str, rows: Sequence[OutboxRow]) -> list[int]:
        """Send rows of one topic in order. Return the ids of those that the topic accepted."""
        topic, sent = self._gate.topics[name], list[tuple[int, Trigger]]()
        for row in rows:
            try:
                trigger = topic.unpack_trigger(row.body)
                await topic.aio.open()
                topic.pack_trigger(trigger)  # the stored policy may have changed since the row was written
            except (InvalidArgument, DecodeError) as error:
                await self._refuse(row, error)
            else:
                sent.append((row.id, replace(trigger, event_id=trigger.event_id or row.event_id)))
        receipts = await topic.aio.trigger_many([trigger for _, trigger in sent])
        self._gate.counters.add("sql.relay_duplicates", sum(one.status == "duplicate" for one in receipts))
        return [id for id, _ in sent]  # noqa: A001

    async def _refuse(self, row: OutboxRow, error: Exception) -> None:
        """Set a row aside that its topic refuses, so that the rows behind it go on."""
        self._gate.counters.add("sql.relay_refused")
        facts = {"topic": row.topic, "row": row.id}
        log.error("sql.relay_refused topic=%r row=%d: %s", *facts.values(), error, extra=facts | {"error": str(error)})
        text = str(error).replace("\0", "\\0")[:500]
        await self._execute(self._statements.refuse, {"id": row.id, "error": text})

    async def _report_unserved(self) -> None:
        """Log rows of topics that the gate of this relay does not have. Another program may send them."""
        params = {"topics": self._statements.pack_names(self._gate.topics)}
        found = {str(topic): int(n) for topic, n in await self._execute(self._statements.waiting, params)}
        if found.keys() - self._unserved:
            log.warning("sql.relay_unserved rows=%r: declare these topics on the gate of the relay", found,
                        extra={"rows": found})  # fmt: skip
        self._unserved = frozenset(found)

    def _begin_outage(self, error: Exception) -> None:
        self._gate.counters.add("sql.relay_failed")
        if is_lock_timeout(error):
            return  # another writer of SQLite
        if self._stalled_since is None:
            self._stalled_since = monotonic()
            facts = {"outbox": self._statements.channel, "error": f"{type(error).__name__}: {error}"}
            log.error("sql.relay_stalled outbox=%r: %s", *facts.values(), extra=facts)

    def _end_outage(self) -> None:
        if self._stalled_since is not None:
            seconds = round(monotonic() - self._stalled_since, 3)
            facts = {"outbox": self._statements.channel, "seconds": seconds}
            log.warning("sql.relay_resumed outbox=%r seconds=%g", *facts.values(), extra=facts)
            self._stalled_since = None


def _by_topic(rows: Iterable[OutboxRow]) -> list[tuple[str, list[OutboxRow]]]:
    """Return the rows of each topic, in their order."""
    found: dict[str, list[OutboxRow]] = {}
    for row in rows:
        found.setdefault(row.topic, []).append(row)
    return list(found.items())


def check_relay_options(batch: Any, poll: Duration) -> tuple[int, float]:
    """Return the number of rows of a batch, and the seconds between two looks. Raise InvalidArgument."""
    if not isinstance(batch, int) or isinstance(batch, bool) or not 1 <= batch <= 10_000:
        raise InvalidArgument("batch", batch, "not a whole number from 1 to 10,000", "Pass an int, such as 500")
    return batch, milliseconds(poll, "poll") / 1000
