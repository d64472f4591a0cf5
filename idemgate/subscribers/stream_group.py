"""The commands of one consumer in a consumer group; each is about one key only, so that they work on a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from idemgate.errors import ServerRejected
from idemgate.store.aio import AsyncLink

__all__ = ["Entry", "Group", "Taken", "is_gone"]


@dataclass(slots=True)
class Entry:
    """One entry of a stream, as its callback gets it.

    `id` is unique in the stream ("1700000000000-0"); `fields` has names as text and values as bytes (of a name that
    occurs twice, the last); `deliveries` is 1 for the first attempt and grows with every one that did not end well.
    """

    stream: str
    id: str
    fields: Mapping[str, bytes]
    deliveries: int = 1


class Taken:
    """An entry this consumer has to see to. `raw`: names and values as they came. `over`: its callback has ended;
    `done`: it waits for its acknowledgement; `lost`: another consumer has it."""

    __slots__ = ("done", "entry", "id", "lost", "over", "raw")

    def __init__(self, stream: str, number: bytes, raw: Sequence[bytes], deliveries: int) -> None:
        self.id = number
        self.raw = raw
        self.done = False
        self.lost = False
        self.over = False
        names = (name.decode(errors="surrogateescape") for name in raw[::2])
        self.entry = Entry(stream, number.decode(), dict(zip(names, raw[1::2], strict=True)), deliveries)


def is_gone(error: BaseException) -> bool:
    """Whether the server said that there is no such stream or group (any more)."""
    return isinstance(error, ServerRejected) and any(word in str(error) for word in ("NOGROUP", "UNBLOCKED"))


class Group:
    """Each method is one command, or one for each entry where a command takes one only; raises StoreError."""

    def __init__(self, link: AsyncLink, stream: str, group: str, consumer: str, reclaim_ms: int) -> None:
        self._link = link
        self.stream = stream
        self.group = group
        self.consumer = consumer
        self.reclaim_ms = reclaim_ms
        self._cursor = b"0-0"

    async def create(self, start: str) -> bool:
        """Makes the group, and the stream if need be; False if it was there."""
        try:
            await self._link.command("XGROUP", "CREATE", self.stream, self.group, start, "MKSTREAM")
        except ServerRejected as error:
            if "BUSYGROUP" not in str(error):
                raise
            return False
        return True

    async def read(self, count: int, block_ms: int) -> list[Taken]:
        """New entries; waits for the first. At most `count`."""
        reply = await self._link.blocking(
            "XREADGROUP", "GROUP", self.group, self.consumer, "COUNT", count, "BLOCK", block_ms,
            "STREAMS", self.stream, ">",
            within=block_ms / 1000 + self._link.seconds,
        )  # fmt: skip
        return [Taken(self.stream, number, raw, 1) for number, raw in reply[0][1]] if reply else []

    async def reclaim(self, count: int, known: Container[bytes]) -> tuple[list[Taken], int]:
        """Entries that nobody has seen to for the reclaim time, and how many of them were gone from the stream.

        XAUTOCLAIM decides who gets an entry; then XCLAIM counts the delivery and gives the content: so an entry that is
        `known` to be at work here, because a heartbeat came late, costs no attempt.
        """
        reply = await self._link.command(
            "XAUTOCLAIM", self.stream, self.group, self.consumer, self.reclaim_ms, self._cursor,
            "COUNT", count, "JUSTID",
        )  # fmt: skip
        self._cursor = reply[0]
        trimmed = len(reply[2]) if len(reply) > 2 else 0  # Redis 6.2 does not say; there XCLAIM finds nothing
        found = await asyncio.gather(*(self._reclaimed(one) for one in reply[1] if one not in known))
        taken = [one for one in found if one is not None]
        return taken, trimmed + len(found) - len(taken)

    async def _reclaimed(self, number: bytes) -> Taken | None:
        entries = await self._claim(0, number)
        if not entries or not entries[0]:
            await self.ack([number])
            return None
        pending = await self._pending(number)
        return Taken(self.stream, number, entries[0][1], pending[0][3] if pending else 1)

    async def beat(self, working: Sequence[Taken]) -> list[Taken]:
        """Tells the group that these are at work here; returns those that are not this consumer's any more."""
        pending = await asyncio.gather(*(self._pending(one.id) for one in working))
        me, mine, gone = self.consumer.encode(), list[bytes](), list[Taken]()
        for one, found in zip(working, pending, strict=True):
            if one.over:
                continue  # it ended meanwhile, and may have been given back
            if found and found[0][1] == me:
                mine.append(one.id)
            else:
                gone.append(one)
        if mine:
            await self._claim(0, *mine, "JUSTID")
        return gone

    async def give_back(self, taken: Taken, after_ms: int, *, undo: bool) -> None:
        """Leaves an entry to whoever reclaims it `after_ms` from now (at most the reclaim time). `undo`: that was no
        attempt."""
        deliveries = taken.entry.deliveries - undo
        idle = max(0, self.reclaim_ms - after_ms)
        await self._claim(0, taken.id, "IDLE", idle, "RETRYCOUNT", deliveries, "JUSTID")

    async def ack(self, ids: Sequence[bytes]) -> None:
        await self._link.command("XACK", self.stream, self.group, *ids)

    async def bury(self, dead: str, keep: int, taken: Taken, why: Iterable[str | bytes]) -> int:
        """Copies an entry to the dead stream; returns how many old ones that pushed out."""
        await self._link.command(
            "XADD", dead, "*",
            "idemgate.id", taken.id, "idemgate.stream", self.stream, "idemgate.group", self.group,
            "idemgate.deliveries", taken.entry.deliveries, *why, *taken.raw,
        )  # fmt: skip
        return int(await self._link.command("XTRIM", dead, "MAXLEN", keep))

    async def leave(self) -> None:
        """Takes this consumer's name off the group, unless entries are pending under it: those would be forgotten."""
        if not await self._link.command("XPENDING", self.stream, self.group, "-", "+", 1, self.consumer):
            await self._link.command("XGROUP", "DELCONSUMER", self.stream, self.group, self.consumer)

    async def _claim(self, idle_ms: int, *rest: bytes | str | int) -> Any:
        return await self._link.command("XCLAIM", self.stream, self.group, self.consumer, idle_ms, *rest)

    async def _pending(self, number: bytes) -> Any:
        return await self._link.command("XPENDING", self.stream, self.group, number, number, 1)
