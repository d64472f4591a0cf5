"""What arguments mean, checked by argparse: a wrong one is said with its name, and exit code 2."""

from __future__ import annotations

import argparse
import math

from idemgate.core.durations import milliseconds
from idemgate.errors import BadInput

__all__ = ["count", "duration", "factor", "span"]


def duration(text: str) -> float:
    """Seconds, from "30", "500ms" or "1h30m"; more than none."""
    return _seconds(text, zero=False)


def span(text: str) -> float:
    """As `duration`; may be "0"."""
    return _seconds(text, zero=True)


def _seconds(text: str, *, zero: bool) -> float:
    number = _number(text)
    try:
        return milliseconds(text if number is None else number, "TIME", zero=zero) / 1000
    except BadInput as error:
        raise argparse.ArgumentTypeError(f"{text!r} {error.problem}. {error.fix}") from None


def factor(text: str) -> float:
    """A positive number; "max" is infinity."""
    if text == "max":
        return math.inf
    number = _number(text) or 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a positive number nor max")
    return number


def count(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
