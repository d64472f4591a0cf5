"""Membership of workers: workers announce themselves, divide the slots, and hand them over drained.

Safety does not depend on it. Two workers that take from one slot still get different messages, and leases and fences
protect each delivery. Membership saves work: only one worker polls each slot, and prefetched messages stay where they
are.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol, runtime_checkable

from idemgate.core import keys
from idemgate.core.calls import new_id
from idemgate.core.clock import Clock, monotonic
from idemgate.core.durations import Duration, milliseconds
from idemgate.core.waits import wait_for_wakeup, watch_moves
from idemgate.errors import InvalidArgument, StoreError
from idemgate.membership.heartbeats import MemberList, heartbeat, leave, list_members
from idemgate.membership.ownership import HeartbeatReply, HeartbeatRequest, Slot, SlotOwnership
from idemgate.store.context import Context, HasContext

__all__ = ["Member", "Membership", "RedisMembership"]

log: logging.Logger = logging.getLogger("idemgate.members")
NONE: frozenset[int] = frozenset()


@runtime_checkable
class Membership(Protocol):
    """One worker's membership: which slots it may take from, and which it has to release.

    A worker uses it as follows:

    1. It calls `on_change(wake)`, then runs `run(stop, {topic: slots, ...})` in a separate task.
    2. It takes from the slots in `assigned_slots(topic)` only. There must be no `await` between that check and
       sending the request. At first no slot is assigned.
    3. Whenever woken, and after each settlement, it returns unstarted deliveries of slots that are not in
       `assigned_slots(topic)`. It calls `release(topic, [slot])` for each slot in `draining(topic)` without
       deliveries: none runs, is unsettled, or may come from a take under way. It never interrupts a running handler.
    4. If the number of a topic's slots changes, it calls `resize`. Members notice such a change one after the other.
    5. To stop, it sets `stop` and continues with step 3 until nothing is left. Then it awaits the task of `run`, which
       ends once all slots are released or the grace time is over. Other members begin to take over when `stop` is set.
    """

    @property
    def member(self) -> str:
        """The member's name, new for each run; "" before the first."""
        ...

    @property
    def members(self) -> tuple[str, ...]:
        """The sorted names of the members that serve a topic, including this one, as of `generation`."""
        ...

    @property
    def generation(self) -> int:
        """A number that rises with every change of the members or of their topics; 0 before the first run."""
        ...

    async def run(self, stop: asyncio.Event, topics: Mapping[str, int]) -> None:
        """Be a member until `stop` is set and all slots are released.

        If cancelled, it ends without leaving, as a killed process would. Other members then wait for its ttl.

        Args:
            stop: Event that makes the member leave.
            topics: Number of slots of each topic.

        Raises:
            InvalidArgument: It is running already.
            StoreError: The first announcement failed. Later failures are retried without limit.
        """
        ...

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever `assigned_slots` or `draining` changes, in the event loop of `run`.

        It is also called once after the first announcement, even without a change.
        """
        ...

    def assigned_slots(self, topic: str) -> frozenset[int]:
        """Return the slots to take from now. None is assigned after a whole `ttl` without a successful heartbeat."""
        ...

    def draining(self, topic: str) -> frozenset[int]:
        """Return the slots that other members cannot get before they are released."""
        ...

    def resize(self, topic: str, slots: int) -> None:
        """Set the number of slots of a topic. Slots that no longer exist are drained."""
        ...

    def release(self, topic: str, slots: Iterable[int]) -> None:
        """Release drained slots. Assigned slots are kept, and slots that are not held are ignored."""
        ...


class Member(ABC):
    """A base class for memberships. It tracks which slots are held and requested, and when the member may leave.

    Subclasses store the list of members: they implement `listening`, `heartbeat` and `leave`.

    While at least one member lives, every slot gets an owner at most ttl + ttl/3 + grace after the last change of the
    members:

    - A member that leaves releases a slot once it is drained. After `grace` it stops waiting.
    - A killed member expires after `ttl`. The others notice within ttl/3.
    - A partitioned member expires likewise. It has stopped taking by then, since it counts the same ttl.
    - A member that does not drain, because a thread does not end, keeps a slot for `grace` after the last change of the
      members. Then the new owner takes it over.

    Two members hold a slot only between such a takeover and the end of the old owner's drain. The old owner takes
    nothing from it. Exception: if `grace` is shorter than `ttl`, a partitioned owner may take for the difference at
    most. Hints shorten all of these times to a round trip, but correctness does not depend on them.

    Counters: `members.store_unavailable`, `members.lapsed` (no successful heartbeat within the ttl),
    `members.taken_over` (slots taken without a hand-over), `members.undrained` (slots still held when it left).

    Args:
        gate: The gate, for its counters and timeout.
        ttl: How long a heartbeat is valid. It is repeated every third of this time.
        grace: How long a new owner waits for a slot to be drained, and how long a leaving member may drain. Use the
            worker's grace time.
        clock: The clock to use instead of a monotonic one, for tests.
    """

    def __init__(self, gate: HasContext, *, ttl: Duration, grace: Duration, clock: Clock | None) -> None:
        self.context: Context = gate.context
        self.ttl: float = milliseconds(ttl, "ttl") / 1000
        self.grace: float = milliseconds(grace, "grace", zero=True) / 1000
        self.interval: float = self.ttl / 3
        self._clock = clock
        self._elapsed = self._last_read = 0.0
        self._listeners: list[Callable[[], None]] = []
        self._running = False
        self._reset({})

    def _reset(self, topics: Mapping[str, int]) -> None:
        # A new name for each run: heartbeats are numbered per name, and a forked child is another member.
        name = f"{socket.gethostname()}-{os.getpid()}-{new_id().hex()}" if topics else ""
        self._ownership = SlotOwnership(name, topics, self.grace * 1000)
        self._wake = asyncio.Event()
        self._due = self._valid_until = self._leaves_at = 0.0
        self._failures, self._failing_since = 0, 0.0
        self._lapsed = False
        self._assigned: dict[str, frozenset[int]] = {}
        self._draining: dict[str, frozenset[int]] = {}

    # -- to be implemented by subclasses ------------------------------------------------------------------------------

    @abstractmethod
    def listening(self) -> AbstractAsyncContextManager[None]:
        """Return a context manager that calls `poke`, in the event loop, when members or slots may have changed."""

    @abstractmethod
    async def heartbeat(self, request: HeartbeatRequest) -> HeartbeatReply:
        """Execute one heartbeat.

        Raises:
            StoreError: It is not certain that the heartbeat was executed.
        """

    @abstractmethod
    async def leave(self) -> None:
        """Remove this member with all its slots.

        Raises:
            StoreError: The store failed.
        """

    @property
    def heartbeat_timeout(self) -> float:
        """The seconds that a heartbeat may take: until the next one is due. The first may take the gate's timeout."""
        return self.interval if self.generation else max(self.context.timeout, self.interval)

    # -- for the worker -----------------------------------------------------------------------------------------------

    @property
    def member(self) -> str:
        return self._ownership.me

    @property
    def members(self) -> tuple[str, ...]:
        return tuple(sorted(self._ownership.members))

    @property
    def generation(self) -> int:
        return self._ownership.generation

    def on_change(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)

    def assigned_slots(self, topic: str) -> frozenset[int]:
        return self._assigned.get(topic, NONE) if self._now() < self._valid_until else NONE

    def draining(self, topic: str) -> frozenset[int]:
        draining = self._draining.get(topic, NONE)
        return draining if self._now() < self._valid_until else draining | self._assigned.get(topic, NONE)

    def resize(self, topic: str, slots: int) -> None:
        self._ownership.resize(topic, slots)
        self._publish()
        self.poke()

    def release(self, topic: str, slots: Iterable[int]) -> None:
        kept = self.assigned_slots(topic)
        if self._ownership.release((topic, slot) for slot in slots if slot not in kept):
            self._publish()
            self.poke()

    # -- the member's loop --------------------------------------------------------------------------------------------

    async def run(self, stop: asyncio.Event, topics: Mapping[str, int]) -> None:
        if self._running:
            raise InvalidArgument("membership", self, "serves another worker already", "Make one for each worker")
        self._running = True
        self._reset(topics)
        watch_moves(self._clock, self._wake.set)
        stopping = asyncio.create_task(self._begin_to_leave(stop))
        try:
            async with self.listening():
                if await self._send_heartbeat():  # joined; the requests that follow are retried without limit
                    await self._try_heartbeats()
                log.info("members.joined", extra={"member": self.member, "members": len(self.members)})
                self._notify()
                while not self._may_leave():
                    await self._sleep()
                    await self._try_heartbeats()
                await self._leave_members()
        finally:
            stopping.cancel()
            self._running = False

    def poke(self) -> None:
        """Send a heartbeat now, since the members or slots may have changed. Event loop only."""
        self._due = 0.0
        self._wake.set()

    async def _begin_to_leave(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self._leaves_at = self._now() + self.grace * 1000
        self._ownership.leave()
        self._publish()
        self.poke()

    def _may_leave(self) -> bool:
        """Return True once the member leaves and has nothing left to wait for."""
        ownership = self._ownership
        return ownership.leaving and (not ownership.held or self._lapsed or self._now() >= self._leaves_at)

    async def _leave_members(self) -> None:
        if undrained := len(self._ownership.held):
            self.context.counters.add("members.undrained", undrained)
        log.info("members.left", extra={"member": self.member, "undrained": undrained})
        try:
            await self.leave()
        except StoreError as error:
            log.warning("members.store_unavailable", extra={"member": self.member, "error": str(error)})

    async def _try_heartbeats(self) -> None:
        """Send heartbeats until the store needs no more, for instance after a change of the members."""
        try:
            while await self._send_heartbeat():
                pass
            if self._failures:
                seconds = round((self._now() - self._failing_since) / 1000, 3)
                facts = {"member": self.member, "seconds": seconds}
                log.warning("members.store_back member=%r seconds=%g", *facts.values(), extra=facts)
            self._failures = 0
            if self._lapsed:
                self._lapsed = False
                self._notify()
        except StoreError as error:
            from idemgate.store.retry import lacks_cluster_url  # it imports redis, which the front door must not

            if lacks_cluster_url(error):
                raise
            if self._failures == 0:
                self._failing_since = self._now()
                log.warning("members.store_unavailable", extra={"member": self.member, "error": str(error)})
            self._failures += 1
            self.context.counters.add("members.store_unavailable")
        if self._now() >= self._valid_until and not self._lapsed:
            self._lapsed = True
            self.context.counters.add("members.lapsed")
            log.warning("members.lapsed", extra={"member": self.member})
            self._notify()

    async def _send_heartbeat(self) -> bool:
        """Send one heartbeat; return True if another should follow at once."""
        sent = self._now()
        if sent >= self._valid_until:
            self._ownership.doubt()
        request = self._ownership.next_request(sent)
        self._due = sent + self.interval * 1000  # before the call, so that a hint during it counts
        try:
            reply = await self.heartbeat(request)
        except BaseException:
            self._ownership.mark_unanswered(request)
            raise
        self._valid_until = sent + self.ttl * 1000  # the store counts from a later moment
        more = self._ownership.apply_reply(request, reply, self._now())
        if taken_over := sum(reply.holders[slot] == self.member for slot in request.taken_over):
            self.context.counters.add("members.taken_over", taken_over)
            log.warning("members.taken_over", extra={"member": self.member, "slots": taken_over})
        self._publish()
        return more

    async def _sleep(self) -> None:
        """Sleep until the next heartbeat, takeover or the end of the grace time; after a failure, until the retry."""
        if self._failures:
            await asyncio.sleep(min(1.0, self.interval, 0.02 * 2 ** min(self._failures, 6)))
            return
        while (left := min(self._due, self._ownership.takes_over_at, self._leaves_at or self._due) - self._now()) > 0:
            await wait_for_wakeup(self._wake, left / 1000)

    # -- listeners ----------------------------------------------------------------------------------------------------

    def _publish(self) -> None:
        assigned, draining = _by_topic(self._ownership.assigned_slots), _by_topic(self._ownership.draining)
        if (assigned, draining) != (self._assigned, self._draining):
            self._assigned, self._draining = assigned, draining
            self._notify()

    def _notify(self) -> None:
        for listener in tuple(self._listeners):
            listener()

    # -- time ---------------------------------------------------------------------------------------------------------

    def _now(self) -> float:
        """Return a time in ms that never goes back. If the clock is set back, it stands still for that one step."""
        read = monotonic() * 1000 if self._clock is None else self._clock.microseconds() / 1000
        self._elapsed += max(0.0, read - self._last_read)
        self._last_read = read
        return self._elapsed


class RedisMembership(Member):
    """A membership kept in the gate's own store, on the server's clock (or the gate's test clock).

    It costs one script call every third of `ttl`, and one more for each change of the members. A process whose event
    loop is blocked for `ttl` has left.

    Args:
        gate: The gate whose store keeps the members.
        group: Name of the group. The members of one group divide the slots of the topics they have in common.
        ttl: See `Member`.
        grace: See `Member`.
    """

    def __init__(
        self, gate: HasContext, group: str = "workers", *, ttl: Duration = "10s", grace: Duration = "30s"
    ) -> None:
        super().__init__(gate, ttl=ttl, grace=grace, clock=gate.context.clock)
        self.group: str = keys.check_name(group, "group")

    @asynccontextmanager
    async def listening(self) -> AsyncGenerator[None]:
        subscription = self.context.aio_link.subscription()
        try:
            channel = keys.members(self.context.namespace, self.group)[0]
            await subscription.add(channel, lambda _channel, _data: self.poke())
            yield
        finally:
            await subscription.close()

    async def heartbeat(self, request: HeartbeatRequest) -> HeartbeatReply:
        context = self.context
        call = heartbeat(context.namespace, self.group, context.clock, request, round(self.ttl * 1000))
        return await context.aio_link.run(call, within=min(context.timeout, self.heartbeat_timeout))

    async def leave(self) -> None:
        context = self.context
        await context.aio_link.run(leave(context.namespace, self.group, context.clock, self.member))

    async def list_members(self) -> MemberList:
        """Return the members and the holders of slots, as the store knows them.

        Raises:
            StoreError: The store failed.
        """
        context = self.context
        return await context.aio_link.run(list_members(context.namespace, self.group, context.clock))


def _by_topic(slots: Iterable[Slot]) -> dict[str, frozenset[int]]:
    numbers: dict[str, set[int]] = {}
    for topic, number in slots:
        numbers.setdefault(topic, set()).add(number)
    return {topic: frozenset(slots) for topic, slots in numbers.items()}
