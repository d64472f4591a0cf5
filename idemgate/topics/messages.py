"""What topics carry, as Python sees it: triggers going in, receipts, deliveries, dead letters and counts coming out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from operator import index
from typing import Any, Generic, Literal, TypeVar, cast

from idemgate.core import keys
from idemgate.core.codec import Codec
from idemgate.core.codec.decoding import as_ours, unpacked
from idemgate.core.durations import LATEST_MS, Duration
from idemgate.core.keys import Key
from idemgate.core.validation import each
from idemgate.errors import DecodeError, InvalidArgument
from idemgate.topics.merge import Merge
from idemgate.topics.partial import Part, part_of

Outcome = Literal["ok", "dead", "cancelled", "lost"]

__all__ = [
    "DeadLetter",
    "Delivery",
    "Message",
    "Outcome",
    "Peek",
    "Receipt",
    "ReceiptStatus",
    "Stats",
    "Taken",
    "Trigger",
    "listed",
]

P = TypeVar("P")
ReceiptStatus = Literal["scheduled", "merged", "replaced", "dropped", "duplicate"]
Reason = Literal["now", "window", "quiet", "max_delay", "max_size", "leading", "time", "flush", "retry", "redrive"]


@dataclass(slots=True)  # not frozen: making it would take three times as long, and many are made
class Trigger:
    """One trigger of `trigger_many`; the fields are those of `Topic.trigger`."""

    key: Key
    payload: object = field(default=None, repr=False)
    priority: int | None = field(default=None, kw_only=True)
    group: Key | None = field(default=None, kw_only=True)
    delay: Duration | None = field(default=None, kw_only=True)
    at: datetime | None = field(default=None, kw_only=True)
    version: int | None = field(default=None, kw_only=True)
    event_id: Key | None = field(default=None, kw_only=True)


def listed(triggers: Iterable[Trigger | tuple[Key, object]]) -> list[Trigger]:
    """What `trigger_many` was passed, or InvalidArgument. No text or dict passes for a pair: it would be taken apart."""
    return [
        one if isinstance(one, Trigger) else Trigger(*one) if type(one) is tuple and len(one) == 2 else _refused(one)
        for one in each(triggers, "triggers", _TRIGGERS)
    ]


def _refused(one: object) -> Trigger:
    raise InvalidArgument("triggers", type(one).__name__, "not a key and its payload", _TRIGGERS)


_TRIGGERS = "Pass (key, payload) tuples, such as the items() of a dict, or Trigger(...)"


@dataclass(slots=True)  # not frozen, as a trigger is not
class Receipt:
    """What became of a trigger.

    - "scheduled": it made a new pending message. - "merged": it joined the pending message of its key.
    - "replaced": it joined, and moved the message to the time it named.
    - "dropped": not accepted: an older `version`, or inside the window of a leading edge. - "duplicate": its
      `event_id` was seen for this key.
    `due_ms` is when the message is due, in ms since the epoch, and `due_at` the same moment; None where nothing was
    accepted.
    """

    status: ReceiptStatus
    due_ms: int | None

    @property
    def due_at(self) -> datetime | None:
        return None if self.due_ms is None else moment(self.due_ms)

    @property
    def accepted(self) -> bool:
        """Whether a delivery will follow."""
        return self.due_ms is not None


class Message:
    """A merged message as a script packed it. Places as in `lua/lib/message.lua`; each is read when it is asked for."""

    __slots__ = ("_codec", "_fields", "_merge")

    def __init__(self, packed: bytes, merge: Merge, codec: Codec) -> None:
        self._fields = unpacked(packed, "a message")
        if not _is_message(self._fields):
            raise DecodeError("it is not a message of ours")
        self._merge = merge
        self._codec = codec

    @property
    def count(self) -> int:
        return cast(int, self._fields[0])

    @property
    def first_ms(self) -> int:
        return cast(int, self._fields[1])

    @property
    def last_ms(self) -> int:
        return cast(int, self._fields[2])

    @property
    def due_ms(self) -> int:
        return cast(int, self._fields[3])

    @property
    def attempts(self) -> int:
        return cast(int, self._fields[4])

    @property
    def reason(self) -> Reason:
        with as_ours("a message"):
            return cast(Reason, self._fields[5].decode())

    @property
    def version(self) -> int | None:
        with as_ours("a message"):
            return int(self._fields[7]) if self._fields[7] != b"" else None

    @property
    def failure(self) -> str:
        return cast(str, self._fields[9].decode(errors="replace"))

    @property
    def priority(self) -> int:
        return int(self._fields[10] or 0)

    @property
    def raw_group(self) -> bytes:
        return cast(bytes, self._fields[11])

    @property
    def group(self) -> str:
        return self.raw_group.decode(errors="backslashreplace")

    @property
    def serial(self) -> int:
        """The number of its newest trigger within the slot."""
        return cast(int, self._fields[12])

    @property
    def splits(self) -> int:
        """How often only some of its items were tried again."""
        return cast(int, self._fields[13])

    @property
    def payload(self) -> Any:
        """The merged payload; DecodeError if it was written by another codec."""
        with as_ours("a payload"):
            return self._merge.lower(self._fields[8], self._codec)

    @property
    def dropped(self) -> int:
        """How many items the merge policy had no room for."""
        with as_ours("a payload"):
            return self._merge.dropped(self._fields[8])

    def part(self, items: object) -> Part:
        """What failed of it; InvalidArgument as `core.partial.part_of` says."""
        return part_of(self._merge, self._fields[8], items, self._codec)


Unread = tuple[bytes, Merge, Codec] | None
"""What a message is made of."""


class Delivery(Generic[P]):
    """One attempt to hand a merged message to a handler.

    `key` is the text of the key (bytes that are not UTF-8 are escaped; `raw_key` has them as they are), `count` how
    many triggers were merged, `reason` why it is delivered now ("window", "quiet", "max_delay", "max_size",
    "leading", "time", "now", "flush", "retry", "redrive"), `attempt` 1 for the first.

    `token` is the fencing token, which rises with each delivery of the key. A database can refuse lower tokens where
    the handler overwrites a state. A redelivery after a crash has a higher token, so a token does not prevent a second
    effect; a key that is stored in the transaction of the effect does. `lost` turns true when the lease is known to be
    lost: stop, another worker may run this key.
    """

    __slots__ = ("_payload", "_read", "_unread", "cancelled", "due_ms", "lost", "raw_key", "slot", "token", "topic")

    def __init__(
        self,
        topic: str,
        slot: int,
        raw_key: bytes,
        token: int,
        due_ms: int,
        message: Message | None,
        unread: Unread = None,
    ) -> None:
        """`unread`, where there is no `message` yet: it is unpacked when something of it is asked for; then raises
        DecodeError."""
        self.topic = topic
        self.slot = slot
        self.raw_key = raw_key
        self.token = token
        self.due_ms = due_ms
        self.lost = False
        self.cancelled = False
        self._read = message
        self._unread = unread
        self._payload: P | None = None

    def __repr__(self) -> str:
        return f"<Delivery {self.topic}/{self.key} count={self.count} attempt={self.attempt} token={self.token}>"

    @property
    def _message(self) -> Message:
        if self._read is None:
            assert self._unread is not None
            self._read = Message(*self._unread)
        return self._read

    @property
    def key(self) -> str:
        return self.raw_key.decode(errors="backslashreplace")

    @property
    def size(self) -> int:
        """Bytes that its message takes in the store; 0 for one that was sent on, which is there no more."""
        return len(self._unread[0]) if self._unread is not None else 0

    @property
    def payload(self) -> P:
        """The merged payload, decoded once. DecodeError if another codec wrote it."""
        if self._payload is None:
            self._payload = cast(P, self._message.payload)
        return self._payload

    @property
    def id(self) -> str:
        """Names this work, for a handler that is itself guarded: no two deliveries of a namespace have the same, but
        those of the same triggers that are tried again. It is another one when others have joined them, or when only
        some of the items are tried again."""
        message = self._message
        about = keys.work(self.topic, message.raw_group, self.raw_key)
        splits = f"/{message.splits}" if message.splits else ""
        return f"{about}@{message.last_ms}-{message.serial}+{message.count}{splits}"

    @property
    def count(self) -> int:
        """How many triggers were merged into it. Where only some items came back: of an append, the items that did
        (each is one trigger); else all triggers, because it is not known from which of them the items came."""
        return self._message.count

    def part(self, items: object) -> Part:
        """What `items` names of the payload; InvalidArgument for what is not in it."""
        return self._message.part(items)

    @property
    def first_at(self) -> datetime:
        """When its first trigger was accepted, by the server's clock."""
        return moment(self._message.first_ms)

    @property
    def last_at(self) -> datetime:
        """When its last trigger was accepted, by the server's clock."""
        return moment(self._message.last_ms)

    @property
    def due_at(self) -> datetime:
        """When it was due; it is never handed out earlier, by the server's clock."""
        return moment(self.due_ms)

    @property
    def reason(self) -> Reason:
        return self._message.reason

    @property
    def attempt(self) -> int:
        return self._message.attempts

    @property
    def priority(self) -> int:
        """That of its newest trigger that named one; 0 if none did."""
        return self._message.priority

    @property
    def route(self) -> bytes:
        """What decides its slot: its group, or its key."""
        return self._message.raw_group or self.raw_key

    @property
    def group(self) -> str:
        """The group whose deliveries do not overlap; empty for none."""
        return self._message.group

    @property
    def version(self) -> int | None:
        """The newest version among its triggers, None if none named one."""
        return self._message.version

    @property
    def dropped(self) -> int:
        """How many items an `append` or `union` had no room for."""
        return self._message.dropped

    @property
    def failure(self) -> str:
        """How the attempt before failed; empty for a first attempt."""
        return self._message.failure


@dataclass(frozen=True, slots=True)
class Taken:
    """What one `take` brought: its deliveries, how many lapsed ones it put back, and when this slot next has work (ms,
    0 = never)."""

    deliveries: list[Delivery[Any]]
    lapsed: int
    next_due_ms: int
    now_ms: int

    @property
    def more(self) -> bool:
        """Whether the slot has work now: large messages go a few at a time."""
        return 0 < self.next_due_ms <= self.now_ms


@dataclass(frozen=True, slots=True)
class Settled:
    """What became of each delivery: "ok", "dead" (given up), "cancelled" (not tried again) or "lost" (not this owner's
    any more)."""

    outcomes: list[str]
    next_due_ms: int
    now_ms: int


@dataclass(frozen=True, slots=True)
class Turned:
    """What became of deliveries that ended, and what was taken in the same step."""

    settled: Settled
    taken: Taken

    @property
    def next_due_ms(self) -> int:
        return self.taken.next_due_ms

    @property
    def now_ms(self) -> int:
        return self.taken.now_ms


@dataclass(frozen=True, slots=True)
class Forward:
    """Where due messages are sent on to. `target` None: the slot's own outbox; `keep`: about how many entries stay, 0
    = all."""

    kind: Literal["list", "stream"]
    target: bytes | None
    keep: int


@dataclass(frozen=True, slots=True)
class Forwarded:
    """How many messages one call sent on, and when this slot next has work (ms, 0 = never)."""

    sent: int
    next_due_ms: int
    now_ms: int

    @property
    def more(self) -> bool:
        """Whether the slot has something to send now, unless that is a delivery that lapsed."""
        return self.sent > 0 and 0 < self.next_due_ms <= self.now_ms


@dataclass(frozen=True, slots=True)
class Peek:
    """What is known of a key. `pending` waits (due at `due_at`); `in_flight` is being handled under `token` until
    `lease_until`."""

    pending: Message | None
    due_at: datetime | None
    in_flight: Message | None
    token: int | None
    lease_until: datetime | None


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message that was given up. `id` names it for `redrive` and `delete`; `reason` is the last line of the
    failure."""

    id: str
    key: str
    reason: str
    died_at: datetime
    attempts: int
    count: int
    first_at: datetime
    last_at: datetime
    message: Message

    @property
    def payload(self) -> Any:
        return self.message.payload


@dataclass(frozen=True, slots=True)
class Stats:
    """How many messages are where, and what was counted since the topic exists.

    `scheduled` are due later, `ready` are due now, `waiting` stand behind a delivery of their key, `blocked` are due
    and stand behind their group, `in_flight` are being handled. `next_due` is when the earliest of the scheduled and
    the ready ones is due; of a topic with priorities, now, once some are ready.
    Of the counters, those that end in `_triggers` and accepted, merged, dropped, duplicate, replaced count triggers;
    the rest count messages or deliveries. accepted = acked_triggers + cancelled_triggers + deleted_triggers +
    expired_triggers + forwarded_triggers + what is held.
    """

    scheduled: int
    ready: int
    waiting: int
    blocked: int
    in_flight: int
    dead: int
    next_due: datetime | None
    paused: bool
    counters: Mapping[str, int]

    @property
    def pending(self) -> int:
        return self.scheduled + self.ready + self.waiting + self.blocked

    def __getitem__(self, counter: str) -> int:
        """A counter by name; 0 if that never happened."""
        return self.counters.get(counter, 0)


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def moment(ms: int) -> datetime:
    """Milliseconds since the epoch as an aware datetime, exactly; DecodeError for what is none."""
    try:
        return _EPOCH + timedelta(milliseconds=ms)
    except OverflowError:
        raise DecodeError(f"{ms} ms since 1970 is no time") from None


def forwarded(topic: str, packed: bytes, merge: Merge, codec: Codec) -> Delivery[Any]:
    """A message that was sent on, or DecodeError. It has no lease: nothing needs to be acknowledged to the topic."""
    with as_ours("a forwarded message"):
        number, raw_key, due_ms, message = unpacked(packed, "a forwarded message")
        if type(raw_key) is not bytes:  # bytes of a number would be as many
            raise TypeError(f"{raw_key!r:.100} is no key")
        return Delivery(topic, -1, raw_key, index(number), _moment_ms(due_ms), Message(message, merge, codec))


def letter_of(slot: int, number: bytes, packed: bytes, merge: Merge, codec: Codec) -> DeadLetter:
    """DecodeError for what is no letter."""
    with as_ours("a dead letter"):
        raw_key, raw_message, reason, died_ms, _ = unpacked(packed, "a dead letter")
        message = Message(raw_message, merge, codec)
        return DeadLetter(
            id=f"{slot}-{number.decode()}",
            key=raw_key.decode(errors="backslashreplace"),
            reason=reason.decode(errors="replace"),
            died_at=moment(_moment_ms(died_ms)),
            attempts=message.attempts,
            count=message.count,
            first_at=moment(message.first_ms),
            last_at=moment(message.last_ms),
            message=message,
        )


_FIRST, _LAST = (int, int, int, int, int, bytes, int, bytes), (bytes, int, int)
"""The kinds of its places, but for the accumulator, the failure, the priority and the rank."""


def _is_message(fields: Any) -> bool:
    """Whether it has the places of `lua/lib/message.lua`, each of its kind."""
    if not isinstance(fields, list):
        return False
    places: list[Any] = fields  # pyright: ignore[reportUnknownVariableType]
    kinds = tuple(map(type, places))
    return (
        14 <= len(kinds) <= 15
        and kinds[:8] == _FIRST
        and kinds[9] is bytes
        and kinds[11:14] == _LAST
        and 0 <= places[1] <= LATEST_MS
        and 0 <= places[2] <= LATEST_MS
        and (kinds[10] is int or places[10] == b"")
    )


def _moment_ms(value: Any) -> int:
    if not 0 <= index(value) <= LATEST_MS:
        raise ValueError(f"{value} ms is no time")
    return index(value)
