"""What this process counted: nothing is dropped, lost or degraded without a number to see it by."""

from __future__ import annotations

from collections.abc import Iterator, KeysView

from idemgate.core.forks import freed_at_fork

__all__ = ["Counters"]


class Counters:
    """Named counters of one gate in this process. Names are stable; a name that never happened counts 0."""

    __slots__ = ("__weakref__", "_counts", "_lock")

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._lock = freed_at_fork(self, "_lock")

    def __repr__(self) -> str:
        return f"Counters({self.snapshot()})"

    def add(self, name: str, n: int = 1) -> None:
        with self._lock:
            self._counts[name] = self._counts.get(name, 0) + n

    def add_each(self, *names: str) -> None:
        """One to each of them."""
        counts = self._counts
        with self._lock:
            for name in names:
                counts[name] = counts.get(name, 0) + 1

    def __getitem__(self, name: str) -> int:
        return self._counts.get(name, 0)

    def __iter__(self) -> Iterator[str]:
        return iter(self.snapshot())

    def __len__(self) -> int:
        return len(self._counts)

    def keys(self) -> KeysView[str]:
        """The names of what happened until now; with it, `dict(counters)` works."""
        return self.snapshot().keys()

    def snapshot(self) -> dict[str, int]:
        """All of them, as they are now."""
        with self._lock:
            return dict(self._counts)
