"""Many of something, as callers pass it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from idemgate.errors import BadInput

__all__ = ["each"]

T = TypeVar("T")


def each(many: Iterable[T], name: str, fix: str) -> Iterator[T]:
    """What `many` holds, or BadInput: a text would be taken apart, and what is asynchronous cannot be waited for."""
    if isinstance(many, str | bytes | bytearray):
        raise BadInput(name, many, "one value, not many", fix)
    try:
        return iter(many)
    except TypeError:
        raise BadInput(name, many, "cannot be iterated over", fix) from None
