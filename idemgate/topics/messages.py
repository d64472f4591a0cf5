"""Values between topics and programs: triggers, receipts, messages, deliveries and counts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from operator import index
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, cast

from idemgate.core import keys
from idemgate.core.codec import Codec
from idemgate.core.codec.decoding import unpack, wrap_decode_errors
from idemgate.core.codec.packing import pack
from idemgate.core.durations import LATEST_MS, Duration, milliseconds
from idemgate.core.keys import Key
from idemgate.core.process import actor_name
from idemgate.core.validation import check_iterable
from idemgate.errors import DecodeError, InvalidArgument
from idemgate.topics.merge import Merge
from idemgate.topics.partial import FailedItems, select_items

if TYPE_CHECKING:
    # Defaults of type parameters need Python 3.13. Type checkers know this module, which is not installed.
    from typing_extensions import TypeVar

    P = TypeVar("P", default=Any)
else:
    from typing import TypeVar

    P = TypeVar("P")

__all__ = [
    "BlockedGroup",
    "Delivery",
    "Message",
    "Pause",
    "Peek",
    "PendingMessage",
    "PendingPage",
    "Position",
    "Reason",
    "Receipt",
    "ReceiptStatus",
    "SettleOutcome",
    "SettledAndTaken",
    "Stats",
    "Taken",
    "Ticket",
    "Trigger",
    "check_ms",
    "decode_forwarded",
    "decode_pause",
    "decode_trigger",
    "encode_trigger",
    "moment",
    "pack_pause",
    "replace_payload",
    "to_triggers",
]

SettleOutcome = Literal["ok", "dead", "cancelled", "lost"]
ReceiptStatus = Literal["scheduled", "merged", "replaced", "dropped", "duplicate"]


@dataclass(slots=True)  # not frozen: creation would take three times as long, and programs create many
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
    trace: bytes = field(default=b"", kw_only=True, repr=False, compare=False)  # a tracer sets it (`store/context.py`)


_TRIGGER_FIELDS = ("key", "payload", "priority", "group", "at", "version", "event_id")


def encode_trigger(trigger: Trigger, codec: Codec, now: float) -> bytes:
    """Encode a trigger. A delay becomes a time, counted from `now`, in seconds since the epoch."""
    at = trigger.at
    if trigger.delay is not None:
        delay = timedelta(milliseconds=milliseconds(trigger.delay, "delay", zero=True))
        at = datetime.fromtimestamp(now, UTC) + delay
    fields = (trigger.key, trigger.payload, trigger.priority, trigger.group, at, trigger.version, trigger.event_id)
    named = dict(zip(_TRIGGER_FIELDS, fields, strict=True))
    return codec.encode({**named, "trace": trigger.trace} if trigger.trace else named, "trigger")


def decode_trigger(packed: bytes, codec: Codec) -> Trigger:
    """Decode a trigger. Raises DecodeError."""
    fields = codec.decode_stored(packed)
    with wrap_decode_errors("a packed trigger"):
        return Trigger(**{name: fields[name] for name in _TRIGGER_FIELDS}, trace=fields.get("trace", b""))


def to_triggers(triggers: Iterable[Trigger | tuple[Key, object]]) -> list[Trigger]:
    """Convert the argument of `trigger_many` to triggers. Only a tuple counts as a pair. Raises InvalidArgument."""
    return [
        item
        if isinstance(item, Trigger)
        else Trigger(*item)
        if type(item) is tuple and len(item) == 2
        else _reject(item)
        for item in check_iterable(triggers, "triggers", _TRIGGERS)
    ]


def _reject(item: object) -> Trigger:
    raise InvalidArgument("triggers", type(item).__name__, "not a key and its payload", _TRIGGERS)


_TRIGGERS = "Pass (key, payload) tuples, such as the items() of a dict, or Trigger(...)"


class Ticket(NamedTuple):
    """The data by which the result of a trigger's delivery is found.

    The results of a key that ended before this trigger have `serial` or a lower one. `accepted_ms` is the time of the
    trigger by the server's clock. `slots` is the number of slots to which the serial belongs.
    """

    topic: str
    key: bytes
    route: bytes
    accepted_ms: int
    slots: int
    serial: int


@dataclass(slots=True)  # not frozen, for the same reason as Trigger
class Receipt:
    """The result of a trigger.

    Attributes:
        status: What became of the trigger. "scheduled": it is a new pending message. "merged": it joined the pending
            message of its key. "replaced": it joined that message and moved it to its own time. "dropped": it was not
            accepted. Its `version` is older, the window of a leading edge is open, or the message is full: it has no
            room for any of the payload (`append`, `union`, a policy per field). If there is room for a part, or the
            payload has another field, the receipt is "merged" or "replaced". A receipt cannot tell what happens later:
            if a delivery fails, its items join the pending message again, which may have no room for all of both
            (`items_dropped` of `stats()`). "duplicate": its `event_id` was seen for this key.
        due_ms: The time at which the message is due. In ms since the epoch. None if the trigger was not accepted.
        ticket: The data by which `topic.result` finds the result. None if the topic stores no results.
        items_dropped: True if the trigger was accepted, but the message had no room for some of its items.
    """

    status: ReceiptStatus
    due_ms: int | None
    ticket: Ticket | None = field(default=None, repr=False, compare=False)
    items_dropped: bool = field(default=False, repr=False, compare=False)

    @property
    def due_at(self) -> datetime | None:
        """The time at which the message is due. None if the trigger was not accepted."""
        return None if self.due_ms is None else moment(self.due_ms)

    @property
    def accepted(self) -> bool:
        """True if a delivery will follow."""
        return self.due_ms is not None


# -- messages and their deliveries ------------------------------------------------------------------------------------

Reason = Literal["now", "window", "quiet", "max_delay", "max_size", "leading", "time", "flush", "retry", "redrive"]
REASONS: tuple[Reason, ...] = (
    "now", "window", "quiet", "max_delay", "max_size", "leading", "time", "flush", "retry", "redrive",
)  # fmt: skip
"""The reasons by their number in the header."""
HEADER_SIZE = 31
_PLAIN = (0, b"", b"", b"", b"", 0, b"", b"", (0,))
"""The extension of a message that has none."""
_EXTENSION = (int, bytes, bytes, object, bytes, int, bytes, bytes, list)


class Message:
    """A merged message. `topics/scripts/lib/slot/header.lua` describes its bytes.

    Args:
        packed: the stored bytes.
        merge: the merge policy of its topic.
        codec: decodes its payload.
        due_ms: the time at which it is due in ms since the epoch, if a flush moved it. None: its own.
        running: True for a message in flight: `attempts` then includes the current one.

    Raises:
        DecodeError: the bytes are no message.
    """

    __slots__ = ("_accumulator", "_codec", "_due_ms", "_extension", "_merge", "_packed", "_running")

    def __init__(
        self, packed: bytes, merge: Merge, codec: Codec, due_ms: int | None = None, running: bool = False
    ) -> None:
        if type(packed) is not bytes or len(packed) < HEADER_SIZE or packed[0] > 3 or packed[1] >= len(REASONS):
            raise DecodeError("expected a message, got another type")
        self._packed = packed
        self._merge = merge
        self._codec = codec
        self._due_ms = due_ms
        self._running = running
        start = HEADER_SIZE
        self._extension: Any = _PLAIN
        if packed[0] & 2:
            start = HEADER_SIZE + 4 + int.from_bytes(packed[HEADER_SIZE : HEADER_SIZE + 4])
            self._extension = _read_extension(packed[HEADER_SIZE + 4 : start])
        if start > len(packed) or max(self.first_ms, self.last_ms) > LATEST_MS:
            raise DecodeError("expected a message, got another type")
        acc = packed[start:]
        self._accumulator: Any = acc if merge.raw else unpack(acc, "a payload")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Message):
            return NotImplemented
        return (self._packed, self._due_ms, self._running) == (other._packed, other._due_ms, other._running)

    def __hash__(self) -> int:
        return hash(self._packed)

    def __repr__(self) -> str:
        group = f" group={self.group!r}" if self.group else ""
        due = moment(self.due_ms).isoformat() if self.due_ms <= LATEST_MS else f"{self.due_ms} ms"
        return f"<Message due={due} reason={self.reason} count={self.count} attempts={self.attempts}{group}>"

    @property
    def count(self) -> int:
        """The number of merged triggers."""
        return int.from_bytes(self._packed[2:7])

    @property
    def first_ms(self) -> int:
        return int.from_bytes(self._packed[7:13])

    @property
    def last_ms(self) -> int:
        return int.from_bytes(self._packed[13:19])

    @property
    def due_ms(self) -> int:
        return int.from_bytes(self._packed[19:25]) if self._due_ms is None else self._due_ms

    @property
    def serial(self) -> int:
        """The number of its newest trigger within the slot."""
        return int.from_bytes(self._packed[25:31])

    @property
    def reason(self) -> Reason:
        """The reason for its due time."""
        moved = self._due_ms is not None and self._due_ms != int.from_bytes(self._packed[19:25])
        return "flush" if moved else REASONS[self._packed[1]]

    @property
    def attempts(self) -> int:
        """The number of attempts. It includes the current one."""
        return cast(int, self._extension[0]) + self._running

    @property
    def failure(self) -> str:
        """The failure of the previous attempt."""
        return cast(str, self._extension[1].decode(errors="replace"))

    @property
    def version(self) -> int | None:
        with wrap_decode_errors("a message"):
            return int(self._extension[2]) if self._extension[2] != b"" else None

    @property
    def priority(self) -> int:
        return int(self._extension[3] or 0)

    @property
    def raw_group(self) -> bytes:
        return cast(bytes, self._extension[4])

    @property
    def group(self) -> str:
        return self.raw_group.decode(errors="backslashreplace")

    @property
    def splits(self) -> int:
        """The number of times that only some of its items were retried."""
        return cast(int, self._extension[5])

    @property
    def traces(self) -> tuple[bytes, ...]:
        """The traces of its triggers, oldest first: at most 16. Triggers in turn with the same trace share it."""
        return cast("tuple[bytes, ...]", self._traces[1:])

    @property
    def dropped_traces(self) -> int:
        """The number of traces beyond those."""
        return cast(int, self._traces[0])

    @property
    def _traces(self) -> tuple[Any, ...]:
        return tuple(self._extension[8]) if len(self._extension) > 8 else (0,)

    @property
    def payload(self) -> Any:
        """The merged payload. Raises DecodeError if another codec wrote it."""
        with wrap_decode_errors("a payload"):
            return self._merge.lower(self._accumulator, self._codec.decode)

    def check_shape(self) -> None:
        """Raise DecodeError unless the payload is one of this merge policy. Values are not decoded."""
        with wrap_decode_errors("a payload"):
            self._merge.check_shape(self._accumulator)
        _ = self.version, self.dropped

    @property
    def _stored_payload(self) -> Any:
        """The merged payload with its models as StoredModel. Raises DecodeError if another codec wrote it."""
        with wrap_decode_errors("a payload"):
            return self._merge.lower(self._accumulator, self._codec.decode_stored)

    def replace_accumulator(self, packed: bytes) -> None:
        """Give the message the payload of another trigger, unless it was merged or only some items are retried."""
        if self.count == 1 and not self.splits:
            self._accumulator = packed if self._merge.raw else unpack(packed, "a payload")

    @property
    def oversize(self) -> int:
        """The bytes of its largest value if they exceed the `max_bytes` of the codec, else 0."""
        with wrap_decode_errors("a payload"):
            largest = self._merge.largest_value(self._accumulator)
        return largest if largest > self._codec.max_bytes else 0

    @property
    def dropped(self) -> int:
        """The number of items beyond the limit of the merge policy."""
        with wrap_decode_errors("a payload"):
            return self._merge.count_dropped(self._accumulator)

    def select_items(self, items: object) -> FailedItems:
        """Return the part of the payload that `items` names. Raises InvalidArgument; see `partial.select_items`."""
        return select_items(self._merge, self._accumulator, items, self._codec)


PackedMessage = tuple[bytes, Merge, Codec] | None
"""The first arguments of `Message`."""


def _read_extension(packed: bytes) -> list[Any]:
    fields = unpack(packed, "a message")
    if not isinstance(fields, list):
        raise DecodeError("expected a message, got another type")
    values: list[Any] = fields  # pyright: ignore[reportUnknownVariableType]
    right = 7 <= len(values) <= 9 and all(
        isinstance(value, kind) for value, kind in zip(values, _EXTENSION, strict=False)
    )
    right = right and (len(values) < 9 or [*map(type, values[8])] == [int] + [bytes] * (len(values[8]) - 1))
    if not right or not (isinstance(values[3], int) or values[3] == b""):
        raise DecodeError("expected a message, got another type")
    return values


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def moment(ms: int) -> datetime:
    """Convert milliseconds since the epoch to an aware datetime, exactly. Raises DecodeError."""
    try:
        return _EPOCH + timedelta(milliseconds=ms)
    except OverflowError:
        raise DecodeError(f"{ms} ms since 1970 is no time") from None


def check_ms(value: Any) -> int:
    """Return a time in ms since the epoch. Raises ValueError or TypeError."""
    if not 0 <= index(value) <= LATEST_MS:
        raise ValueError(f"{value} ms is no time")
    return index(value)


class Delivery(Generic[P]):
    """One attempt to hand a merged message to a handler.

    `token` is the fencing token. It rises with each delivery of the key, so a database can refuse lower tokens when
    the handler overwrites a state. Deliveries of one take share a token. A redelivery after a crash has a higher
    token: the token does not prevent a second effect. A key stored in the same transaction as the effect does.

    Attributes:
        due_ms: The time at which it was due, in ms since the epoch.
        size: The size of the stored message in bytes; 0 for a forwarded message, which is no longer stored.
        lost: True once the lease is known to be lost. Stop then: another worker may run this key.
        cancelled: True once the key is known to be cancelled.
        span: What a tracer keeps of the step that handles it. Not set without a tracer.
    """

    __slots__ = (
        "_packed", "_payload", "_read", "cancelled", "due_ms", "lost", "raw_key", "size", "slot", "span", "token",
        "topic",
    )  # fmt: skip
    span: Any

    def __init__(
        self,
        topic: str,
        slot: int,
        raw_key: bytes,
        token: int,
        due_ms: int,
        message: Message | None,
        packed: PackedMessage = None,
    ) -> None:
        self.topic: str = topic
        self.slot: int = slot
        self.raw_key: bytes = raw_key
        self.token: int = token
        self.due_ms: int = due_ms
        self.size: int = 0 if packed is None else len(packed[0])
        self.lost: bool = False
        self.cancelled: bool = False
        self._read = message
        self._packed = packed
        self._payload: P | None = None

    def __repr__(self) -> str:
        return f"<Delivery {self.topic}/{self.key} count={self.count} attempt={self.attempt} token={self.token}>"

    @property
    def _message(self) -> Message:
        if self._read is None:
            assert self._packed is not None
            self._read = Message(*self._packed, due_ms=self.due_ms, running=True)
        return self._read

    @property
    def key(self) -> str:
        """The key as text. Bytes that are not UTF-8 are escaped; `raw_key` is exact."""
        return self.raw_key.decode(errors="backslashreplace")

    @property
    def oversize(self) -> int:
        """The bytes of its largest value if this gate may not decode it (`max_bytes`); else 0."""
        if self._packed is None or self.size <= self._packed[2].max_bytes:
            return 0  # checked first, without unpacking the message
        try:
            return self._message.oversize
        except DecodeError:  # corrupt for any gate: the handler meets the error
            return 0

    @property
    def payload(self) -> P:
        """The merged payload, decoded once. Raises DecodeError if another codec wrote it."""
        if self._payload is None:
            self._payload = cast(P, self._message.payload)
        return self._payload

    @property
    def _stored_payload(self) -> Any:
        """The merged payload with its models before their class is known, for `gate.merge`. Raises DecodeError."""
        return self._message._stored_payload

    @property
    def id(self) -> str:
        """An id of this work, for a handler that is itself idempotent. It is unique in the namespace.

        Retries of the same triggers have the same id. It changes when more triggers are merged, or when only some
        items are retried.
        """
        message = self._message
        work = keys.work(self.topic, message.raw_group, self.raw_key)
        splits = f"/{message.splits}" if message.splits else ""
        return f"{work}@{message.last_ms}-{message.serial}+{message.count}{splits}"

    @property
    def count(self) -> int:
        """The number of merged triggers. After a retry of some items of an append it is the number of those items."""
        return self._message.count

    def select_items(self, items: object) -> FailedItems:
        """Return the part of the payload that `items` names. Raises InvalidArgument for an unknown item."""
        return self._message.select_items(items)

    @property
    def first_at(self) -> datetime:
        """The time at which its first trigger was accepted, by the server's clock."""
        return moment(self._message.first_ms)

    @property
    def last_at(self) -> datetime:
        """The time at which its last trigger was accepted, by the server's clock."""
        return moment(self._message.last_ms)

    @property
    def due_at(self) -> datetime:
        """The time at which it was due. It is never delivered earlier, by the server's clock."""
        return moment(self.due_ms)

    @property
    def reason(self) -> Reason:
        """The reason for its due time: "window", "quiet", "max_delay", "max_size", "leading", "time", "now", "flush",
        "retry" or "redrive"."""
        return self._message.reason

    @property
    def attempt(self) -> int:
        """The number of this attempt, from 1."""
        return self._message.attempts

    @property
    def priority(self) -> int:
        """The priority of its newest trigger that had one; else 0."""
        return self._message.priority

    @property
    def route(self) -> bytes:
        """The group, or the key without a group. It decides the slot."""
        return self._message.raw_group or self.raw_key

    @property
    def group(self) -> str:
        """The group whose concurrency is limited; empty for none."""
        return self._message.group

    @property
    def version(self) -> int | None:
        """The newest version among its triggers; None if no trigger had one."""
        return self._message.version

    @property
    def dropped(self) -> int:
        """The number of dropped items of an `append` or `union`."""
        return self._message.dropped

    @property
    def failure(self) -> str:
        """The failure of the previous attempt; empty if none failed, or if a newer payload replaced what failed."""
        return self._message.failure

    @property
    def traces(self) -> tuple[bytes, ...]:
        """The traces of its triggers, oldest first: at most 16. Empty without a tracer. Raises DecodeError."""
        return self._message.traces

    @property
    def dropped_traces(self) -> int:
        """The number of traces beyond those."""
        return self._message.dropped_traces


def replace_payload(delivery: Delivery[Any], accumulator: bytes) -> None:
    """Give a delivery of a single trigger another payload. Raises DecodeError for a corrupt message."""
    delivery._message.replace_accumulator(accumulator)  # pyright: ignore[reportPrivateUsage]


@dataclass(frozen=True, slots=True)
class Taken:
    """The reply of one `take`.

    `lapsed` messages were requeued because their lease had lapsed. `next_due_ms` is the time of the slot's next work
    in ms since the epoch, 0 = never. `paused` is the record of the pause (`decode_pause`), if the slot is paused.
    """

    deliveries: list[Delivery[Any]]
    lapsed: int
    next_due_ms: int
    now_ms: int
    paused: bytes | None = None

    @property
    def more(self) -> bool:
        """True if the slot has more work now. One call takes only a few large messages."""
        return 0 < self.next_due_ms <= self.now_ms


@dataclass(frozen=True, slots=True)
class Settled:
    """The outcomes: "ok", "dead" (given up), "cancelled" (not retried) or "lost" (another owner has it)."""

    outcomes: list[str]
    next_due_ms: int
    now_ms: int


@dataclass(frozen=True, slots=True)
class SettledAndTaken:
    """The reply of one `settle_and_take`."""

    settled: Settled
    taken: Taken

    @property
    def next_due_ms(self) -> int:
        return self.taken.next_due_ms

    @property
    def now_ms(self) -> int:
        return self.taken.now_ms

    @property
    def paused(self) -> bytes | None:
        return self.taken.paused


@dataclass(frozen=True, slots=True)
class Forward:
    """The target of forwarded messages.

    `target` None means one key per slot. `keep` 0 keeps all entries. With `trim` a worker removes the entries of a
    stream that every group has acknowledged.
    """

    kind: Literal["list", "stream"]
    target: bytes | None
    keep: int
    trim: bool = False


@dataclass(frozen=True, slots=True)
class Forwarded:
    """The reply of one `forward`: the number of sent messages, and the time of the slot's next work (ms, 0 = never).

    `paused` is the record of the pause, as in `Taken`.
    """

    sent: int
    next_due_ms: int
    now_ms: int
    paused: bytes | None = None

    @property
    def more(self) -> bool:
        """True if the slot has more to forward now. False if only a lapsed lease is due."""
        return self.sent > 0 and 0 < self.next_due_ms <= self.now_ms


@dataclass(frozen=True, slots=True)
class Peek:
    """The state of a key: its pending message, due at `due_at`; and its delivery, under `token` until `lease_until`."""

    pending: Message | None
    due_at: datetime | None
    in_flight: Message | None
    token: int | None
    lease_until: datetime | None


class Position(NamedTuple):
    """A position among the pending messages of a topic, in any slot: a member of a set, and its score.

    `part` is the number of the set (`topics/scripts/messages/list.lua`).
    """

    part: int = 1
    score: float = 0
    member: bytes = b""


@dataclass(frozen=True, slots=True)
class PendingMessage:
    """A pending message with its key.

    Attributes:
        position: Its position among the pending messages.
        raw_key: Its key.
        state: "scheduled", "ready", "blocked" (it waits for its group) or "waiting" (for a delivery of its key).
        due_at: The time at which it is due.
        message: The message, with its payload.
    """

    position: Position
    raw_key: bytes
    state: str
    due_at: datetime
    message: Message


class PendingPage(NamedTuple):
    """Pending messages in the order of their positions, and the position after which others may follow, or None.

    `now_ms` is the time of the server.
    """

    messages: list[PendingMessage]
    next: Position | None
    now_ms: int


@dataclass(frozen=True, slots=True)
class StoredVersion:
    """The newest version that a topic knows of a key. Until `until`, it drops triggers with a lower one."""

    version: int
    until: datetime


@dataclass(frozen=True, slots=True)
class Pause:
    """The pause of a topic.

    Attributes:
        since: The time at which it began, by the server's clock.
        by: Who paused the topic. Of a command it is the user and the host. Of the page it is the name that `access=` or
            the token gives. Of a program it is the file, pid and host.
        reason: The reason that was given, or None.
    """

    since: datetime
    by: str
    reason: str | None


MAX_REASON = 500
"""The most characters of the reason of a pause."""


def pack_pause(reason: str | None) -> bytes:
    """Return what is stored about a pause, without the time. Raises InvalidArgument for the reason."""
    fix = f"Pass a text of 1 to {MAX_REASON} characters, or None"
    if reason is not None and type(reason) is not str:
        raise InvalidArgument("reason", reason, "not a text", fix)
    if reason is not None and not 0 < len(reason) <= MAX_REASON:
        raise InvalidArgument("reason", reason, f"a text of {len(reason)} characters", fix)
    return pack([actor_name(), reason and reason.encode(errors="backslashreplace").decode()])


def decode_pause(stored: bytes) -> Pause:
    """Decode the record of a pause (`topics/scripts/pause.lua`). Raises DecodeError."""
    with wrap_decode_errors("a pause"):
        since_ms, packed = stored.split(b" ", 1)
        by, reason = unpack(packed, "a pause", raw=False)
        since, reason = moment(check_ms(int(since_ms))), None if reason is None else str.__str__(reason)
        return Pause(since, str.__str__(by).rstrip(), reason)


@dataclass(frozen=True, slots=True)
class BlockedGroup:
    """A group with due messages that wait, because it has as many deliveries as it may have at a time.

    Attributes:
        group: The group, as in `Message.group`.
        count: The number of its blocked messages.
        oldest_due: The earliest due time of these.
    """

    group: str
    count: int
    oldest_due: datetime


@dataclass(frozen=True, slots=True)
class Stats:
    """Message counts by state, since when messages are due, and counters since the topic was created.

    Counters of triggers:

    - `accepted`: a delivery follows. `merged` and `replaced` of them joined a pending message, as their receipt says.
    - `dropped`: not accepted. The reason is in `dropped_version` (older than the stored version), `dropped_window` (the
      window of a leading edge was open) and `dropped_full` (the message had no room for any of the payload).
    - `duplicate`: their event id was known.
    - `refused_payload`, `refused_too_large`: raised InvalidArgument for their payload. The processes count them
      best-effort, so the store may miss some.
    - Names that end in `_triggers`: the triggers of the messages that another counter counts, such as `acked_triggers`.

    Counters of deliveries:

    - `taken`: begun.
    - `acked`: done. `partial`: done for a part of their items. The others are retried, and it is `nacked`, too.
    - `nacked`: failed. The message is retried, or becomes a dead letter after its last attempt.
    - `lapsed`: their lease ended before they were settled. Each counts as an attempt, as those of `nacked`.
    - `returned`: given back before their handler started (`release`). `deferred`: not possible yet. Neither counts as
      an attempt.
    - `lost`: settled too late. Another worker had the message, or it was done.
    - `cancelled`: ended by `cancel`. It also counts pending messages that were cancelled.

    Counters of messages and dead letters:

    - `folded`: returned after a delivery, or from the dead letters, and merged with a newer message of their key.
    - `buried`: became dead letters, by `bury` or after their last attempt.
    - `redriven`, `deleted`: dead letters that became messages again, or were deleted. `outdated` of those that were
      deleted had a lower version than a later trigger. `expired`: discarded by `dead_retention` or `max_dead`.
    - `forwarded`: moved to the list or stream of the topic.

    Counters of items: `items_failed` are those that a `partial` delivery retries. `items_dropped` had no room in their
    message.

    At any time, accepted = acked_triggers + cancelled_triggers + deleted_triggers + expired_triggers +
    forwarded_triggers + the triggers of stored messages.

    Attributes:
        scheduled: Messages due later.
        ready: Messages due now. Limits of the topic (`concurrency`, `rate`) and a pause hold them back.
        waiting: Messages that wait for a delivery of their key to end.
        blocked: Due messages that wait for their group.
        in_flight: Messages being handled.
        dead: Dead letters.
        next_due: The earliest due time of the scheduled and ready messages: in the past if any is ready. None if there
            are none. Blocked and waiting messages do not count: the end of a delivery is not known in advance.
        oldest_due: The earliest due time of all messages that are due and not in flight: ready, blocked and waiting.
            By the server's clock. None if no message is due.
        lateness: How long the message of `oldest_due` has been due. Zero if no message is due.
        oldest_blocked: The group of the blocked message with the earliest due time. None if no message is blocked.
        blocked_groups: The groups with the most blocked messages, the largest first, at most five.
        sampled: True if a slot has more than one call looks at: 250 ranks (different priorities) of ready messages, 250
            of blocked ones, 128 blocked groups, and 500 deliveries or 128 KiB for the waiting ones. Then a message may
            have been due for longer than `oldest_due`, `oldest_blocked` and `lateness` say. `blocked_groups` may lack a
            group with less than 1/64 of the blocked messages of its slot. All other numbers are exact.
        paused: The pause of the topic: since when, by which process and why. None if it is not paused.
        counters: The counters by name.
    """

    scheduled: int
    ready: int
    waiting: int
    blocked: int
    in_flight: int
    dead: int
    next_due: datetime | None
    oldest_due: datetime | None
    lateness: timedelta
    oldest_blocked: BlockedGroup | None
    blocked_groups: tuple[BlockedGroup, ...]
    sampled: bool
    paused: Pause | None
    counters: Mapping[str, int]

    @property
    def pending(self) -> int:
        """The number of messages that no handler has: scheduled, ready, waiting and blocked."""
        return self.scheduled + self.ready + self.waiting + self.blocked

    def __getitem__(self, counter: str) -> int:
        """Return a counter by name; 0 if it has never been counted."""
        return self.counters.get(counter, 0)


def decode_forwarded(topic: str, packed: bytes, merge: Merge, codec: Codec) -> Delivery[Any]:
    """Decode a forwarded message. It has no lease and needs no acknowledgement. Raises DecodeError."""
    with wrap_decode_errors("a forwarded message"):
        number, raw_key, due_ms, message = unpack(packed, "a forwarded message")
        if type(raw_key) is not bytes:  # a number would pass too: bytes(5) are five zero bytes
            raise TypeError(f"{raw_key!r:.100} is no key")
        return Delivery(
            topic, -1, raw_key, index(number), check_ms(due_ms),
            Message(message, merge, codec, due_ms=due_ms, running=True),
        )  # fmt: skip
