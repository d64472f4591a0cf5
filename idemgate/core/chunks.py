"""Size limits of one script call. The server is blocked while a script runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

__all__ = ["BATCH", "BYTES", "split_batches"]

T = TypeVar("T")
BATCH = 100
"""The maximum number of deliveries in one call."""
BYTES = 131_072
"""Most bytes of messages, or one message: Lua makes a text of it up to seven times, each costs the server 1 ms a MB. As
in `lua/lib/now.lua`."""


def split_batches(entries: list[T], size_of: Callable[[T], int], most: int = BATCH) -> list[list[T]]:
    """Split `entries` into batches for one script call each, in their order.

    Args:
        entries: the entries to split.
        size_of: returns the bytes of an entry.
        most: the maximum number of entries in a batch.
    """
    sizes = list(map(size_of, entries))
    if sum(sizes) <= BYTES:
        return [entries[start : start + most] for start in range(0, len(entries), most)]
    batches, room = list[list[T]](), 0
    for entry, size in zip(entries, sizes, strict=True):
        if not batches or len(batches[-1]) == most or size > room:
            batches.append([])
            room = BYTES
        batches[-1].append(entry)
        room -= size
    return batches
