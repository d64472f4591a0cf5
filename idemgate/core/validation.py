"""Many of something, as callers pass it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from idemgate.errors import InvalidArgument

__all__ = ["each"]

T = TypeVar("T")


def each(many: Iterable[T], name: str, fix: str) -> Iterator[T]:
    """What `many` holds, or InvalidArgument: a text would be taken apart, and what is asynchronous cannot be waited for."""
    if isinstance(many, str | bytes | bytearray):
        raise InvalidArgument(name, many, "one value, not many", fix)
    try:
        return iter(many)
    except TypeError:
        raise InvalidArgument(name, many, "cannot be iterated over", fix) from None
