"""Counters of one process. Everything dropped, lost or degraded increases one of them."""

from __future__ import annotations

from collections.abc import Iterator, KeysView, Mapping

from idemgate.core.forks import lock_reset_at_fork

__all__ = ["Counters"]


class Counters(Mapping[str, int]):
    """The counters of one gate in this process, a mapping of name to number.

    Names are stable. A counter that was never increased reads 0, but is not `in` the mapping.
    """

    __slots__ = ("__weakref__", "_counts", "_lock")

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._lock = lock_reset_at_fork(self, "_lock")

    def __repr__(self) -> str:
        return f"Counters({self.snapshot()})"

    def add(self, name: str, n: int = 1) -> None:
        """Increase one counter by `n`."""
        with self._lock:
            self._counts[name] = self._counts.get(name, 0) + n

    def add_each(self, *names: str) -> None:
        """Increase each of the counters by 1."""
        with self._lock:
            counts = self._counts
            for name in names:
                counts[name] = counts.get(name, 0) + 1

    def __getitem__(self, name: str) -> int:
        return self._counts.get(name, 0)

    def __contains__(self, name: object) -> bool:
        return name in self._counts

    def __hash__(self) -> int:
        return id(self)  # a mapping has no hash, but these counters are known by their identity

    def __iter__(self) -> Iterator[str]:
        return iter(self.snapshot())

    def __len__(self) -> int:
        return len(self._counts)

    def keys(self) -> KeysView[str]:
        """Return the names of all counters that are not 0. It makes `dict(counters)` work."""
        return self.snapshot().keys()

    def replace(self, counts: dict[str, int]) -> dict[str, int]:
        """Set all counters and return what they were."""
        with self._lock:
            before, self._counts = self._counts, counts
            return before

    def snapshot(self) -> dict[str, int]:
        """Return a copy of all counters."""
        with self._lock:
            return dict(self._counts)
