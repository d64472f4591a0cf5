"""Poller of one topic: when each slot has work next, by the clock of its server; and which policy the topic has."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Collection
from math import ceil
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from idemgate.core.calls import Call
from idemgate.core.clock import monotonic
from idemgate.errors import DecodeError
from idemgate.store.context import Context
from idemgate.topics.messages import decode_pause
from idemgate.topics.policy import find_newer
from idemgate.topics.slots import stored_policy
from idemgate.worker.clock_offset import UNKNOWN, Offset, narrow

if TYPE_CHECKING:
    from idemgate.topics.topic import Topic
    from idemgate.topics.topic_calls import TopicCalls

__all__ = ["POLL", "PolicyFollower", "Poller"]

POLL = 1.0
"""Longest sleep, seconds. Hints shorten it, but correctness does not depend on them."""
IDLE_POLL = 30.0
"""Seconds within which each slot is polled while hints arrive. It bounds the delay of a message whose hint was lost."""
FOLLOW = 10.0
"""Seconds between two looks at the stored policy of a topic."""
NEVER = float("inf")


class SlotReply(Protocol):
    """A reply with the time when its slot has work next (ms, 0 = never) and the server's time (ms)."""

    @property
    def next_due_ms(self) -> int: ...
    @property
    def now_ms(self) -> int: ...


class WorkReply(SlotReply, Protocol):
    """A reply to a request for due messages, with the record of the pause of a paused slot."""

    @property
    def paused(self) -> bytes | None: ...


A = TypeVar("A", bound=WorkReply)
log: logging.Logger = logging.getLogger("idemgate.worker")


class Poller:
    """The slots of one topic, and the time when each has work next.

    The poller has its own calls: a later declaration or deletion of the topic in this process does not reach them.

    Attributes:
        calls: The calls of this worker, for the last known number of slots, from `open` on.
        wake: Set when a slot may have work earlier than was known.
        assigned_slots: Function that returns the slots to poll now. None means all slots.
        on_resize: Callback for a changed number of slots.
        replied_at: When the store replied last, seconds of `monotonic`. Before that, when this was made.
    """

    calls: TopicCalls

    def __init__(self, topic: Topic) -> None:
        self.topic = topic
        self.context: Context = topic.definition.context
        self.wake: asyncio.Event = asyncio.Event()
        self.assigned_slots: Callable[[], Collection[int]] | None = None
        self.on_resize: Callable[[], None] = lambda: None
        self._running: Counter[int] = Counter()
        self._paused = set[int]()  # the slots of which the last reply told so
        self._due_at: dict[int, float] = {}
        # One offset per slot: the nodes of a cluster have different clocks.
        self._offsets: defaultdict[int, Offset] = defaultdict(lambda: UNKNOWN)
        self._rotation = self._next_poll = 0
        self._polled_at = monotonic()
        self._must_subscribe = False
        self.replied_at: float = monotonic()
        self._subscription = self.context.aio_link.subscription()

    async def open(self) -> None:
        """Check the topic's policy.

        Raises:
            PolicyChanged: The stored policy differs.
            StoreError: The store cannot be reached.
        """
        opened = await self.topic.aio.open()
        self.calls = opened.with_adopt(self._adopt_slots)
        self._due_at = dict.fromkeys(range(opened.policy.slots), 0.0)

    def _adopt_slots(self, slots: int) -> None:
        """Use the stored number of slots from the next poll on."""
        if slots != self.calls.policy.slots:
            self.calls = self.calls.for_slots(slots)
        self.topic.definition.set_slots(slots)

    def adopt_policy(self, stored: bytes) -> None:
        """Use the stored policy from the next call on, here and in this program, if its revision is higher."""
        if (newer := find_newer(stored, self.calls.policy)) is not None:
            self.calls = self.calls.for_policy(newer, newer.slots)
            self.topic.definition.adopt(stored)

    @property
    def slot_count(self) -> int:
        """The last known number of slots."""
        return len(self._due_at)

    async def listen(self) -> None:
        """Subscribe to the hints about messages that became the first due of their slot."""
        calls, self._must_subscribe = self.calls, False
        channels = {calls.keys(slot)[0]: slot for slot in range(calls.policy.slots)}

        def on_hint(channel: bytes, data: bytes | None) -> None:
            slot = channels[channel]
            # Any client may publish here. Data that is no number triggers a poll and no error.
            due = float(data) if data is not None and data.isdigit() else 0.0
            if slot in self._due_at:
                self._due_at[slot] = min(self._due_at[slot], due)
            self.wake.set()

        await asyncio.gather(*(self._subscription.add(channel, on_hint) for channel in channels))
        self.mark_all_due()  # hints may have been missed while subscribing
        self.wake.set()

    async def close(self) -> None:
        """Unsubscribe from the hints."""
        await self._subscription.close()

    # -- the server's time, estimated from its replies -------------------------------------------------------------

    def now(self, slot: int = 0) -> float:
        """Return the time of a slot's server, ms.

        The estimate is never ahead, so that no message is requested before it is due. It is meaningless before the
        first reply.
        """
        clock = self.context.clock
        return clock.microseconds() / 1000 if clock is not None else monotonic() * 1000 + self._offsets[slot].low

    def record_time(self, slot: int, now_ms: int, sent: float) -> None:
        """Record a server's time from a reply that arrived now to a request of time `sent` (monotonic seconds)."""
        self.replied_at = monotonic()
        self._offsets[slot] = narrow(self._offsets[slot], now_ms, sent * 1000, self.replied_at * 1000)

    async def sync_clock(self) -> None:
        """Request the time of the first slot's server."""
        sent = monotonic()
        self.record_time(0, await self.context.aio_link.run(self.calls.time()), sent)

    def record_reply(self, slot: int, reply: SlotReply, sent: float) -> None:
        """Record when a slot has work next.

        This never moves the time back to a later one, since a hint may have arrived after the reply was made.
        """
        self.record_time(slot, reply.now_ms, sent)
        if slot in self._due_at:  # the number of slots may have changed meanwhile
            self._due_at[slot] = min(self._due_at[slot], reply.next_due_ms or NEVER)

    def seconds_until(self, at_ms: float, slot: int = 0) -> float:
        """Return how many seconds to sleep until a time of the server, at most `POLL`; 0 if it has passed."""
        seconds = (at_ms - self.now(slot)) / 1000
        if seconds <= 0:
            return 0.0
        # A test clock stands still between its moves, and each move wakes the worker.
        return min(POLL, seconds) if self.context.clock is None else POLL

    def pause(self) -> float:
        """Return how many seconds to sleep until a slot has work. Every `POLL` seconds some slots are due."""
        elapsed = monotonic() - self._polled_at
        if elapsed >= POLL:
            self._mark_next_due()
            self._polled_at, elapsed = monotonic(), 0.0
        pauses = (
            self.seconds_until(self._due_at[slot], slot) for slot in self._slots_to_poll() if slot in self._due_at
        )
        return min(POLL - elapsed, min(pauses, default=POLL))

    def _mark_next_due(self) -> None:
        """Treat the next slots as due, in turn, so that each is polled within `IDLE_POLL`; without hints, all slots.

        One slot at least is polled every time: its reply tells a new number of slots.
        """
        if not self._subscription.is_listening:
            self.mark_all_due()
            return
        slots = sorted(slot for slot in self._slots_to_poll() if slot in self._due_at)
        for _ in range(ceil(len(slots) * POLL / IDLE_POLL)):
            self._next_poll = (self._next_poll + 1) % len(slots)
            self._due_at[slots[self._next_poll]] = 0.0

    def mark_all_due(self) -> None:
        """Treat every slot as due."""
        self._due_at = dict.fromkeys(self._due_at, 0.0)

    # -- polling ---------------------------------------------------------------------------------------------------

    async def refresh_layout(self) -> None:
        """Read the number of slots, at most once per poll, if this worker polls no slot at all.

        A worker that polls a slot learns of a new number from the replies.
        """
        if not self._slots_to_poll() and monotonic() - self.replied_at >= POLL:
            await self.sync_clock()

    def due_slots(self, calls: TopicCalls) -> list[int]:
        """Return the slots that have work now, rotated on each call, so that no slot is always the last.

        Args:
            calls: The calls of the take that follows. Their number of slots may have changed.
        """
        if len(self._due_at) != calls.policy.slots:
            self._due_at = dict.fromkeys(range(calls.policy.slots), 0.0)
            self._must_subscribe = True
            self.on_resize()
        slots = sorted(slot for slot in self._slots_to_poll() if slot in self._due_at)
        self._rotation = (self._rotation + 1) % max(1, len(slots))
        rotated = slots[self._rotation :] + slots[: self._rotation]
        return [slot for slot in rotated if self._due_at[slot] <= self.now(slot)]

    def is_assigned(self, slot: int) -> bool:
        """Return True if this worker polls the slot. Check right before each request: it may change at any time."""
        return slot in self._slots_to_poll()

    def _slots_to_poll(self) -> Collection[int]:
        return self._due_at if self.assigned_slots is None else self.assigned_slots()

    @property
    def running_slots(self) -> set[int]:
        """The slots with a call under way."""
        return {slot for slot, calls in self._running.items() if calls}

    def has_work(self, slot: int) -> bool:
        """Return True if a settlement of this slot should take messages too.

        The slot must be assigned. It must also be due, or have been due at a call that has no reply yet.
        """
        return self.is_assigned(slot) and (self._running[slot] > 0 or self._due_at.get(slot, NEVER) <= self.now(slot))

    async def execute(self, slot: int, call: Call[A], within: float | None = None) -> A:
        """Run a call that processes a slot's due work, and record its reply.

        Args:
            slot: The slot that the call concerns.
            call: The call to run.
            within: Seconds for all tries. None means the gate's timeout.
        """
        if self._must_subscribe:
            await self.listen()
        before, self._due_at[slot] = self._due_at[slot], NEVER  # hints from here on count
        self._running[slot] += 1
        sent = monotonic()
        try:
            reply = await self.context.aio_link.run(call, within)
        except BaseException:
            self._due_at[slot] = min(before, self._due_at.get(slot, NEVER))
            raise
        finally:
            self._running[slot] -= 1
        self.record_reply(slot, reply, sent)
        if self._paused or reply.paused is not None:
            self._record_pause(slot, reply.paused)
        return reply

    def _record_pause(self, slot: int, record: bytes | None) -> None:
        """Record whether a slot is paused. Log the begin of a pause of the topic, and its end."""
        was_paused, name = bool(self._paused), self.topic.name
        self._paused.intersection_update(self._slots_to_poll())
        if record is None:
            self._paused.discard(slot)
        else:
            self._paused.add(slot)
        if was_paused and not self._paused:
            log.warning("worker.resumed topic=%r", name, extra={"topic": name})
        elif not was_paused and record is not None:
            facts = {"topic": name} | _describe_pause(record)
            log.warning("worker.paused topic=%r since=%s by=%r reason=%r", *facts.values(), extra=facts)


def _describe_pause(record: bytes) -> dict[str, str | None]:
    try:
        pause = decode_pause(record)
    except DecodeError as error:  # it is a pause all the same
        return {"since": None, "by": f"<not decodable: {error.why}>", "reason": None}
    return {"since": pause.since.isoformat(), "by": pause.by, "reason": pause.reason}


class PolicyFollower:
    """A follower of the stored policy of one topic.

    Deliveries in flight go on. The lease and the other options that are not stored stay as the program declared them.
    """

    def __init__(self, poller: Poller) -> None:
        self.topic: Topic[Any, Any] = poller.topic
        self.context: Context = poller.context
        self.wake: asyncio.Event = asyncio.Event()
        self._poller = poller
        self._looked_at = self.context.now()

    def pause(self) -> float:
        """Return the seconds until the next look."""
        left = self._looked_at + FOLLOW - self.context.now()
        # A test clock stands still between its moves, and each move wakes the worker.
        return left if left <= 0 or self.context.clock is None else POLL

    async def run_once(self) -> None:
        """Adopt the stored policy if its revision is higher."""
        if self.context.now() < self._looked_at + FOLLOW:
            return
        self._looked_at = self.context.now()
        context = self.context
        stored = await context.aio_link.run(stored_policy(context.namespace, context.clock, self.topic.name))
        if stored is not None:
            self._poller.adopt_policy(stored)
