"""The demo's judgement can fail: each way to break a promise is seen."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from idemgate.cli.demo.events import DemoEvent
from idemgate.cli.demo.records import Delivered, Records, Reports, check_promises
from tests.for_each import for_each

RECEIVED, HANDLED, DELIVERED, EARLY, FAILED, COUNTED = check_promises(Records(1, 1))
STREAM = [
    DemoEvent("a", 0, "p", "M"),
    DemoEvent("b", 0, "p", "M"),
    DemoEvent("b", 0, "p", "M"),
    DemoEvent("c", 0, "q", "M"),
]
TOPIC = {"accepted": 3, "acked_triggers": 3, "pending": 0, "in_flight": 0, "dead": 0}


def kept() -> Records:
    """Two subscribers, events a and b on one path and c on another, b published twice; a window of 100 ms."""
    records = Records(2, 0.1)
    records.published += STREAM
    first, second = records.subscribers
    first.copies += [("a", True), ("c", True), ("b", None), ("b", None)]
    second.copies += [("b", True), ("a", None), ("b", None), ("c", None)]
    records.workers[0].take("delivery", "p", ["a", "b"], 1000, 1100.25)
    records.workers[0].take("delivery", "q", ["c"], 1010, 1112.0)
    records.topic |= TOPIC
    return records


def killed() -> Records:
    """As `kept`, but subscriber 1 was killed before it reported that it handled c, and the worker was killed with a
    delivery that it had reported and not acknowledged. Another subscriber and another worker replaced them."""
    records = Records(2, 0.1)
    records.published += STREAM
    records.subscribers[0].complete = records.workers[0].complete = False
    records.subscribers.append(Reports(complete=False))
    records.workers.append(Reports(complete=False))
    records.subscribers[0].copies += [("a", True)]
    records.subscribers[1].copies += [("b", True), ("c", False), ("a", None), ("b", None)]
    records.subscribers[2].copies += [("c", None)]
    records.workers[0].take("delivery", "p", ["a"], 1000, 1101.0)
    records.workers[1].take("delivery", "p", ["a", "b"], 1000, 3101.0)
    records.workers[1].take("delivery", "q", ["c"], 1010, 1112.0)
    records.topic |= TOPIC
    return records


@pytest.mark.parametrize("records", [kept(), killed()], ids=["kept", "killed"])
def test_kept_promises_are_kept(records: Records) -> None:
    assert [broken for broken in check_promises(records).values() if broken] == []
    assert not any(records.open_copies)


def test_the_numbers_are_those_of_the_reports() -> None:
    numbers = {name: value for name, value, _ in kept().numbers() if name != "elapsed_s"}
    assert numbers == {
        "published": 4, "copies_received": 8, "handled": 3, "duplicates_dropped": 5, "triggers": 3, "deliveries": 2,
        "merge_ratio": 1.5, "lateness_p50_ms": 0.2, "lateness_p99_ms": 2.0,
    }  # fmt: skip


def first_delivery(**changes: object) -> Callable[[Records], None]:
    def change(records: Records) -> None:
        deliveries = records.workers[0].deliveries
        deliveries[0] = deliveries[0]._replace(**changes)

    return change


def add_delivery(path: str, event: str, worker: int = 0) -> Callable[[Records], None]:
    return lambda r: r.workers[worker].deliveries.append(Delivered(path, [event], 1000, 1101.0))


BREACHES: list[tuple[str, str, Callable[[Records], object]]] = [
    (RECEIVED, "1 not handled or dropped by subscriber 2: b", lambda r: r.subscribers[1].copies.remove(("b", None))),
    (
        RECEIVED,
        "1 handled or dropped by subscriber 1 too often: a",
        lambda r: r.subscribers[0].copies.append(("a", None)),
    ),
    (HANDLED, "1 not handled: a", lambda r: r.subscribers[0].copies.pop(0)),
    (HANDLED, "1 handled too often: a", lambda r: r.subscribers[1].copies.append(("a", True))),
    (HANDLED, "1 handled too often: x", lambda r: r.subscribers[0].copies.append(("x", True))),
    (DELIVERED, "1 not delivered: q:c", lambda r: r.workers[0].deliveries.pop()),
    (DELIVERED, "1 delivered too often: q:c", add_delivery("q", "c")),
    (DELIVERED, "1 delivered too often: r:c", add_delivery("r", "c")),
    (EARLY, "1 delivered before their window had ended: p by 0.5 ms", first_delivery(now_ms=1099.5)),
    (FAILED, "subscriber 1 ended with -9", lambda r: r.faults.append("subscriber 1 ended with -9")),
    (COUNTED, "dead: counted 1, expected 0", lambda r: r.topic.update(dead=1)),
    (COUNTED, "accepted: counted None, expected 3", lambda r: r.topic.clear()),
]


@for_each(("promise", "words", "doctor"), BREACHES)
def test_a_breach_is_seen(promise: str, words: str, doctor: Callable[[Records], object]) -> None:
    # Given records in which one thing is not as it should be
    records = kept()
    doctor(records)
    # Then that promise is broken, and the words say by what
    assert words in check_promises(records)[promise]


LOST: list[tuple[str, str, Callable[[Records], object]]] = [
    (RECEIVED, "1 not handled or dropped by subscriber 2: a", lambda r: r.subscribers[1].copies.remove(("a", None))),
    (HANDLED, "1 not handled: c", lambda r: r.subscribers[1].copies.remove(("c", False))),
    (HANDLED, "1 handled too often: b", lambda r: r.subscribers[2].copies.append(("b", True))),
    (DELIVERED, "1 not delivered: q:c", lambda r: r.workers[1].deliveries.pop()),
    (DELIVERED, "1 delivered too often: q:c", add_delivery("q", "c", worker=1)),
    (DELIVERED, "1 delivered too often: p:a", add_delivery("p", "a")),
    (COUNTED, "acked_triggers: counted 2, expected 3", lambda r: r.topic.update(acked_triggers=2)),
]


@for_each(("promise", "words", "doctor"), LOST)
def test_a_loss_by_a_kill_is_seen(promise: str, words: str, doctor: Callable[[Records], object]) -> None:
    records = killed()
    doctor(records)
    assert words in check_promises(records)[promise]


def test_many_breaches_are_told_by_a_few_examples() -> None:
    # Given five events that were never handled
    records = Records(1, 0.1)
    records.published += [DemoEvent(event, 0, "p", "M") for event in "vwxyz"]
    # Then three of them are named
    assert "5 not handled: v, w, x, ..." in check_promises(records)[HANDLED]
    # and all copies are unfinished
    assert records.open_copies == [5]
