"""How much one script call goes through: the server is blocked for the whole of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

__all__ = ["BATCH", "BYTES", "portions"]

T = TypeVar("T")
BATCH = 100
"""Most deliveries."""
BYTES = 131_072
"""Most bytes of messages, or one message: Lua makes a text of it up to seven times, each costs the server 1 ms a MB. As
in `lua/lib/most_bytes.lua`."""


def portions(entries: list[T], size_of: Callable[[T], int], most: int = BATCH) -> list[list[T]]:
    """As many at once as one script call takes, in their order."""
    sizes = list(map(size_of, entries))
    if sum(sizes) <= BYTES:
        return [entries[start : start + most] for start in range(0, len(entries), most)]
    parts, room = list[list[T]](), 0
    for entry, size in zip(entries, sizes, strict=True):
        if not parts or len(parts[-1]) == most or size > room:
            parts.append([])
            room = BYTES
        parts[-1].append(entry)
        room -= size
    return parts
