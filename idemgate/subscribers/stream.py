"""A callback on the entries of a stream, as a member of a consumer group: at least once, shared among the replicas.

An entry is acknowledged when its callback has returned, or was told by its guard that the work is done. It stays
pending while another owner runs, after a failure, and when this process dies: whoever finds it idle for the reclaim
time goes on with it. What cannot be mended, or failed too often, goes to the dead stream first and is acknowledged
then: a crash in between leaves a second copy there, never none.

Counters: `stream.read` and `.reclaimed` (taken), then one of `.handled`, `.duplicate`, `.in_progress`, `.hopeless`,
`.failed`; `.acked`, `.dead`, `.returned` (not started when it stopped), `.abandoned` (cut short then); `.lost`: another
consumer has reclaimed what runs here; `.trimmed`: gone from the stream before it was done; `.dead_trimmed`: pushed out
of the dead stream; `.unburied`: the dead stream could not be written; `.groups_made`; `.store_errors`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import Literal

from idemgate.core.backoff import retry_pause
from idemgate.core.durations import Duration, milliseconds
from idemgate.core.numbers import whole
from idemgate.core.tokens import token
from idemgate.errors import AlreadyInProgress, InvalidArgument, Retry, StoreError, StoreUnavailable
from idemgate.store.context import Context
from idemgate.store.shielded import to_the_end
from idemgate.subscribers.callback import Callback, Ending, checked
from idemgate.subscribers.executor import Lanes
from idemgate.subscribers.stream_group import Entry, Group, Taken, is_gone
from idemgate.worker.outcome import last_line

__all__ = ["Stream"]

log = logging.getLogger("idemgate.subscriber")
Start = Literal["0", "$"]
BLOCK = 500
"""Longest wait of one read, ms: how long a stop takes at most when nothing comes."""
ACKS = 1000


class Stream:
    """A registered callback on a stream; see `Gate.stream`."""

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
        max_dead: int = 10_000,
    ) -> None:
        self.context = context
        self.stream = _named("stream", stream)
        self.group = _named("group", group)
        self.consumer = None if consumer is None else _named("consumer", consumer)
        if start not in ("0", "$"):
            raise InvalidArgument(
                "start", start, "no such choice", "Use '0' for all there is, '$' for what comes from now on"
            )
        self.start = start
        self.callback = callback
        self.name = checked(callback)
        self.concurrency = whole("concurrency", concurrency)
        self.reclaim_ms = milliseconds(reclaim, "reclaim")
        self.max_deliveries = whole("max_deliveries", max_deliveries)
        self.dead = f"{stream}:dead" if dead is None else _named("dead", dead)
        if self.dead == stream:
            raise InvalidArgument("dead", dead, "the stream itself", "Name another stream, or leave it out")
        self.max_dead = whole("max_dead", max_dead)

    def __repr__(self) -> str:
        return f"<Stream {self.stream!r} group {self.group!r} -> {self.name}>"

    async def run(self, stop: asyncio.Event, *, grace: float = 30.0, ready: Callable[[], None] | None = None) -> None:
        """As `Subscriber.run`. Raises ServerRejected if the group cannot be made: the key is no stream, no permission."""
        await _Reader(self, stop).run(grace, ready)


class _Reader:
    """One run of a stream's subscriber. `live`: what it has to see to, from the read to the acknowledgement."""

    def __init__(self, options: Stream, stop: asyncio.Event) -> None:
        self._options = options
        self._stop = stop
        consumer = options.consumer or f"{socket.gethostname()}-{os.getpid()}-{token().hex()}"
        self._group = Group(options.context.aio_link, options.stream, options.group, consumer, options.reclaim_ms)
        self._callback = Callback(options.callback)
        self._lanes = Lanes[Taken](self._handle, options.concurrency)
        self._live: dict[bytes, Taken] = {}
        self._freed = asyncio.Event()
        self._done: list[bytes] = []
        self._to_ack = asyncio.Event()
        self._again_from: str = options.start
        self._reclaim_at = 0.0
        self._facts = {"stream": options.stream, "group": options.group, "consumer": consumer}

    async def run(self, grace: float, ready: Callable[[], None] | None) -> None:
        acking, beating = asyncio.create_task(self._ack()), asyncio.create_task(self._beat())
        try:
            with suppress(StoreUnavailable):  # then it is made when the store is back
                await self._make(self._options.start)
            if ready is not None:
                ready()
            await self._read()
        finally:
            acking.cancel()
            try:
                await to_the_end(self._end(grace if self._stop.is_set() else 0), self._lanes.hurry)
            finally:
                beating.cancel()
                self._callback.close()

    # -- reading ------------------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        failures = 0
        while not self._stop.is_set():
            try:
                await self._turn()
                failures = 0
            except StoreError as error:
                failures += 1
                await self._recover(error, failures)

    async def _turn(self) -> None:
        """Reclaims if it is time, then reads; waits while there is more than enough to do."""
        block = min(BLOCK, max(1, self._options.reclaim_ms // 3))
        if len(self._live) > self._options.concurrency:
            self._freed.clear()
            await _set_within(self._freed, block / 1000)
            return
        if monotonic() >= self._reclaim_at:
            self._reclaim_at = monotonic() + min(1.0, self._options.reclaim_ms / 3000)
            await self._reclaim()
        if (room := self._room()) > 0:
            taken = await self._group.read(room, block)
            self._count("read", len(taken))
            if taken and self._options.start == "$":
                self._again_from = taken[-1].entry.id
            self._take(taken)

    def _room(self) -> int:
        """Twice the concurrency, so that a callback that ends finds the next entry here."""
        return min(1000, 2 * self._options.concurrency) - len(self._live)

    async def _reclaim(self) -> None:
        taken, trimmed = await self._group.reclaim(max(1, self._room()), self._live)
        if trimmed:
            self._count("trimmed", trimmed)
            log.error("subscriber.trimmed", extra=self._facts | {"count": trimmed})
        self._count("reclaimed", len(taken))
        self._take(taken)

    def _take(self, taken: list[Taken]) -> None:
        for one in taken:
            known = self._live.get(one.id)
            if known is not None:  # at work here when the group was made anew: it is ours again
                known.lost = False
                continue
            self._live[one.id] = one
            self._lanes.add(one)

    async def _make(self, start: str) -> None:
        if await self._group.create(start):
            self._count("groups_made")
            log.info("subscriber.group_made", extra=self._facts | {"start": start})

    async def _recover(self, error: StoreError, failures: int) -> None:
        """A group that vanished is made anew from the beginning of the stream (with start="$": from what was last read
        here): what was pending in it is nowhere else, so better twice than never. Everything else is waited out."""
        try:
            if is_gone(error):
                log.error("subscriber.group_gone", extra=self._facts)
                await self._make(self._again_from)
                return
        except StoreError as again:
            error = again
        self._trouble(error, failures)
        await _set_within(self._stop, retry_pause(failures))

    # -- working ------------------------------------------------------------------------------------------------------

    async def _handle(self, taken: Taken) -> None:
        try:
            if taken.entry.deliveries > self._options.max_deliveries:  # it ended with its process, each time
                await self._bury(taken, "max_deliveries", None)
                return
            ending = await self._callback(taken.entry)
            taken.over = True
            self._count(ending.outcome)
            await self._settle(taken, ending)
        except StoreError as error:  # it stays pending
            self._trouble(error)
        finally:
            if not taken.done:
                self._forget(taken.id)

    async def _settle(self, taken: Taken, ending: Ending) -> None:
        outcome, error = ending
        if outcome in ("handled", "duplicate"):
            self._acknowledge(taken)
        elif taken.lost:
            return  # whoever has it now will see for himself
        elif isinstance(error, AlreadyInProgress):
            await self._group.give_back(taken, max(1, round(error.retry_after * 1000)), undo=True)
        elif outcome == "hopeless":
            await self._bury(taken, type(error).__name__, error)
        else:
            log.warning("subscriber.failed", extra=self._facts | {"id": taken.entry.id}, exc_info=error)
            await self._failed(taken, error)

    async def _failed(self, taken: Taken, error: BaseException | None) -> None:
        if taken.entry.deliveries >= self._options.max_deliveries:
            await self._bury(taken, "max_deliveries", error)
        elif isinstance(error, Retry) and error.delay is not None:
            await self._group.give_back(taken, milliseconds(error.delay, "delay", zero=True), undo=False)

    async def _bury(self, taken: Taken, reason: str, error: BaseException | None) -> None:
        """First the dead stream, then the acknowledgement."""
        text = last_line(error) if error is not None else ""
        try:
            pushed_out = await self._group.bury(
                self._options.dead, self._options.max_dead, taken, ("idemgate.reason", reason, "idemgate.error", text)
            )
        except StoreError:
            self._count("unburied")
            raise
        self._count("dead")
        self._count("dead_trimmed", pushed_out)
        log.error("subscriber.dead", extra=self._facts | {"id": taken.entry.id, "reason": reason, "error": text})
        self._acknowledge(taken)

    def _acknowledge(self, taken: Taken) -> None:
        taken.over = taken.done = True
        self._done.append(taken.id)
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
        """Acknowledges what has gathered, many at once, for as long as it takes: the work is done."""
        failures = 0
        while ids := self._done[:ACKS]:
            try:
                await self._group.ack(ids)
                self._count("acked", len(ids))
            except StoreUnavailable as error:
                failures += 1
                self._trouble(error, failures)
                await asyncio.sleep(retry_pause(failures))
                continue
            except StoreError as error:  # refused: it stays pending, and is found to be a duplicate
                self._trouble(error)
            del self._done[: len(ids)]
            for number in ids:
                self._forget(number)

    async def _beat(self) -> None:
        """Keeps what is at work here from being reclaimed by others, as a lease is renewed."""
        while True:
            await asyncio.sleep(self._options.reclaim_ms / 3000)
            working = [taken for taken in self._live.values() if not taken.over and not taken.lost]
            try:
                gone = await self._group.beat(working)
            except StoreError as error:
                self._trouble(error)
                continue
            for taken in gone:
                taken.lost = True
                self._count("lost")
                log.warning("subscriber.lost", extra=self._facts | {"id": taken.entry.id})

    # -- the end ------------------------------------------------------------------------------------------------------

    async def _end(self, grace: float) -> None:
        waiting = tuple(self._lanes.waiting)
        self._lanes.waiting.clear()
        await asyncio.gather(*(self._return(taken) for taken in waiting))
        left = await self._lanes.finish(grace)
        if left:
            self._count("abandoned", left)
            log.warning("subscriber.abandoned", extra=self._facts | {"count": left})
        with suppress(TimeoutError, StoreError):
            async with asyncio.timeout(self._options.context.timeout):
                await self._flush()
                if self._options.consumer is None and not left:
                    await self._group.leave()

    async def _return(self, taken: Taken) -> None:
        """What has not started can be reclaimed by others at once, and that was no attempt."""
        taken.over = True
        self._forget(taken.id)
        try:
            await self._group.give_back(taken, 0, undo=True)
            self._count("returned")
        except StoreError as error:
            self._trouble(error)

    def _trouble(self, error: StoreError, failures: int = 1) -> None:
        self._count("store_errors")
        if failures & (failures - 1) == 0:  # 1, 2, 4, 8: an hour without a store is not a thousand lines
            log.warning("subscriber.store_error", extra=self._facts | {"error": str(error), "failures": failures})

    def _count(self, what: str, n: int = 1) -> None:
        if n:
            self._options.context.counters.add(f"stream.{what}", n)


def _named(name: str, value: str) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidArgument(name, value, "not a name", "Use a text that is not empty")
    return value


async def _set_within(event: asyncio.Event, seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
