"""Histories that break a promise, and those that do not."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from idemgate import Gate
from idemgate.audit.history import check_history
from idemgate.testing import Event, History, audit
from tests.for_each import for_each

HISTORIES: dict[str, tuple[list[Event], list[str]]] = {
    "one after the other": ([Event("start", "k", 1), Event("end", "k", 1), Event("start", "k", 2)], []),
    "after one that died": ([Event("start", "k", 1, owner="a"), Event("gone", owner="a"), Event("start", "k", 2)], []),
    "after one that lost its lease": ([Event("start", "k", 1), Event("gone", "k", 1), Event("start", "k", 2)], []),
    "other keys at once": ([Event("start", "k", 2), Event("start", "l", 1)], []),
    "two at once": ([Event("start", "k", 1), Event("start", "k", 2)], ["overlap-key"]),
    "after another died": (
        [Event("start", "k", 1, owner="a"), Event("gone", owner="b"), Event("start", "k", 2)],
        ["overlap-key"],
    ),
    "the same token": ([Event("start", "k", 2), Event("end", "k", 2), Event("start", "k", 2)], ["fence-fell"]),
    "a lower token": ([Event("start", "k", 2), Event("end", "k", 2), Event("start", "k", 1)], ["fence-fell"]),
    "a lower one after a higher": (
        [
            Event("start", "k", 3),
            Event("end", "k", 3),
            Event("start", "k", 1),
            Event("end", "k", 1),
            Event("start", "k", 2),
        ],
        ["fence-fell", "fence-fell"],
    ),
    "no token at all, then the first": (
        [Event("start", "k"), Event("end", "k"), Event("start", "k", 1), Event("end", "k", 1)],
        ["fence-fell"],
    ),
    "again after it ended": (
        [Event("start", "k", 1, work="w"), Event("end", "k", 1, work="w"), Event("start", "k", 2, work="w")],
        [],
    ),
    "again after it was done": (
        [Event("start", "k", 1, work="w"), Event("done", "k", 1, work="w"), Event("start", "k", 2, work="w")],
        ["ran-again"],
    ),
    "other work after it was done": (
        [Event("start", "k", 1, work="w"), Event("done", "k", 1, work="w"), Event("start", "k", 2, work="v")],
        [],
    ),
    "two of a group": ([Event("start", "k", 1, group="g"), Event("start", "l", 2, group="g")], ["overlap-group"]),
    "of two groups": ([Event("start", "k", 1, group="g"), Event("start", "l", 2, group="h")], []),
    "of a group, one after the other": (
        [Event("start", "k", 1, group="g"), Event("end", "k", 1), Event("start", "l", 2, group="g")],
        [],
    ),
}


@for_each("name", HISTORIES)
def test_what_a_history_shows(name: str) -> None:
    events, kinds = HISTORIES[name]
    assert [one.kind for one in check_history(events)] == kinds


def test_a_group_may_hold_as_many_as_it_says() -> None:
    events = [Event("start", key, 1, group="g") for key in "abc"]
    assert [one.kind for one in check_history(events, group_concurrency=2)] == ["overlap-group"]
    assert list(check_history(events, group_concurrency=3)) == []


@given(st.lists(st.sampled_from("abc"), max_size=30), st.data())
def test_a_serial_history_is_sound_and_any_swap_of_tokens_is_not(names: list[str], data: st.DataObject) -> None:
    # Given runs one after the other, with rising tokens
    runs = [
        [Event("start", key, token, work=f"{token}"), Event("done", key, token, work=f"{token}")]
        for token, key in enumerate(names, 1)
    ]
    assert list(check_history(event for run in runs for event in run)) == []
    # When two of a key change places
    again = [(i, j) for i in range(len(runs)) for j in range(i) if names[i] == names[j]]
    if again:
        i, j = data.draw(st.sampled_from(again))
        runs[i], runs[j] = runs[j], runs[i]
        assert "fence-fell" in {one.kind for one in check_history(event for run in runs for event in run)}


def test_a_recorder_tells_each_event_elsewhere_and_is_made_of_it_again() -> None:
    lines: list[str] = []
    history = History(lambda event: lines.append(event.to_json()))
    with pytest.raises(KeyError), history.run("k", 7, 2, work="w", note=[1]):
        raise KeyError
    history.record_done("k", 7, work="w")
    history.record_death("nobody")
    assert [json.loads(line)["what"] for line in lines] == ["start", "end", "done", "gone"]
    assert History.of(lines).events == history.events
    assert history.events[0].note == [1]


@pytest.mark.parametrize("fault", [False, True])
def test_a_history_of_deliveries_is_audited_with_the_store(gate: Gate, fault: bool) -> None:
    # Given two deliveries of one group, one after the other, or (as if the group had failed) at once
    topic, history = gate.topic("t", group_concurrency=2), History()
    for key in ("a", "b"):
        topic.trigger(key, 1, group="g")
    a, b = topic.take(2)
    with history.delivery(a):
        if fault:
            history.delivery(b).__enter__()
    topic.ack([a, b])
    history.record_done(a.key, a.token, work=a.id)
    # Then the report says so
    report = audit(gate, history=history.findings())
    assert report.by_kind == ({"overlap-group": 1} if fault else {})
    assert audit(gate, history=history.findings(group_concurrency=2)).sound
