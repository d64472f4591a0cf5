"""Slot ownership of one member: the slots it holds, and those its next heartbeat requests. Pure logic.

A slot that this member should serve (`share`) and may take from is also in `held`. A held slot outside the share is
drained by the worker, then released. A slot of the share that another member holds is waited for, up to `grace`, then
taken over: its holder had that time to drain it, and leases and fences still protect its messages. A change of the
members restarts the wait, since the holder may have taken the slot legitimately meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import NamedTuple

from idemgate.membership.rendezvous import owned_slots

__all__ = ["LIMIT", "HeartbeatReply", "HeartbeatRequest", "Slot", "SlotOwnership"]

LIMIT = 500
"""Most slots that one heartbeat requests, and most that it releases. It blocks the server for all of them."""
Slot = tuple[str, int]
"""Topic and number."""


class HeartbeatRequest(NamedTuple):
    """One heartbeat of a member: it is alive, serves `topics` (none: it is leaving), and requests slots.

    - `number` rises with each heartbeat of a member.
    - `generation` is that of the members it knows.
    - `released` slots become free if it held them.
    - `taken_over` slots become its own, whichever member held them, if the generation is still current.
    - `wanted` slots become its own if the generation is still current and they have no holder. Under another
      generation they may belong to another member.
    """

    member: str
    number: int
    topics: tuple[str, ...]
    generation: int
    released: tuple[Slot, ...]
    taken_over: tuple[Slot, ...]
    wanted: tuple[Slot, ...]


class HeartbeatReply(NamedTuple):
    """The reply to a heartbeat.

    - `generation` rises with every change of the members or of their topics.
    - `members` maps each serving member to its topics. It is None if the generation was known.
    - `holders` maps each taken over or wanted slot to its holder, "" if it has none.
    """

    generation: int
    members: Mapping[str, frozenset[str]] | None
    holders: Mapping[Slot, str]


class SlotOwnership:
    """The slots of one member of a group. Times are ms of any clock that the caller chooses."""

    __slots__ = (
        "_doubted", "_number", "_released", "_to_request", "_unconfirmed", "_waiting", "generation", "grace", "held",
        "leaving", "me", "members", "share", "slots",
    )  # fmt: skip

    def __init__(self, me: str, slots: Mapping[str, int], grace: float) -> None:
        self.me: str = me
        self.slots: dict[str, int] = dict(slots)
        self.grace: float = grace
        self.generation: int = 0
        self.members: Mapping[str, frozenset[str]] = {}
        self.share: frozenset[Slot] = frozenset()
        self.held: set[Slot] = set()
        self.leaving: bool = False
        self._number = 0
        self._to_request: dict[Slot, None] = {}  # of the share: not known to be owned in this generation, in order
        self._waiting: dict[Slot, float] = {}  # of those: held by another member, since when
        self._doubted: set[Slot] = set()  # of those: held, but perhaps no longer
        self._released: set[Slot] = set()
        self._unconfirmed: set[Slot] = set()

    @property
    def assigned_slots(self) -> frozenset[Slot]:
        """The slots that the member may take from."""
        return self.share & self.held - self._doubted

    @property
    def draining(self) -> frozenset[Slot]:
        """The slots that the member holds and has to release."""
        return frozenset(self.held - self.share)

    @property
    def takes_over_at(self) -> float:
        """The time when the first wait for another holder ends, ms; infinity without such a wait."""
        return min(self._waiting.values(), default=float("inf")) + self.grace

    def resize(self, topic: str, slots: int) -> None:
        """Set the number of slots of a topic: removed slots are drained, new ones requested.

        The other slots keep their owners, since the hash uses the slot's number only.
        """
        if self.slots.get(topic, slots) != slots:
            self.slots[topic] = slots
            self._update_share()

    def leave(self) -> None:
        """Serve nothing from now on; all held slots are drained."""
        self.leaving = True
        self._update_share()

    def doubt(self) -> None:
        """Doubt all held slots, after the ttl has passed without a heartbeat.

        Other members may have taken them over. Nothing is assigned before the next reply.
        """
        self._request(self.share)
        self._doubted = self.held & self.share

    def release(self, slots: Iterable[Slot]) -> bool:
        """Release held slots with the next heartbeat; return False if none of `slots` was held."""
        released = self.held.intersection(slots)
        self.held -= released
        self._released |= released
        self._request(released & self.share)
        return bool(released)

    # -- heartbeats -----------------------------------------------------------------------------------------------

    def next_request(self, now: float) -> HeartbeatRequest:
        """Build the next heartbeat. Follow it with `apply_reply` or `mark_unanswered`."""
        self._number += 1
        # An unanswered heartbeat may have acquired slots without this member knowing.
        released = self._released | (self._unconfirmed - self.share - self.held)
        overdue = (slot for slot, since in self._waiting.items() if now >= since + self.grace)
        taken_over = dict.fromkeys(islice(overdue, LIMIT))
        wanted = (slot for slot in self._to_request if slot not in taken_over)
        return HeartbeatRequest(
            self.me, self._number, () if self.leaving else tuple(sorted(self.slots)), self.generation,
            tuple(islice(released, LIMIT)), tuple(taken_over), tuple(islice(wanted, LIMIT - len(taken_over))),
        )  # fmt: skip

    def mark_unanswered(self, request: HeartbeatRequest) -> None:
        """Record that a heartbeat got no reply: the store may have executed it or not."""
        self._unconfirmed.update(request.taken_over, request.wanted)

    def apply_reply(self, request: HeartbeatRequest, reply: HeartbeatReply, now: float) -> bool:
        """Apply the reply to a heartbeat.

        Returns:
            True if another heartbeat should follow at once, for changed members or for more slots.
        """
        self._released.difference_update(request.released)
        self._unconfirmed.difference_update(request.released, request.taken_over, request.wanted)
        waited = len(self._waiting)
        for slot, holder in reply.holders.items():
            self._record_holder(slot, holder, now)
        # Some slots became free. Others, for which the request had no room, may be free too.
        more = len(self._waiting) < waited and len(reply.holders) == LIMIT
        if reply.members is not None:
            self.members = reply.members
            self.generation = reply.generation
            self._update_share()
        return more or len(self._to_request) > len(self._waiting) or bool(self._released)

    def _record_holder(self, slot: Slot, holder: str, now: float) -> None:
        self._to_request.pop(slot, None)
        self._doubted.discard(slot)
        if holder == self.me:
            self.held.add(slot)
            self._waiting.pop(slot, None)
            return
        self.held.discard(slot)
        if slot in self.share:  # the member may have begun to leave since its request
            self._to_request[slot] = None  # again, behind all others
            self._waiting.setdefault(slot, now)

    def _request(self, slots: Iterable[Slot]) -> None:
        self._to_request |= dict.fromkeys(slots)

    def _update_share(self) -> None:
        before, self.share = self.share, self._compute_share()
        # A slot that returns to the share while draining may have been taken over: wait for the next reply.
        self._doubted = self.held & ((self.share - before) | (self.share & self._doubted))
        self._waiting.clear()
        self._to_request.clear()
        self._request(self.share - self.held)
        self._request(self._doubted)
        self._request(self.share)

    def _compute_share(self) -> frozenset[Slot]:
        return frozenset(
            (topic, number)
            for topic, slots in self.slots.items()
            for number in owned_slots(self.me, self._members_serving(topic), topic, slots)
            if not self.leaving
        )

    def _members_serving(self, topic: str) -> list[str]:
        return [member for member, topics in self.members.items() if topic in topics]
