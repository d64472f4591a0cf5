"""Decode the stored record of a guarded key (`guard/scripts/lib`).

The tools that read the store directly use it.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

__all__ = ["decode_record"]

_LONG = struct.Struct(">xc 7s6s6s I I 6s B")
_SHORT = 12
"""The size in bytes of the short form before a token, a fingerprint and the result."""
_PLAIN_CLAIM = struct.Struct(">xx6s6s16s")
_PLAIN_MARK = struct.Struct(">x6s16s")
_PLAIN_DONE = 10
"""The size in bytes of a completion by a plain command before its result."""
_NAMES = {b"p": "in progress", b"r": "released", b"v": "done", b"n": "done", b"e": "failed"}


class StoredRecord(NamedTuple):
    """A decoded record.

    `state` is text for display. `kind` is the kind of the result. `data` is the result or the checkpoint. `fence` is
    the last fencing token. `ends` is in ms: the end of the lease in progress, else of the retention, or 0 if forgotten.
    """

    state: str
    kind: bytes
    data: bytes
    fence: int
    ends: int


def decode_record(packed: bytes, expires: int = 0) -> StoredRecord:
    """Decode a record. Raise ValueError if the bytes are not a valid record.

    `expires` is the time in ms at which the key expires. The records of plain commands hold no times of their own.
    """
    code = packed[0] if packed else 0
    if code == 192 or 245 <= code < 248:
        return _plain(packed, code, expires)
    letter, at = _long(packed) if code == 193 else _short(code)
    if letter not in _NAMES or at > len(packed):
        raise ValueError("unknown state or truncated fields")
    first = 2 if code == 193 else 1
    fence, rest = int.from_bytes(packed[first : first + 7]), packed[first + 7 :]
    ends = int.from_bytes(rest[:6]) if code == 193 else fence // 1000 + sum(_after(rest))
    return StoredRecord(_NAMES[letter], b"" if letter in b"pr" else letter, packed[at:], fence, ends)


def _plain(packed: bytes, code: int, expires: int) -> StoredRecord:
    """Decode a record of plain commands (`scripts/lib/plain_record.lua`)."""
    if len(packed) < _PLAIN_DONE if code != 192 else len(packed) not in (_PLAIN_CLAIM.size, _PLAIN_MARK.size):
        raise ValueError("truncated fields")
    if code != 192:
        kind = b"vne"[code - 245 : code - 244]
        return StoredRecord(_NAMES[kind], kind, packed[_PLAIN_DONE:], int.from_bytes(packed[1:8]), expires)
    if len(packed) == _PLAIN_MARK.size:
        lifetime = int.from_bytes(packed[1:7])
        return StoredRecord(_NAMES[b"n"], b"n", b"", max(expires - lifetime, 0) * 1000, expires)
    lease, lifetime, _ = map(int.from_bytes, _PLAIN_CLAIM.unpack(packed))
    begun = expires - lifetime
    return StoredRecord("in progress", b"", b"", max(begun, 0) * 1000, begun + lease)


def _after(rest: bytes) -> tuple[int, int]:
    """Return two spans of the short form in ms: from the token to the completion, and the retention."""
    return int.from_bytes(rest[:2]), 60_000 * int.from_bytes(rest[2:4])


def _short(code: int) -> tuple[bytes, int]:
    """Return the state letter of the short form, and the offset of its data."""
    if code < 248:
        raise ValueError(f"unknown first byte {code:#x}")
    return b"vvnneenn"[code - 248 : code - 247], _SHORT + 16 * (code >= 254) + 16 * (code % 2)


def _long(packed: bytes) -> tuple[bytes, int]:
    """Return the state letter of the long form, and the offset of its data, which is behind a shared failure."""
    at = _LONG.size
    shared = int.from_bytes(packed[29:35]) if packed[1:2] == b"r" else 0
    for _ in ("owner", "fingerprint"):
        at += 1 + (packed[at] if at < len(packed) else 0)
    return packed[1:2], at + shared
