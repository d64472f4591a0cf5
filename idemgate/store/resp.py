"""Packing requests, and reading replies where redis-py's own reader is not in use. hiredis where it is installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast

import redis.exceptions as rx

from idemgate.core.calls import Call

__all__ = ["Reader", "answers", "new_reader", "pack", "request"]

Word = bytes | str | int


class Reader(Protocol):
    """What hiredis' reader offers: bytes in, whole replies out; `False` when none is whole yet."""

    def feed(self, data: bytes, /) -> None: ...
    def gets(self) -> Any: ...


def server_error(text: str) -> rx.ResponseError:
    """A server's error as redis-py would raise it, its first word kept."""
    if text.startswith("NOSCRIPT"):
        return rx.NoScriptError(text)
    if text.startswith("OOM"):
        return rx.OutOfMemoryError(text)
    return rx.ResponseError(text)


def _pack(words: tuple[Word, ...]) -> bytes:
    parts = [b"*%d\r\n" % len(words)]
    for word in words:
        if isinstance(word, int):
            word = b"%d" % word  # noqa: PLW2901
        elif isinstance(word, str):
            word = word.encode()  # noqa: PLW2901
        parts.append(b"$%d\r\n%b\r\n" % (len(word), word))
    return b"".join(parts)


_DEEPEST = 9
"""As many as hiredis reads."""


class PlainReader:
    """RESP2 in Python: strings as bytes, integers, arrays, nulls as None, errors as exceptions."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes, /) -> None:
        self._data += data

    def gets(self) -> Any:
        try:
            found = self._value(0, _DEEPEST)
        except ValueError as error:
            raise rx.InvalidResponse(f"a reply with a length that is none: {error}") from None
        if found is None:
            return False
        value, end = found
        del self._data[:end]
        return value

    def _value(self, start: int, levels: int) -> tuple[Any, int] | None:
        """The value that begins there and where it ends, or None when it is not whole yet. `levels` are how many arrays
        it may be within each other: our scripts answer one."""
        stop = self._data.find(b"\r\n", start)
        if stop < 0:
            return None
        kind, text, after = self._data[start : start + 1], bytes(self._data[start + 1 : stop]), stop + 2
        if kind == b"+":
            return text, after
        if kind == b"-":
            return server_error(text.decode(errors="replace")), after
        if kind == b":":
            return int(text), after
        if kind == b"$":
            return self._bulk(int(text), after)
        if kind == b"*":
            return self._array(int(text), after, levels)
        raise rx.InvalidResponse(f"a reply that begins with {bytes(kind)!r}")

    def _bulk(self, length: int, start: int) -> tuple[Any, int] | None:
        if length < 0:
            return None_, start
        end = start + length
        if len(self._data) < end + 2:
            return None
        return bytes(self._data[start:end]), end + 2

    def _array(self, length: int, start: int, levels: int) -> tuple[Any, int] | None:
        if length < 0:
            return None_, start
        if not levels:
            raise rx.InvalidResponse(f"a reply of more than {_DEEPEST} arrays within each other")
        items: list[Any] = []
        for _ in range(length):
            found = self._value(start, levels - 1)
            if found is None:
                return None
            items.append(found[0])
            start = found[1]
        return items, start


None_ = cast(Any, None)

try:
    import hiredis
except ImportError:
    pack: Callable[[tuple[Word, ...]], bytes] = _pack

    def new_reader() -> Reader:
        """A reader of one connection."""
        return PlainReader()
else:
    pack = cast("Callable[[tuple[Word, ...]], bytes]", cast(Any, hiredis).pack_command)

    def new_reader() -> Reader:
        """A reader of one connection."""
        return hiredis.Reader(protocolError=rx.InvalidResponse, replyError=cast(Any, server_error))


def request(call: Call[Any]) -> bytes:
    """A call of a script that the server may know, for calls that are not framed already."""
    return pack((b"EVALSHA", call.script.sha, len(call.keys), *call.keys, *call.args))


def answers(reply: Any) -> bool:
    """Whether it is what a script answered: neither an error nor missing."""
    return reply is not None and not isinstance(reply, Exception)
