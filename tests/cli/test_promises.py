"""The demo's judgement can fail: each way to break a promise is seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from idemgate.cli.demo.promises import LOSSES, PROMISES, judge
from idemgate.cli.demo.records import Delivered, Handled, Records

RECEIVED, HANDLED, DROPPED, DELIVERED, EARLY, FAILED, COUNTED = (text for text, _ in PROMISES)


def kept() -> Records:
    """Two subscribers, events a and b on one path and c on another, b published twice; a window of 100 ms."""
    records = Records(2, 0.1)
    for event, path in (("a", "p"), ("b", "p"), ("b", "p"), ("c", "q")):
        records.publish(event, path)
    records.take(
        0, {"received": ["a", "b", "b", "c"], "handled": [("a", "p", True), ("c", "q", True)], "dropped": ["b", "b"]}
    )
    records.take(1, {"received": ["a", "b", "b", "c"], "handled": [("b", "p", True)], "dropped": ["a", "b", "c"]})
    records.take(
        0, {"delivered": [("p", ["a", "b"], 2, 0, 1000, 1100, 1100.25), ("q", ["c"], 1, 0, 1010, 1110, 1112.0)]}
    )
    records.take(0, {"counters": [{"once.started": 2, "once.done": 2, "channel.heard": 4}]})
    records.take(1, {"counters": [{"once.started": 1, "once.done": 1, "once.in_progress": 2}, {"worker.taken": 2}]})
    records.store = {"accepted": 3, "acked_triggers": 3, "pending": 0, "in_flight": 0, "dead": 0}
    return records


def test_kept_promises_are_kept() -> None:
    # Given records in which everything is as it should be
    records = kept()
    # Then no promise is broken, and nothing is left to wait for
    assert [(promise.text, promise.broken) for promise in judge(records) if not promise.is_kept] == []
    assert (records.remaining, records.lag) == (0, 0)
    assert records.numbers() == {
        "published": 4, "copies_received": 8, "handled": 3, "duplicates_dropped": 5, "triggers": 3, "deliveries": 2,
        "merge_ratio": 1.5, "lateness_p50_ms": 0.2, "lateness_p99_ms": 2.0,
    }  # fmt: skip


def first_delivery(**changes: object) -> Callable[[Records], None]:
    def change(records: Records) -> None:
        records.deliveries[0] = replace(records.deliveries[0], **changes)

    return change


BREACHES: list[tuple[str, str, Callable[[Records], object]]] = [
    (RECEIVED, "1 lost on the way to subscriber 2: b", lambda r: r.received[1].subtract(["b"])),
    (RECEIVED, "1 received by subscriber 1 more often than published: a", lambda r: r.received[0].update(["a"])),
    (HANDLED, "1 never handled: a", lambda r: r.handled.pop(0)),
    (HANDLED, "1 handled more than once: a", lambda r: r.handled.append(r.handled[0])),
    (HANDLED, "1 handled without being published: x", lambda r: r.handled.append(Handled("x", "p", True))),
    (DROPPED, "1 received, but neither handled nor dropped: c", lambda r: r.dropped[1].subtract(["c"])),
    (DROPPED, "1 handled or dropped more often than received: c", lambda r: r.dropped[0].update(["c"])),
    (DELIVERED, "1 handled, but its trigger was refused: a", lambda r: r.handled.append(Handled("a", "p", False))),
    (DELIVERED, "1 triggered, but in no delivery: c", lambda r: r.deliveries.pop()),
    (DELIVERED, "2 in more deliveries than it was triggered: a, b", lambda r: r.deliveries.append(r.deliveries[0])),
    (DELIVERED, "1 delivered under another path: b", lambda r: r.paths.update(b="q")),
    (DELIVERED, "1 deliveries that do not name all they merged, for: p", first_delivery(count=3)),
    (DELIVERED, "1 deliveries that do not name all they merged, for: p", first_delivery(dropped=1)),
    (EARLY, "1 delivered before they were due: p by 0.5 ms", first_delivery(now_ms=1099.5)),
    (EARLY, "1 due before their window had ended: p", first_delivery(due_ms=1099)),
    (FAILED, "subscriber 1 ended with -9", lambda r: r.faults.append("subscriber 1 ended with -9")),
    *((FAILED, f"{name} happened 1 times", lambda r, name=name: r.counters.update([name])) for name in LOSSES),
    (COUNTED, "calls let through by the guards: counted 4, reported 3", lambda r: r.counters.update(["once.started"])),
    (COUNTED, "calls dropped by the guards: counted 6, reported 5", lambda r: r.counters.update(["once.done"])),
    (COUNTED, "deliveries taken by the worker: counted 3, reported 2", lambda r: r.counters.update(["worker.taken"])),
    (COUNTED, "dead of the topic: counted 1, reported 0", lambda r: r.store.update(dead=1)),
    (COUNTED, "accepted of the topic: counted None, reported 3", lambda r: setattr(r, "store", None)),
]


@pytest.mark.parametrize(("promise", "words", "doctor"), BREACHES)
def test_a_breach_is_seen(promise: str, words: str, doctor: Callable[[Records], object]) -> None:
    # Given records in which one thing is not as it should be
    records = kept()
    doctor(records)
    # Then that promise is broken, and the words say by what
    broken = {one.text: one.broken for one in judge(records)}
    assert words in broken[promise]


def test_many_breaches_are_told_by_a_few_examples() -> None:
    # Given five events that were never handled
    records = Records(1, 0.1)
    for event in "vwxyz":
        records.publish(event, "p")
    # Then three of them are named
    assert "5 never handled: v, w, x, ..." in {one.text: one.broken for one in judge(records)}[HANDLED]


def test_what_has_to_be_waited_for() -> None:
    # Given records with one delivery and one copy outstanding
    records = kept()
    records.publish("d", "q")
    records.take(0, {"received": ["d"], "handled": [("d", "q", True)]})
    # Then the slowest subscriber is one behind, and two things are left
    assert (records.lag, records.remaining) == (1, 2)
    # When both are reported
    records.take(1, {"received": ["d"], "dropped": ["d"]})
    records.take(0, {"delivered": [("q", ["d"], 1, 0, 1, 101, 101.0)]})
    # Then none
    assert (records.lag, records.remaining) == (0, 0)
    assert isinstance(records.deliveries[-1], Delivered)


def killed() -> Records:
    """As `kept`, but subscriber 1 was killed before it reported that it handled c, and the worker was killed with a
    delivery that it had reported and not acknowledged. A third subscriber replaced the first."""
    records = Records(2, 0.1)
    for event, path in (("a", "p"), ("b", "p"), ("b", "p"), ("c", "q")):
        records.publish(event, path)
    records.take(0, {"received": ["a", "b"], "handled": [("a", "p", True)]})
    records.killed.add(0)
    assert records.add_subscriber() == 2
    records.take(1, {"received": ["a", "b", "b", "c"], "handled": [("b", "p", True), ("c", "q", False)]})
    records.take(1, {"dropped": ["a", "b"]})
    first, again = ("p", ["a"], 1, 0, 1000, 1100, 1101.0, 1), ("p", ["a", "b"], 2, 0, 1000, 3100, 3101.0, 2)
    records.take(0, {"delivered": [first, again, ("q", ["c"], 1, 0, 1010, 1110, 1112.0, 1)]})
    records.worker_killed = True
    records.counters.update(["worker.lapsed"])
    records.store = {"accepted": 3, "acked_triggers": 3, "pending": 0, "in_flight": 0, "dead": 0}
    return records


def test_kills_break_no_promise() -> None:
    records = killed()
    assert [(promise.text, promise.broken) for promise in judge(records) if not promise.is_kept] == []
    assert (records.remaining, records.lag, records.numbers()["repeated"]) == (0, 0, 1)


LOST: list[tuple[str, str, Callable[[Records], object]]] = [
    (RECEIVED, "1 lost on the way to subscriber 2: c", lambda r: r.received[1].subtract(["c"])),
    (HANDLED, "1 never handled: c", lambda r: r.deliveries.pop()),
    (HANDLED, "1 handled more than once: b", lambda r: r.handled.append(Handled("b", "p", True, 1))),
    (DROPPED, "1 received, but neither handled nor dropped: a", lambda r: r.dropped[1].subtract(["a"])),
    (DELIVERED, "1 triggered, but in no delivery: c", lambda r: r.deliveries.pop()),
    (DELIVERED, "1 in more deliveries than it was triggered: c", lambda r: r.deliveries.append(r.deliveries[2])),
    (DELIVERED, "1 handled, but its trigger was refused: c", lambda r: r.deliveries.pop()),
    (FAILED, "worker.dead happened 1 times", lambda r: r.counters.update(["worker.dead"])),
    (COUNTED, "acked_triggers of the topic: counted 2, reported 3", lambda r: r.store.update(acked_triggers=2)),
]


@pytest.mark.parametrize(("promise", "words", "doctor"), LOST)
def test_a_loss_by_a_kill_is_seen(promise: str, words: str, doctor: Callable[[Records], object]) -> None:
    records = killed()
    doctor(records)
    broken = {one.text: one.broken for one in judge(records)}
    assert words in broken[promise]
