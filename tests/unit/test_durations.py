"""Durations and instants: what people write becomes milliseconds, or an error that says what to write."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from enum import IntEnum
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from idemgate import Gate
from idemgate.core import durations
from idemgate.core.durations import LONGEST_MS, instant, milliseconds
from idemgate.errors import InvalidArgument
from tests.for_each import for_each

EARLIEST, LATEST = datetime(1970, 1, 2), datetime(9999, 12, 30)  # noqa: DTZ001
NAIVE = datetime(2024, 1, 1)  # noqa: DTZ001
ZONES = st.builds(timezone, st.timedeltas(timedelta(hours=-23), timedelta(hours=23)))


def test_the_longest_span_is_a_hundred_years() -> None:
    assert LONGEST_MS == 100 * 365.25 * 86_400_000


@for_each(
    ("written", "expected"),
    [
        (2, 2_000),
        (0.5, 500),
        (0.001, 1),
        (0.29, 290),
        (1.0005, 1_000),
        (timedelta(milliseconds=1), 1),
        (timedelta(days=7), 604_800_000),
        ("1ms", 1),
        ("500ms", 500),
        ("2s", 2_000),
        ("1.5s", 1_500),
        ("5m", 300_000),
        ("24h", 86_400_000),
        ("7d", 604_800_000),
        ("1h30m", 5_400_000),
        ("1d2h3m4s5ms", 93_784_005),
        ("0.001s", 1),
        ("36525d", LONGEST_MS),
        (100 * 36525 * 864, LONGEST_MS),
    ],
)
def test_what_people_write_becomes_milliseconds(written: Any, expected: int) -> None:
    assert milliseconds(written, "lease") == expected
    assert type(milliseconds(written, "lease")) is int


@for_each(
    "written",
    [
        "", "5", "5 s", " 5s", "5s ", "5S", "5sec", "30m1h", "5m5m", "m", "-5s", "+5s", "1e3s", "\u0665s",
        ".5s", "5.s", "5s\n",
        "nan", "infs", "0x10s", "1_0s", "9" * 30 + "s", None, True, False, [], b"5s", 1j, Fraction(1, 2),
        object,
        float("nan"), float("inf"), float("-inf"), -1, -0.001, timedelta(-1), 0, 0.0, -0.0, "0s", "0ms",
        timedelta(0),
        0.0009, 0.0005, 5e-324, "0.5ms", timedelta(microseconds=999), LONGEST_MS, 1e15, 2**53, 10**400,
        1e308, "36526d",
        timedelta.max, timedelta.min,
    ],
)  # fmt: skip
def test_anything_else_is_refused_by_name(written: Any) -> None:
    with pytest.raises(InvalidArgument) as refused:
        milliseconds(written, "lease")
    assert refused.value.name == "lease"
    assert refused.value.value is written
    assert refused.value.fix


@for_each("written", [0, 0.0, -0.0, "0s", "0ms", timedelta(0)])
def test_zero_passes_only_where_zero_means_something(written: Any) -> None:
    assert milliseconds(written, "delay", zero=True) == 0


@pytest.mark.parametrize("written", [0.0009, 0.0001, timedelta(microseconds=1)])
def test_what_is_left_of_a_time_is_not_refused_for_being_short(written: Any) -> None:
    assert milliseconds(written, "wait", zero=True) == 1


@pytest.mark.parametrize("written", [-1, "-1s"])
def test_zero_being_allowed_allows_nothing_below_it(written: Any) -> None:
    with pytest.raises(InvalidArgument):
        milliseconds(written, "delay", zero=True)


def test_an_int_enum_counts_as_its_number() -> None:
    class Lease(IntEnum):
        SHORT = 2

    assert milliseconds(Lease.SHORT, "lease") == 2_000


@given(st.integers(1, LONGEST_MS))
def test_every_spelling_of_a_span_means_the_same(ms: int) -> None:
    assert milliseconds(f"{ms}ms", "x") == ms
    assert milliseconds(timedelta(milliseconds=ms), "x") == ms
    assert milliseconds(ms / 1000, "x") == ms  # exact: the shortest decimal of the quotient is the quotient


@given(st.floats(0.001, 2e6) | st.integers(2, 10**9).map(lambda half: half / 2000))
def test_a_float_is_rounded_as_it_is_written(seconds: float) -> None:
    assert milliseconds(seconds, "delay") == round(Fraction(repr(seconds)) * 1000)


@given(st.floats() | st.integers())
def test_a_number_is_refused_or_within_half_a_millisecond(seconds: float) -> None:
    try:
        ms = milliseconds(seconds, "x")
    except InvalidArgument:
        assert not (seconds >= 0.001 and seconds * 1000 <= LONGEST_MS)
    else:
        assert 1 <= ms <= LONGEST_MS
        assert abs(ms - Fraction(seconds) * 1000) <= Fraction(501, 1000)


@given(st.text(alphabet="0123456789.dhms -") | st.text())
def test_no_text_is_anything_but_a_duration_or_refused(text: str) -> None:
    try:
        assert 1 <= milliseconds(text, "x") <= LONGEST_MS
    except InvalidArgument as refused:
        assert refused.value is text  # noqa: PT017 - most texts are refused


@given(st.datetimes(EARLIEST, LATEST, timezones=ZONES))
def test_an_instant_is_the_exact_floor_of_epoch_milliseconds(moment: datetime) -> None:
    ms = instant(moment, "at")
    back = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=ms)
    assert timedelta(0) <= moment - back < timedelta(milliseconds=1)


def test_the_same_moment_in_two_zones_is_one_instant() -> None:
    here = datetime(2024, 5, 1, 12, tzinfo=timezone(timedelta(hours=2)))
    assert instant(here, "at") == instant(here.astimezone(UTC), "at") == 1_714_557_600_000


@for_each(
    "value",
    [
        NAIVE, datetime.min.replace(tzinfo=UTC), datetime(1969, 12, 31, 23, 59, 59, 999_999, UTC),
        datetime.min.replace(tzinfo=timezone(timedelta(hours=14))),
        datetime.max.replace(tzinfo=timezone(timedelta(hours=-1))), 1_714_557_600, 1.5,
        "2024-01-01T00:00:00Z", None,
    ],
)  # fmt: skip
def test_naive_and_other_times_are_refused(value: Any) -> None:
    with pytest.raises(InvalidArgument) as refused:
        instant(value, "at")
    assert refused.value.name == "at"
    assert refused.value.value is value
    assert refused.value.problem
    assert refused.value.fix


def test_a_lease_that_heartbeats_cannot_keep_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    durations._warn_about_short_lease.cache_clear()
    gate = Gate("redis://nowhere")
    for _ in range(2):
        gate.guard("s", lease="10ms")
        gate.once(key="{a}", scope="s", lease="10ms")(lambda a: a)
        gate.topic("t", lease="10ms")
    (record,) = caplog.records
    assert record.getMessage().startswith("lease.short lease=10ms: ")
    assert "Use at least 100ms" in record.getMessage()
    gate.guard("s", lease="100ms")
    gate.guard("s")
    assert len(caplog.records) == 1
