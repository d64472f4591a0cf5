"""What our scripts packed, read back. Somebody else may have written there: what is none of ours is DecodeError, told
before it takes memory."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import msgpack

from idemgate.core.codec.limits import measure, nests_little
from idemgate.errors import DecodeError

__all__ = ["BROKEN", "as_ours", "not_ours", "unpacked"]

_DEPTH = 16
_SMALL = 4096


BROKEN = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError)
"""What goes wrong with something stored that is not what we write."""


def not_ours(what: str, error: Exception) -> DecodeError:
    return DecodeError(f"it is not {what} of ours: {str(error) or type(error).__name__}")


@contextmanager
def as_ours(what: str) -> Generator[None]:
    """Whatever is broken inside is DecodeError, which names it."""
    try:
        yield
    except BROKEN as error:
        raise not_ours(what, error) from error


def unpacked(packed: bytes, what: str, *, raw: bool = True) -> Any:
    """The value in `packed`, strings as bytes (`raw`) or as text. It takes at most 100 bytes a byte, or 1 MiB.

    A few bytes can ask for gigabytes, since the unpacker makes room for as many items as a header promises: what could
    nest deeply is measured first.
    """
    try:
        if len(packed) > _SMALL or not nests_little(packed, _DEPTH):
            measure(packed, _DEPTH, len(packed))
        return msgpack.unpackb(packed, raw=raw, strict_map_key=False)
    except BROKEN as error:
        raise not_ours(what, error) from error
