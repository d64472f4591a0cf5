"""What the demo's processes reported, the numbers that it makes, and the check of the promises."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil
from typing import Any, NamedTuple

from idemgate.cli.demo.events import DemoEvent

__all__ = ["Delivered", "Records", "Reports", "judge"]

LOSSES = (
    "channel.abandoned", "channel.dropped", "channel.failed", "channel.gaps", "channel.permanent",
    "once.lost", "once.completion_lost",
    "worker.cut_short", "worker.dead", "worker.failed", "worker.lapsed", "worker.lost", "worker.unsettled",
)  # fmt: skip
"""The counters in which the library admits a loss."""


class Delivered(NamedTuple):
    """One delivery as its handler got it. `first_ms`: its first trigger; `now_ms`: the server's time in the handler."""

    path: str
    ids: list[str]
    first_ms: int
    due_ms: int
    now_ms: float

    @property
    def late_ms(self) -> float:
        return self.now_ms - self.due_ms


@dataclass
class Reports:
    """The reports of one process. They are not `complete` if it was killed, or replaced a killed one.

    A copy is an event's id, and whether the trigger of its handler was accepted; None: dropped as a duplicate.
    """

    complete: bool = True
    copies: list[tuple[str, bool | None]] = field(default_factory=list[tuple[str, bool | None]])
    deliveries: list[Delivered] = field(default_factory=list[Delivered])
    counters: Counter[str] = field(default_factory=Counter[str])

    def take(self, kind: str, *facts: Any) -> None:
        match kind:
            case "copy":
                self.copies.append((facts[0], facts[1]))
            case "delivery":
                self.deliveries.append(Delivered(*facts))
            case _:
                self.counters.update(facts[0])


class Records:
    """Everything that was reported. `topic` is what the topic counts at the end; `faults` says what else went wrong.

    A killed process could not report what it did last, so a process that replaced it may do the same again.
    """

    def __init__(self, subscribers: int, window: float) -> None:
        self.began = time.monotonic()
        self.window_ms = round(window * 1000)
        self.published: list[DemoEvent] = []
        self.subscribers = [Reports() for _ in range(subscribers)]
        self.workers = [Reports()]
        self.topic: dict[str, int] = {}
        self.faults: list[str] = []

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

    def numbers(self) -> list[tuple[str, str, float, str]]:
        """Return the name, label, value and meaning of each number."""
        received = sum(len(one.copies) for one in self.subscribers)
        handled, deliveries = self.handler_runs, self.deliveries
        ratio = sum(len(one.ids) for one in deliveries) / (len(deliveries) or 1)
        late = sorted(one.late_ms for one in deliveries) or [0.0]
        half, most = (round(late[ceil(share * len(late)) - 1], 1) for share in (0.50, 0.99))
        triggers = sum(accepted for _, accepted in handled)
        return [
            ("published", "published", len(self.published), "events, of which 1 in 20 twice"),
            ("copies_received", "copies received", received, "by all subscribers together"),
            ("handled", "handled once", len(handled), "first copies, which the guard let through"),
            ("duplicates_dropped", "duplicates dropped", received - len(handled), "copies, which the guard stopped"),
            ("triggers", "triggers", triggers, "of the topic, one for each event"),
            ("deliveries", "deliveries", len(deliveries), "to the worker, one a path and window"),
            ("merge_ratio", "merge ratio", round(ratio, 2), "triggers in a delivery, on average"),
            ("lateness_p50_ms", "lateness p50", half, "ms from the due time to the handler's start"),
            ("lateness_p99_ms", "lateness p99", most, "ms, of 99 % of the deliveries at most"),
            ("elapsed_s", "elapsed", round(time.monotonic() - self.began, 1), "seconds, with starting the processes"),
        ]


def judge(records: Records) -> dict[str, list[str]]:
    """Return what breaks each promise; an empty list: it was kept."""
    published = Counter(event.id for event in records.published)
    events = Counter(dict.fromkeys(published, 1))

    # A killed subscriber's last reports are missing, its triggers are not, and after it a trigger may be refused.
    killed = not all(one.complete for one in records.subscribers)
    handled = Counter(event for event, accepted in records.handler_runs if accepted or not killed)
    if killed:
        handled |= Counter(dict.fromkeys((event for one in records.deliveries for event in one.ids), 1))

    by_worker = [Counter(f"{d.path}:{event}" for d in one.deliveries for event in d.ids) for one in records.workers]
    delivered = sum(by_worker, Counter[str]())
    for before, after in pairwise(by_worker):
        delivered -= before & after  # what was not acknowledged; what was would show in `acked_triggers`

    early = [f"{one.path} by {-one.late_ms:.1f} ms" for one in records.deliveries if one.late_ms < 0]
    short = [one.path for one in records.deliveries if one.due_ms < one.first_ms + records.window_ms]

    counters = sum((one.counters for one in (*records.subscribers, *records.workers)), Counter[str]())
    if len(records.workers) > 1:
        del counters["worker.lapsed"]  # the leases of the killed one
    count = len(events)
    topic = {"accepted": count, "acked_triggers": count, "pending": 0, "in_flight": 0, "dead": 0}
    return {
        "every subscriber received every event": [
            text
            for number, one in enumerate(records.subscribers, 1)
            if one.complete
            for text in _compare(
                f"handled or dropped by subscriber {number}", published, Counter(event for event, _ in one.copies)
            )
        ],
        "each event was handled once, and once only": _compare("handled", events, handled),
        "each trigger is in one delivery, and in one only": _compare(
            "delivered", Counter({f"{event.path}:{event.id}": 1 for event in records.published}), delivered
        ),
        "no delivery was early by the server's clock": [
            *_count("delivered before they were due", early),
            *_count("due before their window had ended", short),
        ],
        "nothing failed, nothing was lost": [
            *records.faults,
            *(f"{name} happened {counters[name]:,} times" for name in LOSSES if counters[name]),
        ],
        "the topic's counters say the same": [
            f"{name}: counted {records.topic.get(name)}, expected {number}"
            for name, number in topic.items()
            if records.topic.get(name) != number
        ],
    }


def _compare(what: str, expected: Counter[str], found: Counter[str]) -> list[str]:
    missing, surplus = list((expected - found).elements()), list((found - expected).elements())
    return [*_count(f"not {what}", missing), *_count(f"{what} too often", surplus)]


def _count(what: str, found: list[str]) -> list[str]:
    return [f"{len(found):,} {what}: {', '.join(found[:3])}{', ...' * (len(found) > 3)}"] if found else []
