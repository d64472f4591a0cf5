"""Values of 16 bytes and less, each in 17: what a seen-set can keep beside an id."""

from __future__ import annotations

from uuid import UUID

from idemgate.errors import InvalidArgument

__all__ = ["Small", "packed", "unpacked"]

Small = str | bytes | int | UUID
MOST = 16
_KINDS = (bytes, str, int, UUID)
"""By number, which is stored: the first byte is the number, times 32, and how many bytes the value has."""


def packed(value: object) -> bytes:
    """InvalidArgument for what is of another type, or longer."""
    if isinstance(value, bool) or not isinstance(value, _KINDS):
        raise InvalidArgument("value", value, f"a {type(value).__name__} cannot be kept", f"Keep {_WHAT}")
    raw = _bytes(value)
    if len(raw) > MOST:
        raise InvalidArgument(
            "value", value, f"{len(raw)} bytes long", f"Keep {_WHAT}, or more in a record: `once`, `claim`"
        )
    kind = next(number for number, known in enumerate(_KINDS) if isinstance(value, known))
    return bytes([kind * 32 + len(raw)]) + raw.ljust(MOST, b"\0")


def unpacked(data: bytes) -> Small:
    """What was packed. ValueError for anything else."""
    if len(data) != MOST + 1 or data[0] // 32 >= len(_KINDS) or data[0] % 32 > MOST:
        raise ValueError("it is no value that was kept")
    kind, raw = _KINDS[data[0] // 32], data[1 : 1 + data[0] % 32]
    if kind is str:
        return raw.decode()
    if kind is int:
        return int.from_bytes(raw, signed=True)
    return UUID(bytes=raw) if kind is UUID else raw


_WHAT = f"text or bytes of at most {MOST} bytes, a whole number of 128 bits, or a UUID"


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
