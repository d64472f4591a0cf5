"""The topics that a server stores, read from its registry. This works without the program that declared them."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass
from glob import escape
from typing import Any, TypeVar

from idemgate.core import keys
from idemgate.core.calls import Batch, Call, Plan, call, run_call, stamp, text
from idemgate.core.clock import Clock
from idemgate.core.keys import Key, text_of
from idemgate.errors import DecodeError
from idemgate.store.context import Context
from idemgate.topics.dead_letters import DeadFilter, DeadLetter, DeadPage
from idemgate.topics.messages import Peek, Stats
from idemgate.topics.policy import DEFAULT, Policy, from_stored, slots_of
from idemgate.topics.topic_calls import TopicCalls

__all__ = [
    "RegistryEntry", "StoredTopic", "find_dead_letters", "find_entry", "find_messages", "is_active", "list_entries",
    "read_topics", "stored_topics",
]  # fmt: skip

S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StoredTopic:
    """A topic as the server stores it.

    Attributes:
        name: The name of the topic.
        policy: The stored policy. Options that are not stored (see `Policy`) have their defaults.
        changing_to: The target number of slots of a running reshard, 0 while it is being deleted, else None.
        stats: The message counts and counters.
    """

    name: str
    policy: Policy
    changing_to: int | None
    stats: Stats

    @property
    def active(self) -> bool:
        """True if it holds a message or a dead letter, is paused, or is being changed."""
        return is_active(self.stats, self.changing_to)

    @property
    def slots(self) -> int:
        """The number of slots."""
        return self.policy.slots


def is_active(stats: Stats, changing_to: int | None) -> bool:
    """Return True if a topic holds a message or a dead letter, is paused, or is being changed."""
    held = stats.pending + stats.in_flight + stats.dead
    return stats.paused is not None or changing_to is not None or held > 0


@dataclass(frozen=True, slots=True)
class RegistryEntry:
    """A registry entry. `was` holds earlier numbers of slots; for `to` see `OpenReply`."""

    name: str
    policy: bytes
    to: int
    was: tuple[int, ...]

    def decode(self, read: Callable[[bytes], T]) -> T:
        """Return what a function reads from the policy. Raises DecodeError, which names the topic."""
        try:
            return read(self.policy)
        except DecodeError as error:
            raise DecodeError(f"the registry entry of topic {self.name!r}: {error.why}") from error


def list_entries(namespace: str, clock: Clock | None) -> Call[list[RegistryEntry]]:
    """Build the call that returns all registry entries, sorted by name."""

    def read(reply: list[Any]) -> list[RegistryEntry]:
        return [
            RegistryEntry(text(reply[at]), reply[at + 1], reply[at + 2], tuple(map(int, reply[at + 3].split())))
            for at in range(2, len(reply), 4)
        ]

    return call("topics/registry", (keys.topics(namespace),), (stamp(clock),), read)


def find_entry(namespace: str, clock: Clock | None, name: str) -> Call[RegistryEntry | None]:
    """Build the call that returns the registry entry of one topic, or None."""
    listing = list_entries(namespace, clock)
    return Call(
        listing.script,
        listing.keys,
        listing.args,
        lambda reply: next((entry for entry in listing.read(reply) if entry.name == name), None),
    )


def _batch_of_topics(
    context: Context,
    entries: list[RegistryEntry],
    build: Callable[[TopicCalls, RegistryEntry], Batch[T]],
    read: Callable[[RegistryEntry, Policy, T], S],
) -> Batch[list[S]]:
    """Build the calls of several topics as one batch."""
    policies = [entry.decode(lambda stored: from_stored(stored, DEFAULT)) for entry in entries]
    batches = [
        build(TopicCalls(context.namespace, entry.name, policy, context.codec, context.clock), entry)
        for entry, policy in zip(entries, policies, strict=True)
    ]

    def join(answers: list[Any]) -> list[S]:
        rest = iter(answers)
        joined = [batch.join([next(rest) for _ in batch.calls]) for batch in batches]
        return list(map(read, entries, policies, joined))

    return Batch([request for batch in batches for request in batch.calls], join)


def find_messages(context: Context, key: Key) -> dict[str, list[Peek]]:
    """Return what each topic holds of a key, also in groups. Takes four round trips.

    The group of the key is unknown, so it may be in any slot. One plain command a slot asks where it is, and a script
    reads it there. A slot that an error hides is read, too, and so is each slot of a topic whose slots change.
    """
    link, listing, raw_key = context.link, list_entries(context.namespace, context.clock), keys.raw(key)
    entries = link.run(listing)
    places = [
        (entry.name, slot, slots)
        for entry in entries for slots in [entry.decode(slots_of)] for slot in range(slots)
    ]  # fmt: skip
    sizes = link.probe([("HSTRLEN", keys.slot_messages(context.namespace, *place), raw_key) for place in places])
    held: dict[str, list[int]] = {entry.name: [] for entry in entries}
    for (name, slot, _), size in zip(places, sizes, strict=True):
        if size != 0:
            held[name].append(slot)
    unchanged = [entry for entry in link.run(listing) if entry.to < 0]

    def build(calls: TopicCalls, entry: RegistryEntry) -> Batch[list[Peek]]:
        return calls.find(key, held[entry.name] if entry in unchanged else None)

    found = link.run_all(_batch_of_topics(context, entries, build, lambda _, __, seen: seen))
    return {entry.name: seen for entry, seen in zip(entries, found, strict=True)}


MOST_SLOTS = 20
"""The most slots whose dead letters are searched for a key. Each takes the server up to 2 ms."""
_MOST_LETTERS = 3


def find_dead_letters(context: Context, key: Key, buried: Container[str]) -> dict[str, list[DeadLetter]]:
    """Return dead letters of a key by topic, the newest three of a slot. Takes three round trips.

    It looks at the newest 200 letters of each slot, in at most 20 slots that have some: first those of the topics in
    `buried`, since the group of the key is unknown, then the slot of the key in the others.
    """
    link, raw_key = context.link, keys.raw(key)
    entries = [one for one in link.run(list_entries(context.namespace, context.clock)) if one.to < 0]
    places = [
        (entry, slot)
        for entry in sorted(entries, key=lambda one: one.name not in buried) for slots in [entry.decode(slots_of)]
        for slot in (range(slots) if entry.name in buried else [keys.slot_of(raw_key, slots)])
    ]  # fmt: skip
    names = [keys.slot(context.namespace, one.name, slot, one.decode(slots_of))[_DEAD] for one, slot in places]
    there = zip(places, link.probe([("EXISTS", name) for name in names]), strict=True)
    found = [place for place, exists in there if exists != 0][:MOST_SLOTS]
    wanted = DeadFilter(key=escape(text_of(key)))

    def build(calls: TopicCalls, entry: RegistryEntry) -> Batch[list[DeadLetter]]:
        requests = [calls.dead(slot, wanted, _MOST_LETTERS) for one, slot in found if one is entry]
        return Batch(
            requests, lambda pages: [one for page in pages if isinstance(page, DeadPage) for one in page.letters]
        )

    chosen = list({id(entry): entry for entry, _ in found}.values())
    letters = link.run_all(_batch_of_topics(context, chosen, build, lambda _, __, seen: seen))
    mine = {entry.name: list(filter(wanted.matches, seen)) for entry, seen in zip(chosen, letters, strict=True)}
    return {name: seen for name, seen in mine.items() if seen}


_DEAD = keys.PARTS.index("dead")


def stored_topics(context: Context, active: bool = False, without: Container[str] = ()) -> Plan[list[StoredTopic]]:
    """Return every topic of this namespace, or the active ones. Takes two round trips and writes nothing.

    Args:
        context: the context of the gate.
        active: return the active topics only.
        without: the names of topics to leave out, which are not read.
    """
    entries = yield from run_call(list_entries(context.namespace, context.clock))
    found: list[StoredTopic] = yield read_topics(context, [entry for entry in entries if entry.name not in without])
    return [topic for topic in found if topic.active or not active]


def read_topics(context: Context, entries: list[RegistryEntry]) -> Batch[list[StoredTopic]]:
    """Build the calls that count the messages of all topics: one script call per slot."""
    return _batch_of_topics(
        context,
        entries,
        lambda calls, entry: calls.depth(entry.to),
        lambda entry, policy, stats: StoredTopic(entry.name, policy, None if entry.to < 0 else entry.to, stats),
    )
