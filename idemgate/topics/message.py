"""A stored message, decoded when its fields are read."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from operator import index
from typing import Any, Literal, cast

from idemgate.core.codec import Codec
from idemgate.core.codec.decoding import unpack, wrap_decode_errors
from idemgate.core.durations import LATEST_MS
from idemgate.errors import DecodeError
from idemgate.topics.merge import Merge
from idemgate.topics.partial import FailedItems, select_items

__all__ = ["HEADER_SIZE", "REASONS", "Message", "PackedMessage", "Reason", "check_ms", "moment"]

Reason = Literal["now", "window", "quiet", "max_delay", "max_size", "leading", "time", "flush", "retry", "redrive"]
REASONS: tuple[Reason, ...] = (
    "now", "window", "quiet", "max_delay", "max_size", "leading", "time", "flush", "retry", "redrive",
)  # fmt: skip
"""The reasons by their number in the header."""
HEADER_SIZE = 31
_PLAIN = (0, b"", b"", b"", b"", 0, b"")
"""The extension of a message that has none."""
_EXTENSION = (int, bytes, bytes, object, bytes, int, bytes, bytes)


class Message:
    """A merged message. `lua/lib/slot/header.lua` describes its bytes.

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
    def payload(self) -> Any:
        """The merged payload. Raises DecodeError if another codec wrote it."""
        with wrap_decode_errors("a payload"):
            return self._merge.lower(self._accumulator, self._codec.decode)

    @property
    def stored_payload(self) -> Any:
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
    right = 7 <= len(values) <= 8 and all(
        isinstance(value, kind) for value, kind in zip(values, _EXTENSION, strict=False)
    )
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
