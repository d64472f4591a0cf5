"""Replies as stored results: a `Response` of FastStream is stored as a dict, and restored for a duplicate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from faststream import Response

__all__ = ["pack_response", "unpack_response"]

_KIND = "faststream.Response"


def pack_response(result: Any) -> Any:
    """Return what a handler returned as a value to store."""
    return {_KIND: type(result).__name__, **vars(result)} if isinstance(result, Response) else result


def unpack_response(stored: Any) -> Any:
    """Return the reply of a stored result. One of an unknown class keeps its body, headers and correlation id."""
    if not isinstance(stored, dict) or _KIND not in stored:
        return cast("Any", stored)
    attributes = cast("dict[str, Any]", stored).copy()
    name = attributes.pop(_KIND)
    kind = next((one for one in _subclasses(Response) if one.__name__ == name), Response)
    response = kind.__new__(kind)
    vars(response).update(attributes)
    return response


def _subclasses(kind: type[Response]) -> Iterator[type[Response]]:
    for one in kind.__subclasses__():
        yield one
        yield from _subclasses(one)
