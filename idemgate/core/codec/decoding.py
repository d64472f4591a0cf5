"""Decoding of what the scripts packed.

Another program may have written to the key, so data is not trusted: anything unexpected becomes DecodeError before it
takes memory.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import msgpack

from idemgate.core.codec.packing import measure, nests_at_most
from idemgate.errors import DecodeError

__all__ = ["DECODE_ERRORS", "decode_error", "unpack", "wrap_decode_errors"]

_MAX_DEPTH = 16
_SMALL = 4096

DECODE_ERRORS = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError)
"""Errors that reading data of an unexpected form can raise."""


def decode_error(expected: str, error: Exception) -> DecodeError:
    """Return the DecodeError for data that should be `expected`, such as "a message"."""
    return DecodeError(f"expected {expected}: {str(error) or type(error).__name__}")


@contextmanager
def wrap_decode_errors(expected: str) -> Generator[None]:
    """Turn every one of `DECODE_ERRORS` raised inside into a DecodeError that names what was expected."""
    try:
        yield
    except DECODE_ERRORS as error:
        raise decode_error(expected, error) from error


def unpack(packed: bytes, expected: str, *, raw: bool = True) -> Any:
    """Return the value in `packed`. It takes at most 100 bytes of memory per byte, or 1 MiB.

    Args:
        packed: one value in msgpack.
        expected: what it should be, for the error.
        raw: return strings as bytes; False returns them as str.

    Raises:
        DecodeError: the bytes are malformed, or the value nests too deeply.
    """
    # A few bytes can request gigabytes: the unpacker allocates as many items as a header promises.
    try:
        if len(packed) > _SMALL or not nests_at_most(packed, _MAX_DEPTH):
            measure(packed, _MAX_DEPTH, len(packed))
        return msgpack.unpackb(packed, raw=raw, strict_map_key=False)
    except DECODE_ERRORS as error:
        raise decode_error(expected, error) from error
