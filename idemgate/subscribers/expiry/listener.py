"""What keeps the due set of expiring keys: events of every primary, and scans for what no event told."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from itertools import islice
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal

from idemgate.core.backoff import retry_pause
from idemgate.core.calls import Batch
from idemgate.core.keys import raw
from idemgate.errors import InvalidArgument, ServerRejected, StoreError, StoreUnavailable
from idemgate.guard.claim import AioClaim
from idemgate.guard.options import ClaimOptions, attempt_of
from idemgate.store.cluster.nodes import Node, database, primaries
from idemgate.store.endpoint import Endpoint
from idemgate.store.shielded import to_the_end
from idemgate.subscribers.expiry import rules as expiry
from idemgate.topics.messages import Trigger

if TYPE_CHECKING:
    from idemgate.subscribers.expiry.expiry import Expiry

__all__ = ["Hearing"]

log = logging.getLogger("idemgate.subscriber")
TOGETHER = 500
"""Keys that are looked at, or put into the due set, together."""
FOLLOW = 5.0
"""How often a cluster is asked who its primaries are, seconds."""
POLL = 1.0
SETTING = "notify-keyspace-events"
What = Literal["expired", "born", "gone"]
"""It expired; it may have another time to live; it may have been deleted."""
EVENTS: dict[What, tuple[str, ...]] = {"expired": (expiry.EXPIRED,), "born": expiry.BORN, "gone": expiry.GONE}


class Hearing:
    """One run of a listener. `_heard`: the keys of events that were not passed on yet, and which node said so."""

    def __init__(self, of: Expiry) -> None:
        self._of = of
        self._context = of.context
        self._facts = {"topic": of.topic.name, "pattern": of.pattern}
        self._nodes: dict[str, Node] = {}
        self._unchecked: set[str] = set()
        self._unscanned: set[str] = set()
        self._heard: dict[What, dict[bytes, Node]] = {"expired": {}, "born": {}, "gone": {}}
        self._full = self._open = self._over = False
        self._to_pass, self._to_keep = asyncio.Event(), asyncio.Event()
        self._follow_at = self._scan_at = 0.0

    async def run(self, stop: asyncio.Event, grace: float, ready: Callable[[], None] | None) -> None:
        """As `Subscriber.run`."""
        tasks: list[asyncio.Task[Any]] = []
        try:
            with suppress(StoreUnavailable):  # then it begins when the store is there
                await self._of.topic.aio.open()
                await self._follow()
            if ready is not None:
                ready()
            turning = [self._turning(self._pass_on, self._to_pass), self._turning(self._keep, self._to_keep)]
            tasks = [asyncio.create_task(work) for work in (*turning, stop.wait())]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # it can never work, unless it was told to stop
        finally:
            self._over = True  # a cancellation that arrives while redis-py connects may be swallowed
            await to_the_end(self._end(tasks, min(grace, self._context.timeout) if stop.is_set() else 0))

    async def _end(self, tasks: list[asyncio.Task[Any]], seconds: float) -> None:
        """Passes on what was heard: perhaps nobody else did."""
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with suppress(TimeoutError, StoreError):
            async with asyncio.timeout(seconds):
                await self._pass_on()
        if left := self._waiting():
            self._of.count("dropped", left)
            log.warning("expiry.dropped", extra=self._facts | {"count": left})
        for name in tuple(self._nodes):
            await self._nodes.pop(name).close()

    async def _turning(self, turn: Callable[[], Awaitable[None]], wake: asyncio.Event) -> None:
        """Takes turns until it is over; waits out what the store does not answer. Raises ServerRejected before it has
        begun."""
        failures, pause = 0, 0.0
        while not self._over:
            try:
                await turn()
                failures, pause = 0, POLL
            except StoreError as error:
                if isinstance(error, ServerRejected) and not self._open:
                    raise
                failures += 1
                self._trouble(error, failures)
                pause = retry_pause(failures)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await wake.wait()
            wake.clear()

    def _trouble(self, error: StoreError, failures: int = 1) -> None:
        self._of.count("store_errors")
        if failures & (failures - 1) == 0:  # 1, 2, 4, 8: an hour without a store is not a thousand lines
            log.warning("subscriber.store_error", extra=self._facts | {"error": str(error), "failures": failures})

    # -- whom to listen to --------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        """Listens to every primary there is, and to no other server. One that does not answer is asked again next
        time."""
        known = [node.endpoint for node in self._nodes.values()]
        found = {str(one): one for one in await primaries(self._context.endpoint, known)}
        for name in self._nodes.keys() - found.keys():
            await self._nodes.pop(name).close()
        failed: StoreUnavailable | None = None
        for name, one in found.items():
            try:
                await self._meet(name, one)
            except StoreUnavailable as error:
                self._trouble(error)
                failed = error
        if failed is not None and not self._nodes:
            raise failed
        self._open = True
        self._follow_at = monotonic() + FOLLOW

    async def _meet(self, name: str, endpoint: Endpoint) -> None:
        """A new server may have said something before; one whose connection broke may be another one now."""
        if name not in self._nodes:
            node = Node(endpoint)
            try:
                await self._check(node)
                await self._listen(node)
            except BaseException:
                await to_the_end(node.close())
                raise
            self._nodes[name] = node
            self._unscanned.add(name)
        elif name in self._unchecked:
            await self._check(self._nodes[name])
        self._unchecked.discard(name)

    async def _listen(self, node: Node) -> None:
        prefix = f"__keyevent@{database(node.endpoint)}__:"
        await asyncio.gather(
            *(
                node.ear.add((prefix + event).encode(), self._listener(node, what))
                for what, events in EVENTS.items()
                for event in events
            )
        )

    def _listener(self, node: Node, what: What) -> Callable[[bytes, bytes | None], None]:
        def listen(_channel: bytes, key: bytes | None) -> None:
            if key is None:
                self._on_gap(node, what)
            elif self._meant(key):
                self._on_event(node, what, key)

        return listen

    def _on_event(self, node: Node, what: What, key: bytes) -> None:
        if what == "expired":
            self._of.count("heard")
        if self._room():
            self._heard[what][key] = node
        self._to_pass.set()

    def _on_gap(self, node: Node, what: What) -> None:
        """The connection was lost: what expired meanwhile is in the due set, unless it also began meanwhile."""
        if what != "expired":  # one connection, many channels
            return
        self._of.count("gaps")
        log.warning("subscriber.gap", extra=self._facts | {"server": node.name})
        self._unchecked.add(node.name)
        self._unscanned.add(node.name)
        self._follow_at = 0.0
        self._to_keep.set()

    def _meant(self, key: bytes) -> bool:
        if not self._of.matches(key):
            return False
        try:
            raw(key)
        except InvalidArgument:
            self._of.count("unfit")
            return False
        return True

    def _waiting(self) -> int:
        return sum(map(len, self._heard.values()))

    def _room(self) -> bool:
        """Never waits: a slow reader is disconnected by the server, which loses more than one event. What is dropped
        here the due set knows, or the next scan finds, unless it has expired unknown."""
        room = self._waiting() < self._of.backlog
        if not room:
            self._of.count("dropped")
            if not self._full:
                log.error("subscriber.backlog_full", extra=self._facts | {"backlog": self._of.backlog})
        self._full = not room
        return room

    # -- the server's setting -----------------------------------------------------------------------------------------

    async def _check(self, node: Node) -> None:
        """That it says what expires. ServerRejected if not; once begun, it goes on with what it knows and finds."""
        if self._of.notifications == "assume" or (problem := await self._problem(node)) is None:
            return
        if not self._open:
            raise problem
        self._of.count("deaf")
        log.error("expiry.deaf", extra=self._facts | {"server": node.name, "error": str(problem)})

    async def _problem(self, node: Node) -> ServerRejected | None:
        try:
            flags = await self._flags(node)
        except ServerRejected as error:
            return ServerRejected(
                f"{node.name} does not let this user read or change {SETTING} ({error}). Set it to {expiry.WANTED!r} "
                f'in its redis.conf or parameter group and say notifications="assume"; or allow CONFIG to this user'
            )
        if not (lacking := expiry.missing(flags)):
            return None
        return ServerRejected(
            f"{node.name} does not say which keys expire: its {SETTING} is {flags!r} and lacks {lacking!r}. "
            f'Say CONFIG SET {SETTING} {expiry.added(flags)}, or let idemgate do it: notifications="set"'
        )

    async def _flags(self, node: Node) -> str:
        answer = await node.command("CONFIG", "GET", SETTING)
        if not answer:
            raise ServerRejected("it knows no such setting")
        flags = bytes(answer[1]).decode()
        if self._of.notifications == "set" and expiry.added(flags) != flags:
            flags = expiry.added(flags)
            await node.command("CONFIG", "SET", SETTING, flags)
        return flags

    # -- from events to the due set -----------------------------------------------------------------------------------

    async def _pass_on(self) -> None:
        """Puts what was heard into the due set; what cannot be put there now stays."""
        await self._drain("expired", self._time_out)
        await self._drain("born", self._register)
        await self._drain("gone", self._take_away)

    async def _drain(self, what: What, work: Callable[[dict[bytes, Node]], Awaitable[None]]) -> None:
        heard = self._heard[what]
        while part := dict(islice(heard.items(), TOGETHER)):
            for key in part:
                del heard[key]
            try:
                await work(part)
            except BaseException:
                self._heard[what] = part | heard
                raise

    async def _time_out(self, keys: Iterable[bytes]) -> None:
        await self._put([expiry.timed_out(key) for key in keys])

    async def _register(self, keys: Iterable[bytes]) -> None:
        """Those that live, and will expire."""
        found = [expiry.due(key, seen) for key, seen in await self._looks(keys) if seen.expires]
        await self._put(found)
        self._of.count("registered", len(found))

    async def _take_away(self, gone: dict[bytes, Node]) -> None:
        """Believes only primaries: a replica, too, speaks of deletion, when its primary tells it that a key expired.
        Where in doubt, a key that is gone has expired."""
        primary = {node: await self._is_primary(node) for node in set(gone.values())}
        looks = await self._looks(key for key, node in gone.items() if primary[node])
        await self._put([expiry.taken_away(key, seen) for key, seen in looks if not seen.alive])

    async def _is_primary(self, node: Node) -> bool:
        try:
            return self._nodes.get(node.name) is node and await node.is_primary()
        except StoreError:
            return False

    async def _looks(self, keys: Iterable[bytes]) -> list[tuple[bytes, expiry.Look]]:
        wanted = list(keys)
        calls = [self._of.look(key) for key in wanted]
        looks: list[expiry.Look] = await self._context.aio_link.run_all(Batch(calls, list))
        return list(zip(wanted, looks, strict=True))

    async def _put(self, triggers: list[Trigger]) -> None:
        if triggers:
            await self._of.topic.aio.trigger_many(triggers)

    # -- what no event told -------------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        """Follows the primaries; scans a server at once after a gap, and all of them now and then, for all
        listeners."""
        if monotonic() >= self._follow_at:
            await self._follow()
        for name in self._unscanned & self._nodes.keys():
            await self._scan(self._nodes[name])
            self._unscanned.discard(name)
            self._scan_at = self._scan_at or self._context.now() + self._of.scan_seconds
        if self._context.now() >= self._scan_at:
            await self._scan_for_all()

    async def _scan_for_all(self) -> None:
        every = self._of.scan_seconds
        options: ClaimOptions = {"scope": f"{self._of.scope}.scan", "retention": every}
        async with AioClaim(self._context, attempt_of(self._context, "scan", None, options)) as claim:
            if claim.started:
                for node in tuple(self._nodes.values()):
                    await self._scan(node)
        self._scan_at = self._context.now() + (every if claim.started else every / 4)

    async def _scan(self, node: Node) -> None:
        async for keys in node.scan(self._of.pattern, TOGETHER):
            await self._register(filter(self._meant, keys))
        self._of.count("scans")
