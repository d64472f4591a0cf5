"""Changing the number of slots of a topic, and forgetting it: which calls, in which order.

A plan is a generator: it yields batches, is sent their answers, and returns its result. Two short drivers perform it.
Every step may be repeated and a plan may be abandoned anywhere: begun anew, it goes on with what is left.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from idemgate.core import keys
from idemgate.core.calls import Arg, Batch, Call, call, text
from idemgate.core.clock import stamp
from idemgate.core.tokens import token
from idemgate.errors import InvalidArgument, ServerRejected, TopicInUse
from idemgate.lua import commands
from idemgate.topics.calls import TopicCalls
from idemgate.topics.messages import Stats
from idemgate.topics.policy import check_slots, from_stored, slots_of, with_slots
from idemgate.topics.registry import Entry, registered

__all__ = ["DeletedTopic", "Plan", "ReshardProgress", "ReshardResult", "forgetting", "resizing"]

T = TypeVar("T")
Plan = Generator[Batch[list[Any]], list[Any], T]
TOGETHER = 256
"""Most calls that travel together."""


@dataclass(frozen=True, slots=True)
class ReshardProgress:
    """How far a change of slots is: `moved` entries so far (messages, dead letters, what is remembered of keys), and
    `done` of `parts`, each of which stands still while it is moved."""

    done: int
    parts: int
    moved: int


@dataclass(frozen=True, slots=True)
class ReshardResult:
    """A topic had `before` slots and has `after`; `moved` entries were moved by this call."""

    before: int
    after: int
    moved: int


@dataclass(frozen=True, slots=True)
class DeletedTopic:
    """What was discarded with a topic; all 0 where nothing had to be. `known`: whether there was such a topic."""

    known: bool
    pending: int
    in_flight: int
    dead: int


class _Begun(NamedTuple):
    """`change`: its name; of "refused", the command that this user may not send."""

    word: str
    policy: bytes
    to: int
    change: bytes


class _Entry(NamedTuple):
    kind: bytes
    name: bytes
    number: bytes
    value: bytes
    inside: bytes
    route: bytes


class _Shown(NamedTuple):
    number: int
    entries: list[_Entry]


# -- the calls --------------------------------------------------------------------------------------------------------


def _begin(topic: TopicCalls, slots: int) -> Call[_Begun]:
    def read(reply: list[Any]) -> _Begun:
        word = text(reply[0])
        if word == "changing":
            return _Begun(word, reply[2], reply[3], reply[4])
        return _Begun(word, b"", -1, reply[2] if word == "refused" else b"")

    args = (stamp(topic.clock), topic.name, slots, token().hex(), *_needed(topic, slots))
    return call("topics/resize", (keys.topics(topic.namespace),), args, read)


def _needed(topic: TopicCalls, slots: int) -> Iterator[Arg]:
    """The commands of a change and a key for each: of the registry, and of a slot. A hint that may not be published is
    done without."""
    moving = ("close", "reopen", *(("retell", "unload", "load") if slots else ("purge",)))
    for key, scripts in ((keys.topics(topic.namespace), ("resize", "resized")), (topic.keys(0)[0], moving)):
        for command in sorted({one for script in scripts for one in commands(f"topics/{script}")} - {"PUBLISH"}):
            yield command
            yield key


def _end(topic: TopicCalls, change: bytes, how: str, stored: bytes, wanted: bytes) -> Call[bytes | None]:
    """None when it is done; the policy that is stored by now when that is another one."""
    args = (stamp(topic.clock), topic.name, change, how, stored, wanted)
    return call(
        "topics/resized",
        (keys.topics(topic.namespace),),
        args,
        lambda reply: reply[2] if reply[0] == b"differs" else None,
    )


def _of_slot(topic: TopicCalls, script: str, slot: int, args: Sequence[Arg], read: Callable[[list[Any]], T]) -> Call[T]:
    return call(f"topics/{script}", topic.keys(slot), (stamp(topic.clock), *args), read)


def _close(topic: TopicCalls, slot: int, change: bytes) -> Call[None]:
    return _of_slot(topic, "close", slot, (change,), lambda _: None)


def _unload(topic: TopicCalls, slot: int, change: bytes, taken_in: int) -> Call[_Shown]:
    def read(reply: list[Any]) -> _Shown:
        if reply[0] == b"open":
            return _Shown(0, [])
        return _Shown(reply[2], [_Entry(*reply[at : at + 6]) for at in range(3, len(reply), 6)])

    return _of_slot(topic, "unload", slot, (change, taken_in), read)


def _load(topic: TopicCalls, slot: int, change: bytes, source: int, number: int, some: Iterable[_Entry]) -> Call[bool]:
    """Whether it was taken in, now or before; False once somebody else has ended this change."""
    args: list[Arg] = [change, topic.policy.for_scripts(), source, number]
    for entry in some:
        args += entry[:5]
    return _of_slot(topic, "load", slot, args, lambda reply: reply[0] == b"ok")


def _retell(topic: TopicCalls, slot: int, log: int, cursor: bytes) -> Call[tuple[bytes, list[_Entry]]]:
    def read(reply: list[Any]) -> tuple[bytes, list[_Entry]]:
        half = b"%d" % reply[3]
        pairs = zip(reply[4::2], reply[5::2], strict=True)
        return reply[2], [_Entry(b"t", request, half, given, b"", b"") for request, given in pairs]

    return _of_slot(topic, "retell", slot, (log, cursor), read)


def _purge(topic: TopicCalls, slot: int, change: bytes, really: bool) -> Call[tuple[int, int, int]]:
    """(pending, in flight, dead)."""
    args = (change, 1 if really else 0)
    return _of_slot(topic, "purge", slot, args, lambda reply: tuple(reply[2:5]) if len(reply) == 5 else (0, 0, 0))


def _all(calls: Iterable[Call[Any]]) -> Plan[list[Any]]:
    answers: list[Any] = []
    waiting = list(calls)
    for start in range(0, len(waiting), TOGETHER):
        answers += yield Batch(waiting[start : start + TOGETHER], list)
    return answers


def _started(topic: TopicCalls, slots: int) -> Plan[_Begun]:
    """Raises ServerRejected, before anything is written, where the access list does not allow all of the change."""
    begun = yield from _one(_begin(topic, slots))
    if begun.word == "refused":
        what = f"this user's access list does not allow {text(begun.change)}, which changing a topic's slots needs"
        raise ServerRejected(f"{what}. Nothing was changed. What each role needs, `idemgate acl` prints")
    return begun


def _one(made: Call[T]) -> Plan[T]:
    answers: list[T] = yield Batch([made], list)
    return answers[0]


# -- changing the number of slots -------------------------------------------------------------------------------------


def resizing(topic: TopicCalls, slots: int, told: Callable[[ReshardProgress], object]) -> Plan[ReshardResult]:
    """Gives a topic that many slots. Raises InvalidArgument, TopicInUse, ServerRejected; UnexpectedData or DecodeError for what is
    none of ours, before anything is written unless it is one message among others."""
    check_slots(topic.policy, slots)
    yield from _sound(topic, slots)
    begun = yield from _started(topic, slots)
    if begun.word == "absent":
        raise _unknown(topic.name)
    if begun.word == "same":
        return ReshardResult(slots, slots, 0)
    if begun.to != slots:
        raise TopicInUse(topic.name, _busy(topic.name, begun.to))
    before = slots_of(begun.policy)
    known = from_stored(begun.policy, topic.policy)
    moving = _Moving(topic.laid_as(known, before), topic.laid_as(known, slots), begun.change, told)
    yield from moving.all()
    stored: bytes | None = begun.policy
    while stored is not None:
        stored = yield from _one(_end(topic, begun.change, "done", stored, with_slots(stored, slots)))
    return ReshardResult(before, slots, moving.moved)


def _sound(topic: TopicCalls, slots: int) -> Plan[None]:
    """Looks, before a change is begun, at both layouts."""
    known = yield from _one(registered(topic.namespace, topic.clock, topic.name))
    if known is not None and known.to < 0 and (before := from_stored(known.policy, topic.policy).slots) != slots:
        yield from _depth(topic.laid_out(before), slots)


class _Moving:
    """From one layout to another. Slots that exchange anything are a part: a part is closed as a whole, moved, and
    opened in its new place."""

    def __init__(
        self, old: TopicCalls, new: TopicCalls, change: bytes, told: Callable[[ReshardProgress], object]
    ) -> None:
        self.old = old
        self.new = new
        self.change = change
        self.moved = 0
        self._told = told
        self._parts = min(old.policy.slots, new.policy.slots)
        self._done = 0

    def all(self) -> Plan[None]:
        for part in range(self._parts):
            yield from self._part(part)
            self._done = part + 1
            self._tell()

    def _tell(self) -> None:
        self._told(ReshardProgress(self._done, self._parts, self.moved))

    def _part(self, part: int) -> Plan[None]:
        sources = range(part, self.old.policy.slots, self._parts)
        targets = range(part, self.new.policy.slots, self._parts)
        # The new slots first: as long as the old ones serve, nobody finds the new ones open and empty.
        yield from _all(_close(self.new, slot, self.change) for slot in targets)
        yield from _all(_close(self.old, slot, self.change) for slot in sources)
        for source in sources:
            yield from self._told_lately(source, targets)
            yield from self._contents(source, targets)
        yield from _all(self.new.reopen(slot, self.change) for slot in targets)

    def _told_lately(self, source: int, targets: range) -> Plan[None]:
        """Whoever lost a reply asks again, elsewhere, and shall hear it there."""
        for log in (0, 1):
            cursor, more = b"0", True
            while more:
                cursor, found = yield from _one(_retell(self.old, source, log, cursor))
                if found:
                    yield from _all(_load(self.new, slot, self.change, source, 0, found) for slot in targets)
                more = cursor != b"0"

    def _contents(self, source: int, targets: range) -> Plan[None]:
        shown = yield from _one(_unload(self.old, source, self.change, 0))
        while shown.entries:
            shares = self._shared(shown.entries, targets)
            taken = yield from _all(
                _load(self.new, slot, self.change, source, shown.number, share) for slot, share in shares
            )
            if not all(taken):
                return  # somebody else has ended this change
            self.moved += sum(entry.kind != b"c" for entry in shown.entries)
            self._tell()
            shown = yield from _one(_unload(self.old, source, self.change, shown.number))

    def _shared(self, entries: list[_Entry], targets: range) -> Iterator[tuple[int, list[_Entry]]]:
        """What has a route goes there. Of the slot's own facts counters go to one slot, the others to all."""
        shares: defaultdict[int, list[_Entry]] = defaultdict(list)
        for entry in entries:
            if entry.kind == b"e":
                shares[keys.slot_of_event(entry.name, self.new.policy.slots)].append(entry)
            elif entry.route:
                shares[self.new.at(entry.route)].append(entry)
            elif entry.kind == b"c" and entry.name not in _EVERYWHERE:
                shares[targets[0]].append(entry)
            else:
                for slot in targets:
                    shares[slot].append(entry)
        return iter(shares.items())


_EVERYWHERE = (b"fence", b"rate", b"paused")


# -- forgetting -------------------------------------------------------------------------------------------------------


def forgetting(topic: TopicCalls, known: Entry | None, discard: bool) -> Plan[DeletedTopic]:
    """Removes a topic, of which the registry said `known`. Raises TopicInUse if it holds anything and `discard` is not
    said: before anything is written, unless that comes while the topic is being closed."""
    if known is not None and known.to < 0:
        yield from _looked(topic.laid_out(slots_of(known.policy)), discard)
    begun = yield from _started(topic, 0)
    if begun.word == "absent":
        return DeletedTopic(False, 0, 0, 0)
    if begun.to != 0:
        raise TopicInUse(topic.name, _busy(topic.name, begun.to))
    change, calls = begun.change, topic.laid_out(slots_of(begun.policy))
    slots = range(calls.policy.slots)
    yield from _all(_close(calls, slot, change) for slot in slots)
    found = _total((yield from _all(_purge(calls, slot, change, False) for slot in slots)))
    if any(found) and not discard:
        yield from _all(calls.reopen(slot, change) for slot in slots)
        yield from _one(_end(topic, change, "given up", b"", b""))
        raise _full(topic.name, *found)
    gone = _total((yield from _all(_purge(calls, slot, change, True) for slot in slots)))
    for former in (topic.laid_out(slots) for slots in (known.was if known is not None else ())):
        yield from _all(_close(former, slot, change) for slot in range(former.policy.slots))
        yield from _all(_purge(former, slot, change, True) for slot in range(former.policy.slots))
    yield from _one(_end(topic, change, "forgotten", b"", b""))
    return DeletedTopic(True, *gone)


def _looked(calls: TopicCalls, discard: bool) -> Plan[None]:
    """What is refused is refused before anything is closed: TopicInUse, and UnexpectedData for what is none of ours."""
    held = yield from _depth(calls, -1)
    if not discard and (held.pending or held.in_flight or held.dead):
        raise _full(calls.name, held.pending, held.in_flight, held.dead)


def _depth(calls: TopicCalls, to: int) -> Plan[Stats]:
    depth = calls.depth(to)
    return depth.join((yield from _all(depth.calls)))


def _total(counts: list[tuple[int, int, int]]) -> tuple[int, int, int]:
    pending, in_flight, dead = (sum(column) for column in zip(*counts, strict=True))
    return pending, in_flight, dead


def _busy(name: str, to: int) -> str:
    if to == 0:
        return f"it is being forgotten; let that end first: idemgate forget {name}"
    return f"it is being given {to} slots; let that end first: idemgate slots {name} {to}"


def _full(name: str, pending: int, in_flight: int, dead: int) -> TopicInUse:
    what = f"it holds {pending} pending messages, {in_flight} in flight and {dead} dead letters"
    return TopicInUse(name, f"{what}. Let them be handled, or say discard=True (--discard)")


def _unknown(name: str) -> InvalidArgument:
    return InvalidArgument("topic", name, "no such topic in the store", "See which there are: idemgate topics")
