"""Encoding of values: one version byte, then msgpack. No pickle, and nothing is imported by a name in the data.

These types are restored exactly:

- None, bool, int of any size, float, str, bytes, Decimal and UUID.
- list, tuple, set, frozenset, and dict with any hashable keys.
- aware datetime (with its offset, without the name of its zone), date and timedelta.

A dataclass or pydantic model is stored as the name of its class and the values of its fields, which no serializer has
changed. It is decoded as the dict of its fields. `restore` (`restoring.py`) rebuilds it, if an annotation leads to its
class. Any other type is rejected before anything is written.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

from idemgate.core.codec.packing import Unpack, ValueEncoder, looks_plain, measure, pack, unpack, unpack_stored
from idemgate.errors import DecodeError, InvalidArgument, TooLarge

__all__ = ["Codec", "add_trace", "canonical", "digest", "read_trace"]

_VERSION = b"\x01"
_TRACED = b"\x02"
"""Stands before a value that has a trace: then come the length of the trace in 2 bytes, the trace and the value."""
_SMALL = 4096  # the unpacker of a smaller body allocates at most 64 lists of 4096 items: 2 MB
_MAX_DEPTH = 64
_SINGLE = frozenset({str, bool, type(None)})
"""Scalar types that msgpack restores exactly, so their bytes need no check."""
_CANONICAL = _SINGLE | {int, bytes}
"""Types with one encoding for each value."""
_LONE = frozenset((*range(0xA0, 0xC1), 0xC2, 0xC3, 0xD9, 0xDA, 0xDB))
"""The first bytes of scalars. Unpacking one allocates no more memory than it has bytes."""


class Codec:
    """An encoder and decoder with limits. A decoded value equals the encoded one and has the same types.

    Args:
        max_bytes: the maximum stored bytes, including the version byte.
        max_depth: the maximum nesting of containers, 1 to 128. A tuple, set or model counts twice.
        max_items: the maximum number of values inside, where keys, values and containers each count.
        limit_name: the option that sets `max_bytes`, for errors.
    """

    __slots__ = ("_depth", "_small", "limit_name", "max_bytes", "max_depth", "max_items")

    def __init__(
        self,
        max_bytes: int = 262_144,
        max_depth: int = _MAX_DEPTH,
        max_items: int = 100_000,
        limit_name: str = "Gate(max_bytes=)",
    ) -> None:
        if not 1 <= max_depth <= 128:
            raise InvalidArgument(
                "max_depth", max_depth, "is out of range", "Pass 1 to 128: more would not unpack everywhere"
            )
        self.max_bytes: int = max_bytes
        self.limit_name: str = limit_name
        self.max_depth: int = max_depth
        self.max_items: int = max_items
        self._small = min(_SMALL, max_items)
        self._depth = min(max_depth, _MAX_DEPTH)

    def encode(self, value: object, name: str = "payload") -> bytes:
        """Return `value` as bytes.

        Raises:
            InvalidArgument: a type is not supported or a limit is exceeded. The error names the member, such as
                `payload['lines'][3]`.
        """
        try:
            body = pack(value) if type(value) in _SINGLE else self._plain_body(value)
        except UnicodeEncodeError:
            body = None
        if body is None:
            body = ValueEncoder(name, self.max_depth).encode(value)
            self._check_measure(body, value, name)
        if len(body) >= self.max_bytes:
            problem = f"takes {len(body) + 1:,} bytes; the limit is {self.max_bytes:,}"
            raise TooLarge(
                name, type(value), problem, f"Store it elsewhere and pass a reference, or raise {self.limit_name}"
            )
        return _VERSION + body

    def encode_item(self, value: object, name: str = "payload") -> bytes:
        """Return `value` as bytes that are equal only for equal values, as those of `canonical`. `decode` reads them.

        Raises:
            InvalidArgument: as for `encode`.
        """
        encoded = self.encode(value, name)
        return encoded if type(value) in _CANONICAL else _VERSION + _ordered(value, name)

    def decode(self, data: bytes) -> Any:
        """Return the value that `encode` encoded. A model is the dict of its fields, and an enum in one its value.

        Raises:
            DecodeError: the bytes are something else. Raised before memory is allocated for them.
        """
        return self._decode(data, unpack)

    def decode_stored(self, data: bytes) -> Any:
        """Return the value as `decode`, where models are StoredModel. `encode` gives the same bytes for it again.

        Raises:
            DecodeError: as for `decode`.
        """
        return self._decode(data, unpack_stored)

    def _decode(self, data: bytes, unpack: Unpack) -> Any:
        if data[:1] != _VERSION:
            data = data[3 + len(read_trace(data)) :] if data[:1] == _TRACED else data
            if data[:1] != _VERSION:
                raise DecodeError(f"it starts with {data[:1]!r}, not with version {_VERSION!r} of this library")
        if len(data) > self.max_bytes:
            raise DecodeError(f"it is {len(data):,} bytes long; the limit is {self.max_bytes:,}, of {self.limit_name}")
        body = data[1:]
        try:
            if len(body) > self._small or not (body[0] in _LONE or looks_plain(body, self._depth)):
                measure(body, self.max_depth, self.max_items)
            return unpack(body)
        except (ValueError, TypeError, ArithmeticError, IndexError) as error:
            raise DecodeError(str(error) or type(error).__name__) from error

    def _plain_body(self, value: object) -> bytes | None:
        """Return the packed value if msgpack restores it exactly, else None.

        It packs first and checks the bytes after. msgpack also packs bytearray, memoryview and its own ExtType; they
        appear as binary or ext.
        """
        try:
            body = pack(value)
            if len(body) <= self.max_items and looks_plain(body, self.max_depth):
                return body
            return body if measure(body, self.max_depth, self.max_items) else None
        except Exception:  # noqa: BLE001 - the pure form of msgpack shows the value in its error: a __repr__ may raise
            # `ValueEncoder` handles the value, or names the member and the reason.
            return None

    def _check_measure(self, body: bytes, value: object, name: str) -> None:
        try:
            measure(body, self.max_depth, self.max_items)
        except ValueError as error:
            raise InvalidArgument(
                name, type(value), str(error), "Split it, or store it elsewhere and pass a reference"
            ) from None


def add_trace(data: bytes, trace: bytes) -> bytes:
    """Return an encoded value with the trace of the step that made it (`store/context.py`). `decode` leaves it out."""
    return _TRACED + len(trace).to_bytes(2) + trace + data if trace else data


def read_trace(data: bytes) -> bytes:
    """Return the trace that was added to an encoded value, or b""."""
    return data[3 : 3 + int.from_bytes(data[1:3])] if data[:1] == _TRACED else b""


def canonical(value: object, name: str = "value", *, unique: bool = False) -> bytes:
    """Return bytes that are equal only for equal values of the same types, for fingerprints and set members.

    The order of dicts and sets is ignored. 1, 1.0 and True differ, as do a list and a tuple. The same time in two
    zones differs too. Equal Decimals have equal bytes: 1.0 and 1.00. Of a model the name of its class and all its
    attributes count, also those that it leaves out or masks in its output. There is no size limit.

    Args:
        value: the value.
        name: the name of the value, for errors.
        unique: refuse a model or enum whose class its module does not have under its name.

    Raises:
        InvalidArgument: a type is not supported, as for `Codec.encode`.
    """
    return ValueEncoder(name, _MAX_DEPTH, ordered=True, identity=True, unique=unique).encode(value)


def _ordered(value: object, name: str) -> bytes:
    """Return bytes that are equal only for equal values, with all that `decode_stored` needs."""
    return ValueEncoder(name, _MAX_DEPTH, ordered=True).encode(value)


def digest(value: object, size: int = 16, name: str = "value") -> bytes:
    """Return the BLAKE2b digest of `canonical(value, unique=True)`, 1 to 64 bytes.

    Digests are stored, so the result must be the same in every version.
    """
    return blake2b(canonical(value, name, unique=True), digest_size=size).digest()
