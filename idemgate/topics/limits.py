"""The limits of a topic: its rate, the division of limits among slots, and the adaptive concurrency limit.

An adaptive limit is the number of handlers that may run at once, derived from their duration and errors. Its functions
are pure: they take a state and an event and return the new state. The rule is additive increase and
multiplicative decrease (Chiu and Jain, 1989), as in TCP (RFC 5681) and Netflix's concurrency-limits. The limit doubles
until the first sign of overload. Then it grows by one per good window and halves after a bad one. Clients that share a
downstream service and follow this rule end with equal shares, without communication.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from idemgate.core.durations import Duration, milliseconds
from idemgate.core.validation import check_int
from idemgate.errors import InvalidArgument, Overloaded

__all__ = ["Adaptive", "HandlerEnd", "Limit", "Rate", "initial_limit", "rate_of", "share", "update_limit"]

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
    elif isinstance(given, bool) or not isinstance(given, int | float) or not -math.inf < given < math.inf:
        raise InvalidArgument("rate", given, "not a rate", fix)
    else:
        rate = Fraction(given)
    if not Fraction(1, 86_400) <= rate <= 1_000_000:
        raise InvalidArgument("rate", given, "out of range", "Use one a day to a million a second")
    return rate


def share(limit: int, slot: int, slots: int) -> int:
    """Return the share of a slot in a limit. The shares of all slots add up to the limit."""
    return limit // slots + (slot < limit % slots)


WINDOW = 20
"""Minimum handlers per window. With fewer, the mean of handlers of varying duration is sometimes high by chance."""
NOISE = 0.001
"""Seconds. Shorter durations count as this one: the jitter of an event loop is no overload."""
LEARN = 1 / 8
"""The weight of a window's mean in the usual duration.

The usual duration grows only at the minimum limit. There the worker itself does not slow the downstream service, so a
permanently slower service becomes usual. At a higher limit it would adapt to the queue that the worker causes.
"""


@dataclass(frozen=True, slots=True)
class Adaptive:
    """The options of an adaptive concurrency limit: `gate.topic(adaptive=Adaptive())`.

    Each worker has its own limit and stores it nowhere. The `concurrency` of the worker and of the topic still apply. A
    window ends after as many handlers as the limit, at least 20, that started under the current limit. The limit
    doubles with each good window until the first bad one. Then a good window adds one and a bad one halves it. It grows
    only if it was used up.

    Attributes:
        least: The minimum limit, and the first one.
        most: The maximum limit.
        target: A window is bad if its successful handlers took longer on average. None means `tolerance` times the
            usual duration. That is learned from fast windows, and at the limit `least`.
        tolerance: A factor above 1 and below 2, unused with a `target`. From 2 on, half the limit could be as slow as
            usual, and the duration without a queue could not be measured.
        overload: A window is bad, and ends at once, if more than this share of its handlers raised one of `errors`.
        errors: The exceptions that an overloaded service causes. Other exceptions have no effect.

    Raises:
        InvalidArgument: An option is out of range.
    """

    least: int = 1
    most: int = 1000
    target: Duration | None = None
    tolerance: float = 1.8
    overload: float = 0.1
    errors: tuple[type[BaseException], ...] = (Overloaded, TimeoutError, ConnectionError)

    def __post_init__(self) -> None:
        check_int("least", self.least)
        if check_int("most", self.most) < self.least:
            raise InvalidArgument("most", self.most, f"less than least={self.least}", "Make it at least as large")
        if self.target is not None:
            milliseconds(self.target, "target")
        if not _is_number(self.tolerance) or not 1 < self.tolerance < 2:
            raise InvalidArgument(
                "tolerance", self.tolerance, "not a number between 1 and 2", "Use 1.3 to 1.8, or a target="
            )
        if not _is_number(self.overload) or not 0 <= self.overload < 1:
            raise InvalidArgument(
                "overload", self.overload, "not a share", "Use a number from 0 to below 1, such as 0.1"
            )
        if not isinstance(self.errors, tuple) or not all(map(_is_exception, self.errors)):
            raise InvalidArgument("errors", self.errors, "not exception types", "Pass a tuple of them")


class HandlerEnd(NamedTuple):
    """The end of a handler. Times are in seconds of one clock. `running` counts the handlers that ran, including it."""

    began: float
    ended: float
    overloaded: bool
    running: int


class Limit(NamedTuple):
    """The limit, the time since which it holds, and the current window. `usual` is in seconds, 0 = unknown."""

    limit: int
    since: float = -math.inf
    usual: float = 0.0
    doubling: bool = True
    ended: int = 0
    overloaded: int = 0
    seconds: float = 0.0
    most_running: int = 0

    @property
    def mean(self) -> float:
        """The mean duration in seconds of the handlers of this window that were not overloaded; 0 if there is none."""
        returned = self.ended - self.overloaded
        return max(NOISE, self.seconds / returned) if returned else 0.0


def initial_limit(adaptive: Adaptive) -> Limit:
    """Return the initial limit of a worker."""
    return Limit(adaptive.least)


def update_limit(adaptive: Adaptive, state: Limit, event: HandlerEnd) -> Limit:
    """Return the limit after the end of a handler. Handlers that started under another limit are ignored."""
    if event.began < state.since:
        return state
    state = _count_end(state, event)
    window = max(state.limit, WINDOW)
    if state.overloaded > adaptive.overload * window:
        return _decrease(adaptive, state, event.ended)
    if state.ended < window:
        return state
    slow = state.mean > _max_mean(adaptive, state)
    state = state._replace(usual=_learn_usual(adaptive, state))
    if slow:
        return _decrease(adaptive, state, event.ended)
    if state.most_running < state.limit:  # it was not used up
        return _start_window(state, state.limit, event.ended)
    larger = 2 * state.limit if state.doubling else state.limit + 1
    return _start_window(state, min(adaptive.most, larger), event.ended)


def _count_end(state: Limit, event: HandlerEnd) -> Limit:
    return state._replace(
        ended=state.ended + 1,
        overloaded=state.overloaded + event.overloaded,
        seconds=state.seconds + (0.0 if event.overloaded else event.ended - event.began),
        most_running=max(state.most_running, event.running),
    )


def _max_mean(adaptive: Adaptive, state: Limit) -> float:
    if adaptive.target is not None:
        return milliseconds(adaptive.target, "target") / 1000
    return adaptive.tolerance * state.usual if state.usual else math.inf


def _learn_usual(adaptive: Adaptive, state: Limit) -> float:
    if not state.usual:
        return state.mean
    learns = state.mean < state.usual or state.limit == adaptive.least
    return state.usual + (state.mean - state.usual) * LEARN * learns


def _decrease(adaptive: Adaptive, state: Limit, now: float) -> Limit:
    return _start_window(state._replace(doubling=False), max(adaptive.least, state.limit // 2), now)


def _start_window(state: Limit, limit: int, now: float) -> Limit:
    """Start a new window. If the limit changed, handlers that started before are not counted in it."""
    return Limit(limit, state.since if limit == state.limit else now, state.usual, state.doubling)


def _is_exception(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseException)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -math.inf < value < math.inf
