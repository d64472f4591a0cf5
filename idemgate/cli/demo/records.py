"""Collect what the demo's processes report, and check_promises its promises by that."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from math import ceil
from typing import Any, NamedTuple

from idemgate.cli.demo.events import DemoEvent

__all__ = ["Delivered", "Records", "Reports", "check_promises"]


class Delivered(NamedTuple):
    """One delivery as its handler got it. `first_ms`: its first trigger; `now_ms`: the server's time in the handler."""

    path: str
    ids: list[str]
    first_ms: int
    now_ms: float


@dataclass
class Reports:
    """The reports of one process. They are not `complete` if it was killed, or replaced a killed one.

    A subscriber is `ready` once it has received something.
    A copy is an event's id, and whether the trigger of its handler was accepted; None: dropped as a duplicate.
    """

    complete: bool = True
    ready: bool = False
    copies: list[tuple[str, bool | None]] = field(default_factory=list[tuple[str, bool | None]])
    deliveries: list[Delivered] = field(default_factory=list[Delivered])

    def take(self, kind: str, *facts: Any) -> None:
        if kind == "copy":
            self.copies.append((facts[0], facts[1]))
        elif kind == "ready":
            self.ready = True
        else:
            self.deliveries.append(Delivered(*facts))


class Records:
    """Everything that was reported. `topic` is what the topic counts at the end; `faults` says what else went wrong."""

    def __init__(self, subscribers: int, window: float) -> None:
        self.began: float = time.monotonic()
        self.window_ms: int = round(window * 1000)
        self.published: list[DemoEvent] = []
        self.subscribers: list[Reports] = [Reports() for _ in range(subscribers)]
        self.workers: list[Reports] = [Reports()]
        self.topic: dict[str, int] = {}
        self.faults: list[str] = []

    @property
    def size(self) -> int:
        """The number of reports."""
        return sum(len(one.copies) + len(one.deliveries) for one in (*self.subscribers, *self.workers))

    @property
    def handler_runs(self) -> list[tuple[str, bool]]:
        """The id of each handled event, and whether its trigger was accepted."""
        copies = (copy for one in self.subscribers for copy in one.copies)
        return [(event, accepted) for event, accepted in copies if accepted is not None]

    @property
    def deliveries(self) -> list[Delivered]:
        return [delivery for worker in self.workers for delivery in worker.deliveries]

    @property
    def open_copies(self) -> list[int]:
        """The number of unfinished copies of each subscriber that runs from the start to the end."""
        return [len(self.published) - len(one.copies) for one in self.subscribers if one.complete]

    def late_ms(self, delivery: Delivered) -> float:
        """The time from the end of the delivery's window to the start of its handler."""
        return delivery.now_ms - delivery.first_ms - self.window_ms

    def numbers(self) -> list[tuple[str, float, str]]:
        """Return the name, value and meaning of each number."""
        received = sum(len(one.copies) for one in self.subscribers)
        handled, deliveries = self.handler_runs, self.deliveries
        triggers = sum(accepted for _, accepted in handled)
        ratio = sum(len(one.ids) for one in deliveries) / (len(deliveries) or 1)
        late = sorted(self.late_ms(one) for one in deliveries) or [0.0]
        half, most = (round(late[ceil(share * len(late)) - 1], 1) for share in (0.50, 0.99))
        return [
            ("published", len(self.published), "events, of which 1 in 20 twice"),
            ("copies_received", received, "by all subscribers together"),
            ("handled", len(handled), "first copies, which the guard let through"),
            ("duplicates_dropped", received - len(handled), "copies, which the guard stopped"),
            ("triggers", triggers, "of the topic, one for each event"),
            ("deliveries", len(deliveries), "to the worker, one a path and window"),
            ("merge_ratio", round(ratio, 2), "triggers in a delivery, on average"),
            ("lateness_p50_ms", half, "from the window's end to the handler's start"),
            ("lateness_p99_ms", most, "of 99 % of the deliveries at most"),
            ("elapsed_s", round(time.monotonic() - self.began, 1), "with starting the processes"),
        ]


def check_promises(records: Records) -> dict[str, list[str]]:
    """Return what breaks each promise; an empty list: it was kept."""
    published = Counter(event.id for event in records.published)
    events = Counter({event.id: 1 for event in records.published})
    triggers = Counter({f"{event.path}:{event.id}": 1 for event in records.published})

    received: list[str] = []
    for number, one in enumerate(records.subscribers, 1):
        if one.complete:
            copies = Counter(event for event, _ in one.copies)
            received += _compare(f"handled or dropped by subscriber {number}", published, copies)

    # What a killed subscriber had not finished is handled again, and the topic refuses the second trigger of an event.
    killed = not all(one.complete for one in records.subscribers)
    handled = Counter(event for event, accepted in records.handler_runs if accepted or not killed)
    handled |= Counter({event: 1 for event, _ in records.handler_runs})

    # What a killed worker had not acknowledged is delivered again; what it had would show in `acked_triggers`.
    delivered = Counter[str]()
    for worker in records.workers:
        delivered |= Counter(f"{one.path}:{event}" for one in worker.deliveries for event in one.ids)

    lateness = [(one.path, records.late_ms(one)) for one in records.deliveries]
    early = [f"{path} by {-late:.1f} ms" for path, late in lateness if late < 0]

    topic = {"accepted": len(events), "acked_triggers": len(events), "pending": 0, "in_flight": 0, "dead": 0}
    wrong = {name: expected for name, expected in topic.items() if records.topic.get(name) != expected}
    return {
        "every subscriber received every event": received,
        "each event was handled once, and once only": _compare("handled", events, handled),
        "each trigger is in one delivery, and in one only": _compare("delivered", triggers, delivered),
        "no delivery was early by the server's clock": _count("delivered before their window had ended", early),
        "no process failed or stood still": records.faults,
        "the topic's counters say the same": [
            f"{name}: counted {records.topic.get(name)}, expected {expected}" for name, expected in wrong.items()
        ],
    }


def _compare(what: str, expected: Counter[str], found: Counter[str]) -> list[str]:
    missing, surplus = list((expected - found).elements()), list((found - expected).elements())
    return [*_count(f"not {what}", missing), *_count(f"{what} too often", surplus)]


def _count(what: str, found: list[str]) -> list[str]:
    return [f"{len(found):,} {what}: {', '.join(found[:3])}{', ...' * (len(found) > 3)}"] if found else []
