"""Subscriber of a stream, as a member of a consumer group: at least once, shared among the replicas.

An entry is acknowledged when its callback has returned, or when its guard reports that the work is done. It stays
pending while another owner runs, after a failure, and when this process dies. Another consumer reclaims it once it was
idle for the reclaim time. An entry with a permanent error or too many failures is copied to the dead stream, then
acknowledged. A crash in between leaves a second copy there, but loses nothing.

Counters:

- `stream.read`, `.reclaimed`: entries taken.
- `stream.handled`, `.duplicate`, `.in_progress`, `.rejected`, `.failed`, `.unguarded`, `.skipped`: the verdicts.
- `stream.lost`: the guard or the consumer lost the entry to another one while the callback ran.
- `stream.acked`, `.dead`: entries acknowledged, and entries copied to the dead stream.
- `stream.returned`, `.abandoned`: entries not started, and entries cancelled, at the stop.
- `stream.trimmed`: entries trimmed from the stream before they were done.
- `stream.dead_trimmed`: entries trimmed from the dead stream.
- `stream.unburied`: failed writes to the dead stream.
- `stream.groups_made`, `.store_errors`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import Any, Literal

from idemgate.core.backoff import retry_pause
from idemgate.core.durations import Duration, milliseconds
from idemgate.core.failure import last_line
from idemgate.core.tokens import token
from idemgate.core.validation import check_int
from idemgate.core.verdict import Verdict
from idemgate.errors import InvalidArgument, StoreError, StoreUnavailable
from idemgate.store.context import Context
from idemgate.store.shielded import finish_despite_cancel
from idemgate.subscribers.callback import Callback, check_callback
from idemgate.subscribers.executor import BoundedExecutor
from idemgate.subscribers.stream_group import Entry, Group, PendingEntry, is_group_missing

__all__ = ["Stream"]

log = logging.getLogger("idemgate.subscriber")
Start = Literal["0", "$"]
BLOCK = 500
"""Longest wait of one read, ms. It bounds the duration of a stop without new entries."""
ACKS = 1000


class Stream:
    """A callback registered for a stream; see `Gate.stream`."""

    def __init__(
        self,
        context: Context,
        stream: str,
        callback: Callable[[Entry], object],
        *,
        group: str,
        consumer: str | None = None,
        start: Start = "0",
        concurrency: int = 32,
        reclaim: Duration = "30s",
        max_deliveries: int = 17,
        dead: str | None = None,
        max_dead_letters: int = 10_000,
    ) -> None:
        self.context = context
        self.stream = _check_name("stream", stream)
        self.group = _check_name("group", group)
        self.consumer = None if consumer is None else _check_name("consumer", consumer)
        if start not in ("0", "$"):
            raise InvalidArgument("start", start, "no such choice", "Use '0' for all entries, '$' for new entries only")
        self.start = start
        self.callback = callback
        self.name = check_callback(callback)
        self.concurrency = check_int("concurrency", concurrency)
        self.reclaim_ms = milliseconds(reclaim, "reclaim")
        self.max_deliveries = check_int("max_deliveries", max_deliveries)
        self.dead = f"{stream}:dead" if dead is None else _check_name("dead", dead)
        if self.dead == stream:
            raise InvalidArgument("dead", dead, "the stream itself", "Name another stream, or leave it out")
        self.max_dead_letters = check_int("max_dead_letters", max_dead_letters)

    def __repr__(self) -> str:
        return f"<Stream {self.stream!r} group {self.group!r} -> {self.name}>"

    async def run(self, stop: asyncio.Event, *, grace: float = 30.0, ready: Callable[[], None] | None = None) -> None:
        """Run the subscriber; see `Subscriber.run`.

        Raises:
            ServerRejected: The group cannot be created, since the key is no stream or a permission is missing.
        """
        await _Reader(self, stop).run(grace, ready)


class _Reader:
    """One run of a stream's subscriber. `_live` holds the entries between the read and the acknowledgement."""

    def __init__(self, options: Stream, stop: asyncio.Event) -> None:
        self._options = options
        self._stop = stop
        consumer = options.consumer or f"{socket.gethostname()}-{os.getpid()}-{token().hex()}"
        self._group = Group(options.context.aio_link, options.stream, options.group, consumer, options.reclaim_ms)
        self._callback = Callback(options.callback)
        self._executor = BoundedExecutor[PendingEntry](self._handle, options.concurrency)
        self._live: dict[bytes, PendingEntry] = {}
        self._freed = asyncio.Event()
        self._acknowledgeable: list[bytes] = []
        self._to_ack = asyncio.Event()
        self._recreate_from: str = options.start
        self._reclaim_at = 0.0
        self._facts = {"stream": options.stream, "group": options.group, "consumer": consumer}

    async def run(self, grace: float, ready: Callable[[], None] | None) -> None:
        acking, renewing = asyncio.create_task(self._ack()), asyncio.create_task(self._renew_forever())
        try:
            with suppress(StoreUnavailable):  # then it is created when the store is back
                await self._create_group(self._options.start)
            if ready is not None:
                ready()
            await self._read()
        finally:
            acking.cancel()
            try:
                await finish_despite_cancel(self._end(grace if self._stop.is_set() else 0), self._executor.hurry)
            finally:
                renewing.cancel()
                self._callback.close()

    # -- reading ------------------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        failures = 0
        while not self._stop.is_set():
            try:
                await self._read_once()
                failures = 0
            except StoreError as error:
                failures += 1
                await self._recover(error, failures)

    async def _read_once(self) -> None:
        """Reclaim if it is time, then read. With more entries than the concurrency, wait instead."""
        block = min(BLOCK, max(1, self._options.reclaim_ms // 3))
        if len(self._live) > self._options.concurrency:
            self._freed.clear()
            await _wait_within(self._freed, block / 1000)
            return
        if monotonic() >= self._reclaim_at:
            self._reclaim_at = monotonic() + min(1.0, self._options.reclaim_ms / 3000)
            await self._reclaim()
        if (room := self._room()) > 0:
            taken = await self._group.read(room, block)
            self._count("read", len(taken))
            if taken and self._options.start == "$":
                self._recreate_from = taken[-1].entry.id
            self._take(taken)

    def _room(self) -> int:
        """Return how many entries to read: twice the concurrency in total, so that no callback waits for a read."""
        return min(1000, 2 * self._options.concurrency) - len(self._live)

    async def _reclaim(self) -> None:
        taken, trimmed = await self._group.reclaim(max(1, self._room()), self._live)
        if trimmed:
            self._count("trimmed", trimmed)
            log.error("subscriber.trimmed", extra=self._facts | {"count": trimmed})
        self._count("reclaimed", len(taken))
        self._take(taken)

    def _take(self, taken: list[PendingEntry]) -> None:
        for one in taken:
            known = self._live.get(one.id)
            if known is not None:  # it was running here when the group was created again
                known.lost = False
                continue
            self._live[one.id] = one
            self._executor.add(one)

    async def _create_group(self, start: str) -> None:
        if await self._group.create(start):
            self._count("groups_made")
            log.info("subscriber.group_made", extra=self._facts | {"start": start})

    async def _recover(self, error: StoreError, failures: int) -> None:
        """Create a deleted group again; after any other error wait.

        The new group starts at the beginning of the stream, or with start="$" at the last entry read here. The list of
        pending entries is lost with the group, so some entries are delivered twice rather than never.
        """
        try:
            if is_group_missing(error):
                log.error("subscriber.group_gone", extra=self._facts)
                await self._create_group(self._recreate_from)
                return
        except StoreError as again:
            error = again
        self._report_error(error, failures)
        await _wait_within(self._stop, retry_pause(failures))

    # -- working ------------------------------------------------------------------------------------------------------

    async def _handle(self, taken: PendingEntry) -> None:
        try:
            if taken.entry.deliveries > self._options.max_deliveries:  # each delivery ended with its process
                await self._bury(taken, "max_deliveries", None)
                return
            verdict = await self._callback(taken.entry)
            taken.over = True
            self._count(verdict.outcome)
            await self._settle(taken, verdict)
        except StoreError as error:  # it stays pending
            self._report_error(error)
        finally:
            if not taken.done:
                self._forget(taken.id)

    async def _settle(self, taken: PendingEntry, verdict: Verdict[Any]) -> None:
        outcome, error = verdict.outcome, verdict.error
        if verdict.action == "ack":
            self._acknowledge(taken)
        elif taken.lost:
            return  # its new consumer settles it
        elif outcome == "rejected":
            await self._bury(taken, type(error).__name__, error)
        elif outcome != "failed":  # in progress, or the guard lost its lease to another owner
            await self._group.release(taken, max(1, round(verdict.delay(0) * 1000)), undo=True)
        elif not verdict.ran and isinstance(error, StoreError):
            self._report_error(error)
            await self._group.release(taken, self._options.reclaim_ms, undo=True)
        else:
            log.warning("subscriber.failed", extra=self._facts | {"id": taken.entry.id}, exc_info=error)
            await self._retry_or_bury(taken, verdict)

    async def _retry_or_bury(self, taken: PendingEntry, verdict: Verdict[Any]) -> None:
        if taken.entry.deliveries >= self._options.max_deliveries:
            await self._bury(taken, "max_deliveries", verdict.error)
        elif verdict.retry_after is not None:
            await self._group.release(taken, round(verdict.retry_after * 1000), undo=False)

    async def _bury(self, taken: PendingEntry, reason: str, error: BaseException | None) -> None:
        """Copy an entry to the dead stream, then acknowledge it."""
        text = last_line(error) if error is not None else ""
        try:
            pushed_out = await self._group.bury(
                self._options.dead,
                self._options.max_dead_letters,
                taken,
                ("idemgate.reason", reason, "idemgate.error", text),
            )
        except StoreError:
            self._count("unburied")
            raise
        self._count("dead")
        self._count("dead_trimmed", pushed_out)
        log.error("subscriber.dead", extra=self._facts | {"id": taken.entry.id, "reason": reason, "error": text})
        self._acknowledge(taken)

    def _acknowledge(self, taken: PendingEntry) -> None:
        taken.over = taken.done = True
        self._acknowledgeable.append(taken.id)
        self._to_ack.set()

    def _forget(self, number: bytes) -> None:
        self._live.pop(number, None)
        self._freed.set()

    # -- in the background --------------------------------------------------------------------------------------------

    async def _ack(self) -> None:
        while True:
            await self._to_ack.wait()
            self._to_ack.clear()
            await self._flush()

    async def _flush(self) -> None:
        """Acknowledge all finished entries in batches, with unlimited retries while the store is unavailable."""
        failures = 0
        while ids := self._acknowledgeable[:ACKS]:
            try:
                await self._group.ack(ids)
                self._count("acked", len(ids))
            except StoreUnavailable as error:
                failures += 1
                self._report_error(error, failures)
                await asyncio.sleep(retry_pause(failures))
                continue
            except StoreError as error:  # rejected: the entry stays pending, and its next delivery is a duplicate
                self._report_error(error)
            del self._acknowledgeable[: len(ids)]
            for number in ids:
                self._forget(number)

    async def _renew_forever(self) -> None:
        """Reset the idle time of running entries, so that no other consumer reclaims them."""
        while True:
            await asyncio.sleep(self._options.reclaim_ms / 3000)
            working = [taken for taken in self._live.values() if not taken.over and not taken.lost]
            try:
                gone = await self._group.renew(working)
            except StoreError as error:
                self._report_error(error)
                continue
            for taken in gone:
                taken.lost = True
                self._count("lost")
                log.warning("subscriber.lost", extra=self._facts | {"id": taken.entry.id})

    # -- the end ------------------------------------------------------------------------------------------------------

    async def _end(self, grace: float) -> None:
        waiting = tuple(self._executor.waiting)
        self._executor.waiting.clear()
        await asyncio.gather(*(self._return(taken) for taken in waiting))
        left = await self._executor.finish(grace)
        if left:
            self._count("abandoned", left)
            log.warning("subscriber.abandoned", extra=self._facts | {"count": left})
        with suppress(TimeoutError, StoreError):
            async with asyncio.timeout(self._options.context.timeout):
                await self._flush()
                if self._options.consumer is None and not left:
                    await self._group.leave()

    async def _return(self, taken: PendingEntry) -> None:
        """Make an unstarted entry reclaimable at once; this does not count as an attempt."""
        taken.over = True
        self._forget(taken.id)
        try:
            await self._group.release(taken, 0, undo=True)
            self._count("returned")
        except StoreError as error:
            self._report_error(error)

    def _report_error(self, error: StoreError, failures: int = 1) -> None:
        self._count("store_errors")
        if failures & (failures - 1) == 0:  # 1, 2, 4, 8: a long outage must not flood the log
            log.warning("subscriber.store_error", extra=self._facts | {"error": str(error), "failures": failures})

    def _count(self, what: str, n: int = 1) -> None:
        if n:
            self._options.context.counters.add(f"stream.{what}", n)


def _check_name(name: str, value: str) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidArgument(name, value, "not a name", "Use a non-empty string")
    return value


async def _wait_within(event: asyncio.Event, seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
