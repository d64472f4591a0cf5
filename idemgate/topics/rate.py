"""The rate limit of a topic, and the division of limits among slots."""

from __future__ import annotations

import math
import re
from fractions import Fraction

from idemgate.core.durations import milliseconds
from idemgate.errors import InvalidArgument

__all__ = ["Rate", "rate_of", "share"]

Rate = str | int | float
"""Deliveries per time span: "100/s", "6000/1m", "1/500ms". A number means per second."""

_RATE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*/\s*(\S+)\s*")


def rate_of(given: Rate) -> Fraction:
    """Parse a rate to deliveries per second. Raises InvalidArgument."""
    fix = 'Use deliveries a span, such as "100/s" or "6000/1m"'
    if isinstance(given, str):
        found = _RATE.fullmatch(given)
        if not found:
            raise InvalidArgument("rate", given, "not a rate", fix)
        span = found[2] if found[2][0].isdigit() else f"1{found[2]}"
        rate = Fraction(found[1]) * 1000 / milliseconds(span, "rate")
    elif isinstance(given, bool) or not isinstance(given, int | float) or not math.isfinite(given):
        raise InvalidArgument("rate", given, "not a rate", fix)
    else:
        rate = Fraction(given)
    if not Fraction(1, 86_400) <= rate <= 1_000_000:
        raise InvalidArgument("rate", given, "out of range", "Use one a day to a million a second")
    return rate


def share(limit: int, slot: int, slots: int) -> int:
    """Return the share of a slot in a limit. The shares of all slots add up to the limit."""
    return limit // slots + (slot < limit % slots)
