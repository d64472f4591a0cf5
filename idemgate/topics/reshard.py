"""Plans that change the number of slots of a topic, or delete the topic: which calls, in which order.

Every step may be repeated. A plan may stop anywhere: the same plan, started again, continues with the rest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from idemgate.core import keys
from idemgate.core.calls import Arg, Call, Plan, call, new_id, run_call, run_calls, stamp, text
from idemgate.errors import InvalidArgument, ServerRejected, TopicInUse
from idemgate.lua import commands
from idemgate.topics.messages import Stats
from idemgate.topics.policy import check_slots, from_stored, slots_of, with_slots
from idemgate.topics.registry import RegistryEntry, find_entry
from idemgate.topics.topic_calls import TopicCalls

__all__ = [
    "DeletedTopic",
    "ReshardProgress",
    "ReshardResult",
    "plan_delete",
    "plan_reshard",
]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ReshardProgress:
    """The progress of a reshard.

    Attributes:
        done: The number of completed parts. A part is unavailable while it is moved.
        parts: The number of parts.
        moved: The number of entries moved so far: messages, dead letters, dedup entries and versions.
    """

    done: int
    parts: int
    moved: int


@dataclass(frozen=True, slots=True)
class ReshardResult:
    """The result of a reshard: the number of slots before and after, and the entries that this call moved."""

    before: int
    after: int
    moved: int


@dataclass(frozen=True, slots=True)
class DeletedTopic:
    """The messages and dead letters that were discarded with a topic. `known` is false if there was no such topic."""

    known: bool
    pending: int
    in_flight: int
    dead: int


class _BeginReply(NamedTuple):
    """The reply of `_begin`. `change` is the id of the change; for "refused" it is the command that the ACL denies."""

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


class _Page(NamedTuple):
    number: int
    entries: list[_Entry]


# -- script calls -----------------------------------------------------------------------------------------------------


def _begin(topic: TopicCalls, slots: int) -> Call[_BeginReply]:
    def read(reply: list[Any]) -> _BeginReply:
        word = text(reply[0])
        if word == "changing":
            return _BeginReply(word, reply[2], reply[3], reply[4])
        return _BeginReply(word, b"", -1, reply[2] if word == "refused" else b"")

    args = (stamp(topic.clock), topic.name, slots, new_id().hex(), *_required_commands(topic))
    return call("topics/reshard/begin", (keys.topics(topic.namespace),), args, read)


def _required_commands(topic: TopicCalls) -> Iterator[Arg]:
    """Yield each command of a change with a key: of the registry, or of a slot.

    A deletion needs those of a change of the slot count, too, because a producer has all commands of `purge`. PUBLISH
    is left out, because the change works without wake-up hints.
    """
    moving = ("close", "reopen", "replies", "unload", "load", "purge")
    for key, scripts in ((keys.topics(topic.namespace), ("begin", "finish")), (topic.keys(0)[0], moving)):
        for command in sorted(
            {name for script in scripts for name in commands(f"topics/reshard/{script}")} - {"PUBLISH"}
        ):
            yield command
            yield key


def _end(topic: TopicCalls, change: bytes, how: str, stored: bytes, wanted: bytes) -> Call[bytes | None]:
    """Build the call that ends a change. It returns None, or the stored policy if that differs from `stored`."""
    args = (stamp(topic.clock), topic.name, change, how, stored, wanted)
    return call(
        "topics/reshard/finish",
        (keys.topics(topic.namespace),),
        args,
        lambda reply: reply[2] if reply[0] == b"differs" else None,
    )


def _of_slot(topic: TopicCalls, script: str, slot: int, args: Sequence[Arg], read: Callable[[list[Any]], T]) -> Call[T]:
    return call(f"topics/reshard/{script}", topic.keys(slot), (stamp(topic.clock), *args), read)


def _close(topic: TopicCalls, slot: int, change: bytes) -> Call[None]:
    return _of_slot(topic, "close", slot, (change,), lambda _: None)


def _unload(topic: TopicCalls, slot: int, change: bytes, loaded: int) -> Call[_Page]:
    """Build the call that removes page number `loaded` from a closed slot and returns the next page."""

    def read(reply: list[Any]) -> _Page:
        if reply[0] == b"open":
            return _Page(0, [])
        return _Page(reply[2], [_Entry(*reply[at : at + 6]) for at in range(3, len(reply), 6)])

    return _of_slot(topic, "unload", slot, (change, loaded), read)


def _load(
    topic: TopicCalls, slot: int, change: bytes, source: int, number: int, entries: Iterable[_Entry]
) -> Call[bool]:
    """Build the call that loads a page into its new slot. It returns False if another process ended the change."""
    args: list[Arg] = [change, topic.policy.for_scripts(), source, number]
    for entry in entries:
        args += entry[:5]
    return _of_slot(topic, "load", slot, args, lambda reply: reply[0] == b"ok")


def _list_replies(topic: TopicCalls, slot: int, log: int, cursor: bytes) -> Call[tuple[bytes, list[_Entry]]]:
    """Build the call that returns the next cursor and a page of the replies remembered per request id."""

    def read(reply: list[Any]) -> tuple[bytes, list[_Entry]]:
        half = b"%d" % reply[3]
        pairs = zip(reply[4::2], reply[5::2], strict=True)
        return reply[2], [_Entry(b"t", request, half, answer, b"", b"") for request, answer in pairs]

    return _of_slot(topic, "replies", slot, (log, cursor), read)


def _purge(topic: TopicCalls, slot: int, change: bytes, really: bool) -> Call[tuple[int, int, int]]:
    """Build the call that counts the pending, in-flight and dead messages of a slot, and deletes them if `really`."""
    args = (change, 1 if really else 0)
    return _of_slot(topic, "purge", slot, args, lambda reply: tuple(reply[2:5]) if len(reply) == 5 else (0, 0, 0))


def _begin_change(topic: TopicCalls, slots: int) -> Plan[_BeginReply]:
    """Begin a change. Raises ServerRejected, before anything is written, if the ACL denies a part of it."""
    begun = yield from run_call(_begin(topic, slots))
    if begun.word == "refused":
        what = f"this user's access list does not allow {text(begun.change)}, which changing a topic's slots needs"
        raise ServerRejected(f"{what}. Nothing was changed. What each role needs, `idemgate acl` prints")
    return begun


# -- changing the number of slots -------------------------------------------------------------------------------------


def plan_reshard(
    topic: TopicCalls, slots: int, on_progress: Callable[[ReshardProgress], object]
) -> Plan[ReshardResult]:
    """Plan the change of a topic to another number of slots.

    Raises InvalidArgument, TopicInUse or ServerRejected. Raises UnexpectedData or DecodeError for corrupt data: before
    anything is written, unless a single message among others is corrupt.
    """
    check_slots(topic.policy, slots)
    yield from _check_readable(topic, slots)
    begun = yield from _begin_change(topic, slots)
    if begun.word == "absent":
        fix = "List the topics: idemgate topic ls"
        raise InvalidArgument("topic", topic.name, "no such topic in the store", fix)
    if begun.word == "same":
        return ReshardResult(slots, slots, 0)
    if begun.to != slots:
        raise TopicInUse(topic.name, _busy_text(topic.name, begun.to))
    before = slots_of(begun.policy)
    policy = from_stored(begun.policy, topic.policy)
    move = _Move(topic.for_policy(policy, before), topic.for_policy(policy, slots), begun.change, on_progress)
    yield from move.run()
    stored: bytes | None = begun.policy
    while stored is not None:
        stored = yield from run_call(_end(topic, begun.change, "done", stored, with_slots(stored, slots)))
    return ReshardResult(before, slots, move.moved)


def _check_readable(topic: TopicCalls, slots: int) -> Plan[None]:
    """Read both layouts before a change begins, so that corrupt data is found before anything is written."""
    entry = yield from run_call(find_entry(topic.namespace, topic.clock, topic.name))
    if entry is None or entry.to >= 0:
        return
    before = entry.decode(lambda stored: from_stored(stored, topic.policy)).slots
    if before != slots:
        yield from _count_messages(topic.for_slots(before), slots)


class _Move:
    """The move from one layout to another.

    Slots that exchange entries form a part. A part is closed as a whole, moved, and opened in the new layout.
    """

    def __init__(
        self, old: TopicCalls, new: TopicCalls, change: bytes, on_progress: Callable[[ReshardProgress], object]
    ) -> None:
        self.old = old
        self.new = new
        self.change = change
        self.moved = 0
        self._on_progress = on_progress
        self._parts = min(old.policy.slots, new.policy.slots)
        self._done = 0

    def run(self) -> Plan[None]:
        for part in range(self._parts):
            yield from self._move_part(part)
            self._done = part + 1
            self._report_progress()

    def _report_progress(self) -> None:
        self._on_progress(ReshardProgress(self._done, self._parts, self.moved))

    def _move_part(self, part: int) -> Plan[None]:
        sources = range(part, self.old.policy.slots, self._parts)
        targets = range(part, self.new.policy.slots, self._parts)
        # Close the new slots first: while the old ones still serve, no client may find a new one open and empty.
        yield from run_calls(_close(self.new, slot, self.change) for slot in targets)
        yield from run_calls(_close(self.old, slot, self.change) for slot in sources)
        for source in sources:
            yield from self._copy_replies(source, targets)
            yield from self._move_entries(source, targets)
        yield from run_calls(self.new.reopen(slot, self.change) for slot in targets)

    def _copy_replies(self, source: int, targets: range) -> Plan[None]:
        """Copy the remembered replies: a client that lost a reply sends its request again, to the new slot."""
        for log in (0, 1):
            cursor, more = b"0", True
            while more:
                cursor, entries = yield from run_call(_list_replies(self.old, source, log, cursor))
                if entries:
                    yield from run_calls(_load(self.new, slot, self.change, source, 0, entries) for slot in targets)
                more = cursor != b"0"

    def _move_entries(self, source: int, targets: range) -> Plan[None]:
        page = yield from run_call(_unload(self.old, source, self.change, 0))
        while page.entries:
            shares = self._split_entries(page.entries, targets)
            loaded = yield from run_calls(
                _load(self.new, slot, self.change, source, page.number, share) for slot, share in shares
            )
            if not all(loaded):
                return  # another process has ended this change
            self.moved += sum(entry.kind != b"c" for entry in page.entries)
            self._report_progress()
            page = yield from run_call(_unload(self.old, source, self.change, page.number))

    def _split_entries(self, entries: list[_Entry], targets: range) -> Iterator[tuple[int, list[_Entry]]]:
        """Split entries by target slot.

        An entry with a route goes to the slot of its route. Counters go to one slot, other metadata to all.
        """
        shares: defaultdict[int, list[_Entry]] = defaultdict(list)
        for entry in entries:
            if entry.kind == b"e":
                shares[keys.slot_of_event(entry.name, self.new.policy.slots)].append(entry)
            elif entry.route:
                shares[self.new.slot_of(entry.route)].append(entry)
            elif entry.kind == b"c" and entry.name not in _COPIED_METADATA:
                shares[targets[0]].append(entry)
            else:
                for slot in targets:
                    shares[slot].append(entry)
        return iter(shares.items())


_COPIED_METADATA = (b"fence", b"rate", b"paused", b"lease")


# -- deleting a topic -------------------------------------------------------------------------------------------------


def plan_delete(topic: TopicCalls, entry: RegistryEntry | None, discard: bool) -> Plan[DeletedTopic]:
    """Plan the deletion of a topic with this registry entry.

    Raises TopicInUse if it holds messages or dead letters and `discard` is false. Nothing is written then, unless a
    message arrives while the topic is being closed.
    """
    if entry is not None and entry.to < 0:
        yield from _check_deletable(topic.for_slots(entry.decode(slots_of)), discard)
    begun = yield from _begin_change(topic, 0)
    if begun.word == "absent":
        return DeletedTopic(False, 0, 0, 0)
    if begun.to != 0:
        raise TopicInUse(topic.name, _busy_text(topic.name, begun.to))
    change, calls = begun.change, topic.for_slots(slots_of(begun.policy))
    slots = range(calls.policy.slots)
    yield from run_calls(_close(calls, slot, change) for slot in slots)
    held = _sum_counts((yield from run_calls(_purge(calls, slot, change, False) for slot in slots)))
    if any(held) and not discard:
        yield from run_calls(calls.reopen(slot, change) for slot in slots)
        yield from run_call(_end(topic, change, "given up", b"", b""))
        raise _not_empty(topic.name, *held)
    deleted = _sum_counts((yield from run_calls(_purge(calls, slot, change, True) for slot in slots)))
    for former in (topic.for_slots(slots) for slots in (entry.was if entry is not None else ())):
        yield from run_calls(_close(former, slot, change) for slot in range(former.policy.slots))
        yield from run_calls(_purge(former, slot, change, True) for slot in range(former.policy.slots))
    yield from run_call(_end(topic, change, "forgotten", b"", b""))
    return DeletedTopic(True, *deleted)


def _check_deletable(calls: TopicCalls, discard: bool) -> Plan[None]:
    """Raise TopicInUse or UnexpectedData before anything is closed."""
    held = yield from _count_messages(calls, -1)
    if not discard and (held.pending or held.in_flight or held.dead):
        raise _not_empty(calls.name, held.pending, held.in_flight, held.dead)


def _count_messages(calls: TopicCalls, to: int) -> Plan[Stats]:
    depth = calls.depth(to)
    return depth.join((yield from run_calls(depth.calls)))


def _sum_counts(counts: list[tuple[int, int, int]]) -> tuple[int, int, int]:
    pending, in_flight, dead = (sum(column) for column in zip(*counts, strict=True))
    return pending, in_flight, dead


def _busy_text(name: str, to: int) -> str:
    if to == 0:
        return f"it is being deleted; let that end first: idemgate topic delete {name}"
    return f"it is being resharded to {to} slots; let that end first: idemgate topic reshard {name} {to}"


def _not_empty(name: str, pending: int, in_flight: int, dead: int) -> TopicInUse:
    what = f"it holds {pending} pending messages, {in_flight} in flight and {dead} dead letters"
    return TopicInUse(name, f"{what}. Let workers handle them, or pass discard=True (--discard)")
