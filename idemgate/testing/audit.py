"""Consistency check of a whole namespace. It only reads."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from idemgate.audit.findings import Finding, Report
from idemgate.audit.keys import (
    MAX_SLOTS,
    check_entries,
    check_expiring,
    check_list,
    check_members,
    check_names,
    check_page,
    check_persistent,
    check_processes,
    check_record,
    check_registered,
    check_report,
    check_reshard_mark,
    check_results,
    check_scopes,
    check_slot_counts,
    check_unknown_key,
    parse_slot_counts,
)
from idemgate.audit.slot import (
    Contents,
    Slot,
    SlotTooLarge,
    SlotView,
    TopicEntry,
    balance,
    check_balance,
    check_slot,
    decode_topic_entry,
    read_slot,
)
from idemgate.core import keys
from idemgate.core.calls import text
from idemgate.core.clock import Clock
from idemgate.core.codec import Codec
from idemgate.core.history import decode_act, decode_transition
from idemgate.core.keys import Owner, check_name
from idemgate.core.validation import check_int
from idemgate.errors import ServerRejected, UnexpectedData
from idemgate.guard.record import decode_record
from idemgate.membership.heartbeats import list_members
from idemgate.store.context import url_to_open
from idemgate.store.endpoint import Endpoint
from idemgate.store.nodes import Server, servers
from idemgate.store.sync import SyncLink
from idemgate.store.url import endpoint_from_url

if TYPE_CHECKING:
    from idemgate.gate import Gate

__all__ = ["audit"]

BATCH = 100
_PAGES = {"dedup": check_page, "results": check_results}
_WHOLE: dict[str, tuple[Any, ...]] = {
    "scopes": (check_scopes, "HGETALL"),
    "acts": (partial(check_entries, "an act", decode_act), "LRANGE", 0, -1),
    "history": (partial(check_entries, "a transition", decode_transition), "LRANGE", 0, -1),
    "presence": (check_processes, "ZRANGE", 0, -1),
    "names": (check_names, "ZRANGE", 0, -1),
    "report": (check_report, "GET"),
}
"""The keys that one command reads: their check, and the command with the arguments behind the key."""
"""Records to read at once. Each may contain a result of 256 KiB."""
CODEC = Codec(max_bytes=2**31)
"""A codec without a practical size limit, since gates choose their own limits."""
OF_LAYOUT = ("closed", "conservation", "unregistered", "wrong-slot")
"""Findings that depend on the number of slots of a topic."""


def audit(
    store: Gate | str,
    namespace: str | None = None,
    *,
    history: Iterable[Finding] = (),
    most: int = 20_000,
    most_bytes: int = 16_777_216,
) -> Report:
    """Check a namespace and return a report of all errors: `assert audit(gate).sound`.

    It only reads, and it blocks. In an event loop use `await asyncio.to_thread(audit, gate)`.

    It may run beside other clients. One script reads each slot, each group of members and each record, so each finding
    was true at one moment. Of a page of a dedup set, or of results, only the head is read. Operations on a corrupt
    bucket raise UnexpectedData. The keys are found by SCAN, which may miss keys that are created or deleted meanwhile.
    The audit blocks a server for about a millisecond per thousand entries of a slot.

    Args:
        store: A gate, or the URL of a store.
        namespace: None means the gate's namespace, or "default" for a URL.
        history: Findings of a `History`, to include in the report.
        most: Most entries of a slot. A larger slot is not read, and is reported as "unread".
        most_bytes: Most bytes of messages of a slot, likewise. Stored event ids count as well.

    Raises:
        StoreUnavailable: The store cannot be reached.
        ServerRejected: A server rejected a command.
    """
    endpoint, name, clock = _where(store, namespace)
    made = _Audit(name, clock, check_int("most", most), check_int("most_bytes", most_bytes))
    link = SyncLink(endpoint, 5.0)
    try:
        with servers(endpoint) as found:
            findings = [*history, *made.all(link, found)]
    finally:
        link.close()
    return Report(tuple(findings), dict(made.counted))


def _where(store: Gate | str, namespace: str | None) -> tuple[Endpoint, str, Clock | None]:
    if isinstance(store, str):
        return endpoint_from_url(url_to_open(store)), check_name(namespace or "default", "namespace"), None
    return store.context.endpoint, check_name(namespace or store.namespace, "namespace"), store.context.clock


class _Audit:
    """One pass over a namespace."""

    def __init__(self, namespace: str, clock: Clock | None, most: int, room: int) -> None:
        self.namespace = namespace
        self.clock = clock
        self.most = most
        self.room = room
        self.counted: Counter[str] = Counter(records=0, topics=0, slots=0, pending=0, in_flight=0, dead=0)
        self.topics: dict[str, TopicEntry | None] = {}
        self.changes: dict[bytes, bytes] = {}
        self.slots: defaultdict[str, set[Slot]] = defaultdict(set)
        self.balances: defaultdict[str, list[int | None]] = defaultdict(list)

    def all(self, link: SyncLink, found: list[Server]) -> Iterator[Finding]:
        yield from self._registry(link)
        doubtful: set[str] = set()
        for server in found:
            slots: dict[Slot, bytes] = {}
            groups: set[str] = set()
            seen: set[bytes] = set()
            for batch in server.scan(keys.pattern(self.namespace)):
                fresh = {key: keys.owner_of(self.namespace, key) for key in batch if key not in seen}
                seen |= fresh.keys()
                yield from self._keys(server, fresh)
                for key, owner in fresh.items():
                    if owner.kind == "slot":
                        slots.setdefault(Slot(self.namespace, owner.name, owner.number, owner.slots), key)
                    elif owner.kind == "members":
                        groups.add(owner.name)
            for slot, key in slots.items():
                self.slots[slot.topic].add(slot)
                if list(self._slot(link, slot, key, counted=self.counted)):
                    doubtful.add(slot.topic)
            for group in sorted(groups):
                yield from self._group(link, server, group)
        doubtful |= {topic for topic in self.slots if list(self._balance(topic))}
        for topic in sorted(doubtful):
            yield from self._again(link, topic)
        yield from self._changing(link)

    def _changing(self, link: SyncLink) -> Iterator[Finding]:
        """Report changes of slot counts that were under way at the start and still are.

        The store does not show if a process still works on a change, but most changes are shorter than an audit.
        """
        key = keys.topics(self.namespace)
        for field, change in self.changes.items():
            if _run_command(link, "HGET", key, field) == change:
                yield from check_reshard_mark(key, text(field.removesuffix(b" to")), change, self.topics)

    def _balance(self, topic: str) -> Iterator[Finding]:
        yield from check_balance(topic, text(keys.topics(self.namespace)), self.balances[topic])

    def _again(self, link: SyncLink, topic: str) -> Iterator[Finding]:
        """Check a suspicious topic again, between two equal readings of its registry entry.

        The registry and the slots are not read atomically, so the number of slots may have changed in between.
        """
        before = self._entry(link, topic)
        self.balances[topic] = []
        found: list[Finding] = []
        for slot in sorted(self.slots[topic] | self._known_slots(topic, before)):
            found += self._slot(link, slot, keys.slot(*slot)[keys.PARTS.index("meta")])
        found += self._balance(topic)
        rests = before == self._entry(link, topic) and before[1] is None
        yield from (one for one in found if rests or one.kind not in OF_LAYOUT)

    def _entry(self, link: SyncLink, topic: str) -> list[bytes | None]:
        """Read a topic's registry entry: policy, change under way, earlier numbers of slots, and its last change.

        The last change matters, since a topic may return to an earlier number of slots.
        """
        names = [topic, f"{topic} to", f"{topic} was"]
        entry: list[bytes | None] = _run_command(link, "HMGET", keys.topics(self.namespace), *names) or [None] * 3
        self.topics.pop(topic, None)
        if entry[0] is None:
            return entry
        now = self.topics[topic] = decode_topic_entry(entry[0], entry[1] is not None)
        made = now and _run_command(link, "HGET", Slot(self.namespace, topic, 0, now.slots).key("meta"), "opened")
        return [*entry, made]

    def _known_slots(self, topic: str, entry: list[bytes | None]) -> set[Slot]:
        """Return every slot that a topic has or had: SCAN may have missed a slot created meanwhile."""
        now = self.topics.get(topic)
        had = parse_slot_counts(entry[2] or b"") or ()
        numbers = {*had, now.slots} if now else {*had}
        return {Slot(self.namespace, topic, at, slots) for slots in numbers for at in range(min(slots, MAX_SLOTS))}

    def _registry(self, link: SyncLink) -> Iterator[Finding]:
        key = keys.topics(self.namespace)
        try:
            stored = link.command("HGETALL", key)
        except ServerRejected as error:
            if "WRONGTYPE" not in str(error):
                raise
            yield Finding("wrong-type", text(key), f"the registry of topics cannot be read: {error}")
            return
        found: dict[bytes, bytes] = dict(zip(stored[::2], stored[1::2], strict=True))
        self.changes = {name: change for name, change in found.items() if name.endswith(b" to")}
        for name, packed in found.items():
            if b" " in name:  # what is noted of a change of slots
                yield from check_slot_counts(key, name, packed)
                continue
            self.topics[text(name)] = decode_topic_entry(packed, name + b" to" in found)
            self.counted["topics"] = len(self.topics)
            if self.topics[text(name)] is None:
                yield Finding("undecodable", text(key), f"the policy of topic {text(name)!r} cannot be read")

    def _keys(self, server: Server, found: Mapping[bytes, Owner]) -> Iterator[Finding]:
        for key, owner in found.items():
            yield from check_unknown_key(owner, key)
        yield from self._records(server, [key for key, owner in found.items() if owner.kind == "once"])
        for owner in {owner._replace(part="") for owner in found.values() if owner.part.startswith("out:")}:
            yield from self._consumed_list(server, owner)
        for key, owner in found.items():
            if owner.kind in _PAGES:
                yield from self._page(server, key, _PAGES[owner.kind])
            elif owner.kind in _WHOLE:
                check, command, *arguments = _WHOLE[owner.kind]
                yield from self._whole(server, key, check, command, key, *arguments)
            if owner.kind in ("topics", "scopes", "acts", "out"):
                yield from check_persistent(key, server.command("PTTL", key))
            elif owner.kind in ("durability", "presence", "names", "report", "history"):
                yield from check_expiring(key, server.command("PTTL", key))

    def _consumed_list(self, server: Server, owner: Owner) -> Iterator[Finding]:
        """Check the entries of a forward target that a consumer has taken."""
        name = keys.outbox(self.namespace, owner.name, owner.number, owner.slots).decode()
        leases, state, data = keys.list_keys(name)[2:5]
        read = server.pipeline([("ZRANGE", leases, 0, -1), ("HKEYS", state), ("HKEYS", data)], atomic=True)
        if error := next((reply for reply in read if isinstance(reply, Exception)), None):
            yield Finding("wrong-type" if "WRONGTYPE" in str(error) else "unread", name, f"{error}")
        else:
            yield from check_list(name, *read)

    def _whole(
        self, server: Server, key: bytes, check: Callable[..., Iterator[Finding]], *command: Any
    ) -> Iterator[Finding]:
        """Check all that a command reads of a key."""
        try:
            stored = server.command(*command)
        except ServerRejected as error:
            yield Finding("wrong-type" if "WRONGTYPE" in str(error) else "unread", text(key), f"{error}")
        else:
            yield from check(key, stored)

    def _page(self, server: Server, key: bytes, check: Callable[..., Iterator[Finding]]) -> Iterator[Finding]:
        left, head = server.pipeline([("PTTL", key), ("HGET", key, "")], atomic=True)
        if isinstance(head, Exception) or isinstance(left, Exception):
            yield Finding("wrong-type" if "WRONGTYPE" in str(head) else "unread", text(key), f"{head}")
        elif left != -2:
            yield from check(key, left, head)

    def _records(self, server: Server, found: list[bytes]) -> Iterator[Finding]:
        for start in range(0, len(found), BATCH):
            part = found[start : start + BATCH]
            # PTTL first: a record that expires in between is nil, and a new one has an expiry from the start.
            replies = server.pipeline([words for key in part for words in (("PTTL", key), ("GET", key))])
            now_us = self._now_us(server)
            for key, left, packed in zip(part, replies[::2], replies[1::2], strict=True):
                yield from self._record(key, left, packed, now_us)

    def _record(self, key: bytes, left: Any, packed: Any, now_us: int) -> Iterator[Finding]:
        if left == -2 or packed is None:
            return
        if isinstance(packed, Exception) or isinstance(left, Exception):
            yield Finding("wrong-type" if "WRONGTYPE" in str(packed) else "unread", text(key), f"{packed}")
            return
        self.counted["records"] += 1
        with suppress(ValueError):
            self.counted[f"records {decode_record(packed).state}"] += 1
        yield from check_record(key, left, packed, now_us, CODEC, timed=self.clock is None)

    def _group(self, link: SyncLink, server: Server, group: str) -> Iterator[Finding]:
        try:
            present = link.run(list_members(self.namespace, group, self.clock))
        except UnexpectedData as error:
            yield Finding("wrong-type", error.redis_key, error.problem)
            return
        names = keys.members(self.namespace, group)
        asked = [
            ("ZRANGE", names[0], 0, -1, "WITHSCORES"),
            *(("HGETALL", key) for key in names[1:]),
            *(("PTTL", key) for key in names),
        ]
        alive, meta, held, *lives = server.pipeline(asked, atomic=True)
        self.counted["members"] += len(present.members)
        until = dict(zip(alive[::2], map(float, alive[1::2]), strict=True))
        yield from check_members(dict(zip(names, lives, strict=True)), held, until, meta, self._now_us(server) // 1000)

    def _now_us(self, server: Server) -> int:
        # A test clock may stand still while others keep to the server's time.
        return max(server.microseconds(), self.clock.microseconds() if self.clock else 0)

    def _slot(self, link: SyncLink, slot: Slot, key: bytes, counted: Counter[str] | None = None) -> Iterator[Finding]:
        try:
            found = link.run(read_slot(slot, self.clock, self.most, self.room))
        except UnexpectedData as error:
            self.balances[slot.topic].append(None)
            yield Finding("wrong-type", error.redis_key, error.problem)
            return
        if isinstance(found, SlotTooLarge):
            what = f"the slot holds {found.entries:,} entries and {found.bytes:,} bytes of messages"
            self.balances[slot.topic].append(None)
            yield Finding("unread", text(key), f"{what}; at most {self.most:,} and {self.room:,} are read")
            return
        if counted is not None:
            _count(found, counted)
        if not any(left != -2 for left in found.lives.values()):
            return
        if not found.closed:
            owner = Owner("slot", slot.topic, slot.number, slot.slots)
            yield from check_registered(owner, key, self.topics)
        topic = self.topics.get(slot.topic)
        view = SlotView(slot, found, topic, CODEC)
        yield from check_slot(view)
        unknown = topic is None or topic.changing
        self.balances[slot.topic].append(None if unknown else balance(view))


def _run_command(link: SyncLink, *words: str | bytes) -> Any:
    """Return the reply to a command; None if the key has another type, which another check reports."""
    try:
        return link.command(*words)
    except ServerRejected as error:
        if "WRONGTYPE" not in str(error):
            raise
        return None


def _count(found: Contents, counted: Counter[str]) -> None:
    counted["slots closed" if found.closed else "slots"] += 1
    counted.update(pending=len(found.pending), in_flight=len(found.in_flight), dead=len(found.dead_data))
