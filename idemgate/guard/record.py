"""The record of a guarded key as it is stored (`lua/lib/record.lua`), for those who look from outside."""

from __future__ import annotations

import struct
from typing import NamedTuple

__all__ = ["Stored", "stored"]

_LONG = struct.Struct(">xc 7s6s6s I I 6s B")
_SHORT = 12
"""Bytes of the short form before a token, a fingerprint and the result."""
_NAMES = {b"p": "in progress", b"r": "released", b"v": "done", b"n": "done", b"e": "failed"}


class Stored(NamedTuple):
    """`state` as people say it, `kind` of the result, `data` the result or checkpoint, `fence` its last token; `ends`,
    ms: of the lease in progress, else of the retention, 0 of what was forgotten."""

    state: str
    kind: bytes
    data: bytes
    fence: int
    ends: int


def stored(packed: bytes) -> Stored:
    """What a record says. ValueError where it is none."""
    code = packed[0] if packed else 0
    letter, at = _long(packed) if code == 193 else _short(code)
    if letter not in _NAMES or at > len(packed):
        raise ValueError("no state of ours, or not its fields")
    first = 2 if code == 193 else 1
    fence, rest = int.from_bytes(packed[first : first + 7]), packed[first + 7 :]
    ends = int.from_bytes(rest[:6]) if code == 193 else fence // 1000 + sum(_after(rest))
    return Stored(_NAMES[letter], b"" if letter in b"pr" else letter, packed[at:], fence, ends)


def _after(rest: bytes) -> tuple[int, int]:
    """Of the short form: ms from the token's time until it was done, and of its retention."""
    return int.from_bytes(rest[:2]), 60_000 * int.from_bytes(rest[2:4])


def _short(code: int) -> tuple[bytes, int]:
    if code < 248:
        raise ValueError(f"it begins with {code:#x}, as no record of this program does")
    return b"vvnneenn"[code - 248 : code - 247], _SHORT + 16 * (code >= 254) + 16 * (code % 2)


def _long(packed: bytes) -> tuple[bytes, int]:
    at = _LONG.size
    for _ in ("owner", "fingerprint"):
        at += 1 + (packed[at] if at < len(packed) else 0)
    return packed[1:2], at
