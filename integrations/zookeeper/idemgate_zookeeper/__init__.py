"""Who serves which slot, kept in ZooKeeper instead of Redis: the same protocol, `idemgate.Membership`.

<path>/members/<member>        ephemeral: the topics it serves
<path>/held/<topic>:<slot>     ephemeral: the member that takes from it, or still drains it
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager
from typing import Any

from idemgate import AioGate, Duration, Gate, InvalidArgument
from idemgate.types import HeartbeatReply, HeartbeatRequest, Member, check_gate
from idemgate_zookeeper.wire import Wire

__all__ = ["ZooKeeperMembership"]

__version__ = "0.1.0"

Slot = tuple[str, int]


class ZooKeeperMembership(Member):
    """A Membership kept in ZooKeeper; `idemgate.types.Member` says what it promises. Each run has a session of its own.

    - `gate`: its counters count, and its `timeout` is how long it may take to join; its store is not asked.
    - `hosts`: "zk1:2181,zk2:2181", as kazoo takes them; a chroot at the end has to exist.
    - `path`: those of one path divide the slots of the topics they have in common; None: /idemgate/<namespace>.
    - `ttl`: the session's timeout. ZooKeeper keeps it within 2 and 20 of its ticks (4 s to 40 s, unless configured
      otherwise): a shorter one delays taking over to its minimum, a longer one lets a member that is cut off go on
      taking after others took over, for the difference.
    - `grace`: as long as the worker's.
    - `options`: for `KazooClient`, such as `auth_data`, `default_acl`, `use_ssl`.

    Sessions end at a tick of the server, so the bound is that of `Member` and one tick (2 s) more. Cancelled, it ends
    its session: the others do not wait until its time has passed. Whether the members are still those that it knew is
    looked at just before a slot is taken, not in the same step, as in Redis: two may hold one for that moment more.
    """

    def __init__(
        self,
        gate: Gate,
        hosts: str,
        path: str | None = None,
        *,
        ttl: Duration = "10s",
        grace: Duration = "30s",
        **options: Any,
    ) -> None:
        check_gate(gate, Gate, AioGate)
        super().__init__(gate, ttl=ttl, grace=grace, clock=None)
        if not hosts:
            raise InvalidArgument("hosts", hosts, "names no server", 'Pass "host:2181", or several with commas between')
        self.path: str = f"/idemgate/{self.context.namespace}" if path is None else path.rstrip("/")
        if not self.path.startswith("/"):
            raise InvalidArgument("path", path, "not an absolute path", 'Begin it with "/", and name at least one node')
        self.hosts = hosts
        self.options = options
        self._wire: Wire | None = None
        self._topics: dict[str, frozenset[str]] = {}

    # -- what Member asks for -----------------------------------------------------------------------------------------

    @asynccontextmanager
    async def listening(self) -> AsyncGenerator[None]:
        self._topics = {}
        self._wire = wire = Wire(self.hosts, self.ttl, self.options, self.poke)
        try:
            await wire.open(self.context.timeout, f"{self.path}/members", f"{self.path}/held")
            yield
        finally:
            await asyncio.shield(wire.close())

    async def heartbeat(self, said: HeartbeatRequest) -> HeartbeatReply:
        if self.generation:
            return await self._session.within(self.heartbeat_timeout, self._announce(said))
        # An error of the first heartbeat ends the run, so that one is sent again if the connection is lost.
        return await self._session.retry(self.heartbeat_timeout, lambda: self._announce(said))

    async def leave(self) -> None:
        await self._session.within(self.interval, self._leave())

    # -- how ----------------------------------------------------------------------------------------------------------

    @property
    def _session(self) -> Wire:
        assert self._wire is not None, "asked for inside of listening only"
        return self._wire

    async def _announce(self, said: HeartbeatRequest) -> HeartbeatReply:
        await asyncio.gather(*(self._free(slot) for slot in said.released))
        names, generation = await self._present(said)
        if generation == said.generation:
            await asyncio.gather(*(self._session.delete(self._held(slot)) for slot in said.taken_over))
            holders = await self._holders(said.taken_over + said.wanted, take=True)
            return HeartbeatReply(generation, None, holders)
        holders = await self._holders(said.taken_over + said.wanted, take=False)
        return HeartbeatReply(generation, await self._members(names), holders)

    async def _present(self, said: HeartbeatRequest) -> tuple[list[str], int]:
        """Comes, stays or goes; then who is there, and the generation."""
        names, generation = await self._session.children(f"{self.path}/members")
        if (self.member in names) == bool(said.topics):
            return names, generation
        mine = f"{self.path}/members/{self.member}"
        await (self._session.create(mine, " ".join(said.topics)) if said.topics else self._session.delete(mine))
        return await self._session.children(f"{self.path}/members")

    async def _members(self, names: Iterable[str]) -> dict[str, frozenset[str]]:
        """What each serves: read once, for it does not change."""
        new = [name for name in names if name not in self._topics]
        read = await asyncio.gather(*(self._session.text(f"{self.path}/members/{name}") for name in new))
        known = self._topics | {name: frozenset(text.split()) for name, text in zip(new, read, strict=True) if text}
        self._topics = {name: known[name] for name in names if name in known}
        return self._topics

    async def _holders(self, slots: Iterable[Slot], take: bool) -> dict[Slot, str]:
        asked = tuple(slots)
        return dict(zip(asked, await asyncio.gather(*(self._holder(slot, take) for slot in asked)), strict=True))

    async def _holder(self, slot: Slot, take: bool) -> str:
        """Return the holder of a slot: this member, if the slot was free. "" if it is free or was just taken."""
        holder = await self._session.text(self._held(slot))
        if holder is None and take and await self._session.create(self._held(slot), self.member):
            return self.member
        return holder or ""

    async def _free(self, slot: Slot) -> None:
        if await self._session.text(self._held(slot)) == self.member:
            await self._session.delete(self._held(slot))

    async def _leave(self) -> None:
        # The session's end would do the same, but waiting members would wait for that.
        await self._session.delete(f"{self.path}/members/{self.member}")
        names, _ = await self._session.children(f"{self.path}/held")
        slots = (name.rpartition(":") for name in names)
        await asyncio.gather(*(self._free((topic, int(number))) for topic, _, number in slots))

    def _held(self, slot: Slot) -> str:
        return f"{self.path}/held/{slot[0]}:{slot[1]}"
