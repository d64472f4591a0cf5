"""Encode requests, and parse replies. hiredis does both where it is installed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import redis.exceptions as rx

from idemgate.core.calls import Call

__all__ = ["Reader", "encode_call", "key_of", "new_reader", "pack_command"]

Word = bytes | str | int


class Reader(Protocol):
    """The interface of hiredis.Reader: feed bytes, get whole replies. `gets` returns False while none is complete."""

    def feed(self, data: bytes, /) -> None: ...
    def gets(self) -> Any: ...


def server_error(text: str) -> rx.ResponseError:
    """Return a server's error as redis-py would raise it, with its first word."""
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


MAX_DEPTH = 9
"""The deepest nesting of arrays, the same as in hiredis."""


class PlainReader:
    """RESP2 reader in Python: strings as bytes, integers, arrays, nulls as None, errors as exceptions."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes, /) -> None:
        self._data += data

    def gets(self) -> Any:
        try:
            parsed = self._value(0, MAX_DEPTH)
        except ValueError as error:
            raise rx.InvalidResponse(f"invalid reply: a length is not a number: {error}") from None
        if parsed is None:
            return False
        value, end = parsed
        del self._data[:end]
        return value

    def _value(self, start: int, levels: int) -> tuple[Any, int] | None:
        """Return the value at `start` and its end, or None when it is incomplete.

        `levels` is the number of nested arrays still allowed. Scripts of idemgate return one.
        """
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
        raise rx.InvalidResponse(f"invalid reply: it begins with {bytes(kind)!r}")

    def _bulk(self, length: int, start: int) -> tuple[Any, int] | None:
        if length < 0:
            return NULL, start
        end = start + length
        if len(self._data) < end + 2:
            return None
        return bytes(self._data[start:end]), end + 2

    def _array(self, length: int, start: int, levels: int) -> tuple[Any, int] | None:
        if length < 0:
            return NULL, start
        if not levels:
            raise rx.InvalidResponse(f"invalid reply: more than {MAX_DEPTH} nested arrays")
        items: list[Any] = []
        for _ in range(length):
            parsed = self._value(start, levels - 1)
            if parsed is None:
                return None
            items.append(parsed[0])
            start = parsed[1]
        return items, start


NULL = cast(Any, None)

try:
    import hiredis
except ImportError:
    pack_command: Callable[[tuple[Word, ...]], bytes] = _pack

    def new_reader() -> Reader:
        """Return a reader for one connection."""
        return PlainReader()
else:
    pack_command = cast("Callable[[tuple[Word, ...]], bytes]", cast(Any, hiredis).pack_command)

    def new_reader() -> Reader:
        """Return a reader for one connection."""
        return hiredis.Reader(protocolError=rx.InvalidResponse, replyError=cast(Any, server_error))


def encode_call(call: Call[Any]) -> bytes:
    """Encode a call as EVALSHA, for calls that are not framed already."""
    return pack_command((b"EVALSHA", call.script.sha, len(call.keys), *call.keys, *call.args))


def key_of(words: Sequence[Any]) -> bytes:
    """Return the first key of a command. A command without a key may go to any node, so any value will do."""
    name = words[0]
    if name in ("EVAL", "EVALSHA"):
        key = words[3]
    elif name in ("XREAD", "XREADGROUP"):
        key = words[words.index("STREAMS") + 1]
    else:
        key = words[2 if name in ("XGROUP", "XINFO") else 1] if len(words) > 1 else b""
    return key if isinstance(key, bytes) else str(key).encode()
