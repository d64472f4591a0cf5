"""Who serves which slot: workers announce themselves, divide the slots, and hand them over drained.

Safety never depends on it: two workers that take from one slot still get different messages, and leases and fences hold
as ever. It spares work: each slot is asked about by one worker, and prefetched messages do not change hands.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from time import monotonic
from typing import Protocol, runtime_checkable

from idemgate.core import keys
from idemgate.core.clock import Clock
from idemgate.core.durations import Duration, milliseconds
from idemgate.core.tokens import token
from idemgate.errors import InvalidArgument, StoreError
from idemgate.membership import calls as members
from idemgate.membership.ownership import Announcement, Holdings, Roll, Slot
from idemgate.store.context import HasContext

__all__ = ["Member", "Membership", "RedisMembership"]

log = logging.getLogger("idemgate.members")
NONE: frozenset[int] = frozenset()


@runtime_checkable
class Membership(Protocol):
    """A worker's place among the workers: which slots it may take from, and which it has to give up.

    How a worker uses it:

    1. `on_change(wake)` for each of its topics, then `run(stop, {topic: slots, ...})` in a task of its own.
    2. Before each take: from the slots in `assigned(topic)` and no others, and without an `await` between asking and
       sending. At first there are none.
    3. Whenever woken, and after each settlement: deliveries of slots that are not in `assigned(topic)` and were not
       started go back ("return"). Each slot in `draining(topic)` of which nothing is left, neither running nor
       unsettled nor in a take under way, is let go: `release(topic, [slot])`. No running handler is interrupted.
    4. When a topic was given another number of slots, `resize`; the members learn of it one after the other.
    5. To stop: set `stop`, go on as in 3 until nothing is left, then await the task of `run`, which ends when all is
       released (or the grace time is over). Others begin to take over as soon as `stop` is set.
    """

    @property
    def member(self) -> str:
        """Its name, new with each run; "" before the first."""
        ...

    @property
    def members(self) -> tuple[str, ...]:
        """The names of those that serve something, itself among them, sorted; as of `generation`."""
        ...

    @property
    def generation(self) -> int:
        """A number that rises with every change of the members and of the topics they serve; 0 before the first."""
        ...

    async def run(self, stop: asyncio.Event, topics: Mapping[str, int]) -> None:
        """Is a member until `stop` is set and everything is released. `topics`: number of slots by topic.

        InvalidArgument if it runs already. StoreError if it cannot announce itself at the start; later it tries for as long
        as it takes. Cancelled, it says nothing, as a killed process would, and the others wait until its time has
        passed.
        """
        ...

    def on_change(self, listener: Callable[[], None]) -> None:
        """Calls `listener`, in the event loop of `run`, whenever `assigned` or `draining` changed, and once in any
        case: when the first announcement was heard."""
        ...

    def assigned(self, topic: str) -> frozenset[int]:
        """The slots to take from now. None at all once it could not announce itself for its whole `ttl`."""
        ...

    def draining(self, topic: str) -> frozenset[int]:
        """The slots that are kept from others until they are released."""
        ...

    def resize(self, topic: str, slots: int) -> None:
        """The topic has another number of slots from now on. Those it shares with the others are of the new number; a
        slot that there is no more is drained."""
        ...

    def release(self, topic: str, slots: Iterable[int]) -> None:
        """Lets go what is drained. Slots that are assigned (again) are kept, those it does not hold passed over."""
        ...


class Member(ABC):
    """A Membership that keeps its side of the agreement: what it holds, what it waits for, when it stops.

    Where the list of members is kept is its subclass's business: `listening`, `announce`, `leave`.

    Every slot of a topic has a taker at most ttl + ttl/3 + grace after the last change of the members, while one lives:

    - left: as soon as it is drained, or `grace` after;
    - killed: its announcement lapses after `ttl`, and the others notice within ttl/3;
    - partitioned: the same, and by then it has stopped taking, for its own time since it was last heard is over, too;
    - alive, but not draining (a handler in a thread that does not end): the new owner waits for `grace`, counted from
      the last change of the members, and seizes it.

    Between seizing and the end of the old owner's drain, and nowhere else, a slot is in two hands, and the old one
    takes nothing from it (unless `grace` is shorter than `ttl` and it is cut off: then for the difference at most).
    Hints shorten all of it to a round trip; none of them is needed.

    - `ttl`: how long an announcement holds; repeated every third of it.
    - `grace`: how long a new owner waits for a slot to be drained, and how long a leaving member may drain. As long as
      the worker's.

    Counted in `gate.counters`: `members.store_away`, `members.lapsed` (could not announce itself in time),
    `members.seized` (slots taken without a hand-over), `members.undrained` (slots still held when it left).
    """

    def __init__(self, gate: HasContext, *, ttl: Duration, grace: Duration, clock: Clock | None) -> None:
        self.context = gate.context
        self.ttl = milliseconds(ttl, "ttl") / 1000
        self.grace = milliseconds(grace, "grace", zero=True) / 1000
        self.interval = self.ttl / 3
        self._clock = clock
        self._passed = self._read = 0.0
        self._listeners: list[Callable[[], None]] = []
        self._running = False
        self._begin({})

    def _begin(self, topics: Mapping[str, int]) -> None:
        # A name of its own for each run: announcements are numbered, and a forked child is somebody else.
        name = f"{socket.gethostname()}-{os.getpid()}-{token().hex()}" if topics else ""
        self._holdings = Holdings(name, topics, self.grace * 1000)
        self._wake = asyncio.Event()
        self._due = self._until = self._leaves_at = 0.0
        self._failures = 0
        self._lapsed = False
        self._mine: dict[str, frozenset[int]] = {}
        self._drained: dict[str, frozenset[int]] = {}

    # -- what the store does ------------------------------------------------------------------------------------------

    @abstractmethod
    def listening(self) -> AbstractAsyncContextManager[None]:
        """While inside, `poke` is called, in the event loop, when the members or their slots may have changed."""

    @abstractmethod
    async def announce(self, said: Announcement) -> Roll:
        """Carries one announcement out, and answers; StoreError if that is not certain."""

    @abstractmethod
    async def leave(self) -> None:
        """Takes this member away with everything it holds; StoreError."""

    @property
    def patience(self) -> float:
        """Seconds that an announcement may take: until the next is due; the first, after which none is, may take all of
        the gate's `timeout`."""
        return self.interval if self.generation else max(self.context.timeout, self.interval)

    # -- what a worker asks -------------------------------------------------------------------------------------------

    @property
    def member(self) -> str:
        return self._holdings.me

    @property
    def members(self) -> tuple[str, ...]:
        return tuple(sorted(self._holdings.members))

    @property
    def generation(self) -> int:
        return self._holdings.generation

    def on_change(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)

    def assigned(self, topic: str) -> frozenset[int]:
        return self._mine.get(topic, NONE) if self._now() < self._until else NONE

    def draining(self, topic: str) -> frozenset[int]:
        drained = self._drained.get(topic, NONE)
        return drained if self._now() < self._until else drained | self._mine.get(topic, NONE)

    def resize(self, topic: str, slots: int) -> None:
        self._holdings.resize(topic, slots)
        self._published()
        self.poke()

    def release(self, topic: str, slots: Iterable[int]) -> None:
        kept = self.assigned(topic)
        if self._holdings.release((topic, slot) for slot in slots if slot not in kept):
            self._published()
            self.poke()

    # -- being a member -----------------------------------------------------------------------------------------------

    async def run(self, stop: asyncio.Event, topics: Mapping[str, int]) -> None:
        if self._running:
            raise InvalidArgument("members", self, "serves another worker already", "Make one for each worker")
        self._running = True
        self._begin(topics)
        self._watch_clock()
        stopping = asyncio.create_task(self._stopped(stop))
        try:
            async with self.listening():
                if await self._turn():  # announced it is; what it asks for next may take as long as it takes
                    await self._try_round()
                log.info("members.joined", extra={"member": self.member, "members": len(self.members)})
                self._tell()
                while not self._over():
                    await self._rest()
                    await self._try_round()
                await self._go()
        finally:
            stopping.cancel()
            self._running = False

    def poke(self) -> None:
        """Something may have changed: announces and looks now rather than when it is due. Event loop only."""
        self._due = 0.0
        self._wake.set()

    async def _stopped(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self._leaves_at = self._now() + self.grace * 1000
        self._holdings.leave()
        self._published()
        self.poke()

    def _over(self) -> bool:
        """Whether there is nothing left to wait for."""
        holdings = self._holdings
        return holdings.leaving and (not holdings.held or self._lapsed or self._now() >= self._leaves_at)

    async def _go(self) -> None:
        if undrained := len(self._holdings.held):
            self.context.counters.add("members.undrained", undrained)
        log.info("members.left", extra={"member": self.member, "undrained": undrained})
        try:
            await self.leave()
        except StoreError as error:
            log.warning("members.store_away", extra={"member": self.member, "error": str(error)})

    async def _try_round(self) -> None:
        try:
            await self._round()
            self._failures = 0
            if self._lapsed:
                self._lapsed = False
                self._tell()
        except StoreError as error:
            if self._failures == 0:
                log.warning("members.store_away", extra={"member": self.member, "error": str(error)})
            self._failures += 1
            self.context.counters.add("members.store_away")
        if self._now() >= self._until and not self._lapsed:
            self._lapsed = True
            self.context.counters.add("members.lapsed")
            log.warning("members.lapsed", extra={"member": self.member})
            self._tell()

    async def _round(self) -> None:
        """Announces until there is nothing more to say: when the members changed, it asks for other slots."""
        while await self._turn():
            pass

    async def _turn(self) -> bool:
        asked = self._now()
        if asked >= self._until:
            self._holdings.doubt()
        said = self._holdings.announcement(asked)
        self._due = asked + self.interval * 1000  # before the call: a hint during it counts
        try:
            roll = await self.announce(said)
        except BaseException:
            self._holdings.unheard(said)
            raise
        self._until = asked + self.ttl * 1000  # the store counts from when it heard, which was later
        again = self._holdings.heard(said, roll, self._now())
        if seized := sum(roll.holders[slot] == self.member for slot in said.seized):
            self.context.counters.add("members.seized", seized)
            log.warning("members.seized", extra={"member": self.member, "slots": seized})
        self._published()
        return again

    async def _rest(self) -> None:
        """Until something is due; after a failure, until it is time to try again."""
        if self._failures:
            await asyncio.sleep(min(1.0, self.interval, 0.02 * 2 ** min(self._failures, 6)))
            return
        while (left := min(self._due, self._holdings.seizes_at, self._leaves_at or self._due) - self._now()) > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(left / 1000):  # wait_for of Python 3.11 may swallow a cancellation
                    await self._wake.wait()
            self._wake.clear()

    # -- telling ------------------------------------------------------------------------------------------------------

    def _published(self) -> None:
        mine, drained = _by_topic(self._holdings.assigned), _by_topic(self._holdings.draining)
        if (mine, drained) != (self._mine, self._drained):
            self._mine, self._drained = mine, drained
            self._tell()

    def _tell(self) -> None:
        for listener in tuple(self._listeners):
            listener()

    # -- time ---------------------------------------------------------------------------------------------------------

    def _now(self) -> float:
        """ms of a time of its own, which a clock that is set back only holds up for that moment."""
        read = monotonic() * 1000 if self._clock is None else self._clock.microseconds() / 1000
        self._passed += max(0.0, read - self._read)
        self._read = read
        return self._passed

    def _watch_clock(self) -> None:
        watch = getattr(self._clock, "on_move", None)
        if watch is not None:
            loop, wake = asyncio.get_running_loop(), self._wake

            def moved() -> None:
                if not loop.is_closed():
                    loop.call_soon_threadsafe(wake.set)

            watch(moved)


class RedisMembership(Member):
    """A Membership kept in the gate's own store, on the server's clock (or the gate's test clock).

    - `group`: those of one group divide the slots of the topics they have in common.
    - `ttl`, `grace`: see `Member`. A process whose event loop stands still for `ttl` has left.

    One script call every third of `ttl`, and one more for each change of the members.
    """

    def __init__(
        self, gate: HasContext, group: str = "workers", *, ttl: Duration = "10s", grace: Duration = "30s"
    ) -> None:
        super().__init__(gate, ttl=ttl, grace=grace, clock=gate.context.clock)
        self.group = keys.check_name(group, "group")

    @asynccontextmanager
    async def listening(self) -> AsyncGenerator[None]:
        ear = self.context.aio_link.ear()
        try:
            await ear.add(keys.members(self.context.namespace, self.group)[0], lambda _channel, _data: self.poke())
            yield
        finally:
            await ear.close()

    async def announce(self, said: Announcement) -> Roll:
        context = self.context
        call = members.announce(context.namespace, self.group, context.clock, said, round(self.ttl * 1000))
        return await context.aio_link.run(call, within=min(context.timeout, self.patience))

    async def leave(self) -> None:
        context = self.context
        await context.aio_link.run(members.leave(context.namespace, self.group, context.clock, self.member))

    async def attendance(self) -> members.Attendance:
        """Who is there and who holds what, as the store sees it. Raises StoreError."""
        context = self.context
        return await context.aio_link.run(members.attendance(context.namespace, self.group, context.clock))


def _by_topic(slots: Iterable[Slot]) -> dict[str, frozenset[int]]:
    found: dict[str, set[int]] = {}
    for topic, number in slots:
        found.setdefault(topic, set()).add(number)
    return {topic: frozenset(numbers) for topic, numbers in found.items()}
