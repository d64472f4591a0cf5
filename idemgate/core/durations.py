"""Conversion of durations and datetimes to the integer milliseconds that Redis gets."""

from __future__ import annotations

import functools
import logging
import re
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from math import isfinite
from typing import TypeAlias

from idemgate.errors import InvalidArgument

__all__ = ["LATEST_MS", "LONGEST_MS", "Duration", "instant", "lease_milliseconds", "milliseconds", "parse_seconds"]

log: logging.Logger = logging.getLogger("idemgate.lease")

Duration: TypeAlias = int | float | timedelta | str
"""Seconds as int or float, a timedelta, or text such as "500ms", "2s", "5m", "24h", "7d", "1h30m"."""

LONGEST_MS = 100 * 36525 * 24 * 36000
"""100 years, in ms.

Now plus any duration stays below 2^53, so Lua computes it exactly. A wrong unit is noticed.
"""
LATEST_MS = 253_402_300_799_999
"""The latest time that a Python datetime can represent, in ms since 1970."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)
_FIX = 'Pass seconds (2, 0.5), a timedelta, or text like "500ms", "2s", "5m", "24h", "7d", "1h30m"'

_UNITS = {"d": 86_400_000, "h": 3_600_000, "m": 60_000, "s": 1_000, "ms": 1}
_TEXT = re.compile("".join(rf"(?:([0-9]{{1,18}}(?:\.[0-9]{{1,18}})?){unit}(?![a-z]))?" for unit in _UNITS))


def milliseconds(value: Duration, name: str, *, zero: bool = False) -> int:
    """Convert a duration to the nearest number of whole milliseconds.

    Args:
        value: the duration.
        name: the parameter to name in the error.
        zero: accept a duration of 0.

    Raises:
        InvalidArgument: `value` is not a duration or is negative or is longer than 100 years. Without `zero`, it is
            also raised for 0 and for a positive duration below 1 ms. With `zero` the latter is 1 ms: what is left of a
            longer time may be as short.
    """
    if type(value) is float and 0.002 < value < 1e6:  # the common case; the exact computation takes 20 times as long
        ms = value * 1000
        rest = ms % 1
        if not 0.49999 < rest < 0.50001:  # outside the range where a rounding error could change the result
            return int(ms) + (rest > 0.5)
    exact = _exact(value, name)
    if exact < 0:
        raise InvalidArgument(name, value, "is negative", "Pass a duration that lies ahead")
    if 0 < exact < 1:
        if zero:
            return 1
        raise InvalidArgument(name, value, "is shorter than a millisecond", 'Pass at least 0.001 seconds, or "1ms"')
    if exact > LONGEST_MS:
        raise InvalidArgument(name, value, "is longer than 100 years", "Numbers are seconds, not milliseconds")
    if exact == 0 and not zero:
        raise InvalidArgument(name, value, "is zero", 'Pass at least 0.001 seconds, or "1ms"')
    return round(exact)


SHORT_LEASE_MS = 100
"""The lease below which a heartbeat, every sixth of it, comes too late on a busy machine."""


def lease_milliseconds(value: Duration) -> int:
    """Convert a lease to whole milliseconds, and warn once about one that heartbeats cannot keep.

    Raises:
        InvalidArgument: as `milliseconds`.
    """
    lease = milliseconds(value, "lease")
    if lease < SHORT_LEASE_MS:
        _warn_about_short_lease(lease)
    return lease


@functools.cache
def _warn_about_short_lease(lease: int) -> None:
    log.warning(
        "lease.short lease=%dms: heartbeats renew it every sixth, and a pause of the process ends it, so that the work "
        "runs twice. Use at least %dms, or the default of 30s", lease, SHORT_LEASE_MS, extra={"lease": lease / 1000},
    )  # fmt: skip


def instant(value: datetime, name: str) -> int:
    """Convert an aware datetime to whole milliseconds since 1970 UTC, rounded down.

    The result is exact: no floats are involved.

    Args:
        value: the datetime, with a time zone.
        name: the parameter to name in the error.

    Raises:
        InvalidArgument: `value` is naive, is a number, or lies before 1970 or after the year 9999 in UTC.
    """
    since = (_check_aware(value, name) - _EPOCH) // _MILLISECOND
    if since < 0:
        raise InvalidArgument(name, value, "lies before 1970", "Pass a time on this side of 1970-01-01 UTC")
    if since > LATEST_MS:
        raise InvalidArgument(name, value, "lies after the year 9999 of UTC", "Pass a time that UTC has a date for")
    return since


def _check_aware(value: object, name: str) -> datetime:
    if not isinstance(value, datetime):
        fix = "Pass an aware datetime, such as datetime.now(UTC) + timedelta(hours=1)"
        raise InvalidArgument(name, value, "is not a datetime", fix)
    if value.utcoffset() is None:
        fix = "Give it a zone: value.replace(tzinfo=UTC), or value.astimezone() if local time is meant"
        raise InvalidArgument(name, value, "is a naive datetime", fix)
    return value


def _exact(value: object, name: str) -> Fraction | int:
    """Return milliseconds before rounding: the checks must see fractions of a millisecond."""
    if isinstance(value, str):
        return _parse(value, name)
    if isinstance(value, timedelta):
        return Fraction(value // timedelta(microseconds=1), 1000)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidArgument(name, value, "is not a duration", _FIX)
    if isinstance(value, int):
        return int(value) * 1000
    if not isfinite(value):
        raise InvalidArgument(name, value, "is not a finite number", _FIX)
    return Fraction(repr(float(value))) * 1000  # as written: 0.001 is exactly 1 ms


@functools.lru_cache(maxsize=256)  # a program writes few texts, and passes them to each claim or trigger
def _parse(text: str, name: str) -> Fraction | int:
    found = _TEXT.fullmatch(text)
    if found is None or found.lastindex is None:
        raise InvalidArgument(name, text, "is not a duration", _FIX)
    numbers = zip(found.groups(), _UNITS.values(), strict=True)
    exact = sum((Fraction(number) * unit for number, unit in numbers if number is not None), Fraction(0))
    return exact.numerator if exact.denominator == 1 else exact


def parse_seconds(text: str, name: str, *, zero: bool = False) -> float:
    """Parse a duration such as "30", "500ms" or "1h30m" in seconds; "0" only with `zero`."""
    try:
        duration: float | str = float(text)
    except ValueError:
        duration = text
    return milliseconds(duration, name, zero=zero) / 1000
