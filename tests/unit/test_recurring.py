"""The occurrences of a cron expression: local time, daylight saving, one key each."""

from __future__ import annotations

import sys
from collections import Counter
from datetime import UTC, datetime, timedelta
from itertools import islice, takewhile
from typing import Any
from zoneinfo import ZoneInfo, reset_tzpath

import pytest

from idemgate import InvalidArgument
from idemgate.errors import NotConfigured
from idemgate.topics.recurring import build_recurring
from tests.for_each import for_each


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


CHANGES = {  # of the clocks, in 2026
    "Europe/Berlin": (datetime(2026, 3, 29, 1, tzinfo=UTC), datetime(2026, 10, 25, 1, tzinfo=UTC)),
    "America/New_York": (datetime(2026, 3, 8, 7, tzinfo=UTC), datetime(2026, 11, 1, 6, tzinfo=UTC)),
    "Australia/Lord_Howe": (datetime(2026, 10, 3, 15, 30, tzinfo=UTC), datetime(2026, 4, 4, 15, tzinfo=UTC)),
}


def local_times(expression: str, zone: str, start: datetime, hours: int) -> list[str]:
    """Return the local times of all occurrences in some hours, with the offset from UTC."""
    recurring, end = build_recurring("r", expression, zone, None), start + timedelta(hours=hours)
    times = [one.at for one in takewhile(lambda one: one.at is not None and one.at < end, recurring.after(start))]
    assert times == sorted(set(times))
    return [at.astimezone(ZoneInfo(zone)).strftime("%H:%M%z")[:8] for at in times if at is not None]


@for_each(
    ("zone", "expression", "spring", "autumn"),
    [
        # Named hours: each once a day. What the change skips runs once, when the clock goes on.
        ("Europe/Berlin", "30 2 * * *", ["03:00+02"], ["02:30+02"]),
        ("Europe/Berlin", "*/30 2 * * *", ["03:00+02"], ["02:00+02", "02:30+02"]),
        ("Europe/Berlin", "*/30 2,3 * * *", ["03:00+02", "03:30+02"],
         ["02:00+02", "02:30+02", "03:00+01", "03:30+01"]),
        ("Europe/Berlin", "30 */2 * * *", ["03:00+02", "04:30+02"], ["02:30+02"]),
        ("America/New_York", "*/20 2 * * *", ["03:00-04"], ["02:00-05", "02:20-05", "02:40-05"]),
        ("America/New_York", "*/30 1 * * *", ["01:00-05", "01:30-05"], ["01:00-04", "01:30-04"]),
        ("Australia/Lord_Howe", "*/15 2 * * *", ["02:30+11", "02:45+11"],
         ["02:00+10", "02:15+10", "02:30+10", "02:45+10"]),
        # Every hour: each hour that there is, so both of the repeated one, and none for the skipped one.
        ("Europe/Berlin", "30 * * * *", ["01:30+01", "03:30+02", "04:30+02"], ["02:30+02", "02:30+01", "03:30+01"]),
        ("Europe/Berlin", "0 0-23 * * *", ["01:00+01", "03:00+02", "04:00+02"], ["02:00+02", "02:00+01", "03:00+01"]),
        ("America/New_York", "15 */1 * * *", ["01:15-05", "03:15-04", "04:15-04"],
         ["01:15-04", "01:15-05", "02:15-05"]),
        ("Australia/Lord_Howe", "45 */1,7 * * *", ["01:45+10", "02:45+11", "03:45+11"],
         ["01:45+11", "01:45+10", "02:45+10"]),
    ],
)  # fmt: skip
def test_named_hours_run_once_a_day_and_every_hour_follows_the_time_that_passes(
    zone: str, expression: str, spring: list[str], autumn: list[str]
) -> None:
    # Given three hours around each change of the clocks
    for change, expected in zip(CHANGES[zone], (spring, autumn), strict=True):
        assert local_times(expression, zone, change - timedelta(minutes=61), 3) == expected


@for_each("zone", CHANGES)
@for_each("expression", ["*/15 2 * * *", "0 */3 * * *", "*/30 1,2,3 * * *", "17 * * * *"])
def test_no_day_has_fewer_or_more_runs_than_its_hours(zone: str, expression: str) -> None:
    recurring = build_recurring("r", expression, zone, None)
    for change in CHANGES[zone]:
        days = Counter[int]()
        for one in recurring.after(change - timedelta(days=3)):
            assert one.at is not None
            if one.at > change + timedelta(days=3):
                break
            days[one.at.astimezone(ZoneInfo(zone)).day] += 1
        usual = days[(change + timedelta(days=1)).astimezone(ZoneInfo(zone)).day + 1]
        day = days[change.astimezone(ZoneInfo(zone)).day]
        if "17 *" in expression:  # a day of 23 or of 25 hours
            assert abs(day - usual) <= 1
        else:
            assert usual - 4 < day <= usual


def test_the_newest_missed_occurrence_is_found_among_any_number() -> None:
    last, now = datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 12, 31, 23, 59, 59, 999000, tzinfo=UTC)
    for expression, newest in (
        ("* * * * *", datetime(2026, 12, 31, 23, 59, tzinfo=UTC)),
        ("0 0 29 2 *", None),
        ("0 0 1 1-6 *", datetime(2026, 6, 1, tzinfo=UTC)),
        ("*/7 3 * 3 *", datetime(2026, 3, 31, 3, 56, tzinfo=UTC)),
    ):
        assert build_recurring("r", expression, "UTC", None).find_missed(last, now) == newest
        one = build_recurring("r", expression, "UTC", None, "all", "400d")
        assert one.find_missed(last, now) == (newest and next(one.after(last)).at)
    # Given a bound, the oldest within it is the first to make up for; it lies within the bound, however exactly
    bounded = build_recurring("r", "* * * * *", "UTC", None, "all", "1h")
    assert bounded.find_missed(last, datetime(2026, 2, 1, 1, tzinfo=UTC)) == datetime(2026, 2, 1, tzinfo=UTC)
    assert build_recurring("r", "0 9 * * *", "UTC", None, misfire_grace="1h").find_missed(last, now) is None


@for_each(
    ("zone", "expression", "minutes", "newest"),
    [
        # Minutes after the end of summer time, and the newest occurrence by then, in UTC
        ("Europe/Berlin", "30 2 * * *", -31, datetime(2026, 10, 24, 0, 30, tzinfo=UTC)),
        ("Europe/Berlin", "30 2 * * *", -30, datetime(2026, 10, 25, 0, 30, tzinfo=UTC)),
        ("Europe/Berlin", "30 2 * * *", 45, datetime(2026, 10, 25, 0, 30, tzinfo=UTC)),
        ("Europe/Berlin", "30 * * * *", 45, datetime(2026, 10, 25, 1, 30, tzinfo=UTC)),
        ("Europe/Berlin", "0 9 * * *", 7 * 60 - 1, datetime(2026, 10, 24, 7, tzinfo=UTC)),
        ("Europe/Berlin", "0 9 * * *", 7 * 60, datetime(2026, 10, 25, 8, tzinfo=UTC)),
        ("Europe/Berlin", "*/30 2 29 3 *", 0, datetime(2026, 3, 29, 1, tzinfo=UTC)),
        ("America/New_York", "30 1 * * *", 45, datetime(2026, 11, 1, 5, 30, tzinfo=UTC)),
        ("America/New_York", "15 */1 * * *", 20, datetime(2026, 11, 1, 6, 15, tzinfo=UTC)),
        ("America/New_York", "15 1 * * MON-FRI", 45, datetime(2026, 10, 30, 5, 15, tzinfo=UTC)),
        ("America/New_York", "0 2 8 3 *", 0, datetime(2026, 3, 8, 7, tzinfo=UTC)),
    ],
)
def test_what_was_missed_over_both_changes_of_the_clocks_is_found(
    zone: str, expression: str, minutes: int, newest: datetime
) -> None:
    # Given nothing that ran from before the beginning of summer time until around its end
    spring, autumn = CHANGES[zone]
    last, now = spring - timedelta(hours=30), autumn + timedelta(minutes=minutes)
    missed = [one.at for one in takewhile(lambda one: one.at is not None and one.at <= now,
                                          build_recurring("r", expression, zone, None).after(last))]  # fmt: skip
    assert missed[-1] == newest

    def find(last: datetime, **policy: Any) -> datetime | None:
        return build_recurring("r", expression, zone, None, **policy).find_missed(last, now)

    # Then the newest one is found, and with the policy "all" the oldest one
    assert find(last) == newest
    assert find(last, misfire="all", misfire_grace="400d") == missed[0]
    assert find(newest) is None
    # And a bound counts the time that passes, not that of the clock on the wall
    late = now - newest
    assert find(last, misfire="all", misfire_grace=late + timedelta(seconds=1)) == newest
    if late >= timedelta(minutes=1):
        assert find(last, misfire_grace=late - timedelta(seconds=1)) is None


def test_utc_needs_no_time_zone_database(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a system without a database, also if another test has imported some of the package
    for name in ["tzdata", *(name for name in sys.modules if name.startswith("tzdata."))]:
        monkeypatch.setitem(sys.modules, name, None)
    reset_tzpath(to=[])
    ZoneInfo.clear_cache()
    try:
        daily = build_recurring("r", "0 9 * * *", "UTC", None)
        assert next(daily.after(datetime(2026, 1, 1, tzinfo=UTC))).at == datetime(2026, 1, 1, 9, tzinfo=UTC)
        with pytest.raises(NotConfigured, match=r"'Europe/Berlin' needs a time-zone database.*pip install tzdata"):
            build_recurring("r", "0 9 * * *", "Europe/Berlin", None)
    finally:
        reset_tzpath()


@for_each(
    ("name", "cron", "zone", "word"),
    [
        ("", "* * * * *", "UTC", "name"),
        ("a", "61 * * * *", "UTC", "Bad minute"),
        ("a", "every day", "UTC", "cron"),
        ("a", "0 0 30 2 *", "UTC", "Bad day-of-month"),
        ("a", "* * * * *", "Mars/Olympus", "no such time zone.*pip install tzdata"),
        ("a", "* * * * *", 5, "no such time zone"),
        ("a", "0 30 2 * * *", "UTC", r"it has 6 fields; there is none for seconds.*Write five fields"),
        ("a", "30 2 * *", "UTC", "not five fields"),
        ("a", "@daily", "UTC", "not five fields"),
        ("a", 30, "UTC", "not a text"),
    ],
)
def test_what_is_no_schedule_is_refused(name: str, cron: str, zone: str, word: str) -> None:
    with pytest.raises(InvalidArgument, match=word):
        build_recurring(name, cron, zone, None)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"misfire": "skip"}, "neither once nor all"),
        ({"misfire": "all"}, 'misfire_grace="1h"'),
        ({"misfire_grace": "soon"}, "misfire_grace"),
        ({"misfire_grace": 0}, "misfire_grace"),
    ],
)
def test_a_misfire_policy_without_a_meaning_is_refused(options: Any, word: str) -> None:
    with pytest.raises(InvalidArgument, match=word):
        build_recurring("r", "* * * * *", "UTC", None, **options)
