"""The guard within one process for `on_store_error="local"`, used while the store is unavailable."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator
from contextlib import contextmanager
from threading import Lock
from time import monotonic

__all__ = ["LocalGuard"]

LIMIT = 100_000
"""The maximum number of done keys in memory. The oldest are evicted first."""


class LocalGuard:
    """The keys that this process runs, or ran while the store was unavailable. Results are not kept."""

    __slots__ = ("_done", "_lock", "_running")

    def __init__(self) -> None:
        self._running: set[bytes] = set()
        self._done: OrderedDict[bytes, float] = OrderedDict()
        self._lock = Lock()

    def claim(self, record: bytes) -> str:
        """Claim a record in this process. Return "started", "in_progress" or "done"."""
        with self._lock:
            if record in self._running:
                return "in_progress"
            if self._done.get(record, 0.0) > monotonic():
                return "done"
            self._running.add(record)
            return "started"

    @contextmanager
    def hold(self, record: bytes, retention: int, even_failed: bool) -> Generator[None]:
        """Mark the record as done when the block ends.

        A record whose block raised is forgotten, unless `even_failed`. `retention` is in ms.
        """
        try:
            yield
        except BaseException:
            self._release(record, retention if even_failed else None)
            raise
        self._release(record, retention)

    def _release(self, record: bytes, retention: int | None) -> None:
        with self._lock:
            self._running.discard(record)
            if retention is None:
                return
            self._done[record] = monotonic() + retention / 1000
            self._done.move_to_end(record)
            while len(self._done) > LIMIT:
                self._done.popitem(last=False)
