"""Subscriber of a Redis list: at least once, shared among the replicas.

A blocking pop (BLMOVE) moves an entry to the key `incoming`, from which the next take of any consumer gets it. A take
gives each entry an id and a lease. The entry is stored beside the list until it is settled, so a consumer that dies
loses nothing: another consumer takes the entry when the lease ends. A live consumer renews its leases. Each step costs
the server the same time, however long the list is. `idemgate.core.keys.LIST_PARTS` describes the keys.

The consumer takes entries whose lease or delay has ended first, then the list from one end. With `concurrency=1` and
one consumer it keeps the order of the list, except that an entry that is retried runs after entries behind it.

Counters:

- `list.read`, `.reclaimed`: entries taken as their first attempt, and as a later one.
- `list.handled`, `.duplicate`, `.in_progress`, `.rejected`, `.failed`, `.unguarded`, `.skipped`: the verdicts.
- `list.lost`: the guard or the consumer lost the entry to another one while the callback ran.
- `list.acked`, `.dead`: entries removed, and those among them that became dead letters.
- `list.returned`, `.abandoned`: entries not started, and entries cancelled, at the stop.
- `list.missing`: entries whose data was deleted or evicted before they were done.
- `list.dead_trimmed`: dead letters dropped because there were too many.
- `list.unburied`: failed writes of dead letters.
- `list.store_errors`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Literal

from idemgate.core.calls import Call
from idemgate.core.durations import Duration, milliseconds
from idemgate.core.keys import list_keys
from idemgate.core.validation import check_int
from idemgate.errors import InvalidArgument
from idemgate.store.context import Context
from idemgate.subscribers.callback import check_callback
from idemgate.subscribers.list_entries import ListCalls, ListEntry, TakenEntry, encode_dead_letter
from idemgate.subscribers.reader import EntryReader
from idemgate.subscribers.stream_group import consumer_name

__all__ = ["ListQueue"]

log: logging.Logger = logging.getLogger("idemgate.subscriber")
SHORTEST_BLOCK = 10
"""Shortest wait of one read, ms. A lease that is about to end must not turn the reads into a busy loop."""


class ListQueue:
    """A callback registered for a list; see `Gate.consume_list`."""

    def __init__(
        self,
        context: Context,
        name: str,
        callback: Callable[[ListEntry], object],
        *,
        pop: Literal["left", "right"] = "left",
        concurrency: int = 32,
        reclaim: Duration = "30s",
        max_deliveries: int = 17,
        max_dead_letters: int = 10_000,
    ) -> None:
        list_keys(name)
        if pop not in ("left", "right"):
            raise InvalidArgument("pop", pop, "no such choice", "Use 'left' if producers RPUSH, 'right' if they LPUSH")
        self.context = context
        self.list = name
        self.callback = callback
        self.name: str = check_callback(callback)
        self.pop: Literal["left", "right"] = pop
        self.concurrency: int = check_int("concurrency", concurrency)
        self.reclaim_ms: int = milliseconds(reclaim, "reclaim")
        self.max_deliveries: int = check_int("max_deliveries", max_deliveries)
        self.max_dead_letters: int = check_int("max_dead_letters", max_dead_letters)

    def __repr__(self) -> str:
        return f"<ListQueue {self.list!r} -> {self.name}>"

    async def run(self, stop: asyncio.Event, *, grace: float = 30.0, ready: Callable[[], None] | None = None) -> None:
        """Run the subscriber; see `Subscriber.run`.

        Raises:
            UnexpectedData: The key is no list, or a key beside it has another type.
            ServerRejected: A permission is missing.
        """
        await _ListReader(self, stop).run(grace, ready)

    async def drain_once(self) -> int:
        """Process the entries that are there now, and return how many these were; for `AioGate.drain`."""
        return await _ListReader(self, asyncio.Event()).run_once()


class _ListReader(EntryReader[TakenEntry]):
    """One run of a list's subscriber."""

    def __init__(self, options: ListQueue, stop: asyncio.Event) -> None:
        self._link = options.context.aio_link
        consumer = consumer_name()
        self._calls = ListCalls(
            options.list, consumer, options.context.clock,
            lease_ms=options.reclaim_ms, pop=options.pop, max_dead_letters=options.max_dead_letters,
        )  # fmt: skip
        self._pop = options.pop.upper()
        super().__init__(options, "list", {"list": options.list, "consumer": consumer}, stop)

    async def _open(self) -> None:
        await self._take_entries()

    # -- reading ------------------------------------------------------------------------------------------------------

    async def _read_once(self) -> None:
        """Take entries. Without any, wait for the first one, or until a lease or delay ends."""
        taken_any, next_ms = await self._take_entries()
        if not taken_any:
            await self._wait_for_entry(self._block_ms() if next_ms is None else min(self._block_ms(), next_ms))

    async def _take_waiting(self) -> None:
        """Nothing is left to do: `_open` took them."""

    async def _take_entries(self) -> tuple[bool, int | None]:
        reply = await self._link.run(self._calls.take(self._room()))
        if reply.missing:
            self._count("missing", reply.missing)
            log.error("subscriber.missing", extra=self._facts | {"count": reply.missing})
        new = [one for one in reply.entries if one.id not in self._in_flight]
        reclaimed = sum(one.entry.deliveries > 1 for one in new)
        self._count("reclaimed", reclaimed)
        self._count("read", len(new) - reclaimed)
        self._take(reply.entries)
        return bool(reply.entries), reply.next_ms

    async def _wait_for_entry(self, block_ms: int) -> None:
        """Wait until an entry is pushed. It moves to `incoming`, so that a push wakes one of all waiting consumers."""
        seconds = max(SHORTEST_BLOCK, block_ms) / 1000
        await self._link.blocking(
            "BLMOVE", self._calls.source, self._calls.incoming, self._pop, "RIGHT", f"{seconds:.3f}",
            within=seconds + self._link.seconds,
        )  # fmt: skip

    # -- settling -----------------------------------------------------------------------------------------------------

    async def _acknowledge_entries(self, ids: Sequence[bytes]) -> None:
        await self._link.run(self._calls.remove(ids))

    def _renew_entries(self, held: Sequence[TakenEntry]) -> Call[list[bool]]:
        return self._calls.renew(held)

    async def _release(self, taken: TakenEntry, after_ms: int, *, undo: bool) -> None:
        await self._link.run(self._calls.retry(taken, after_ms, undo=undo))

    async def _write_dead_letter(self, taken: TakenEntry, reason: str, error: str) -> int | None:
        return await self._link.run(self._calls.bury(taken, encode_dead_letter(taken, reason, error)))
