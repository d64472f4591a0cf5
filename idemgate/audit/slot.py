"""One slot of a topic, read in one step and checked: is everything where it belongs, and is nothing missing?

The checks say what holds between any two scripts; each is one function over a `Contents`, in the words of
`lua/lib/slot.lua`.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from fractions import Fraction
from math import isfinite
from typing import Any, NamedTuple

import msgpack

from idemgate.audit.findings import Finding, quoted
from idemgate.core import keys
from idemgate.core.calls import Call, call, text
from idemgate.core.clock import Clock, stamp
from idemgate.core.codec import Codec
from idemgate.core.durations import LATEST_MS
from idemgate.errors import IdemgateError
from idemgate.topics.merge import Merge, merge_of_spec

__all__ = [
    "Contents",
    "Declared",
    "Large",
    "Slot",
    "balance",
    "check_balance",
    "check_slot",
    "declared",
    "far_token",
    "moment",
    "read_slot",
    "shown",
]

_ZSETS = ("due", "lease", "dead", "fade", "ready", "line")
_HASHES = ("pending", "flight", "grave", "facts", "busy", "memo")
_NOT_COUNTED = (b"", b"v", b"opened", b"gone")
"""What the facts hold beside numbers."""
LEASE_MS = 7 * 86_400_000
"""Where the slot does not say how long the longest lease was: a longer one is taken for a mistake."""
_LARGE = 1024 + 64
"""Bytes of a message or letter from which on a slot says that it has held one: lengths are asked there only. What a
script adds to one that is stored is less than the difference."""
_YEAR_US = 366 * 86_400_000_000
_VERSION = re.compile(rb"\d+(?: .*)?", re.DOTALL)
AHEAD_US = 86_400_000_000
"""Tokens are never below the clock, and rise by one a grant: none is a day ahead of it."""
_GONE = ("acked", "cancelled", "deleted", "expired", "forwarded")


class Slot(NamedTuple):
    """Which slot."""

    namespace: str
    topic: str
    number: int
    slots: int

    def key(self, part: str) -> str:
        return text(keys.slot(*self)[keys.PARTS.index(part)])


class Declared(NamedTuple):
    """What the registry says of a topic that matters here."""

    slots: int
    group_limit: int
    merge: Merge
    changing: bool
    rest_us: int
    """What the rate of a slot may take back at most: its whole burst, and one more."""


class Contents(NamedTuple):
    """All of one slot at one moment: zsets as name -> score, hashes as name -> value."""

    now_ms: int
    lives: dict[str, int]
    due: dict[bytes, float]
    lease: dict[bytes, float]
    dead: dict[bytes, float]
    fade: dict[bytes, float]
    ready: dict[bytes, float]
    line: dict[bytes, float]
    pending: dict[bytes, bytes]
    flight: dict[bytes, bytes]
    grave: dict[bytes, bytes]
    facts: dict[bytes, bytes]
    busy: dict[bytes, bytes]
    memo: dict[bytes, bytes]

    @property
    def closed(self) -> bool:
        """Whether a change of the number of slots has closed it."""
        return self.facts.get(b"v", b"").startswith(b"closed ")


class Large(NamedTuple):
    """A slot that holds more than was to be read."""

    entries: int
    bytes: int


def declared(stored: bytes, changing: bool) -> Declared | None:
    """A topic's entry in the registry; None if it cannot be read. `changing`: its number of slots is being changed."""
    try:
        facts = msgpack.unpackb(stored)
        slots, rate = int(facts["slots"]), Fraction(facts.get("rate", 1_000_000_000))
        rest = round((int(facts.get("burst", 1)) + 1) * slots * 1_000_000 / rate)
        return Declared(slots, int(facts.get("group_concurrency", 1)), merge_of_spec(facts["merge"]), changing, rest)
    except Exception:  # noqa: BLE001 - whatever it holds, it is not a policy
        return None


def read_slot(slot: Slot, clock: Clock | None, most: int, room: int) -> Call[Contents | Large]:
    """The whole slot, in one atomic step; Large, and nothing read, if it holds more than `most` entries or `room`
    bytes of messages."""
    return call("topics/audit", keys.slot(*slot), (stamp(clock), most, room), _contents)


def _contents(reply: list[Any]) -> Contents | Large:
    if reply[0] == b"large":
        return Large(reply[2], reply[3])
    parts: list[list[Any]] = []
    at = 2
    while at < len(reply):
        if reply[at] < 0:
            raise ValueError(f"a part of {reply[at]} entries")
        parts.append(reply[at + 1 : at + 1 + reply[at]])
        at += 1 + reply[at]
    lives, *rest = parts
    found: dict[str, Any] = {name: dict(_pairs(part)) for name, part in zip(_ZSETS + _HASHES, rest, strict=True)}
    for name in _ZSETS:
        found[name] = {member: float(score) for member, score in found[name].items()}
    return Contents(now_ms=reply[1], lives=dict(zip(keys.PARTS, lives, strict=True)), **found)


def _pairs(flat: list[Any]) -> Iterator[tuple[bytes, Any]]:
    return zip(flat[::2], flat[1::2], strict=True)


# -- what the packed values say ---------------------------------------------------------------------------------------


class _Message(NamedTuple):
    triggers: int
    due: int
    attempts: int
    group: bytes
    acc: Any
    serial: int


class _Flight(NamedTuple):
    fence: int
    due: int
    triggers: int
    group: bytes
    message: _Message


class _Letter(NamedTuple):
    key: bytes
    died: int
    fence: int
    message: _Message


def _unpacked(packed: bytes, *lengths: int) -> list[Any]:
    found = msgpack.unpackb(packed, raw=True, strict_map_key=False)
    if not isinstance(found, list) or len(found) not in lengths:  # pyright: ignore[reportUnknownArgumentType]
        raise ValueError(f"not an array of {lengths[0]}")
    return found  # pyright: ignore[reportUnknownVariableType]


def _whole(value: Any, least: int = 0) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{value!r} where a whole number belongs")
    return value


def _text(value: Any) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError(f"{value!r} where a text belongs")
    return value


def _message(packed: Any, merge: Merge | None, codec: Codec) -> _Message:
    fields = _unpacked(_text(packed), 14, 15)
    for place in (1, 2, 12, 13):
        _whole(fields[place])
    for place in (5, 9):
        _text(fields[place])
    if merge is not None:
        merge.lower(fields[8], codec)
    return _Message(
        _whole(fields[0], 1), _whole(fields[3]), _whole(fields[4]), _text(fields[11]), fields[8], fields[12]
    )


def _flight(packed: bytes, merge: Merge | None, codec: Codec) -> _Flight:
    fence, request, cancelled, due, count, group, message = _unpacked(packed, 7)
    _text(request)
    if cancelled not in (0, 1):
        raise ValueError(f"{cancelled!r} where 0 or 1 belongs")
    made = _message(message, merge, codec)
    return _Flight(_whole(fence, 1), _whole(due), _whole(count, 1), _text(group), made)


def _letter(packed: bytes, merge: Merge | None, codec: Codec) -> _Letter:
    key, message, reason, died, fence = _unpacked(packed, 5)
    _text(reason)
    return _Letter(_text(key), _whole(died), _whole(fence, 1), _message(message, merge, codec))


class _Seen:
    """A slot's contents with what could be unpacked of them."""

    def __init__(self, slot: Slot, found: Contents, topic: Declared | None, codec: Codec) -> None:
        self.slot = slot
        self.found = found
        self.topic = topic
        self.garbled: list[Finding] = []
        merge = topic.merge if topic else None
        self.pending = self._all("pending", found.pending, lambda packed: _message(packed, merge, codec))
        self.flight = self._all("flight", found.flight, lambda packed: _flight(packed, merge, codec))
        self.grave = self._all("grave", found.grave, lambda packed: _letter(packed, merge, codec))
        self.busy = self._all("busy", found.busy, _inside)
        numbers = {name: value for name, value in found.facts.items() if name not in _NOT_COUNTED}
        self.facts: dict[bytes, int] = self._all("facts", numbers, int)
        self.ready = self._all("ready", {member: member for member in found.ready}, _sortable)
        self.line = self._all("line", {member: member for member in found.line}, _in_line)

    def _all(self, part: str, packed: dict[bytes, bytes], read: Callable[[bytes], Any]) -> dict[bytes, Any]:
        made: dict[bytes, Any] = {}
        for name, value in packed.items():
            try:
                made[name] = read(value)
            except (ValueError, TypeError, KeyError, IndexError, AttributeError, IdemgateError) as error:
                self.garbled.append(self.finding("undecodable", part, f"{shown(name)} cannot be read: {error}"))
        return made

    def finding(self, kind: str, part: str, what: str, *mend: str | bytes | int) -> Finding:
        """`mend`: a command and what follows its key."""
        words = [] if not mend else [str(mend[0]), quoted(self.slot.key(part)), *map(_word, mend[1:])]
        return Finding(kind, self.slot.key(part), what, " ".join(words))


def _word(value: str | bytes | int) -> str:
    return str(value) if isinstance(value, int) else quoted(value)


def _inside(packed: bytes) -> list[bytes]:
    found = msgpack.unpackb(packed, raw=True)
    return [_text(one) for one in found]


def _sortable(member: bytes) -> tuple[int, bytes]:
    return int(member[:15]), member[15:]


def _in_line(member: bytes) -> tuple[bytes, int, bytes]:
    group, _, rest = member.partition(b"\0")
    return group, *_sortable(rest.partition(b"\0")[2])


def shown(name: bytes) -> str:
    """A name of users in a sentence."""
    return repr(text(name))


def moment(ms: float) -> str:
    """A moment as people read it; the number where it is none."""
    try:
        return f"{datetime.fromtimestamp(ms / 1000, UTC):%Y-%m-%d %H:%M:%S.%f}"[:-3] + "Z"
    except (ValueError, OverflowError, OSError):
        return f"{ms}"


# -- what must hold ---------------------------------------------------------------------------------------------------


def check_slot(slot: Slot, found: Contents, topic: Declared | None, codec: Codec) -> list[Finding]:
    """Everything that is wrong with a slot. `topic`: None where the registry does not know it. One that is closed is
    moved, or was; it holds nothing any more, unless its topic is `changing`."""
    if found.closed:
        return [] if (topic and topic.changing) or not _holds(found) else [_left_behind(slot, found)]
    seen = _Seen(slot, found, topic, codec)
    checks = (
        _layout, _standing, _unplaced, _leases, _pace, _letters, _memories, _versions, _events, _groups, _lines,
        _fences, _agreement, _order, _places, _lifetimes,
    )  # fmt: skip
    return [*seen.garbled, *(finding for check in checks for finding in check(seen))]


def _holds(found: Contents) -> int:
    return len(found.pending) + len(found.flight) + len(found.grave)


def _left_behind(slot: Slot, found: Contents) -> Finding:
    what = f"the slot is closed and holds {_holds(found)} messages, and nobody changes the number of slots"
    return Finding("closed", slot.key("facts"), what)


def _layout(seen: _Seen) -> Iterator[Finding]:
    if seen.found.facts and b"v" not in seen.found.facts:
        yield seen.finding("layout", "facts", "the slot does not say of which layout it is", "HSETNX", b"v", b"1")


def _standing(seen: _Seen) -> Iterator[Finding]:
    """What is scheduled, ready or in a line is pending, stands there alone, and is not in flight."""
    for part, member, key in _stands(seen):
        if key not in seen.found.pending:
            yield seen.finding("orphan", part, f"{shown(key)} stands here and is not pending", "ZREM", member)
        elif key in seen.found.flight:
            yield seen.finding("misplaced", part, f"{shown(key)} stands here while it is in flight", "ZREM", member)
    places = Counter(key for _, _, key in _stands(seen))
    for key, times in places.items():
        if times > 1 and key in seen.found.pending:
            parts = ", ".join(part for part, _, one in _stands(seen) if one == key)
            yield seen.finding("misplaced", "pending", f"{shown(key)} stands in {times} places: {parts}")


def _stands(seen: _Seen) -> Iterator[tuple[str, bytes, bytes]]:
    yield from (("due", key, key) for key in seen.found.due)
    yield from (("ready", member, key) for member, (_, key) in seen.ready.items())
    yield from (("line", member, key) for member, (_, _, key) in seen.line.items())


def _unplaced(seen: _Seen) -> Iterator[Finding]:
    """What is pending stands somewhere, or waits behind the delivery of its key."""
    standing = {key for _, _, key in _stands(seen)} | seen.found.flight.keys()
    for key in seen.found.pending.keys() - standing:
        what = f"{shown(key)} is pending and stands nowhere: it will never be delivered"
        yield Finding("unplaced", seen.slot.key("pending"), what, _schedule(seen, key))


def _schedule(seen: _Seen, key: bytes) -> str:
    due = seen.pending[key].due if key in seen.pending else seen.found.now_ms
    return f"ZADD {quoted(seen.slot.key('due'))} {due} {quoted(key)}"


def _leases(seen: _Seen) -> Iterator[Finding]:
    for key in seen.found.lease.keys() - seen.found.flight.keys():
        yield seen.finding("orphan", "lease", f"{shown(key)} has a lease and no delivery", "ZREM", key)
    for key in seen.found.flight.keys() - seen.found.lease.keys():
        what = f"{shown(key)} has a delivery and no lease: it will never lapse"
        mend = f"ZADD {quoted(seen.slot.key('lease'))} {seen.found.now_ms} {quoted(key)}"
        yield Finding("orphan", seen.slot.key("flight"), what, mend)
    now, latest = seen.found.now_ms, _latest(seen)
    for key, score in seen.found.lease.items():
        if score > latest and key in seen.found.flight:
            what = (
                f"the lease of {shown(key)} ends at {moment(score)}, and none of this slot can after {moment(latest)}"
            )
            mend = f"ZADD {quoted(seen.slot.key('lease'))} {now} {quoted(key)}"
            yield Finding("lease", seen.slot.key("lease"), f"{what}: it comes back too late if its owner dies", mend)


def _latest(seen: _Seen) -> int:
    """When the last lease can end, ms: the longest there was, from the last token on, which each grant and each
    heartbeat puts at its own time, or before it by less than a ms."""
    granted = [seen.facts.get(b"fence", 0), *(one.fence for one in seen.flight.values())]
    longest = seen.facts.get(b"lease", 0)
    return max(granted) // 1000 + longest + 1 if longest > 0 else seen.found.now_ms + LEASE_MS


def _pace(seen: _Seen) -> Iterator[Finding]:
    """What a rate makes wait for is near: the rate may have been another, but none makes wait for a year."""
    latest = 1000 * seen.found.now_ms + max(_YEAR_US, seen.topic.rest_us if seen.topic else 0)
    if (until := seen.facts.get(b"rate", 0)) > latest:
        what = f"the rate lets nothing be taken before {moment(until / 1000)}"
        yield seen.finding("lease", "facts", what, "HDEL", b"rate")


def _letters(seen: _Seen) -> Iterator[Finding]:
    for number in seen.found.dead.keys() - seen.found.grave.keys():
        yield seen.finding("orphan", "dead", f"letter {text(number)} has no body", "ZREM", number)
    for number in seen.found.grave.keys() - seen.found.dead.keys():
        what = f"letter {text(number)} has no time of death: it is neither listed nor ever discarded"
        mend = f"ZADD {quoted(seen.slot.key('dead'))} {seen.found.now_ms} {quoted(number)}"
        yield Finding("orphan", seen.slot.key("grave"), what, mend)


def _memories(seen: _Seen) -> Iterator[Finding]:
    for name in seen.found.memo.keys() - seen.found.fade.keys() - _tabled(seen.found.memo):
        yield seen.finding("forgotten-never", "memo", f"{shown(name)} has no time to be forgotten", "HDEL", name)
    for name in seen.found.fade.keys() - seen.found.memo.keys():
        yield seen.finding("forgotten-never", "fade", f"{shown(name)} names nothing remembered", "ZREM", name)
    for name, score in seen.found.fade.items():
        if score > LATEST_MS:
            what = f"{shown(name)} is to be forgotten at {moment(score)}"
            yield seen.finding("forgotten-never", "fade", what, "ZADD", seen.found.now_ms, name)


def _versions(seen: _Seen) -> Iterator[Finding]:
    for name, value in seen.found.memo.items():
        if name[:1] == b"v" and not _VERSION.fullmatch(value):
            what = f"what is remembered as {shown(name)} is no version: {shown(value[:40])}"
            yield seen.finding("undecodable", "memo", what, "HDEL", name)


def _tabled(memo: dict[bytes, bytes]) -> set[bytes]:
    """What of a memo is the table of event ids (`lua/lib/events.lua`)."""
    return {name for name in memo if name == b"e" or (name[:1] == b"e" and name[1:].isdigit())}


_EVENT = 24
"""Bytes of a mark: digest, what decides its slot, when to forget it."""


def _events(seen: _Seen) -> Iterator[Finding]:
    """Each event id stands in its bucket, once, and is counted; and it belongs to this slot."""
    tabled = {name: value for name, value in seen.found.memo.items() if name in _tabled(seen.found.memo)}
    if not tabled:
        return
    try:
        layout, many, count = _unpacked(tabled.pop(b"e", b""), 3)
        if layout != 1:
            raise ValueError(f"layout {layout!r}, this program knows layout 1")  # noqa: TRY301 - as what cannot be read
        many, count = _whole(many, 1), _whole(count)
    except (ValueError, TypeError) as error:
        yield seen.finding("undecodable", "memo", f"the table of event ids cannot be read: {error}")
        return
    short = sorted(name for name, bucket in tabled.items() if len(bucket) % _EVENT)
    if short:
        what = f"bucket {text(short[0])} of event ids is cut short"
        yield seen.finding("undecodable", "memo", what, "HDEL", short[0])
        return
    marks: list[bytes] = []
    for name, bucket in sorted(tabled.items()):
        held = [bucket[at : at + _EVENT] for at in range(0, len(bucket), _EVENT)]
        marks += held
        if any(b"%d" % _bucket_of(mark, many) != name[1:] for mark in held):
            yield seen.finding("disagrees", "memo", f"bucket {text(name)} holds event ids of another one")
    names = len({mark[:16] for mark in marks})
    if not len(marks) == names == count:
        what = f"{len(marks)} event ids are remembered, {names} different ones, and {count} are counted"
        mend = ("HSET", b"e", msgpack.packb([1, many, names])) if len(marks) == names else ()
        yield seen.finding("disagrees", "memo", what, *mend)
    if any(keys.slot_of_event(mark, seen.slot.slots) != seen.slot.number for mark in marks):
        yield seen.finding("wrong-slot", "memo", "event ids of another slot are remembered: nobody will find them here")


def _bucket_of(mark: bytes, many: int) -> int:
    """As `lua/lib/buckets.lua` has it."""
    hashed, base = int.from_bytes(mark[:4]), 1 << (many.bit_length() - 1)
    at = hashed % base
    return hashed % (2 * base) if at < many - base else at


def _groups(seen: _Seen) -> Iterator[Finding]:
    """A group holds what is in flight and what is between two attempts, and no more than it may."""
    between = {key for part, _, key in _stands(seen) if part != "line"}
    flying = defaultdict[bytes, list[bytes]](list)
    for key, one in seen.flight.items():
        flying[one.group].append(key)
    for group, inside in seen.busy.items():
        distinct = dict.fromkeys(inside)
        own = dict.fromkeys(
            key
            for key in distinct
            if _belongs(seen, "flight", key, group) or (key in between and _belongs(seen, "pending", key, group))
        )
        # What is in flight and unknown to it is held, too: else the command would let another run beside.
        held = own | dict.fromkeys(flying[group])
        mend = ("HSET", group, msgpack.packb([*held], use_bin_type=False)) if held else ("HDEL", group)
        for key in distinct:
            if key not in own:
                what = f"group {shown(group)} holds {shown(key)}, which is neither in flight nor between two attempts"
                yield seen.finding("held", "busy", what, *mend)
        if len(distinct) < len(inside):
            what = f"group {shown(group)} holds a key more than once: {', '.join(map(shown, inside))}"
            yield seen.finding("held", "busy", what, *mend)
        limit = seen.topic.group_limit if seen.topic else len(own)
        if len(own) > limit:
            yield seen.finding("overlap", "busy", f"group {shown(group)} holds {len(own)} keys, it may hold {limit}")
    for key, one in seen.flight.items():
        if one.group and key not in seen.busy.get(one.group, ()) and not _garbled(seen, one.group):
            what = f"{shown(key)} is in flight, and its group {shown(one.group)} does not know: another may run beside"
            yield seen.finding("overlap", "flight", what)


def _belongs(seen: _Seen, part: str, key: bytes, group: bytes) -> bool:
    """Whether this part has the key, as one of that group as far as it can be read."""
    one = getattr(seen, part).get(key)
    return key in getattr(seen.found, part) and (one is None or one.group == group)


def _garbled(seen: _Seen, group: bytes) -> bool:
    return group in seen.found.busy and group not in seen.busy


def _lines(seen: _Seen) -> Iterator[Finding]:
    """A line forms behind a group that is full: of what is in it, and of what was let in and is not taken yet."""
    limit = seen.topic.group_limit if seen.topic else 1
    scheduled = [
        (key, seen.pending[key].group) for part, _, key in _stands(seen) if part != "line" and key in seen.pending
    ]
    for group in sorted({group for group, _, _ in seen.line.values()}):
        inside = {*seen.busy.get(group, ()), *(key for key, one in scheduled if one == group)}
        behind = [shown(key) for one, _, key in seen.line.values() if one == group]
        if not inside and not _garbled(seen, group):
            what = f"{', '.join(behind[:3])}{' ...' if behind[3:] else ''} stands behind group {shown(group)}"
            yield seen.finding("stuck", "line", f"{what}, which is empty: nothing will let it in")
        elif len(inside) < limit and not _garbled(seen, group):
            yield seen.finding("room", "line", f"group {shown(group)} has room for {limit - len(inside)} of its line")


def _fences(seen: _Seen) -> Iterator[Finding]:
    """The last token is above all that are still known, and no two of a key are the same."""
    last = seen.facts.get(b"fence", 0)
    if problem := far_token(last, seen.found.now_ms * 1000):
        yield seen.finding("fence", "facts", f"the slot's last token {problem}")
    granted = [(one.fence, "flight", key) for key, one in seen.flight.items()]
    granted += [(one.fence, "grave", one.key) for one in seen.grave.values()]
    unread = b"fence" in seen.found.facts and b"fence" not in seen.facts
    for fence, part, key in granted:
        if fence > last and not unread:
            what = f"{shown(key)} has token {fence}, the slot's last one is {last or 'missing'}"
            yield seen.finding("fence", "facts", f"{what} ({part})", "HSET", "fence", max(one[0] for one in granted))
    for (fence, key), times in Counter((fence, key) for fence, _, key in granted).items():
        if times > 1:
            yield seen.finding("fence", "flight", f"{shown(key)} was granted token {fence} {times} times")


def far_token(token: int, now_us: int) -> str:
    """What is wrong with a token that nobody can have been granted by now; "" for nothing."""
    if not 0 <= token < 2**53:
        return f"is {token}: scripts count exactly up to 2^53 only"
    if token > now_us + AHEAD_US:
        return f"is {token}, more than a day ahead of the clock, which says {now_us}"
    return ""


def _order(seen: _Seen) -> Iterator[Finding]:
    """A line goes by its members, which have one score; what is ready by a number that its priority makes."""
    for member, score in seen.found.line.items():
        if score:
            what = f"{shown(member)} has the score {score:g}, not 0, and so is not taken in its turn"
            yield seen.finding("disagrees", "line", what, "ZADD", 0, member)
    for member, score in seen.found.ready.items():
        if not isfinite(score):
            yield seen.finding("disagrees", "ready", f"{shown(member)} has the rank {score:g}, which no priority has")


def _agreement(seen: _Seen) -> Iterator[Finding]:
    """Where the same thing is written twice, both say the same."""
    places = Counter(key for _, _, key in _stands(seen))
    for key, score in seen.found.due.items():
        one = seen.pending.get(key) if places[key] == 1 and key not in seen.found.flight else None
        if one and score != one.due and not (score < one.due and _flushed(seen, one)):
            what = f"{shown(key)} is scheduled at {moment(score)}, its message is due at {moment(one.due)}"
            yield Finding("disagrees", seen.slot.key("due"), what, _schedule(seen, key))
    standing = [("ready", due, key, None) for due, key in seen.ready.values()]
    for part, due, key, group in [*standing, *(("line", due, key, group) for group, due, key in seen.line.values())]:
        one = seen.pending.get(key)
        if one and (due != one.due or group not in (None, one.group)):
            yield seen.finding("disagrees", part, f"{shown(key)} stands here with another time or group than its own")
    for key, flying in seen.flight.items():
        message = flying.message
        if (flying.triggers, flying.group, flying.due) != (
            message.triggers,
            message.group,
            message.due,
        ) or not message.attempts:
            yield seen.finding("disagrees", "flight", f"the delivery of {shown(key)} and its message differ")
    for number, letter in seen.grave.items():
        if number != b"%d" % letter.fence or seen.found.dead.get(number, letter.died) != letter.died:
            yield seen.finding("disagrees", "grave", f"letter {text(number)} says another number or time")
    large = [name for part in (seen.found.pending, seen.found.grave) for name in part if len(part[name]) > _LARGE]
    if large and b"large" not in seen.found.facts:
        what = f"{shown(large[0])} is large, and the slot does not say that it ever held such: a call may take long"
        yield seen.finding("disagrees", "facts", what, "HSET", "large", 1)


def _flushed(seen: _Seen, one: _Message) -> bool:
    """Whether a flush of the whole slot may have made it due earlier: that does not rewrite messages."""
    unread = b"flushed" in seen.found.facts and b"flushed" not in seen.facts
    return unread or one.serial <= seen.facts.get(b"flushed", 0)


def _places(seen: _Seen) -> Iterator[Finding]:
    """What stands in a slot belongs to it, by its group or key, and by how many slots its name says there are."""
    found = [("pending", key, one.group) for key, one in seen.pending.items()]
    found += [("flight", key, one.group) for key, one in seen.flight.items()]
    found += [("grave", one.key, one.message.group) for one in seen.grave.values()]
    for part, key, group in found:
        right = keys.slot_of(group or key, seen.slot.slots)
        if right != seen.slot.number:
            yield seen.finding("wrong-slot", part, f"{shown(key)} belongs to slot {right}: nobody will find it here")


def _lifetimes(seen: _Seen) -> Iterator[Finding]:
    for part, left in seen.found.lives.items():
        if part.startswith("told") and left == -1:
            yield seen.finding("no-expiry", part, "replies are remembered for ever", "PEXPIRE", 120_000)
        elif not part.startswith("told") and left >= 0:
            yield seen.finding("expires", part, f"it will be gone in {left / 1000:.0f} s", "PERSIST")


def balance(slot: Slot, found: Contents, topic: Declared | None, codec: Codec) -> int | None:
    """Accepted triggers that are not accounted for in this slot; None where something cannot be read.

    No script changes it, and a change of the number of slots moves counters and messages apart: it is 0 over all slots
    of a topic, whenever each of them was read.
    """
    seen = _Seen(slot, found, topic, codec)
    if seen.garbled:
        return None
    gone = sum(seen.facts.get(b"%s_triggers" % end.encode(), 0) for end in _GONE)
    held: int = sum(one.triggers for one in seen.pending.values())
    held += sum(one.message.triggers for part in (seen.flight, seen.grave) for one in part.values())
    missing: int = seen.facts.get(b"accepted", 0) - gone - held
    return missing


def check_balance(topic: str, key: str, balances: Sequence[int | None]) -> Iterator[Finding]:
    """Every accepted trigger of a topic is accounted for. Not asked where a slot cannot be read, a fault of its
    own."""
    missing = 0 if None in balances else sum(filter(None, balances))
    if missing > 0:
        yield Finding("conservation", key, f"topic {topic!r}: {missing} accepted triggers neither ended nor are held")
    elif missing:
        yield Finding("conservation", key, f"topic {topic!r}: {-missing} more than accepted ended or are held")
