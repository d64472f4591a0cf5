"""Values to bytes and back: one version byte, then msgpack. Never pickle; no name in the data is imported.

Kept as they are: None, bool, int of any size, float, str, bytes, list, tuple, dict (any hashable keys),
set, frozenset, aware datetime (its offset, not the name of its zone), date, timedelta, Decimal, UUID.
Dataclasses and pydantic models are stored as the dict of their fields; `rebuild` (in `core.models`) makes
them again from an annotation. Everything else is refused before anything is written.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

from idemgate.core.codec.limits import looks_plain, measure
from idemgate.core.codec.plain import Walk, pack, unpack
from idemgate.errors import DecodeError, InvalidArgument

__all__ = ["Codec", "canonical", "digest"]

_VERSION = b"\x01"
_SMALL = 4096  # a plain body up to here cannot make the unpacker ask for more than 64 lists of 4096: 2 MB
_MAX_DEPTH = 64
_SINGLE = frozenset({str, bool, type(None)})
"""Types that msgpack keeps by itself, in one value each: nothing in the bytes is worth a look."""
_LONE = frozenset((*range(0xA0, 0xC1), 0xC2, 0xC3, 0xD9, 0xDA, 0xDB))
"""What such a value begins with: it asks for no more memory than it has bytes."""


class Codec:
    """What `encode` accepts, `decode` of a codec with the same limits gives back equal and of the same types.

    `max_bytes` counts the stored bytes, version byte included. `max_depth` counts nested containers; a
    tuple or set counts twice. `max_items` counts every value inside: keys, values and containers.
    """

    __slots__ = ("_depth", "_small", "max_bytes", "max_depth", "max_items")

    def __init__(self, max_bytes: int = 262_144, max_depth: int = _MAX_DEPTH, max_items: int = 100_000) -> None:
        if not 1 <= max_depth <= 128:
            raise InvalidArgument(
                "max_depth", max_depth, "is out of range", "Pass 1 to 128: more would not unpack everywhere"
            )
        self.max_bytes = max_bytes
        self.max_depth = max_depth
        self.max_items = max_items
        self._small = min(_SMALL, max_items)
        self._depth = min(max_depth, _MAX_DEPTH)

    def encode(self, value: object, name: str = "payload") -> bytes:
        """`value` as bytes. Raises InvalidArgument naming the member at fault, as in `payload['lines'][3]`."""
        try:
            body = pack(value) if type(value) in _SINGLE else self._plain_body(value)
        except UnicodeEncodeError:
            body = None
        if body is None:
            body = Walk(name, self.max_depth).packed(value)
            self._check_measure(body, value, name)
        if len(body) >= self.max_bytes:
            problem = f"takes {len(body) + 1:,} bytes; the limit is {self.max_bytes:,}"
            raise InvalidArgument(
                name, type(value), problem, "Store it elsewhere and pass a reference, or raise the limit"
            )
        return _VERSION + body

    def decode(self, data: bytes) -> Any:
        """The value `encode` was given. Raises DecodeError, before taking memory, for anything else."""
        if data[:1] != _VERSION:
            raise DecodeError(f"it starts with {data[:1]!r}, not with version {_VERSION!r} of this library")
        if len(data) > self.max_bytes:
            raise DecodeError(f"it is {len(data):,} bytes long; the limit is {self.max_bytes:,}")
        body = data[1:]
        try:
            if len(body) > self._small or not (body[0] in _LONE or looks_plain(body, self._depth)):
                measure(body, self.max_depth, self.max_items)
            return unpack(body)
        except (ValueError, TypeError, ArithmeticError, IndexError) as error:
            raise DecodeError(str(error) or type(error).__name__) from error

    def _plain_body(self, value: object) -> bytes | None:
        """For what msgpack keeps by itself: pack first, then look at the bytes. None: go the long way.

        msgpack writes bytearray, memoryview and its own ExtType without asking; they show as binary or ext.
        """
        try:
            body = pack(value)
            if len(body) <= self.max_items and looks_plain(body, self.max_depth):
                return body
            return body if measure(body, self.max_depth, self.max_items) else None
        except Exception:  # noqa: BLE001 - whatever it was, the long way says where and why, or manages
            return None

    def _check_measure(self, body: bytes, value: object, name: str) -> None:
        try:
            measure(body, self.max_depth, self.max_items)
        except ValueError as error:
            raise InvalidArgument(
                name, type(value), str(error), "Split it, or store it elsewhere and pass a reference"
            ) from None


def canonical(value: object, name: str = "value") -> bytes:
    """Bytes that are equal only for equal values of the same types: for fingerprints and set members.

    The order of dicts and sets does not count. 1, 1.0 and True differ, so do a list and a tuple, and the
    same moment in two zones. A model equals the dict of its fields. Raises InvalidArgument as `Codec.encode`
    does; there is no size limit.
    """
    return Walk(name, _MAX_DEPTH, ordered=True).packed(value)


def digest(value: object, size: int = 16, name: str = "value") -> bytes:
    """BLAKE2b of `canonical(value)`, `size` bytes (1 to 64). It is stored: the same in every version."""
    return blake2b(canonical(value, name), digest_size=size).digest()
