"""Types of command-line arguments. argparse reports an invalid one by name, with exit code 2."""

from __future__ import annotations

import argparse
import math
import os

from idemgate.core.durations import milliseconds
from idemgate.errors import InvalidArgument, NotConfigured

__all__ = ["add_namespace", "add_url", "count", "duration", "factor", "span", "url_of"]


def add_url(parser: argparse.ArgumentParser) -> None:
    """Adds --url; `url_of` says what was meant."""
    parser.add_argument("--url", help="the store (default: the environment variable IDEMGATE_URL)")


def url_of(options: argparse.Namespace) -> str:
    """NotConfigured where no store was named."""
    url: str = options.url or os.environ.get("IDEMGATE_URL", "")
    if not url:
        raise NotConfigured("no store was named. Pass --url redis://host:6379/0, or set IDEMGATE_URL")
    return url


def add_namespace(parser: argparse.ArgumentParser) -> None:
    """Adds --namespace, whose default the environment variable IDEMGATE_NAMESPACE says."""
    default = os.environ.get("IDEMGATE_NAMESPACE") or "default"
    about = f"of the gate (default: IDEMGATE_NAMESPACE, or default; now: {default})"
    parser.add_argument("--namespace", "-n", metavar="NAME", default=default, help=about)


def duration(text: str) -> float:
    """Seconds, from "30", "500ms" or "1h30m"; more than none."""
    return _seconds(text, zero=False)


def span(text: str) -> float:
    """Parse a duration in seconds; "0" is allowed."""
    return _seconds(text, zero=True)


def _seconds(text: str, *, zero: bool) -> float:
    number = _number(text)
    try:
        return milliseconds(text if number is None else number, "TIME", zero=zero) / 1000
    except InvalidArgument as error:
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
