"""The slots of a topic: their keys, requests about them, and what becomes of a request when its slot has moved."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from random import randrange
from typing import Any, Generic, NamedTuple, Self, TypeVar

from idemgate import lua
from idemgate.core import keys
from idemgate.core.calls import MAX_ENTRIES, Arg, Batch, Call, call, new_id, split_batches, stamp, text
from idemgate.core.clock import Clock
from idemgate.core.codec import Codec
from idemgate.core.keys import Key
from idemgate.errors import DecodeError
from idemgate.topics.merge import Merge
from idemgate.topics.messages import Delivery
from idemgate.topics.policy import Policy, slots_of

__all__ = [
    "BaseCalls",
    "OpenReply",
    "Rebuild",
    "SlotRequest",
    "SlotsChanged",
    "open_topic",
    "restore_order",
    "stored_policy",
]

CheckPayload = Callable[[Merge, bytes, Any], None]
"""A check of a lifted payload, and of what it was. It raises InvalidArgument if the handler could not take it."""
A = TypeVar("A")
E = TypeVar("E")
T = TypeVar("T")
_USE_RESULTS = frozenset({"cancel", "results", "settle", "settle_and_take", "take"})
"""The scripts that store or read results of deliveries."""
Rebuild = Callable[[Any, int], Batch[Any]]
"""A function that builds a call again for another slot layout. It takes the calls of that layout and the old slot."""


class OpenReply(NamedTuple):
    """The reply of `open_topic`.

    `word` is "made", "same", "changed", "newer", "differs" or "resized". "resized" means that the topic once had the
    requested number of slots. "newer" means that the stored policy has a higher revision. `policy` is the stored
    policy; for "changed" it is the previous one. `to` is the target number of slots of a running reshard, 0 while the
    topic is being deleted, else -1.
    """

    word: str
    policy: bytes
    to: int


def open_topic(namespace: str, clock: Clock | None, name: str, policy: Policy) -> Call[OpenReply]:
    """Build the call that creates a topic or compares its policy with the stored one.

    It replaces a stored policy with a lower revision.
    """
    args = (stamp(clock), name, policy.pack_stored())
    return call(
        "topics/open",
        (keys.topics(namespace),),
        args,
        lambda reply: OpenReply(text(reply[0]), reply[2], reply[3]),
    )


def stored_policy(namespace: str, clock: Clock | None, name: str) -> Call[bytes | None]:
    """Build the call that returns the stored policy of a topic, or None if the topic does not exist."""
    return call(
        "topics/policy",
        (keys.topics(namespace),),
        (stamp(clock), name),
        lambda reply: reply[2] if reply[0] == b"ok" else None,
    )


class SlotRedirect:
    """The redirect of a call whose slot was closed: build the same request for the current slot layout."""

    __slots__ = ("calls", "rebuild", "slot")

    def __init__(self, calls: BaseCalls, slot: int, rebuild: Rebuild) -> None:
        self.calls: BaseCalls = calls
        self.slot: int = slot
        self.rebuild: Rebuild = rebuild

    def lookup(self) -> Call[OpenReply]:
        """Build the call that reads the layout from the registry. It creates a topic that was deleted."""
        return self.calls.lookup()

    def resolve(self, found: OpenReply, by: bytes) -> Batch[Any]:
        """Build the calls for the layout that the registry returned. `by` is the change that closed the slot."""
        calls = self.calls.resolve_layout(found)
        batch = self.rebuild(calls, self.slot)
        if calls is not self.calls or found.to >= 0:
            return batch
        # The slot is closed although no change is running: it was deleted with its topic and is needed again.
        return Batch([calls.reopen(self.slot, by), *batch.calls], lambda answers: batch.join(answers[1:]))


class SlotsChanged(NamedTuple):
    """The answer of a call that did nothing because its slot has moved. `calls` are those of the layout to use."""

    calls: Any


class BaseCalls:
    """The part of `TopicCalls` that every kind of call uses."""

    __slots__ = (
        "_policy", "_rules", "_serials", "adopt", "check", "clock", "codec", "hidden", "name", "namespace", "policy",
    )  # fmt: skip

    def __init__(
        self,
        namespace: str,
        name: str,
        policy: Policy,
        codec: Codec,
        clock: Clock | None,
        adopt: Callable[[int], None] = lambda _slots: None,
        check: CheckPayload | None = None,
        hidden: bool = False,
    ) -> None:
        """Create the calls of one topic.

        `adopt` receives the number of slots after each registry lookup, unless a reshard is running. `check` sees
        the payload of each trigger. `hidden`: histories get digests of keys.
        """
        self.namespace: str = namespace
        self.name: str = name
        self.policy: Policy = policy
        self.codec: Codec = codec
        self.clock: Clock | None = clock
        self.adopt: Callable[[int], None] = adopt
        self.check: CheckPayload | None = check
        self.hidden: bool = hidden
        self._policy = policy.for_scripts(hidden)
        self._rules = policy.for_triggers(hidden)
        self._serials = policy.result_retention is not None  # replies name the last serial before them: see `Ticket`

    def keys(self, slot: int) -> tuple[bytes, ...]:
        """Return the Redis keys of a slot, in the order that scripts expect."""
        return keys.slot(self.namespace, self.name, slot, self.policy.slots)

    def slot_of(self, route: bytes) -> int:
        """Return the slot of a route: a group, or a key without a group."""
        return keys.slot_of(route, self.policy.slots)

    def slot_of_delivery(self, delivery: Delivery[Any]) -> int:
        """Return the current slot of a delivery. It may have been taken under another number of slots."""
        try:
            return self.slot_of(delivery.route)
        except DecodeError:
            return delivery.slot % self.policy.slots

    def result_keys(self, slot: int) -> tuple[bytes, ...]:
        """Return the Redis keys of the results of a slot; none if the topic stores no results."""
        if self.policy.result_retention is None:
            return ()
        return keys.slot_results(self.namespace, self.name, slot, self.policy.slots)

    # -- slot layouts -------------------------------------------------------------------------------------------------

    def for_slots(self, slots: int) -> Self:
        """Return the calls of the same topic with another number of slots."""
        return self.for_policy(self.policy, slots)

    def with_adopt(self, adopt: Callable[[int], None]) -> Self:
        """Return the same calls, which report the stored number of slots to `adopt`."""
        common = self.namespace, self.name, self.policy, self.codec, self.clock
        return type(self)(*common, adopt, self.check, self.hidden)

    def for_policy(self, policy: Policy, slots: int) -> Self:
        """Return the calls of the same topic with another policy and number of slots."""
        policy = replace(policy, slots=slots)
        common = self.namespace, self.name, policy, self.codec, self.clock
        return type(self)(*common, self.adopt, self.check, self.hidden)

    def lookup(self) -> Call[OpenReply]:
        """Build the call that reads the layout from the registry. It creates a topic that was deleted."""
        return open_topic(self.namespace, self.clock, self.name, self.policy)

    def resolve_layout(self, found: OpenReply) -> Self:
        """Return the calls of the layout to try after this layout found a slot closed.

        That is the stored layout, or the target of a running reshard. In the second case only the target is tried
        until the slot is open.
        """
        stored, mine = slots_of(found.policy), self.policy.slots
        if found.to < 0:
            self.adopt(stored)
        wanted = found.to if found.to > 0 and mine in (stored, found.to) else stored
        return self if wanted == mine else self.for_slots(wanted)

    def successor_slots(self, slot: int, before: BaseCalls) -> range:
        """Return the slots of this layout that hold the content of a slot of layout `before`."""
        return keys.successor_slots(slot, before.policy.slots, self.policy.slots)

    def merged_successors(self, slot: int, before: BaseCalls) -> Sequence[int]:
        """Return the slots that `successor_slots` returns, and for each merged slot the one it was merged into.

        It is for calls that may be repeated. The other merged slots may have been called before they were merged.
        """
        return self.successor_slots(slot, before) or (slot % self.policy.slots,)

    def reopen(self, slot: int, change: bytes) -> Call[bool]:
        """Build the call that opens a slot which `change` closed."""
        return call("topics/reshard/reopen", self.keys(slot), (stamp(self.clock), change), lambda _: True)

    # -- building calls -----------------------------------------------------------------------------------------------

    def _call(
        self,
        script: str,
        slot: int,
        args: Sequence[Arg],
        read: Callable[[list[Any]], Any],
        rebuild: Rebuild | None = None,
        *more: bytes,
    ) -> Call[Any]:
        if script in _USE_RESULTS:
            more = self.result_keys(slot)
        redirect = None if rebuild is None else SlotRedirect(self, slot, rebuild)
        args = (stamp(self.clock), *args)
        return Call(lua.script(f"topics/{script}"), (*self.keys(slot), *more), args, read, redirect)

    def _answer_change(self, build: Callable[[int], Call[Any]]) -> Rebuild:
        """Return a function that answers SlotsChanged for another layout. For this one `build` makes the call again."""

        def rebuild(calls: Any, slot: int) -> Batch[Any]:
            if calls.policy.slots == self.policy.slots:
                return single(build(slot))
            return Batch([], lambda _: SlotsChanged(calls))

        return rebuild

    def _for_each_successor(self, build: Callable[[Any, int], Call[T]], join: Callable[[list[T]], T]) -> Rebuild:
        """Return a function that makes the call again for each slot that holds the content of the moved one."""
        return lambda calls, slot: Batch([build(calls, target) for target in calls.merged_successors(slot, self)], join)

    def _call_for_key(
        self, script: str, route: bytes, args: Sequence[Arg], read: Callable[[list[Any]], Any]
    ) -> Call[Any]:
        """Build a call about one key. Its arguments are the same in every layout."""
        return self._call(
            script,
            self.slot_of(route),
            args,
            read,
            lambda calls, _: single(calls._call_for_key(script, route, args, read)),
        )

    def _split_by_slot(
        self,
        entries: Iterable[Any],
        slot_of: Callable[[Any], int],
        build: Callable[[int, list[Any]], Call[Any]],
        read: Callable[[Any], list[str]],
        size_of: Callable[[Any], int],
        most: int = MAX_ENTRIES,
    ) -> Batch[list[str]]:
        """Build one call per slot and batch of entries. Outcomes are joined in the order of the entries."""
        found = list(entries)
        if self.policy.slots == 1:
            return Batch(
                [build(0, batch) for batch in split_batches(found, size_of, most)],
                lambda answers: flatten(read(answer) for answer in answers),
            )
        by_slot: defaultdict[int, list[int]] = defaultdict(list)
        for position, entry in enumerate(found):
            by_slot[slot_of(entry)].append(position)
        sizes = list(map(size_of, found))
        placed = [
            (slot, batch)
            for slot, positions in by_slot.items()
            for batch in split_batches(positions, sizes.__getitem__, most)
        ]
        calls = [build(slot, [found[position] for position in batch]) for slot, batch in placed]
        return Batch(
            calls, lambda answers: restore_order([batch for _, batch in placed], [read(answer) for answer in answers])
        )


class SlotRequest(Generic[E]):
    """The entries that one script call handles in one slot.

    `id` is the request id, followed by the ids of the larger requests that this one is a part of. The server may have
    answered one of those before the slot moved, and the reply may be lost. `larger` maps the number of entries of
    each larger request to the positions of these entries in it.
    """

    __slots__ = ("entries", "id", "larger")

    def __init__(
        self, request_id: bytes, entries: Sequence[E], larger: Mapping[int, Sequence[int]] | None = None
    ) -> None:
        self.id: bytes = request_id
        self.entries: Sequence[E] = entries
        self.larger: Mapping[int, Sequence[int]] | dict[int, Sequence[int]] = larger or {}

    def select_answers(self, answers: list[A]) -> list[A]:
        """Return the answers to these entries from a reply to this request or to a larger one."""
        if len(answers) == len(self.entries):
            return answers
        return [answers[position] for position in self.larger[len(answers)]]

    def split(
        self,
        slot_of: Callable[[E], int],
        build: Callable[[int, SlotRequest[E]], Call[A]],
        join: Callable[[list[list[int]], list[A]], A],
    ) -> Batch[A]:
        """Build the same request again, one call per slot. Entries that share a slot keep the request id."""
        by_slot: defaultdict[int, list[int]] = defaultdict(list)
        for position, entry in enumerate(self.entries):
            by_slot[slot_of(entry)].append(position)
        calls = [build(slot, self._select(positions)) for slot, positions in by_slot.items()]
        return Batch(calls, lambda answers: join(list(by_slot.values()), answers))

    def _select(self, positions: list[int]) -> SlotRequest[E]:
        if len(positions) == len(self.entries):
            return self
        larger = {size: [where[position] for position in positions] for size, where in self.larger.items()}
        larger[len(self.entries)] = positions
        return SlotRequest(new_id() + self.id, [self.entries[position] for position in positions], larger)


def restore_order(positions: list[list[int]], answers: list[Any]) -> list[Any]:
    """Join the answers of several calls in the order of the original entries."""
    by_position = {
        position: answer
        for where, part in zip(positions, answers, strict=True)
        for position, answer in zip(where, part, strict=True)
    }
    return [by_position[position] for position in sorted(by_position)]


def single(request: Call[T]) -> Batch[T]:
    """Return a batch of one call."""
    return Batch([request], lambda answers: answers[0])


def flatten(lists: Iterable[Iterable[Any]]) -> list[Any]:
    """Return the items of all lists as one list."""
    return [item for items in lists for item in items]


def route_of(key: Key, group: Key | None) -> bytes:
    """Return the route of a key: its group, or the key without a group. The route decides the slot."""
    raw_key = keys.raw(key)
    return raw_key if group is None else keys.raw(group)


def split_request(request: bytes, n: int) -> list[bytes]:
    """Return `n` request ids for the parts of one request.

    Two parts may meet in one slot again. Distinct ids keep one part from receiving the remembered reply of the other.
    """
    return [request] if n == 1 else [new_id() + request for _ in range(n)]


def divide(n: int, slots: int) -> list[int]:
    """Divide `n` among the slots. The remainder starts at a random slot, so that no slot is always served last."""
    first = randrange(slots)
    return [n // slots + ((slot - first) % slots < n % slots) for slot in range(slots)]


def earliest(times: Iterable[int]) -> int:
    """Return the earliest of the times in ms. 0 means never."""
    return min(filter(None, times), default=0)


def next_batch_size(done: int) -> int:
    """Return the size of the next batches after a script call completed `done` entries.

    A call that stopped early would stop early again if it received all remaining entries.
    """
    return 2 * done or MAX_ENTRIES
