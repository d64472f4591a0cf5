"""Listener that keeps the due set of expiring keys: it uses events of every primary, and scans for missed keys."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from itertools import islice
from typing import Any, Literal, Protocol

from idemgate.core.backoff import retry_pause
from idemgate.core.calls import Batch
from idemgate.core.clock import monotonic
from idemgate.core.keys import raw
from idemgate.core.waits import finish_despite_cancel, wait_for_wakeup
from idemgate.errors import InvalidArgument, ServerRejected, StoreError, StoreUnavailable
from idemgate.guard.claim import AioClaim, claim_request
from idemgate.guard.options import ClaimOptions
from idemgate.store.context import Context
from idemgate.store.endpoint import Endpoint
from idemgate.store.nodes import Node, database, primaries
from idemgate.store.retry import lacks_cluster_url
from idemgate.subscribers.expiry import rules
from idemgate.topics.messages import Trigger
from idemgate.topics.topic import Topic

__all__ = ["ExpiryListener"]

log: logging.Logger = logging.getLogger("idemgate.subscriber")
BATCH = 500
"""Keys to check, or to put into the due set, in one batch."""
REFRESH_INTERVAL = 5.0
"""Seconds between two reads of a cluster's primaries."""
POLL = 1.0
SETTING = "notify-keyspace-events"
What = Literal["expired", "born", "gone"]
"""The key expired; its time to live may have changed; it may have been deleted."""
EVENTS: dict[What, tuple[str, ...]] = {"expired": (rules.EXPIRED,), "born": rules.BORN, "gone": rules.GONE}


class ExpiryRegistration(Protocol):
    """The part of an `Expiry` that its listener needs."""

    context: Context
    topic: Topic
    pattern: str
    notifications: Literal["check", "set", "assume"]
    scan_seconds: float
    scope: str
    backlog: int

    def matches(self, key: bytes) -> bool: ...
    def look(self, key: bytes) -> Any: ...
    def count(self, what: str, n: int = 1) -> None: ...


class ExpiryListener:
    """One run of a listener. `_events` holds the keys of unprocessed events, with the node that sent each event."""

    def __init__(self, expiry: ExpiryRegistration) -> None:
        self._expiry = expiry
        self._context = expiry.context
        self._facts = {"topic": expiry.topic.name, "pattern": expiry.pattern}
        self._nodes: dict[str, Node] = {}
        self._to_check: set[str] = set()
        self._to_scan: set[str] = set()
        self._events: dict[What, dict[bytes, Node]] = {"expired": {}, "born": {}, "gone": {}}
        self._full = self._open = self._over = False
        self._events_ready, self._maintain_now = asyncio.Event(), asyncio.Event()
        self._refresh_at = self._scan_at = 0.0

    async def run(self, stop: asyncio.Event, grace: float, ready: Callable[[], None] | None) -> None:
        """Run the listener; see `Subscriber.run`."""
        tasks: list[asyncio.Task[Any]] = []
        try:
            with suppress(StoreUnavailable):  # the loops below retry
                await self._expiry.topic.aio.open()
                await self._refresh_primaries()
            if ready is not None:
                ready()
            loops = [
                self._run_loop(self._process_events, self._events_ready),
                self._run_loop(self._maintain, self._maintain_now),
            ]
            tasks = [asyncio.create_task(work) for work in (*loops, stop.wait())]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # raises, unless it is the wait for a stop
        finally:
            self._over = True  # a cancellation that arrives while redis-py connects may be swallowed
            await finish_despite_cancel(self._end(tasks, min(grace, self._context.timeout) if stop.is_set() else 0))

    async def _end(self, tasks: list[asyncio.Task[Any]], seconds: float) -> None:
        """Process the remaining events, since other listeners may have missed them; then close the connections."""
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with suppress(TimeoutError, StoreError):
            async with asyncio.timeout(seconds):
                await self._process_events()
        if left := self._backlog_size():
            self._expiry.count("dropped", left)
            log.warning("expiry.dropped", extra=self._facts | {"count": left})
        for name in tuple(self._nodes):
            await self._nodes.pop(name).close()

    async def _run_loop(self, turn: Callable[[], Awaitable[None]], wake: asyncio.Event) -> None:
        """Run `turn` in a loop, and retry store errors after a pause.

        Raises:
            ServerRejected: A server rejected a command before the listener was open, or the URL must name a cluster.
        """
        failures, pause = 0, 0.0
        while not self._over:
            try:
                await turn()
                failures, pause = 0, POLL
            except StoreError as error:
                if (isinstance(error, ServerRejected) and not self._open) or lacks_cluster_url(error):
                    raise
                failures += 1
                self._report_error(error, failures)
                pause = retry_pause(failures)
            await wait_for_wakeup(wake, pause)

    def _report_error(self, error: StoreError, failures: int = 1) -> None:
        self._expiry.count("store_errors")
        if failures & (failures - 1) == 0:  # 1, 2, 4, 8: a long outage must not flood the log
            log.warning("subscriber.store_error", extra=self._facts | {"error": str(error), "failures": failures})

    # -- primaries ---------------------------------------------------------------------------------------------------

    async def _refresh_primaries(self) -> None:
        """Listen to every primary, and to no other server. A primary that fails is retried next time."""
        known = [node.endpoint for node in self._nodes.values()]
        found = {str(one): one for one in await primaries(self._context.endpoint, known)}
        for name in self._nodes.keys() - found.keys():
            await self._nodes.pop(name).close()
        failed: StoreUnavailable | None = None
        for name, one in found.items():
            try:
                await self._connect(name, one)
            except StoreUnavailable as error:
                self._report_error(error)
                failed = error
        if failed is not None and not self._nodes:
            raise failed
        self._open = True
        self._refresh_at = monotonic() + REFRESH_INTERVAL

    async def _connect(self, name: str, endpoint: Endpoint) -> None:
        """Connect to a new server and plan a scan; check the setting of a known one after a reconnect.

        A new server may have sent events before. After a reconnect the server may be another one.
        """
        if name in self._nodes and not await self._nodes[name].is_primary():
            await self._nodes.pop(name).close()  # the connection leads to a former primary behind the address
        if name not in self._nodes:
            node = Node(endpoint)
            try:
                await self._check(node)
                await self._listen(node)
            except BaseException:
                await finish_despite_cancel(node.close())
                raise
            self._nodes[name] = node
            self._to_scan.add(name)
        elif name in self._to_check:
            await self._check(self._nodes[name])
        self._to_check.discard(name)

    async def _listen(self, node: Node) -> None:
        prefix = f"__keyevent@{database(node.endpoint)}__:"
        await asyncio.gather(
            *(
                node.subscription.add((prefix + event).encode(), self._listener(node, what))
                for what, events in EVENTS.items()
                for event in events
            )
        )

    def _listener(self, node: Node, what: What) -> Callable[[bytes, bytes | None], None]:
        def listen(_channel: bytes, key: bytes | None) -> None:
            if key is None:
                self._on_gap(node, what)
            elif self._is_relevant(key):
                self._on_event(node, what, key)

        return listen

    def _on_event(self, node: Node, what: What, key: bytes) -> None:
        if what == "expired":
            self._expiry.count("heard")
        if self._has_room():
            self._events[what][key] = node
        self._events_ready.set()

    def _on_gap(self, node: Node, what: What) -> None:
        """Plan a check and a scan after a lost connection.

        Keys that expired meanwhile are in the due set, unless they were also created meanwhile.
        """
        if what != "expired":  # one connection, many channels
            return
        self._expiry.count("gaps")
        log.warning("subscriber.gap", extra=self._facts | {"server": node.name})
        self._to_check.add(node.name)
        self._to_scan.add(node.name)
        self._refresh_at = 0.0
        self._maintain_now.set()

    def _is_relevant(self, key: bytes) -> bool:
        if not self._expiry.matches(key):
            return False
        try:
            raw(key)
        except InvalidArgument:
            self._expiry.count("unfit")
            return False
        return True

    def _backlog_size(self) -> int:
        return sum(map(len, self._events.values()))

    def _has_room(self) -> bool:
        """Return False, and count a dropped event, if the backlog is full.

        It never waits: the server disconnects a slow reader, which loses more events. A dropped key is in the due set
        or found by the next scan, unless it expired before that.
        """
        room = self._backlog_size() < self._expiry.backlog
        if not room:
            self._expiry.count("dropped")
            if not self._full:
                log.error("subscriber.backlog_full", extra=self._facts | {"backlog": self._expiry.backlog})
        self._full = not room
        return room

    # -- the server's setting -----------------------------------------------------------------------------------------

    async def _check(self, node: Node) -> None:
        """Check that a server sends expiry events.

        Once the listener is open, a failed check is logged, and the due set and scans must suffice.

        Raises:
            ServerRejected: The server sends no such events, and the listener is not open yet.
        """
        if self._expiry.notifications == "assume" or (problem := await self._find_problem(node)) is None:
            return
        if not self._open:
            raise problem
        self._expiry.count("deaf")
        log.error("expiry.deaf", extra=self._facts | {"server": node.name, "error": str(problem)})

    async def _find_problem(self, node: Node) -> ServerRejected | None:
        try:
            flags = await self._flags(node)
        except ServerRejected as error:
            return ServerRejected(
                f"{node.name} does not let this user read or change {SETTING} ({error}). Set it to {rules.WANTED!r} "
                f'in its redis.conf or parameter group and pass notifications="assume"; or allow CONFIG to this user'
            )
        if not (lacking := rules.missing(flags)):
            return None
        return ServerRejected(
            f"{node.name} sends no events for expired keys: its {SETTING} is {flags!r} and lacks {lacking!r}. "
            f'Run CONFIG SET {SETTING} {rules.add_event_flags(flags)}, or let idemgate do it: notifications="set"'
        )

    async def _flags(self, node: Node) -> str:
        answer = await node.command("CONFIG", "GET", SETTING)
        if not answer:
            raise ServerRejected("the server has no such setting")
        flags = bytes(answer[1]).decode()
        if self._expiry.notifications == "set" and rules.add_event_flags(flags) != flags:
            flags = rules.add_event_flags(flags)
            await node.command("CONFIG", "SET", SETTING, flags)
        return flags

    # -- from events to the due set -----------------------------------------------------------------------------------

    async def _process_events(self) -> None:
        """Put the keys of events into the due set. After an error the remaining keys stay for the next turn."""
        await self._drain("expired", self._mark_expired)
        await self._drain("born", self._register)
        await self._drain("gone", self._mark_deleted)

    async def _drain(self, what: What, work: Callable[[dict[bytes, Node]], Awaitable[None]]) -> None:
        events = self._events[what]
        while part := dict(islice(events.items(), BATCH)):
            for key in part:
                del events[key]
            try:
                await work(part)
            except BaseException:
                self._events[what] = part | events
                raise

    async def _mark_expired(self, keys: Iterable[bytes]) -> None:
        await self._enqueue([rules.timed_out(key) for key in keys])

    async def _register(self, keys: Iterable[bytes]) -> None:
        """Put the keys with a time to live into the due set."""
        found = [rules.due(key, seen) for key, seen in await self._look_many(keys) if seen.expires]
        await self._enqueue(found)
        self._expiry.count("registered", len(found))

    async def _mark_deleted(self, gone: dict[bytes, Node]) -> None:
        """Mark keys as deleted, for events of primaries only.

        A replica also sends a deletion event when its primary expires a key. In doubt a missing key counts as expired.
        """
        primary = {node: await self._is_primary(node) for node in set(gone.values())}
        looks = await self._look_many(key for key, node in gone.items() if primary[node])
        await self._enqueue([rules.taken_away(key, seen) for key, seen in looks if not seen.alive])

    async def _is_primary(self, node: Node) -> bool:
        try:
            return self._nodes.get(node.name) is node and await node.is_primary()
        except StoreError:
            return False

    async def _look_many(self, keys: Iterable[bytes]) -> list[tuple[bytes, rules.Look]]:
        wanted = list(keys)
        calls = [self._expiry.look(key) for key in wanted]
        looks: list[rules.Look] = await self._context.aio_link.run_all(Batch(calls, list))
        return list(zip(wanted, looks, strict=True))

    async def _enqueue(self, triggers: list[Trigger]) -> None:
        if triggers:
            await self._expiry.topic.aio.trigger_many(triggers)

    # -- scans -------------------------------------------------------------------------------------------------------

    async def _maintain(self) -> None:
        """Refresh the primaries and scan: a server at once after a gap, all servers at intervals.

        One listener does the periodic scan for all.
        """
        if monotonic() >= self._refresh_at:
            await self._refresh_primaries()
        for name in self._to_scan & self._nodes.keys():
            await self._scan(self._nodes[name])
            self._to_scan.discard(name)
            self._scan_at = self._scan_at or self._context.now() + self._expiry.scan_seconds
        if self._context.now() >= self._scan_at:
            await self._scan_for_all()

    async def _scan_for_all(self) -> None:
        every = self._expiry.scan_seconds
        options: ClaimOptions = {"scope": f"{self._expiry.scope}.scan", "retention": every}
        async with AioClaim(self._context, claim_request(self._context, "scan", None, options)) as claim:
            if claim.started:
                for node in tuple(self._nodes.values()):
                    await self._scan(node)
        self._scan_at = self._context.now() + (every if claim.started else every / 4)

    async def _scan(self, node: Node) -> None:
        async for keys in node.scan(self._expiry.pattern, BATCH):
            await self._register(filter(self._is_relevant, keys))
        self._expiry.count("scans")
