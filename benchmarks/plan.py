"""How much is measured."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["APART", "PARTS", "Plan"]

PARTS = {
    "wire": "limits of the server, of redis-py and of a bare socket",
    "guard": "guards, first call and replay",
    "threads": "guards that callers in 1 to 64 threads share, pinned and on any core",
    "loops": "guards on asyncio and on uvloop",
    "scheduler": "enqueue, drain, and both at once",
    "unpinned": "some of both, with the server and the clients on any core",
    "lateness": "how long after due, at 200 a second",
    "merging": "100,000 triggers of 1,000 keys",
    "memory": "bytes per remembered key",
    "blocks": "the longest time that one script holds the server",
    "imports": "what importing costs",
    "microseconds": "where the time of a call goes",
    "pieces": "what the pieces of a guarded call, of sending and of a worker cost the client",
    "runner": "what guard.run costs the client beside a decorated function",
    "profile": "instructions of the server by role, and misses of its caches (needs valgrind)",
    "dispatch": "what the pieces of a script call cost the server",
    "cluster": "three primaries",
    "embedded": "the embedded server",
    "http": "what the HTTP middleware adds to a request (needs idemgate-http)",
}
APART = {"backlog": "what pending messages cost, up to 5,000,000: needs 2-3 GB and some ten minutes"}
"""What `all` leaves out."""


class Plan(NamedTuple):
    """`share` of the full number of operations, so many `repetitions`."""

    repetitions: int = 5
    share: float = 1.0

    def size(self, full: int) -> int:
        """A full number of operations, cut to the share; a multiple of 200, so that batches come out even."""
        return max(200, round(full * self.share / 200) * 200)
