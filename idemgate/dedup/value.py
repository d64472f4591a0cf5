"""Encoding of the small values of a dedup set: up to 16 bytes each, stored in 17."""

from __future__ import annotations

from uuid import UUID

from idemgate.errors import InvalidArgument

__all__ = ["Small", "pack", "unpack"]

Small = str | bytes | int | UUID
MAX_BYTES = 16
_KINDS = (bytes, str, int, UUID)
"""The types by their stored number. The first stored byte is the number times 32, plus the length of the value."""


def pack(value: object) -> bytes:
    """Return the value in 17 bytes. Raises InvalidArgument for another type or a longer value."""
    if isinstance(value, bool) or not isinstance(value, _KINDS):
        raise InvalidArgument("value", value, f"a {type(value).__name__} cannot be stored", f"Store {_SUPPORTED}")
    raw = _bytes(value)
    if len(raw) > MAX_BYTES:
        raise InvalidArgument(
            "value", value, f"{len(raw)} bytes long", f"Store {_SUPPORTED}, or a larger value with `once` or `claim`"
        )
    kind = next(number for number, known in enumerate(_KINDS) if isinstance(value, known))
    return bytes([kind * 32 + len(raw)]) + raw.ljust(MAX_BYTES, b"\0")


def unpack(data: bytes) -> Small:
    """Return the packed value. Raises ValueError for anything else."""
    if len(data) != MAX_BYTES + 1 or data[0] // 32 >= len(_KINDS) or data[0] % 32 > MAX_BYTES:
        raise ValueError("it is not a value of a dedup set")
    kind, raw = _KINDS[data[0] // 32], data[1 : 1 + data[0] % 32]
    if kind is str:
        return raw.decode()
    if kind is int:
        return int.from_bytes(raw, signed=True)
    return UUID(bytes=raw) if kind is UUID else raw


_SUPPORTED = f"text or bytes of at most {MAX_BYTES} bytes, a whole number of 128 bits, or a UUID"


def _bytes(value: Small) -> bytes:
    if isinstance(value, str):
        try:
            return value.encode()
        except UnicodeEncodeError as error:
            problem = f"not valid Unicode ({error.reason})"
            raise InvalidArgument("value", value, problem, "Pass bytes, or repair the text") from None
    if isinstance(value, int):
        return value.to_bytes((8 + (value + (value < 0)).bit_length()) // 8, signed=True)
    return value.bytes if isinstance(value, UUID) else value
