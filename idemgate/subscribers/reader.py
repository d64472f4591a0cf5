"""The common part of the consumers of streams and lists: take entries, run the callback, settle, renew, stop."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from operator import itemgetter
from typing import Any, Generic, Protocol, TypeVar

from idemgate.core.backoff import retry_pause
from idemgate.core.calls import Batch, Call
from idemgate.core.clock import monotonic
from idemgate.core.text import event_log, last_line
from idemgate.core.verdict import Verdict, choose_step
from idemgate.core.waits import finish_despite_cancel, wait_within
from idemgate.errors import StoreError, StoreUnavailable
from idemgate.store.context import Context
from idemgate.store.held import HeldRenewal
from idemgate.store.retry import lacks_cluster_url
from idemgate.subscribers.callback import Callback
from idemgate.subscribers.executor import BoundedExecutor

__all__ = ["BLOCK", "EntryReader", "HeldEntry"]

log: logging.Logger = event_log("idemgate.subscriber")
BLOCK = 500
"""Longest wait of one read, ms. It bounds the duration of a stop without new entries."""
READ = ACKS = 1000
"""Entries that one call reads or acknowledges."""
RENEWALS = 100
"""Entries that one script call renews."""


class HeldEntry:
    """An entry that a consumer holds, from its take to its acknowledgement.

    Attributes:
        entry: The entry as passed to the callback.
        until: The lease holds at least until then; see `Held`.
        settling: The callback has ended, or does not run.
        released: This consumer releases the entry. A renewal would undo that.
        done: The entry waits for its acknowledgement.
        lost: Another consumer has the entry.
    """

    __slots__ = ("done", "entry", "id", "lost", "released", "settling", "until")

    def __init__(self, number: bytes, entry: Any) -> None:
        self.id: bytes = number
        self.entry: Any = entry
        self.settling: bool = False
        self.released: bool = False
        self.done: bool = False
        self.lost: bool = False
        self.until: float = 0.0

    @property
    def is_renewable(self) -> bool:
        return not self.released and not self.lost


H = TypeVar("H", bound=HeldEntry)


class Registration(Protocol):
    """The options that a stream and a list share."""

    context: Context
    callback: Callable[[Any], object]
    concurrency: int
    reclaim_ms: int
    max_deliveries: int


class EntryReader(ABC, Generic[H]):
    """One run of a consumer. `_in_flight` holds the entries between the read and the acknowledgement."""

    def __init__(self, options: Registration, kind: str, facts: Mapping[str, object], stop: asyncio.Event) -> None:
        """Build the run of `facts[kind]`. `kind` is the prefix of its counters; `facts` are in its log records."""
        self._options = options
        self._kind = kind
        self._facts = dict(facts)
        self._stop = stop
        self._callback = Callback(options.callback, options.context, str(facts[kind]))
        self._executor = BoundedExecutor[H](self._handle, options.concurrency)
        self._in_flight: dict[bytes, H] = {}
        self._cancelled: list[H] = []  # by the stop
        self._lease = options.reclaim_ms / 1000
        self._renewal: HeldRenewal[H] | None = None
        self._freed = asyncio.Event()
        self._acknowledgeable: list[bytes] = []
        self._to_ack = asyncio.Event()
        self._reads_at = self._read_from = 0.0
        self._taken = 0

    async def run(self, grace: float, ready: Callable[[], None] | None) -> None:
        async with self._running(grace):
            with suppress(StoreUnavailable):  # then it begins when the store is back
                await self._open()
            if ready is not None:
                ready()
            await self._read()

    async def run_once(self) -> int:
        """Take what is there, run the callbacks one after the other, and settle. Return the number of entries."""
        self._executor = BoundedExecutor[H](self._handle, 1)
        self._read_from = monotonic()
        async with self._running(0):
            await self._open()
            await self._take_waiting()
            while self._in_flight:
                self._freed.clear()
                await self._freed.wait()
        return self._taken

    @asynccontextmanager
    async def _running(self, grace: float) -> AsyncGenerator[None]:
        acking = asyncio.create_task(self._ack())
        try:
            yield
        finally:
            acking.cancel()
            try:
                await finish_despite_cancel(self._end(grace if self._stop.is_set() else 0), self._executor.hurry)
            finally:
                if self._renewal is not None:
                    self._options.context.heartbeat.remove(self._renewal)
                self._callback.close()

    # -- what a source does -------------------------------------------------------------------------------------------

    @abstractmethod
    async def _open(self) -> None:
        """Prepare the source, or raise the StoreError that ends the run."""

    @abstractmethod
    async def _read_once(self) -> None:
        """Take entries, or wait for at most the time of `_block_ms`. There is room for one at least."""

    @abstractmethod
    async def _take_waiting(self) -> None:
        """Take the entries that are there, without waiting for one."""

    @abstractmethod
    async def _acknowledge_entries(self, ids: Sequence[bytes]) -> None:
        """Acknowledge handled entries."""

    @abstractmethod
    def _renew_entries(self, held: Sequence[H]) -> Call[list[bool]]:
        """Build the call that renews entries. Its answer says of each whether this consumer still holds it."""

    @abstractmethod
    async def _release(self, taken: H, after_ms: int, *, undo: bool) -> None:
        """Let any consumer take the entry after `after_ms`. With `undo` the delivery counts as no attempt."""

    @abstractmethod
    async def _write_dead_letter(self, taken: H, reason: str, error: str) -> int | None:
        """Write a dead letter; return how many old ones were dropped, or None if another consumer has the entry."""

    async def _leave(self) -> None:
        """Remove what this consumer keeps in the store, after a stop that left no entry behind."""

    async def _recover(self, error: StoreError, failures: int) -> None:
        """Wait after a failed read."""
        self._report_error(error, failures)
        await wait_within(self._stop, retry_pause(failures))

    # -- reading ------------------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        failures, failing_since = 0, 0.0
        while not self._stop.is_set():
            if (pause := self._reads_at - monotonic()) > 0:
                await wait_within(self._stop, pause)
                continue
            self._read_from = monotonic()
            try:
                if len(self._in_flight) > self._options.concurrency:
                    await self._wait_for_room()
                else:
                    await self._read_once()
                if failures:
                    seconds = round(monotonic() - failing_since, 3)
                    log.warning("subscriber.store_back seconds=%g", seconds, extra=self._facts | {"seconds": seconds})
                failures = 0
            except StoreError as error:
                if lacks_cluster_url(error):  # a slot moved
                    raise
                failing_since = failing_since if failures else monotonic()
                failures += 1
                await self._recover(error, failures)

    def _block_ms(self) -> int:
        return min(BLOCK, max(1, self._options.reclaim_ms // 3))

    def _room(self) -> int:
        """Return how many entries to read: twice the concurrency in total, so that no callback waits for a read."""
        return min(READ, 2 * self._options.concurrency - len(self._in_flight))

    async def _wait_for_room(self) -> None:
        self._freed.clear()
        await wait_within(self._freed, self._block_ms() / 1000)

    def _take(self, taken: Sequence[H]) -> None:
        self._taken += len(taken)
        if taken and self._renewal is None:
            self._renewal = HeldRenewal(self._lease, self, expires=False)
            self._options.context.heartbeat.add(self._renewal)
        for one in taken:
            known = self._in_flight.setdefault(one.id, one)
            known.until = self._read_from + self._lease
            if known is not one:  # it runs here already
                known.lost = False
                continue
            self._executor.add(one)

    # -- working ------------------------------------------------------------------------------------------------------

    async def _handle(self, taken: H) -> None:
        started = False
        try:
            if taken.until < monotonic() + self._lease / 2:  # the process stalled, or just waited
                await self._renew_now(taken)
            if taken.lost:  # while it waited; its new consumer handles it
                return
            if taken.entry.deliveries > self._options.max_deliveries:  # each delivery ended with its process
                await self._bury(taken, "max_deliveries", None)
                return
            started = True
            verdict = await self._callback(taken.entry)
            taken.settling = True
            self._count(verdict.outcome)
            await self._settle(taken, verdict)
        except StoreError as error:  # it stays pending
            self._report_error(error)
        except asyncio.CancelledError:
            if not taken.settling and not taken.lost and (self._callback.is_async or not started):  # a thread goes on
                self._cancelled.append(taken)
            raise
        finally:
            if not taken.done:
                self._forget(taken.id)

    async def _settle(self, taken: H, verdict: Verdict[Any]) -> None:
        step, error = choose_step(verdict), verdict.error
        if step == "ack":
            self._acknowledge(taken)
        elif taken.lost:
            return  # its new consumer settles it
        elif step == "bury":
            await self._bury(taken, type(error).__name__, error)
        elif step == "pause":
            await self._pause(taken, verdict)
        elif step == "defer" and verdict.outcome == "failed":
            assert isinstance(error, StoreError)
            self._report_error(error)
            await self._release_entry(taken, self._options.reclaim_ms, undo=True)
        elif step == "defer":  # in progress, or the guard lost its lease to another owner
            await self._release_entry(taken, max(1, round(verdict.delay(0) * 1000)), undo=True)
        else:
            log.warning("subscriber.failed", extra=self._facts | {"id": taken.entry.id}, exc_info=error)
            await self._retry_or_bury(taken, verdict)

    async def _pause(self, taken: H, verdict: Verdict[Any]) -> None:
        """Release an entry whose downstream service is unavailable, which is no attempt, and pause the reading."""
        seconds = min(verdict.delay(self._lease), self._lease)
        if monotonic() >= self._reads_at:
            self._reads_at = monotonic() + seconds
            error = str(verdict.error)
            log.warning("subscriber.downstream_unavailable error=%r", error, extra=self._facts | {"error": error})
        self._count("downstream_unavailable")
        await self._release_entry(taken, round(seconds * 1000), undo=True)

    async def _retry_or_bury(self, taken: H, verdict: Verdict[Any]) -> None:
        if taken.entry.deliveries >= self._options.max_deliveries:
            await self._bury(taken, "max_deliveries", verdict.error)
            return
        after = verdict.retry_after
        await self._release_entry(taken, self._options.reclaim_ms if after is None else round(after * 1000), undo=False)

    async def _release_entry(self, taken: H, after_ms: int, *, undo: bool) -> None:
        taken.released = True  # first: no renewal may begin now
        await self._release(taken, after_ms, undo=undo)

    async def _bury(self, taken: H, reason: str, error: BaseException | None) -> None:
        """Write a dead letter, then acknowledge the entry."""
        taken.settling = True
        text = last_line(error) if error is not None else ""
        try:
            dropped = await self._write_dead_letter(taken, reason, text)
        except StoreError:
            self._count("unburied")
            raise
        if dropped is None:
            return
        self._count("dead")
        self._count("dead_trimmed", dropped)
        log.error("subscriber.dead", extra=self._facts | {"id": taken.entry.id, "reason": reason, "error": text})
        self._acknowledge(taken)

    def _acknowledge(self, taken: H) -> None:
        taken.settling = taken.done = True
        self._acknowledgeable.append(taken.id)
        self._to_ack.set()

    def _forget(self, number: bytes) -> None:
        self._in_flight.pop(number, None)
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
                await self._acknowledge_entries(ids)
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

    async def _renew_now(self, taken: H) -> None:
        """Renew an entry that may have waited for too long, and mark it as lost if another consumer has it."""
        sent, renewal = monotonic(), self._renewal
        assert renewal is not None, "the first take makes it"
        renewal.record([taken], await self._options.context.aio_link.run(self._renew_entries([taken])), sent)

    # -- renewal: the `Holder` of `HeldRenewal`, in the heartbeat's thread ---------------------------------------------

    def copy_held(self) -> Collection[H]:
        """Return the entries that this consumer holds."""
        return self._in_flight.copy().values()

    def split_renewal(self, held: list[H], _alone: bool) -> Iterable[list[H]]:
        """Split entries into script calls. The calls read no data of an entry that may be corrupt."""
        return (held[n : n + RENEWALS] for n in range(0, len(held), RENEWALS))

    def build_renewal(self, part: Sequence[H]) -> Batch[list[bool]]:
        """Build the call that renews entries."""
        return Batch([self._renew_entries(part)], itemgetter(0))

    def mark_lost(self, taken: H) -> None:
        """Mark an entry that another consumer has; count and log it."""
        taken.lost = True
        self._count("lost")
        log.warning("subscriber.lost", extra=self._facts | {"id": taken.entry.id})

    # -- the end ------------------------------------------------------------------------------------------------------

    async def _end(self, grace: float) -> None:
        waiting = tuple(self._executor.waiting)
        self._executor.waiting.clear()
        await self._return_all(waiting)
        left = await self._executor.finish(grace)
        for taken in self._in_flight.values():
            if not taken.settling:
                taken.lost = True  # its callback swallowed the cancellation: leave it to its lease
        await self._return_all(self._cancelled)
        if left:
            self._count("abandoned", left)
            log.warning("subscriber.abandoned", extra=self._facts | {"count": left})
        with suppress(TimeoutError, StoreError):
            async with asyncio.timeout(self._options.context.timeout):
                await self._flush()
                if not left:
                    await self._leave()

    async def _return_all(self, entries: Sequence[H]) -> None:
        """Make unstarted or cancelled entries reclaimable at once; this does not count as an attempt."""
        await asyncio.gather(*(self._return(taken) for taken in entries))

    async def _return(self, taken: H) -> None:
        taken.settling = True
        self._forget(taken.id)
        try:
            await self._release_entry(taken, 0, undo=True)
            self._count("returned")
        except StoreError as error:
            self._report_error(error)

    def _report_error(self, error: StoreError, failures: int = 1) -> None:
        self._count("store_errors")
        if failures & (failures - 1) == 0:  # 1, 2, 4, 8: a long outage must not flood the log
            log.warning("subscriber.store_error", extra=self._facts | {"error": str(error), "failures": failures})

    def _count(self, what: str, n: int = 1) -> None:
        if n:
            self._options.context.counters.add(f"{self._kind}.{what}", n)
