"""The report of a process: at most 4 KiB, fair to all of its lists, and never trusted."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from idemgate.core.activity import BOUNDS, Sampled
from idemgate.errors import DecodeError
from idemgate.presence.compose import Past
from idemgate.presence.report import MAX_BYTES, Process, decode_report, pack_report
from tests.for_each import for_each

AT = datetime(2026, 12, 24, 18, 0, tzinfo=UTC)
FACTS = {
    "host": "h", "pid": 1, "version": "1", "program": "p", "role": "client", "up": 1500, "places": [1, 2], "calls": [],
}  # fmt: skip
LISTS: dict[str, list[Any]] = {"running": [], "failures": [], "topics": [], "times": [], "scopes": [], "refused": []}


def packed(**lists: list[Any]) -> bytes:
    counters = lists.pop("counters", [])
    return pack_report(FACTS, counters, LISTS | lists, {})


def read(report: bytes) -> Process:
    return decode_report("0" * 32, AT, report)


def test_ages_become_times_by_the_clock_of_the_server() -> None:
    report = read(
        packed(
            running=[["jobs", "k", 2000, "a.py:1 f"]],
            failures=[["jobs", "k", 3, "ValueError: no", 1000, 5000]],
            refused=[["jobs", "k", None, "no", 1000, None]],
        )
    )
    assert report.started_at == AT - timedelta(seconds=1.5)
    assert report.running[0].since == AT - timedelta(seconds=2)
    [failure] = report.failures
    assert (failure.at, failure.next_at) == (AT - timedelta(seconds=1), AT + timedelta(seconds=4))
    assert report.refused[0].next_at is None


def test_a_report_of_another_version_may_lack_facts_of_its_entries() -> None:
    rows: dict[str, list[Any]] = {
        "running": [["jobs", "k", 1, ""], ["charge", "k", 1, ""]], "failures": [["jobs", "k", 3, "no", 1, 5]] * 2
    }  # fmt: skip
    more = pack_report(FACTS | {"max_run": [None, 5000], "of_store": [1]}, [], LISTS | rows, {})
    for report, most, of_store in (
        (read(more), [None, 5000], [False, True]),
        (read(packed(**rows)), [None] * 2, [False] * 2),
    ):
        assert [work.max_run for work in report.running] == most
        assert [failure.of_store for failure in report.failures] == of_store


def test_a_full_report_keeps_a_part_of_each_list_and_counts_the_rest() -> None:
    # Given much more than fits
    long = "x" * 160
    full = pack_report(
        FACTS,
        [[f"counter.{n}", n, n, n] for n in range(300)],
        {
            "running": [["topic", long, n, long] for n in range(20)],
            "failures": [["topic", long, n, long, n, n] for n in range(20)],
            "topics": [f"topic-{n}" for n in range(500)],
            "times": [[f"topic-{n}", [9] * 13, [9] * 13] for n in range(500)],
            "scopes": [f"scope-{n}" for n in range(100)],
            "refused": [["topic", long, None, long, n, None] for n in range(20)],
        },
        {"running": 480},
    )
    # Then the bytes are bounded, each list begins with its first entries, and all others are counted
    assert MAX_BYTES * 0.8 < len(full) <= MAX_BYTES
    report = read(full)
    parts = {
        "counters": (300, report.counters), "running": (500, report.running), "failures": (20, report.failures),
        "topics": (500, report.topics), "times": (500, report.times), "scopes": (100, report.scopes),
        "refused": (20, report.refused),
    }  # fmt: skip
    for name, (whole, kept) in parts.items():
        assert len(kept) > 0, name
        assert len(kept) + report.dropped.get(name, 0) == whole, name
    assert report.running[0].key == long
    assert list(report.topics) == [f"topic-{n}" for n in range(len(report.topics))]


@given(st.binary(max_size=200))
def test_bytes_of_a_stranger_are_refused(report: bytes) -> None:
    with pytest.raises(DecodeError):
        read(report)


DAMAGED: dict[str, Any] = {
    "host": 7, "pid": "1", "places": [1], "up": None, "running": [["t", "k", 1]], "failures": [[1] * 6],
    "counters": {"a": 1}, "times": [["t", [1] * 14, []]], "last_minute": [["t", []]], "calls": [1.5], "topics": [1],
    "scopes": None, "dropped": [], "refused": [["t", "k", None, "e", 2**63, None]],
}  # fmt: skip


@for_each("name", DAMAGED)
def test_a_damaged_field_is_refused(name: str) -> None:
    facts = msgpack.unpackb(packed())
    with pytest.raises(DecodeError):
        read(msgpack.packb(facts | {name: DAMAGED[name]}))


def test_a_histogram_has_one_bucket_more_than_bounds() -> None:
    histogram = Sampled()
    for seconds in (-1.0, 0.001, 0.0011, 300.0, 301.0):
        histogram.add(seconds)
    assert histogram.counts == [2, 1, *[0] * (len(BOUNDS) - 3), 1, 1]


def test_of_frequent_durations_one_in_each_pause_is_counted() -> None:
    sampled = Sampled()
    assert [sampled.begin(now) for now in (5.0, 5.01, 5.04, 5.06, 5.07)] == [True, False, False, True, False]


def test_increases_are_those_of_a_minute_and_of_ten() -> None:
    past = Past()
    # When a number grows by 1 before each report
    found = [past.differences({"n": n}) for n in range(1, 200)]
    # Then its increase is that since the start at first, then that of 6 and of 55 to 60 reports
    assert [minute["n"] for minute, _ in found[:9]] == [1, 2, 3, 4, 5, 6, 6, 6, 6]
    assert {minute["n"] for minute, _ in found[6:]} == {6}
    assert {ten["n"] for _, ten in found[60:]} == {55, 56, 57, 58, 59, 60}
