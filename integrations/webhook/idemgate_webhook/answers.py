"""What came back: of one attempt, and of all of a message."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Any, cast

__all__ = ["Attempt", "History", "described", "history_of", "retry_after", "with_attempt"]

KEPT = 32
"""Attempts that a history keeps, the newest."""
_SECONDS = re.compile(r"[0-9]{1,10}")


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt to deliver. `number` 1 for the first (a redriven message begins anew), `at` when it began, `ms` how
    long it took. `status` is None where no answer came, and `error` says why. `excerpt` is the beginning of the body
    that came back: another's text, to be escaped wherever it is shown."""

    number: int
    at: datetime
    status: int | None
    ms: int
    excerpt: str
    error: str


@dataclass(frozen=True, slots=True)
class History:
    """The attempts of one message, oldest first, at most the newest 32. Empty before the first attempt has ended, and
    when its retention is over."""

    id: str
    delivered: bool
    attempts: tuple[Attempt, ...]


def with_attempt(stored: object, attempt: Attempt) -> list[dict[str, Any]]:
    """A stored history (None: none yet) and one attempt more, as it is stored."""
    return [*cast("Sequence[dict[str, Any]]", stored or ()), asdict(attempt)][-KEPT:]


def history_of(id: str, delivered: bool, stored: object) -> History:  # noqa: A002 - the specification's word
    """A stored history (None: none yet) as people read it."""
    return History(id, delivered, tuple(Attempt(**one) for one in cast("Sequence[dict[str, Any]]", stored or ())))


def described(status: int) -> str:
    """A status by its registered name; the receiver's own words stay out of logs and dead letters."""
    try:
        name = HTTPStatus(status).phrase
    except ValueError:
        return str(status)
    return f"{status} {name}" + (" (redirects are not followed)" if 300 <= status < 400 else "")


def retry_after(value: str, now: float) -> float | None:
    """Seconds from `now` (since 1970) that a Retry-After asks to wait, 0.0 for a time in the past; None for no such
    header or one that says nothing."""
    if _SECONDS.fullmatch(value.strip()):
        return float(value.strip())
    try:
        moment = parsedate_to_datetime(value)
        aware = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
        return max(0.0, aware.timestamp() - now)
    except (ValueError, TypeError, OverflowError):
        return None
