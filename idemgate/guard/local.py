"""A guard of this process alone, for when the store is away and the caller chose `on_store_error="local"`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator
from contextlib import contextmanager
from threading import Lock
from time import monotonic

__all__ = ["Local"]

LIMIT = 100_000
"""Most keys remembered as done; the oldest are forgotten first."""


class Local:
    """Which keys this process is running, or ran while the store was away. Results are not kept."""

    __slots__ = ("_done", "_lock", "_running")

    def __init__(self) -> None:
        self._running: set[bytes] = set()
        self._done: OrderedDict[bytes, float] = OrderedDict()
        self._lock = Lock()

    def enter(self, record: bytes) -> str:
        """ "started" (now running here), "in_progress" or "done"."""
        with self._lock:
            if record in self._running:
                return "in_progress"
            if self._done.get(record, 0.0) > monotonic():
                return "done"
            self._running.add(record)
            return "started"

    @contextmanager
    def running(self, record: bytes, retention: int, even_failed: bool) -> Generator[None]:
        """From `enter` to the end of the work: done if it returned, forgotten if it raised, unless `even_failed`.
        `retention` in ms."""
        try:
            yield
        except BaseException:
            self._end(record, retention if even_failed else None)
            raise
        self._end(record, retention)

    def _end(self, record: bytes, retention: int | None) -> None:
        with self._lock:
            self._running.discard(record)
            if retention is None:
                return
            self._done[record] = monotonic() + retention / 1000
            self._done.move_to_end(record)
            while len(self._done) > LIMIT:
                self._done.popitem(last=False)
