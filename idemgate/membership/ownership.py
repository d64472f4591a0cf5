"""What one member holds of the slots, and what it asks for next. Pure: whoever keeps the list of members performs it.

A slot that this member should serve (`share`) and may take from is in `held` too. What is held and no longer in the
share is drained by the worker, then let go. What is in the share and in other hands is waited for, `grace` long, then
seized: its holder had that time to drain it, and leases and fences stand behind. The wait begins anew when the members
change, for the holder may have been right to take it meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import NamedTuple

from idemgate.membership.rendezvous import mine

__all__ = ["LIMIT", "Announcement", "Holdings", "Roll", "Slot"]

LIMIT = 500
"""Most slots that one announcement asks for, and lets go: the server is blocked for the whole of it."""
Slot = tuple[str, int]
"""Topic and number."""


class Announcement(NamedTuple):
    """What a member says: that it is there and `topics` are served ((): none, it is leaving), and about slots.

    `number` rises with each announcement of a member; `generation` is the one whose members it knows. The slots let go
    are free if it held them. If that generation is still the present one, those seized are its own, whoever held them,
    and so are those wanted that nobody holds: under another, they may be somebody else's by right.
    """

    member: str
    number: int
    topics: tuple[str, ...]
    generation: int
    released: tuple[Slot, ...]
    seized: tuple[Slot, ...]
    wanted: tuple[Slot, ...]


class Roll(NamedTuple):
    """The answer to an announcement.

    `generation` rises with every change of the members and of what they serve; `members` (topics by member, of those
    that serve any) is None if the generation is the one that was known. `holders`: who holds each slot that was seized
    or wanted, "" if nobody does.
    """

    generation: int
    members: Mapping[str, frozenset[str]] | None
    holders: Mapping[Slot, str]


class Holdings:
    """The slots of one member of a group. Times are ms, of whatever clock the caller keeps to."""

    __slots__ = (
        "_asking", "_doubted", "_number", "_released", "_unsure", "_waiting", "generation", "grace", "held", "leaving",
        "me", "members", "share", "slots",
    )  # fmt: skip

    def __init__(self, me: str, slots: Mapping[str, int], grace: float) -> None:
        self.me = me
        self.slots = dict(slots)
        self.grace = grace
        self.generation = 0
        self.members: Mapping[str, frozenset[str]] = {}
        self.share: frozenset[Slot] = frozenset()
        self.held: set[Slot] = set()
        self.leaving = False
        self._number = 0
        self._asking: dict[Slot, None] = {}  # of the share: not known to be ours in this generation, next one first
        self._waiting: dict[Slot, float] = {}  # of those: in other hands, since when
        self._doubted: set[Slot] = set()  # of those: held, but perhaps no longer
        self._released: set[Slot] = set()
        self._unsure: set[Slot] = set()

    @property
    def assigned(self) -> frozenset[Slot]:
        """What it may take from."""
        return self.share & self.held - self._doubted

    @property
    def draining(self) -> frozenset[Slot]:
        """What it holds and is to give up."""
        return frozenset(self.held - self.share)

    @property
    def seizes_at(self) -> float:
        """When the wait for a hand-over ends, ms; infinity if none is waited for."""
        return min(self._waiting.values(), default=float("inf")) + self.grace

    def resize(self, topic: str, slots: int) -> None:
        """The topic has that many slots by now: those that it has not any more are to be drained, new ones asked for.
        What stays keeps its owner, which is decided by the number of a slot alone."""
        if self.slots.get(topic, slots) != slots:
            self.slots[topic] = slots
            self._shared()

    def leave(self) -> None:
        """From here on it serves nothing; what it holds is to be drained."""
        self.leaving = True
        self._shared()

    def doubt(self) -> None:
        """Its time has passed: others may have taken everything. Nothing is assigned before the next answers."""
        self._ask(self.share)
        self._doubted = self.held & self.share

    def release(self, slots: Iterable[Slot]) -> bool:
        """Lets go what is held, with the next announcement. Whether there was any."""
        gone = self.held.intersection(slots)
        self.held -= gone
        self._released |= gone
        self._ask(gone & self.share)
        return bool(gone)

    # -- asking ---------------------------------------------------------------------------------------------------

    def announcement(self, now: float) -> Announcement:
        """The next one. Then `heard` its answer, or say that it was `unheard`."""
        self._number += 1
        # What an unheard announcement wanted may be in our hands without our knowing.
        released = self._released | (self._unsure - self.share - self.held)
        overdue = (slot for slot, since in self._waiting.items() if now >= since + self.grace)
        seized = dict.fromkeys(islice(overdue, LIMIT))
        wanted = (slot for slot in self._asking if slot not in seized)
        return Announcement(
            self.me, self._number, () if self.leaving else tuple(sorted(self.slots)), self.generation,
            tuple(islice(released, LIMIT)), tuple(seized), tuple(islice(wanted, LIMIT - len(seized))),
        )  # fmt: skip

    def unheard(self, said: Announcement) -> None:
        """No answer came: it may have been carried out or not."""
        self._unsure.update(said.seized, said.wanted)

    def heard(self, said: Announcement, roll: Roll, now: float) -> bool:
        """Learns; True if there is more to say at once: to other members, or about more slots."""
        self._released.difference_update(said.released)
        self._unsure.difference_update(said.released, said.seized, said.wanted)
        waited = len(self._waiting)
        for slot, holder in roll.holders.items():
            self._learn(slot, holder, now)
        # Some of what was waited for is free now; so may be what there was no room to ask for.
        more = len(self._waiting) < waited and len(roll.holders) == LIMIT
        if roll.members is not None:
            self.members = roll.members
            self.generation = roll.generation
            self._shared()
        return more or len(self._asking) > len(self._waiting) or bool(self._released)

    def _learn(self, slot: Slot, holder: str, now: float) -> None:
        self._asking.pop(slot, None)
        self._doubted.discard(slot)
        if holder == self.me:
            self.held.add(slot)
            self._waiting.pop(slot, None)
            return
        self.held.discard(slot)
        if slot in self.share:  # it may have begun to leave since it asked
            self._asking[slot] = None  # again, after all the others
            self._waiting.setdefault(slot, now)

    def _ask(self, slots: Iterable[Slot]) -> None:
        self._asking |= dict.fromkeys(slots)

    def _shared(self) -> None:
        before, self.share = self.share, self._fair_share()
        # What comes back while it is drained may have been seized meanwhile: the next answer tells.
        self._doubted = self.held & ((self.share - before) | (self.share & self._doubted))
        self._waiting.clear()
        self._asking.clear()
        self._ask(self.share - self.held)
        self._ask(self._doubted)
        self._ask(self.share)

    def _fair_share(self) -> frozenset[Slot]:
        return frozenset(
            (topic, number)
            for topic, slots in self.slots.items()
            for number in mine(self.me, self._serving(topic), topic, slots)
            if not self.leaving
        )

    def _serving(self, topic: str) -> list[str]:
        return [member for member, topics in self.members.items() if topic in topics]
