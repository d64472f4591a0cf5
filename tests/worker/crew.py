"""Workers that only take: fake lines that use a Membership as its docstring says, and a world that watches them.

Time is the test clock's; `world.pass_time` moves it in steps and lets every worker react to each.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from time import monotonic
from typing import Any

from idemgate import Gate, StoreUnavailable
from idemgate.membership.member import RedisMembership
from idemgate.testing import Clock

TTL, INTERVAL, GRACE = 9.0, 3.0, 12.0
BOUND = TTL + INTERVAL + GRACE
Slot = tuple[str, int]


class Watched(RedisMembership):
    """Says when it is at rest; may be cut off from the store, and deaf to hints."""

    def __init__(self, gate: Gate, deaf: bool = False, **options: Any) -> None:
        super().__init__(gate, **{"ttl": TTL, "grace": GRACE, **options})
        self.deaf = deaf
        self.cut_off = False
        self._resting = False

    @property
    def at_rest(self) -> bool:
        if self._failures:
            return self.cut_off
        return self._resting and min(self._due, self._ownership.takes_over_at) > self._now()

    @asynccontextmanager
    async def listening(self) -> AsyncGenerator[None]:
        if self.deaf:
            yield
            return
        async with super().listening():
            yield

    async def heartbeat(self, said: Any) -> Any:
        if self.cut_off:
            raise StoreUnavailable("cut off", "no")
        return await super().heartbeat(said)

    async def _sleep(self) -> None:
        self._resting = True
        try:
            await super()._sleep()
        finally:
            self._resting = False


class Hand:
    """A worker whose handlers take `busy` seconds by the clock (None: they never end)."""

    def __init__(self, world: World, topics: Mapping[str, int], busy: float | None, **options: Any) -> None:
        self.world = world
        self.topics = topics
        self.busy = busy
        self.membership = Watched(world.gate, world.deaf, **options)
        self.membership.on_change(self.work)
        self.running: dict[Slot, float] = {}
        self.stop = asyncio.Event()
        self.task = asyncio.create_task(self.membership.run(self.stop, topics))

    def work(self) -> None:
        """One turn of the fetch loop: settle what ended, let go what is drained, take from what is assigned."""
        now = self.world.now
        self.running = {slot: end for slot, end in self.running.items() if end > now}
        for topic in self.topics:
            draining = self.membership.draining(topic)
            self.membership.release(topic, [number for number in draining if (topic, number) not in self.running])
            for number in self.membership.assigned_slots(topic):
                slot = (topic, number)
                self.world.takes[slot].add(self)
                if self.busy is None:
                    self.running[slot] = float("inf")
                elif self.busy:
                    self.running.setdefault(slot, now + self.busy)

    @property
    def assigned(self) -> set[Slot]:
        return {(topic, number) for topic in self.topics for number in self.membership.assigned_slots(topic)}

    @property
    def draining(self) -> set[Slot]:
        return {(topic, number) for topic in self.topics for number in self.membership.draining(topic)}


class World:
    """All the workers there are, and who took from which slot since `takes` was emptied."""

    def __init__(self, gate: Gate, clock: Clock, deaf: bool = False) -> None:
        self.gate = gate
        self.clock = clock
        self.deaf = deaf
        self.hands: list[Hand] = []
        self.takes: defaultdict[Slot, set[Hand]] = defaultdict(set)

    @property
    def now(self) -> float:
        return self.clock.microseconds() / 1_000_000

    def owners(self) -> dict[Slot, Hand]:
        """Who may take from which slot; fails if two may."""
        found: dict[Slot, Hand] = {}
        for hand in self.hands:
            for slot in hand.assigned:
                assert slot not in found, f"{slot} is in two hands"
                found[slot] = hand
        return found

    async def join(self, topics: Mapping[str, int], busy: float | None = 0.0, **options: Any) -> Hand:
        hand = Hand(self, topics, busy, **options)
        self.hands.append(hand)
        await self.settle()
        return hand

    async def leave(self, hand: Hand) -> None:
        hand.stop.set()
        await self.settle()

    async def kill(self, hand: Hand) -> None:
        """As SIGKILL: nothing more is said, and nothing runs on."""
        self.hands.remove(hand)
        hand.task.cancel()
        await asyncio.wait({hand.task})
        assert hand.task.cancelled()

    async def pass_time(self, seconds: float, step: float = 1.0) -> None:
        """Moves the clock, in steps, and lets everybody react to each."""
        end = self.now + seconds
        while self.now < end:
            self.clock.advance(min(step, round(end - self.now, 3)))
            await self.settle()

    async def settle(self) -> None:
        """Until every worker has done what it could do at this time."""
        deadline = monotonic() + 20
        await asyncio.sleep(0.001)
        while not all(hand.task.done() or hand.membership.at_rest for hand in self.hands):
            assert monotonic() < deadline, "a worker never rests"
            await asyncio.sleep(0.001)
        for hand in [hand for hand in self.hands if hand.task.done()]:
            hand.task.result()
            self.hands.remove(hand)
        for hand in self.hands:
            hand.work()

    async def close(self) -> None:
        for hand in self.hands:
            hand.task.cancel()
        await asyncio.gather(*(hand.task for hand in self.hands), return_exceptions=True)
