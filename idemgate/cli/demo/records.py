"""Reports of the demo's processes, the numbers that they make, and the check of the promises."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil
from typing import Any, NamedTuple

from idemgate.cli.demo.events import DemoEvent

__all__ = ["Delivered", "Records", "Reports", "judge"]

LOSSES = (
    "channel.abandoned", "channel.dropped", "channel.failed", "channel.gaps", "channel.permanent",
    "once.lease_lost", "once.completion_lost",
    "worker.cut_short", "worker.dead", "worker.failed", "worker.lapsed", "worker.lost", "worker.unsettled",
)  # fmt: skip
SHOWN = 3


class Delivered(NamedTuple):
    """One delivery as its handler got it. `first_ms`: its first trigger; `now_ms`: the server's time in the handler."""

    path: str
    ids: list[str]
    triggers: int
    dropped: int
    first_ms: int
    due_ms: int
    now_ms: float

    @property
    def late_ms(self) -> float:
        return self.now_ms - self.due_ms


@dataclass
class Reports:
    """The reports of one process. `late`: it replaced a killed one, so it missed what came before."""

    late: bool = False
    killed: bool = False
    handled: list[tuple[str, bool]] = field(default_factory=list[tuple[str, bool]])
    dropped: list[str] = field(default_factory=list[str])
    delivered: list[Delivered] = field(default_factory=list[Delivered])
    counters: Counter[str] = field(default_factory=Counter[str])

    def take(self, kind: str, *facts: Any) -> None:
        match kind:
            case "handled":
                self.handled.append((facts[0], facts[1]))
            case "dropped":
                self.dropped.append(facts[0])
            case "delivered":
                self.delivered.append(Delivered(*facts))
            case _:
                self.counters.update(facts[0])

    @property
    def copy_count(self) -> int:
        return len(self.handled) + len(self.dropped)


class Records:
    """Everything that was reported. `topic` is what the topic counts at the end; `faults` says what else went wrong.

    A killed process could not report what it did last, so a process that replaced it may do the same again.
    """

    def __init__(self, subscribers: int, window: float) -> None:
        self.window_ms = round(window * 1000)
        self.published: list[DemoEvent] = []
        self.subscribers = [Reports() for _ in range(subscribers)]
        self.workers = [Reports()]
        self.topic: dict[str, int] = {}
        self.faults: list[str] = []

    @property
    def handler_runs(self) -> list[tuple[str, bool]]:
        return [one for subscriber in self.subscribers for one in subscriber.handled]

    @property
    def deliveries(self) -> list[Delivered]:
        return [one for worker in self.workers for one in worker.delivered]

    @property
    def open_copies(self) -> list[int]:
        """The number of unfinished copies of each subscriber that runs from the start to the end."""
        return [len(self.published) - one.copy_count for one in self.subscribers if not one.killed and not one.late]

    def numbers(self) -> dict[str, int | float]:
        """Return the numbers to show. `merge_ratio` is triggers per delivery; lateness is in ms."""
        handled, deliveries = self.handler_runs, self.deliveries
        late = sorted(one.late_ms for one in deliveries)
        dropped = sum(len(one.dropped) for one in self.subscribers)
        return {
            "published": len(self.published),
            "copies_received": len(handled) + dropped,
            "handled": len(handled),
            "duplicates_dropped": dropped,
            "triggers": sum(accepted for _, accepted in handled),
            "deliveries": len(deliveries),
            "merge_ratio": round(sum(one.triggers for one in deliveries) / (len(deliveries) or 1), 2),
            "lateness_p50_ms": _percentile(late, 0.50),
            "lateness_p99_ms": _percentile(late, 0.99),
        }


def _percentile(ordered: list[float], share: float) -> float:
    """Return the smallest value that at least `share` of all do not exceed; 0 if there are none."""
    return round(ordered[max(0, ceil(share * len(ordered)) - 1)], 1) if ordered else 0.0


def judge(records: Records) -> dict[str, list[str]]:
    """Return what breaks each promise; an empty list: it was kept."""
    checks = {
        "every subscriber received every event": _received_by_all,
        "each event was handled once, and once only": _handled_once,
        "each trigger is in one delivery, and in one only": _delivered_once,
        "no delivery was early by the server's clock": _never_early,
        "nothing failed, nothing was lost": _nothing_failed,
        "the topic's counters say the same": _counted_alike,
    }
    return {promise: list(check(records)) for promise, check in checks.items()}


def _received_by_all(records: Records) -> Iterable[str]:
    published = Counter(event.id for event in records.published)
    for number, one in enumerate(records.subscribers, 1):
        if not one.killed and not one.late:
            ended = Counter([event for event, _ in one.handled] + one.dropped)
            yield from _compare(f"handled or dropped by subscriber {number}", published, ended)


def _handled_once(records: Records) -> Iterable[str]:
    """Check the events of accepted triggers: after a kill the second handler's trigger is refused as a duplicate."""
    killed = any(one.killed for one in records.subscribers)
    handled = Counter(event for event, accepted in records.handler_runs if accepted or not killed)
    if killed:  # its last reports are missing, its triggers are not
        handled |= _once(event for one in records.deliveries for event in one.ids)
    yield from _compare("handled", _once(event.id for event in records.published), handled)
    refused = [event for event, accepted in records.handler_runs if not accepted and not killed]
    yield from _count("handled, but the trigger was refused", refused)


def _delivered_once(records: Records) -> Iterable[str]:
    by_worker = [
        Counter(f"{d.path}:{event}" for d in worker.delivered for event in d.ids) for worker in records.workers
    ]
    delivered = sum(by_worker, Counter[str]())
    for killed, successor in pairwise(by_worker):
        delivered -= killed & successor  # what was not acknowledged; what was would show in `acked_triggers`
    yield from _compare("delivered", _once(f"{event.path}:{event.id}" for event in records.published), delivered)
    wrong = [one.path for one in records.deliveries if one.triggers != len(one.ids) or one.dropped]
    yield from _count("deliveries that do not name all they merged", wrong)


def _never_early(records: Records) -> Iterable[str]:
    early = [f"{one.path} by {-one.late_ms:.1f} ms" for one in records.deliveries if one.late_ms < 0]
    yield from _count("delivered before they were due", early)
    short = [one.path for one in records.deliveries if one.due_ms < one.first_ms + records.window_ms]
    yield from _count("due before their window had ended", short)


def _nothing_failed(records: Records) -> Iterable[str]:
    """Check that no process failed, and the counters in which the library admits a loss."""
    yield from records.faults
    counters = sum((one.counters for one in (*records.subscribers, *records.workers)), Counter[str]())
    for name in LOSSES:
        if counters[name] and not (name == "worker.lapsed" and records.workers[0].killed):
            yield f"{name} happened {counters[name]:,} times"


def _counted_alike(records: Records) -> Iterable[str]:
    events = len({event.id for event in records.published})
    expected = {"accepted": events, "acked_triggers": events, "pending": 0, "in_flight": 0, "dead": 0}
    for name, number in expected.items():
        if records.topic.get(name) != number:
            yield f"{name}: counted {records.topic.get(name)}, expected {number}"


def _once(events: Iterable[str]) -> Counter[str]:
    return Counter(dict.fromkeys(events, 1))


def _compare(what: str, expected: Counter[str], found: Counter[str]) -> Iterable[str]:
    yield from _count(f"not {what}", list((expected - found).elements()))
    yield from _count(f"{what} too often", list((found - expected).elements()))


def _count(what: str, found: list[str]) -> Iterable[str]:
    if found:
        yield f"{len(found):,} {what}: {', '.join(found[:SHOWN])}{', ...' if len(found) > SHOWN else ''}"
