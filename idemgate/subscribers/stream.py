"""Subscriber of a stream, as a member of a consumer group: at least once, shared among the replicas.

An entry is acknowledged when its callback has returned, or when its guard reports that the work is done. It stays
pending while another owner runs, after a failure, and when this process dies. Another consumer reclaims it once it was
idle for the reclaim time. An entry with a permanent error or too many failures is copied to the dead stream, then
acknowledged. A crash in between leaves a second copy there, but loses nothing.

Counters:

- `stream.read`, `.reclaimed`: entries taken.
- `stream.handled`, `.duplicate`, `.in_progress`, `.rejected`, `.failed`, `.unguarded`, `.skipped`: the verdicts.
- `stream.downstream_unavailable`: entries released because the callback raised `DownstreamUnavailable`.
- `stream.lost`: the guard or the consumer lost the entry to another one while the callback ran.
- `stream.acked`, `.dead`: entries acknowledged, and entries copied to the dead stream.
- `stream.returned`, `.abandoned`: entries not started, and entries cancelled, at the stop.
- `stream.trimmed`: entries trimmed from the stream before they were done.
- `stream.dead_trimmed`: entries trimmed from the dead stream.
- `stream.unburied`: failed writes to the dead stream.
- `stream.consumers_removed`: names of vanished consumers, deleted from the group.
- `stream.groups_made`, `.store_errors`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Literal

from idemgate.core.calls import Call
from idemgate.core.clock import monotonic
from idemgate.core.durations import Duration, milliseconds
from idemgate.core.validation import check_int
from idemgate.errors import InvalidArgument, ServerRejected, StoreError
from idemgate.store.context import Context
from idemgate.store.retry import is_out_of_memory
from idemgate.subscribers.callback import check_callback
from idemgate.subscribers.reader import EntryReader
from idemgate.subscribers.stream_group import (
    Entry,
    Group,
    PendingEntry,
    consumer_name,
    is_group_missing,
)

__all__ = ["Stream"]

log: logging.Logger = logging.getLogger("idemgate.subscriber")
Start = Literal["0", "$"]
REMOVE_INTERVAL = 600.0
"""Seconds between two searches for the names of vanished consumers."""


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
        self.stream: str = _check_name("stream", stream)
        self.group: str = _check_name("group", group)
        self.consumer: str | None = None if consumer is None else _check_name("consumer", consumer)
        if start not in ("0", "$"):
            raise InvalidArgument("start", start, "no such choice", "Use '0' for all entries, '$' for new entries only")
        self.start = start
        self.callback = callback
        self.name: str = check_callback(callback)
        self.concurrency: int = check_int("concurrency", concurrency)
        self.reclaim_ms: int = milliseconds(reclaim, "reclaim")
        self.max_deliveries: int = check_int("max_deliveries", max_deliveries)
        self.dead: str = f"{stream}:dead" if dead is None else _check_name("dead", dead)
        if self.dead == stream:
            raise InvalidArgument("dead", dead, "the stream itself", "Name another stream, or leave it out")
        self.max_dead_letters: int = check_int("max_dead_letters", max_dead_letters)

    def __repr__(self) -> str:
        return f"<Stream {self.stream!r} group {self.group!r} -> {self.name}>"

    async def run(self, stop: asyncio.Event, *, grace: float = 30.0, ready: Callable[[], None] | None = None) -> None:
        """Run the subscriber; see `Subscriber.run`.

        Raises:
            ServerRejected: The group cannot be created, since the key is no stream or a permission is missing.
        """
        await _StreamReader(self, stop).run(grace, ready)

    async def drain_once(self) -> int:
        """Process the entries that are there now, and return how many these were; for `AioGate.drain`."""
        return await _StreamReader(self, asyncio.Event()).run_once()


class _StreamReader(EntryReader[PendingEntry]):
    """One run of a stream's subscriber."""

    def __init__(self, options: Stream, stop: asyncio.Event) -> None:
        self._stream = options
        consumer = options.consumer or consumer_name()
        self._group = Group(options.context.aio_link, options.stream, options.group, consumer, options.reclaim_ms)
        self._recreate_from: str = options.start
        self._reclaim_at = self._remove_at = 0.0
        self._group_seen = False
        self._refusal: ServerRejected | None = None  # of the creation of the group
        facts = {"stream": options.stream, "group": options.group, "consumer": consumer}
        super().__init__(options, "stream", facts, stop)

    async def _open(self) -> None:
        try:
            await self._create_group(self._stream.start)
        except ServerRejected as error:
            if not is_out_of_memory(error):
                raise
            self._refusal = error
            self._report_error(error)  # the group may exist; if not, the first read says so, and it is created later

    async def _create_group(self, start: str) -> None:
        made = await self._group.create(start)
        self._group_seen = True
        if made:
            self._count("groups_made")
            log.info("subscriber.group_made", extra=self._facts | {"start": start})

    # -- reading ------------------------------------------------------------------------------------------------------

    async def _read_once(self) -> None:
        """Reclaim if it is time, then read."""
        if monotonic() >= self._remove_at:
            self._remove_at = monotonic() + REMOVE_INTERVAL
            await self._remove_vanished()
        if monotonic() >= self._reclaim_at:
            self._reclaim_at = monotonic() + min(1.0, self._options.reclaim_ms / 3000)
            await self._reclaim()
        await self._take_new(self._block_ms())

    async def _take_waiting(self) -> None:
        try:
            await self._reclaim()
            await self._take_new(None)
        except ServerRejected as error:
            if self._refusal is not None and is_group_missing(error):
                raise self._refusal from None  # the cause
            raise

    async def _take_new(self, block_ms: int | None) -> None:
        if (room := self._room()) > 0:  # after the reclaim
            taken = await self._group.read(room, block_ms)
            self._group_seen = True
            self._count("read", len(taken))
            if taken and self._stream.start == "$":
                self._recreate_from = taken[-1].entry.id
            self._take(taken)

    async def _reclaim(self) -> None:
        taken, trimmed = await self._group.reclaim(self._room(), self._in_flight)
        if trimmed:
            self._count("trimmed", trimmed)
            log.error("subscriber.trimmed", extra=self._facts | {"count": trimmed})
        self._count("reclaimed", len(taken))
        self._take(taken)

    async def _remove_vanished(self) -> None:
        """Delete the names of vanished consumers. An access list without this command must not stop the reading."""
        try:
            self._count("consumers_removed", await self._group.remove_vanished())
        except ServerRejected as error:
            if is_group_missing(error):
                raise
            self._remove_at = float("inf")
            facts = self._facts | {"error": str(error)}
            log.warning("subscriber.consumers_kept stream=%r error=%r", self._stream.stream, str(error), extra=facts)

    async def _recover(self, error: StoreError, failures: int) -> None:
        """Create a group that was deleted, or could not be created before; after any other error wait.

        The new group starts at the beginning of the stream, or with start="$" at the last entry read here. The list of
        pending entries is lost with the group, so some entries are delivered twice rather than never.
        """
        try:
            if is_group_missing(error):
                if self._group_seen and failures & (failures - 1) == 0:
                    log.error("subscriber.group_gone", extra=self._facts)
                await self._create_group(self._recreate_from)
                return
        except StoreError as again:
            error = again
        await super()._recover(error, failures)

    # -- settling -----------------------------------------------------------------------------------------------------

    async def _acknowledge_entries(self, ids: Sequence[bytes]) -> None:
        await self._group.ack(ids)

    def _renew_entries(self, held: Sequence[PendingEntry]) -> Call[list[bool]]:
        return self._group.renew([entry.id for entry in held])

    async def _release(self, taken: PendingEntry, after_ms: int, *, undo: bool) -> None:
        if self._renewal is not None:  # one that the server executes later would undo the release
            await self._renewal.wait_for(taken)
        await self._group.release(taken, after_ms, undo=undo)

    async def _write_dead_letter(self, taken: PendingEntry, reason: str, error: str) -> int:
        why = ("idemgate.reason", reason, "idemgate.error", error)
        return await self._group.bury(self._stream.dead, self._stream.max_dead_letters, taken, why)

    async def _leave(self) -> None:
        if self._stream.consumer is None:
            await self._group.leave()


def _check_name(name: str, value: str) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidArgument(name, value, "not a name", "Use a non-empty string")
    return value
