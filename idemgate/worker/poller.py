"""When a topic has work: what replies and hints told, by the server's clock."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Collection
from time import monotonic
from typing import TYPE_CHECKING, Protocol, TypeVar

from idemgate.core.calls import Call
from idemgate.worker.clock_offset import UNKNOWN, Offset, narrowed

if TYPE_CHECKING:
    from idemgate.topics.calls import TopicCalls
    from idemgate.topics.topic import Topic

__all__ = ["POLL", "Due"]

POLL = 1.0
"""Longest sleep, seconds. Hints shorten it; none of them is needed."""
NEVER = float("inf")


class Answer(Protocol):
    """What tells when a slot has work next (ms, 0 = never), and what the server's time is."""

    @property
    def next_due_ms(self) -> int: ...
    @property
    def now_ms(self) -> int: ...


A = TypeVar("A", bound=Answer)


class Due:
    """The slots of one topic, and when each has work. `wake` is set when one may have it sooner than was known.

    `mine` tells which of them are to be asked now; None: all. `resized` is told when there are more or fewer.
    """

    def __init__(self, topic: Topic) -> None:
        self.topic = topic
        self.context = topic.opening.context
        self.wake = asyncio.Event()
        self.mine: Callable[[], Collection[int]] | None = None
        self.resized: Callable[[], None] = lambda: None
        self._asking: Counter[int] = Counter()
        self._at: dict[int, float] = {}
        # Of slots: the nodes of a cluster have clocks of their own.
        self._offsets: defaultdict[int, Offset] = defaultdict(lambda: UNKNOWN)
        self._turn = 0
        self._looked = monotonic()
        self._deaf = False
        self._heard = monotonic()
        self._ear = self.context.aio_link.ear()

    async def open(self) -> None:
        """Checks the topic's policy; raises PolicyChanged, StoreError."""
        calls = await self.topic.aio.open()
        self._at = dict.fromkeys(range(calls.policy.slots), 0.0)

    @property
    def number(self) -> int:
        """How many slots there are, as far as is known."""
        return len(self._at)

    async def listen(self) -> None:
        """Hears of messages that came to be due before everything else."""
        calls = await self.topic.aio.open()
        self._deaf = False
        channels = {calls.keys(slot)[0]: slot for slot in range(calls.policy.slots)}

        def heard(channel: bytes, data: bytes | None) -> None:
            slot = channels[channel]
            # Anybody may publish: what is no number is a reason to look, and none to fail.
            due = float(data) if data is not None and data.isdigit() else 0.0
            if slot in self._at:
                self._at[slot] = min(self._at[slot], due)
            self.wake.set()

        await asyncio.gather(*(self._ear.add(channel, heard) for channel in channels))
        self.look_again()  # for what was not heard while the subscription was made
        self.wake.set()

    async def close(self) -> None:
        """Hears nothing any more."""
        await self._ear.close()

    # -- time: the server's, as far as its replies told ------------------------------------------------------------

    def now(self, slot: int = 0) -> float:
        """The time of a slot's server, ms, or a little less, so that nothing is asked for before it is due; meaningless
        until something was learnt."""
        clock = self.context.clock
        return clock.microseconds() / 1000 if clock is not None else monotonic() * 1000 + self._offsets[slot].low

    def told(self, slot: int, now_ms: int, asked: float) -> None:
        """A server's time, from a reply that came just now to what was asked then (monotonic seconds)."""
        self._heard = monotonic()
        self._offsets[slot] = narrowed(self._offsets[slot], now_ms, asked * 1000, self._heard * 1000)

    async def look_at_the_clock(self, calls: TopicCalls) -> None:
        """Asks the first slot's server for its time."""
        asked = monotonic()
        self.told(0, await self.context.aio_link.run(calls.time()), asked)

    def learn(self, slot: int, answer: Answer, asked: float) -> None:
        """Never makes it later than what is known: a hint may have been heard while this answer was under way."""
        self.told(slot, answer.now_ms, asked)
        if slot in self._at:  # the number of slots may have changed meanwhile
            self._at[slot] = min(self._at[slot], answer.next_due_ms or NEVER)

    def left(self, at_ms: float, slot: int = 0) -> float:
        """How many seconds to sleep until a time, at most `POLL`; 0 if it has come."""
        left = (at_ms - self.now(slot)) / 1000
        if left <= 0:
            return 0.0
        # A test clock stands still: only its moves are worth waking for.
        return min(POLL, left) if self.context.clock is None else POLL

    def pause(self) -> float:
        """How many seconds to sleep until a slot has work; every `POLL` all may have."""
        since = monotonic() - self._looked
        if since >= POLL:
            self.look_again()
            self._looked, since = monotonic(), 0.0
        lefts = (self.left(self._at[slot], slot) for slot in self._mine() if slot in self._at)
        return min(POLL - since, min(lefts, default=POLL))

    def look_again(self) -> None:
        """Every slot may have work."""
        self._at = dict.fromkeys(self._at, 0.0)

    # -- asking ----------------------------------------------------------------------------------------------------

    async def inquire(self) -> None:
        """Who asks a slot hears when the topic has other slots by now. Who has none to ask inquires, once a poll."""
        if not self._mine() and monotonic() - self._heard >= POLL:
            calls = await self.topic.aio.open()
            await self.look_at_the_clock(calls)

    def slots(self, calls: TopicCalls) -> list[int]:
        """Those that have work now, each time beginning with another, so that none is served last for ever. `calls`
        are those of the take that follows: the topic may have been given other slots."""
        if len(self._at) != calls.policy.slots:
            self._at = dict.fromkeys(range(calls.policy.slots), 0.0)
            self._deaf = True
            self.resized()
        mine = sorted(slot for slot in self._mine() if slot in self._at)
        self._turn = (self._turn + 1) % max(1, len(mine))
        return [slot for slot in mine[self._turn :] + mine[: self._turn] if self._at[slot] <= self.now(slot)]

    def is_mine(self, slot: int) -> bool:
        """Whether it is to be asked: look right before asking, for that may change at any time."""
        return slot in self._mine()

    def _mine(self) -> Collection[int]:
        return self._at if self.mine is None else self.mine()

    @property
    def asking(self) -> set[int]:
        """Those that are being asked."""
        return set(self._asking)

    def has_work(self, slot: int) -> bool:
        """Whether a slot that is asked for something else should be taken from, too: it has work as far as is known,
        or had when it was asked, and did not answer yet. It is one of ours."""
        return self.is_mine(slot) and (slot in self._asking or self._at.get(slot, NEVER) <= self.now(slot))

    async def ask(self, slot: int, call: Call[A], within: float | None = None) -> A:
        """Runs a call that does a slot's work, and learns from its answer. `within`: seconds to try, None: the
        gate's."""
        if self._deaf:
            await self.listen()
        before, self._at[slot] = self._at[slot], NEVER  # what is heard from here on counts
        self._asking[slot] += 1
        asked = monotonic()
        try:
            answer = await self.context.aio_link.run(call, within)
        except BaseException:
            self._at[slot] = min(before, self._at.get(slot, NEVER))
            raise
        finally:
            self._asking -= Counter((slot,))  # which leaves no zeros
        self.learn(slot, answer, asked)
        return answer
