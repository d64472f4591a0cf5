"""Commands of one consumer in a consumer group. Each uses one key only, so that it works on a cluster."""

from __future__ import annotations

import asyncio
import os
import re
import socket
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from idemgate.core.calls import Call, call, new_id
from idemgate.errors import ServerRejected
from idemgate.store.aio import AsyncLink
from idemgate.subscribers.reader import HeldEntry

__all__ = ["VANISHED", "Entry", "Group", "PendingEntry", "consumer_name", "is_group_missing"]

VANISHED = 3_600_000
"""Ms without a command of a consumer, after which its process has probably ended. A consumer that lives loses nothing:
its next entry creates the name again."""
_GENERATED = re.compile(rb".+-[0-9]+-[0-9a-f]{32}", re.DOTALL)


def consumer_name() -> str:
    """Return a new name that tells the machine and the process."""
    return f"{socket.gethostname()}-{os.getpid()}-{new_id().hex()}"


@dataclass(slots=True)
class Entry:
    """One entry of a stream, as passed to its callback.

    Attributes:
        stream: Name of the stream.
        id: Identifier, unique in the stream, such as "1700000000000-0".
        fields: Names as strings and values as bytes. Of a repeated name, only the last value is kept.
        deliveries: Number of the attempt, from 1. It rises with every failed attempt.
    """

    stream: str
    id: str
    fields: Mapping[str, bytes]
    deliveries: int = 1


class PendingEntry(HeldEntry):
    """An entry that is pending for this consumer. `raw` has its names and values as received."""

    __slots__ = ("raw",)

    def __init__(self, stream: str, number: bytes, raw: Sequence[bytes], deliveries: int) -> None:
        names = (name.decode(errors="surrogateescape") for name in raw[::2])
        fields = dict(zip(names, raw[1::2], strict=True))
        super().__init__(number, Entry(stream, number.decode(), fields, deliveries))
        self.raw: Sequence[bytes] = raw


def is_group_missing(error: BaseException) -> bool:
    """Return True if the server reported a missing stream or group."""
    words = ("NOGROUP", "UNBLOCKED", "no such key")
    return isinstance(error, ServerRejected) and any(word in str(error) for word in words)


class Group:
    """A consumer group. Each method sends one command, or one for each entry, and raises StoreError."""

    def __init__(self, link: AsyncLink, stream: str, group: str, consumer: str, reclaim_ms: int) -> None:
        self._link = link
        self.stream = stream
        self.group = group
        self.consumer = consumer
        self.reclaim_ms = reclaim_ms
        self._cursor = b"0-0"
        self._key = stream.encode()

    async def create(self, start: str) -> bool:
        """Create the group, and the stream if necessary; return False if the group exists."""
        try:
            await self._link.command("XGROUP", "CREATE", self.stream, self.group, start, "MKSTREAM")
        except ServerRejected as error:
            if "BUSYGROUP" not in str(error):
                raise
            return False
        return True

    async def read(self, count: int, block_ms: int | None) -> list[PendingEntry]:
        """Read at most `count` new entries; wait up to `block_ms` for the first. None: do not wait."""
        block = () if block_ms is None else ("BLOCK", block_ms)
        reply = await self._link.blocking(
            "XREADGROUP", "GROUP", self.group, self.consumer, "COUNT", count, *block, "STREAMS", self.stream, ">",
            within=(block_ms or 0) / 1000 + self._link.seconds,
        )  # fmt: skip
        return [PendingEntry(self.stream, number, raw, 1) for number, raw in reply[0][1]] if reply else []

    async def reclaim(self, count: int, known: Container[bytes]) -> tuple[list[PendingEntry], int]:
        """Reclaim entries that were idle for the reclaim time.

        XAUTOCLAIM assigns an entry to one consumer. Then XCLAIM counts the delivery and returns the content. So an
        entry that runs here already, because of a late renewal, loses no attempt.

        Args:
            count: Most entries to reclaim.
            known: Identifiers of the entries that run here.

        Returns:
            The entries, and how many others had been trimmed from the stream.
        """
        reply = await self._link.command(
            "XAUTOCLAIM", self.stream, self.group, self.consumer, self.reclaim_ms, self._cursor,
            "COUNT", count, "JUSTID",
        )  # fmt: skip
        self._cursor = reply[0]
        trimmed = len(reply[2]) if len(reply) > 2 else 0  # Redis 6.2 does not report them; there XCLAIM finds nothing
        found = await asyncio.gather(*(self._fetch_reclaimed(one) for one in reply[1] if one not in known))
        taken = [one for one in found if one is not None]
        return taken, trimmed + len(found) - len(taken)

    async def _fetch_reclaimed(self, number: bytes) -> PendingEntry | None:
        entries = await self._claim(0, number)
        if not entries or not entries[0]:
            await self.ack([number])
            return None
        pending = await self._pending(number)
        return PendingEntry(self.stream, number, entries[0][1], pending[0][3] if pending else 1)

    def renew(self, ids: Sequence[bytes]) -> Call[list[bool]]:
        """Build the call that resets the idle time of entries. Its answer says of each whether it is held."""
        return call("subscribers/streams/renew", (self._key,), ("", self.group, self.consumer, *ids), _read_renewed)

    async def release(self, entry: PendingEntry, after_ms: int, *, undo: bool) -> None:
        """Make an entry reclaimable after `after_ms`, at most the reclaim time. With `undo` it counts as no attempt."""
        await self._link.run(self.build_release(entry, max(0, self.reclaim_ms - after_ms), undo=undo))

    def build_release(self, entry: PendingEntry, idle_ms: int, *, undo: bool) -> Call[bool]:
        """Build the call that sets the idle time of an entry. Its answer says whether this consumer still held it."""
        args = ("", self.group, self.consumer, entry.id, idle_ms, entry.entry.deliveries - undo)
        return call("subscribers/streams/release", (self._key,), args, _read_released)

    async def ack(self, ids: Sequence[bytes]) -> None:
        await self._link.command("XACK", self.stream, self.group, *ids)

    async def bury(self, dead: str, keep: int, taken: PendingEntry, why: Iterable[str | bytes]) -> int:
        """Copy an entry to the dead stream; return how many old ones were trimmed."""
        await self._link.command(
            "XADD", dead, "*",
            "idemgate.id", taken.id, "idemgate.stream", self.stream, "idemgate.group", self.group,
            "idemgate.deliveries", taken.entry.deliveries, *why, *taken.raw,
        )  # fmt: skip
        return int(await self._link.command("XTRIM", dead, "MAXLEN", keep))

    async def leave(self) -> None:
        """Delete this consumer from the group, unless it has pending entries."""
        await self._link.run(self.build_leave(self.consumer))

    def build_leave(self, consumer: str | bytes) -> Call[bool]:
        """Build the call that deletes a consumer, unless it has pending entries. Its answer says whether it did."""
        return call("subscribers/streams/leave", (self._key,), ("", self.group, consumer), _read_left)

    async def remove_vanished(self) -> int:
        """Delete the consumers of processes that ended without leaving, and whose entries others have taken over.

        Only names that `consumer_name` made are deleted.
        """
        consumers = await self._link.command("XINFO", "CONSUMERS", self.stream, self.group)
        fields = [dict(zip(one[::2], one[1::2], strict=True)) for one in consumers]
        names = [
            one[b"name"]
            for one in fields
            if not one[b"pending"] and one[b"idle"] >= VANISHED and _GENERATED.fullmatch(one[b"name"])
        ]
        return sum(await asyncio.gather(*(self._link.run(self.build_leave(name)) for name in names)))

    async def _claim(self, idle_ms: int, *rest: bytes | str | int) -> Any:
        return await self._link.command("XCLAIM", self.stream, self.group, self.consumer, idle_ms, *rest)

    async def _pending(self, number: bytes) -> Any:
        return await self._link.command("XPENDING", self.stream, self.group, number, number, 1)


def _read_renewed(reply: list[Any]) -> list[bool]:
    return [word == b"renewed" for word in reply[2:]]


def _read_released(reply: list[Any]) -> bool:
    return bool(reply[0] == b"released")


def _read_left(reply: list[Any]) -> bool:
    return bool(reply[0] == b"left")
