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
    """One run of the guarded handler: the trigger it made, whether that was accepted, and by which subscriber."""

    id: str
    path: str
    accepted: bool
    by: int = 0


@dataclass(frozen=True, slots=True)
class Delivered:
    """One delivery as its handler got it. `first_ms`: its first trigger; `now_ms`: the server's time when the handler
    began. `attempt`: the number of the attempt."""

    path: str
    ids: list[str]
    count: int
    dropped: int
    first_ms: int
    due_ms: int
    now_ms: float
    attempt: int = 1

    @property
    def late_ms(self) -> float:
        return self.now_ms - self.due_ms


@dataclass
class Records:
    """Everything that was reported. `received`, `dropped`: how often each event was, by subscriber. `store` is what the
    topic says of itself when all is over; None: not asked. `counters`: of all processes together. `faults`: what went
    wrong on the way, in words. `window`: of the topic, in seconds.

    `killed` holds the numbers of subscribers that were killed on purpose. A killed subscriber could not report what it
    did last. `late` maps those that replaced them to the number of publications before. `worker_killed`: the worker was
    killed on purpose.
    """

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
    killed: set[int] = field(default_factory=set[int])
    late: dict[int, int] = field(default_factory=dict[int, int])
    worker_killed: bool = False

    def __post_init__(self) -> None:
        self.received = [Counter() for _ in range(self.subscribers)]
        self.dropped = [Counter() for _ in range(self.subscribers)]
        self._lock = Lock()
        self._heard = [0] * self.subscribers
        self._ended = [0] * self.subscribers
        self._dropped = 0
        self._published = 0
        self._accepted = 0
        self._merged = 0
        self._delivered = set[str]()

    # -- taking down --------------------------------------------------------------------------------------------------

    def publish(self, event_id: str, path: str) -> None:
        self.published[event_id] += 1
        self.paths[event_id] = path
        self._published += 1

    def add_subscriber(self) -> int:
        """Add a subscriber that replaces a killed one. Return its number."""
        with self._lock:
            self.received.append(Counter())
            self.dropped.append(Counter())
            self._heard.append(0)
            self._ended.append(0)
            self.late[len(self.received) - 1] = self._published
            return len(self.received) - 1

    def take(self, subscriber: int, facts: Mapping[str, Any]) -> None:
        """One report of a process; from any thread. The worker's `subscriber` is of no account."""
        with self._lock:
            if ids := facts.get("received"):
                self.received[subscriber].update(ids)
                self._heard[subscriber] += len(ids)
            if ids := facts.get("dropped"):
                self.dropped[subscriber].update(ids)
                self._dropped += len(ids)
                self._ended[subscriber] += len(ids)
            for counters in facts.get("counters", ()):
                self.counters.update(counters)
            handled = [Handled(*one)._replace(by=subscriber) for one in facts.get("handled", ())]
            self.handled += handled
            self._ended[subscriber] += len(handled)
            self._accepted += sum(one.accepted for one in handled)
            delivered = [Delivered(*one) for one in facts.get("delivered", ())]
            self.deliveries += delivered
            self._merged += sum(one.count for one in delivered)
            for one in delivered:
                self._delivered.update(one.ids)

    # -- numbers ------------------------------------------------------------------------------------------------------

    @property
    def lag(self) -> int:
        """Return how many publications the slowest subscriber is behind."""
        heard = (self.late.get(at, 0) + n for at, n in enumerate(self._heard) if at not in self.killed)
        return self._published - min(heard, default=self._published)

    @property
    def witnesses(self) -> list[int]:
        """Return the subscribers that ran from the start to the end."""
        return [at for at in range(self.subscribers) if at not in self.killed]

    @property
    def remaining(self) -> int:
        """Return the number of unfinished copies and undelivered events; 0 when all work is done."""
        with self._lock:
            copies = sum(abs(self._published - self._ended[at]) for at in self.witnesses)
            copies += sum(abs(self._heard[at] - self._ended[at]) for at in self.late)
            return copies + len(self.published.keys() - self._delivered)

    @property
    def repeated_deliveries(self) -> list[Delivered]:
        """Return the deliveries of a killed worker that another attempt repeated with all their events."""
        if not self.worker_killed:
            return []
        again = [one for one in self.deliveries if one.attempt > 1]
        return [
            one
            for one in self.deliveries
            if any(
                other is not one and other.path == one.path and other.attempt > one.attempt
                and set(one.ids) <= set(other.ids)
                for other in again
            )
        ]  # fmt: skip

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
            } | ({"repeated": len(self.repeated_deliveries)} if self.worker_killed else {})


def percentile(ordered: list[float], share: float) -> float:
    """The smallest value that at least `share` of all do not exceed; 0 if there are none."""
    return round(ordered[max(0, ceil(share * len(ordered)) - 1)], 1) if ordered else 0.0
