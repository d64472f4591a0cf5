"""The occurrences of a cron expression: local time, daylight saving, one key each."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import islice

import pytest

from idemgate import InvalidArgument
from idemgate.topics.cron import build_recurring


def test_occurrences_follow_the_local_clock() -> None:
    # Given nine o'clock in Berlin, across the change to summer time
    daily = build_recurring("report", "0 9 * * *", "Europe/Berlin", {"kind": "daily"})
    found = list(islice(daily.after(datetime(2026, 3, 27, 12, tzinfo=UTC)), 3))
    # Then the instants move by an hour, and each has its own key and event id
    assert [trigger.at for trigger in found] == [
        datetime(2026, 3, 28, 8, tzinfo=UTC),
        datetime(2026, 3, 29, 7, tzinfo=UTC),
        datetime(2026, 3, 30, 7, tzinfo=UTC),
    ]
    assert [trigger.key for trigger in found] == [
        "report@2026-03-28T08:00:00Z",
        "report@2026-03-29T07:00:00Z",
        "report@2026-03-30T07:00:00Z",
    ]
    assert all(trigger.event_id == trigger.key and trigger.payload == {"kind": "daily"} for trigger in found)


def test_in_an_hour_that_is_repeated_nothing_is_planned_for_what_has_been() -> None:
    # Given half past two in Berlin in the night in which summer time ends
    nightly = build_recurring("n", "30 2 * * *", "Europe/Berlin", None)
    first, next_day = datetime(2026, 10, 25, 0, 30, tzinfo=UTC), datetime(2026, 10, 26, 1, 30, tzinfo=UTC)
    # Then before it, it and that of the next night are planned
    assert [one.at for one in islice(nightly.after(first - timedelta(minutes=1)), 2)] == [first, next_day]
    # And between it and the second half past two only the latter
    for now in (first, first + timedelta(minutes=45)):
        assert next(nightly.after(now)).at == next_day


@pytest.mark.parametrize(
    ("name", "cron", "zone", "word"),
    [
        ("", "* * * * *", "UTC", "name"),
        ("a", "61 * * * *", "UTC", "Bad minute"),
        ("a", "every day", "UTC", "cron"),
        ("a", "0 0 30 2 *", "UTC", "Bad day-of-month"),
        ("a", "* * * * *", "Mars/Olympus", "no such time zone"),
    ],
)
def test_what_is_no_schedule_is_refused(name: str, cron: str, zone: str, word: str) -> None:
    with pytest.raises(InvalidArgument, match=word):
        build_recurring(name, cron, zone, None)
