"""Builds and takes apart stored messages: the inverse of `idemgate.topics.messages`, for tests that plant them."""

from __future__ import annotations

import struct
from typing import Any

import msgpack

__all__ = ["pack_message", "unpack_message"]

_EXTENSION = ("attempts", "failure", "version", "priority", "group", "splits", "earlier", "rank", "traces")
_NONE = {"attempts": 0, "splits": 0}


def pack_message(
    acc: bytes = b"\x01\x01", *, count: int = 1, first: int = 1, last: int = 1, due: int = 1, serial: int = 1,
    why: int = 0, pinned: int = 0, **extension: Any,
) -> bytes:  # fmt: skip
    """Return the bytes of a message. `extension` names fields of its extension, which is left out without any."""
    times = b"".join(ms.to_bytes(6) for ms in (first, last, due, serial))
    header = struct.pack(">BB", pinned + 2 * bool(extension), why) + count.to_bytes(5) + times
    if not extension:
        return header + acc
    names = _EXTENSION if "traces" in extension else _EXTENSION[:8] if "rank" in extension else _EXTENSION[:7]
    packed = msgpack.packb([extension.get(name, _NONE.get(name, b"")) for name in names], use_bin_type=False)
    return header + struct.pack(">I", len(packed)) + packed + acc


def unpack_message(packed: bytes) -> dict[str, Any]:
    """Return the arguments of `pack_message` that make these bytes."""
    count, *times = (int.from_bytes(packed[at:end]) for at, end in ((2, 7), (7, 13), (13, 19), (19, 25), (25, 31)))
    found: dict[str, Any] = dict(zip(("first", "last", "due", "serial"), times, strict=True))
    found |= {"count": count, "why": packed[1], "pinned": packed[0] & 1}
    start = 31
    if packed[0] & 2:
        start = 35 + int.from_bytes(packed[31:35])
        found |= dict(zip(_EXTENSION, msgpack.unpackb(packed[35:start], raw=True), strict=False))
    return found | {"acc": packed[start:]}
