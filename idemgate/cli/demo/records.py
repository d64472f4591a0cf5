"""Reports of the demo's processes, and the numbers computed from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil
from threading import Lock
from typing import Any, NamedTuple

__all__ = ["Delivered", "Handled", "Records", "percentile"]


class Handled(NamedTuple):
    """One run of the guarded handler: the trigger it made, and whether that was accepted."""

    id: str
    path: str
    accepted: bool


@dataclass(frozen=True, slots=True)
class Delivered:
    """One delivery as its handler got it. `first_ms`: its first trigger; `now_ms`: the server's time when the handler
    began."""

    path: str
    ids: list[str]
    count: int
    dropped: int
    first_ms: int
    due_ms: int
    now_ms: float

    @property
    def late_ms(self) -> float:
        return self.now_ms - self.due_ms


@dataclass
class Records:
    """Everything that was reported. `received`, `dropped`: how often each event was, by subscriber. `store` is what the
    topic says of itself when all is over; None: not asked. `counters`: of all processes together. `faults`: what went
    wrong on the way, in words. `window`: of the topic, in seconds."""

    subscribers: int
    window: float
    published: Counter[str] = field(default_factory=Counter[str])
    paths: dict[str, str] = field(default_factory=dict[str, str])
    received: list[Counter[str]] = field(default_factory=list[Counter[str]])
    dropped: list[Counter[str]] = field(default_factory=list[Counter[str]])
    handled: list[Handled] = field(default_factory=list[Handled])
    deliveries: list[Delivered] = field(default_factory=list[Delivered])
    counters: Counter[str] = field(default_factory=Counter[str])
    store: Mapping[str, int] | None = None
    faults: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        self.received = [Counter() for _ in range(self.subscribers)]
        self.dropped = [Counter() for _ in range(self.subscribers)]
        self._lock = Lock()
        self._heard = [0] * self.subscribers
        self._dropped = 0
        self._published = 0
        self._accepted = 0
        self._merged = 0

    # -- taking down --------------------------------------------------------------------------------------------------

    def publish(self, event_id: str, path: str) -> None:
        self.published[event_id] += 1
        self.paths[event_id] = path
        self._published += 1

    def take(self, subscriber: int, facts: Mapping[str, Any]) -> None:
        """One report of a process; from any thread. The worker's `subscriber` is of no account."""
        with self._lock:
            if ids := facts.get("received"):
                self.received[subscriber].update(ids)
                self._heard[subscriber] += len(ids)
            if ids := facts.get("dropped"):
                self.dropped[subscriber].update(ids)
                self._dropped += len(ids)
            for counters in facts.get("counters", ()):
                self.counters.update(counters)
            handled = [Handled(*one) for one in facts.get("handled", ())]
            self.handled += handled
            self._accepted += sum(one.accepted for one in handled)
            delivered = [Delivered(*one) for one in facts.get("delivered", ())]
            self.deliveries += delivered
            self._merged += sum(one.count for one in delivered)

    # -- numbers ------------------------------------------------------------------------------------------------------

    @property
    def lag(self) -> int:
        """Return how many publications the slowest subscriber is behind."""
        return self._published - min(self._heard)

    @property
    def remaining(self) -> int:
        """Return the number of unfinished copies and undelivered triggers; 0 when all work is done."""
        with self._lock:
            copies = self._published * self.subscribers - self._dropped - len(self.handled)
            return abs(copies) + abs(self._accepted - self._merged)

    def lateness(self) -> list[float]:
        """Return the sorted lateness of all deliveries, ms after their due times."""
        with self._lock:
            return sorted(one.late_ms for one in self.deliveries)

    def numbers(self) -> dict[str, int | float]:
        """Return the numbers to show. `merge_ratio` is triggers per delivery; lateness is in ms."""
        late = self.lateness()
        with self._lock:
            return {
                "published": self._published,
                "copies_received": sum(self._heard),
                "handled": len(self.handled),
                "duplicates_dropped": self._dropped,
                "triggers": self._accepted,
                "deliveries": len(self.deliveries),
                "merge_ratio": round(self._merged / len(self.deliveries), 2) if self.deliveries else 0.0,
                "lateness_p50_ms": percentile(late, 0.50),
                "lateness_p99_ms": percentile(late, 0.99),
            }


def percentile(ordered: list[float], share: float) -> float:
    """The smallest value that at least `share` of all do not exceed; 0 if there are none."""
    return round(ordered[max(0, ceil(share * len(ordered)) - 1)], 1) if ordered else 0.0
