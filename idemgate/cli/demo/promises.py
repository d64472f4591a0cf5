"""The promises, checked against the records. Each check is blunt and reads only what the processes reported."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

from idemgate.cli.demo.records import Delivered, Records

__all__ = ["PROMISES", "Promise", "judge"]

SHOWN = 3
LOSSES = (
    "channel.abandoned", "channel.dropped", "channel.failed", "channel.gaps", "channel.permanent",
    "once.lease_lost", "once.completion_lost",
    "worker.cut_short", "worker.dead", "worker.failed", "worker.lapsed", "worker.lost", "worker.unsettled",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Promise:
    """A promise and what breaks it, in words; nothing: it was kept."""

    text: str
    broken: list[str]

    @property
    def is_kept(self) -> bool:
        return not self.broken


def judge(records: Records) -> list[Promise]:
    """All promises, each with what breaks it."""
    return [Promise(text, list(check(records))) for text, check in PROMISES]


def received_by_all(records: Records) -> Iterable[str]:
    """Check that every subscriber received each event as often as it was published.

    Pub/Sub ensures this only if the publisher waits for slow subscribers.
    """
    for at in records.witnesses:
        received, number = records.received[at], at + 1
        yield from _report_count(f"lost on the way to subscriber {number}", records.published - received)
        yield from _report_count(
            f"received by subscriber {number} more often than published", received - records.published
        )


def handled_once(records: Records) -> Iterable[str]:
    handled = Counter(one.id for one in records.handled if not records.killed or one.accepted)
    known = handled.keys() | _delivered_ids(records) if records.killed else handled
    yield from _report_count("never handled", [event for event in records.published if event not in known])
    yield from _report_count("handled more than once", [event for event, times in handled.items() if times > 1])
    yield from _report_count(
        "handled without being published", [event for event in handled if event not in records.published]
    )


def duplicates_dropped(records: Records) -> Iterable[str]:
    """Every copy was either handled or dropped: no call to the guard failed, or is still under way."""
    judged = {*records.witnesses, *records.late}
    ended = Counter(one.id for one in records.handled if one.by in judged)
    received: Counter[str] = Counter()
    for at in judged:
        ended += records.dropped[at]
        received += records.received[at]
    yield from _report_count("received, but neither handled nor dropped", received - ended)
    yield from _report_count("handled or dropped more often than received", ended - received)


def delivered_once(records: Records) -> Iterable[str]:
    repeated = records.repeated_deliveries
    delivered = Counter(
        event for delivery in records.deliveries if not _is_among(delivery, repeated) for event in delivery.ids
    )
    # A killed subscriber could not report its last triggers. Its successor triggers again, as a duplicate.
    told = Counter(one.id for one in records.handled if one.accepted)
    accepted = Counter(dict.fromkeys(records.published, 1)) if records.killed else told
    refused = [one.id for one in records.handled if not one.accepted]
    if records.killed:
        refused = [event for event in refused if event not in delivered]
    yield from _report_count("handled, but its trigger was refused", refused)
    yield from _report_count("triggered, but in no delivery", accepted - delivered)
    yield from _report_count("in more deliveries than it was triggered", delivered - accepted)
    yield from _report_count("delivered under another path", _find_misplaced(records))
    wrong = [one.path for one in records.deliveries if one.count != len(one.ids) or one.dropped]
    yield from _report_count("deliveries that do not name all they merged, for", wrong)


def _delivered_ids(records: Records) -> set[str]:
    return {event for delivery in records.deliveries for event in delivery.ids}


def _is_among(one: Delivered, others: list[Delivered]) -> bool:
    return any(one is other for other in others)


def never_early(records: Records) -> Iterable[str]:
    early = [f"{one.path} by {-one.late_ms:.1f} ms" for one in records.deliveries if one.late_ms < 0]
    yield from _report_count("delivered before they were due", early)
    window = round(records.window * 1000)
    short = [one.path for one in records.deliveries if one.due_ms < one.first_ms + window]
    yield from _report_count("due before their window had ended", short)


def nothing_failed(records: Records) -> Iterable[str]:
    """No process, and none of the counters in which the library admits a loss."""
    yield from records.faults
    losses = [name for name in LOSSES if name != "worker.lapsed" or not records.worker_killed]
    yield from (f"{name} happened {records.counters[name]:,} times" for name in losses if records.counters[name])


def counted_alike(records: Records) -> Iterable[str]:
    """The library's own counters, in the processes and in the topic, agree with what the handlers reported."""
    triggers = len(records.published) if records.killed else sum(one.accepted for one in records.handled)
    dropped = sum(one.total() for one in records.dropped)
    counted = records.counters
    told: dict[str, tuple[int | None, int]] = (
        {}
        if records.killed or records.worker_killed
        else {
            "calls let through by the guards": (counted["once.started"], len(records.handled)),
            "calls dropped by the guards": (counted["once.done"] + counted["once.in_progress"], dropped),
            "deliveries taken by the worker": (counted["worker.taken"], len(records.deliveries)),
        }
    )
    for name, value in {
        "accepted": triggers,
        "acked_triggers": triggers,
        "pending": 0,
        "in_flight": 0,
        "dead": 0,
    }.items():
        told[f"{name} of the topic"] = ((records.store or {}).get(name), value)
    for name, (found, expected) in told.items():
        if found != expected:
            yield f"{name}: counted {found}, reported {expected}"


PROMISES: list[tuple[str, Callable[[Records], Iterable[str]]]] = [
    ("every subscriber received every event", received_by_all),
    ("each event was handled once, and once only", handled_once),
    ("every other copy was dropped", duplicates_dropped),
    ("each trigger is in one delivery, and in one only", delivered_once),
    ("no delivery was early by the server's clock", never_early),
    ("nothing failed, nothing was lost", nothing_failed),
    ("the library's counters say the same", counted_alike),
]


def _find_misplaced(records: Records) -> list[str]:
    return [
        event
        for delivery in records.deliveries
        for event in delivery.ids
        if event in records.paths and records.paths[event] != delivery.path
    ]


def _report_count(what: str, found: Counter[str] | list[str]) -> Iterable[str]:
    number = found.total() if isinstance(found, Counter) else len(found)
    if number:
        examples = ", ".join(islice(found, SHOWN))
        yield f"{number:,} {what}: {examples}{', ...' if number > SHOWN else ''}"
