"""An adaptive limit: how many handlers may run at once, found out by how they fare. Pure: state and event in,
state out.

Additive increase, multiplicative decrease (Chiu and Jain, 1989), as TCP does it (RFC 5681) and Netflix's
concurrency-limits do it for calls: double until the first sign of overload, then one more a good window, half after a
bad one. Everybody who follows this rule and shares a downstream ends with a fair share of it, without a word between
them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from idemgate.core.durations import Duration, milliseconds
from idemgate.core.numbers import whole
from idemgate.errors import InvalidArgument, Overloaded

__all__ = ["Adaptive", "Ended", "Limit", "after", "first"]

WINDOW = 20
"""Least ends a window: with fewer, the mean of handlers that differ much is now and then slow by chance."""
NOISE = 0.001
"""Seconds; what is faster is as fast as this: an event loop's own jitter is no overload."""
LEARN = 1 / 8
"""How far what is usual goes towards the mean of a window. It goes up at the least limit only: there it is not we who
make the downstream slow, and what became slower for good has to become usual. Anywhere else it would get used to the
queue of its own making."""


@dataclass(frozen=True, slots=True)
class Adaptive:
    """How a worker finds out how many handlers of a topic its downstream can stand: `gate.topic(adaptive=Adaptive())`.

    It is each worker's own, kept nowhere, and bounded by the worker's `concurrency` and the topic's, if it has one. A
    window is as many ends of handlers as the limit, at least 20, that began under the present limit. The limit doubles
    with each good window until the first bad one, from then on a good window adds one, a bad one halves it. It never
    grows unless it was used up.

    - `least`, `most`: its bounds; it begins at `least`.
    - `target`: a window is bad if handlers that returned took longer than this on average. None: longer than
      `tolerance` times what is usual, which is learnt from fast windows, and at the limit `least`.
    - `tolerance`: above 1, and below 2, or half the limit could be as slow as usual and nobody would see what is
      usual without a queue. Not used with a `target`.
    - `overload`: a window is bad if more than this share of its handlers raised one of `errors`; then it ends at once.
    - `errors`: what an overloaded downstream makes a handler raise. Whatever else it raises tells nothing.

    Raises InvalidArgument.
    """

    least: int = 1
    most: int = 1000
    target: Duration | None = None
    tolerance: float = 1.8
    overload: float = 0.1
    errors: tuple[type[BaseException], ...] = (Overloaded, TimeoutError, ConnectionError)

    def __post_init__(self) -> None:
        whole("least", self.least)
        if whole("most", self.most) < self.least:
            raise InvalidArgument("most", self.most, f"less than least={self.least}", "Make it at least as large")
        if self.target is not None:
            milliseconds(self.target, "target")
        if not _number(self.tolerance) or not 1 < self.tolerance < 2:
            raise InvalidArgument(
                "tolerance", self.tolerance, "not a number between 1 and 2", "Use 1.3 to 1.8, or a target="
            )
        if not _number(self.overload) or not 0 <= self.overload < 1:
            raise InvalidArgument(
                "overload", self.overload, "not a share", "Use a number from 0 to below 1, such as 0.1"
            )
        if not isinstance(self.errors, tuple) or not all(map(_exception, self.errors)):
            raise InvalidArgument("errors", self.errors, "not exception types", "Pass a tuple of them")


class Ended(NamedTuple):
    """A handler that ended. Times in seconds, of one clock; `running`: how many ran until then, itself among them."""

    began: float
    ended: float
    overloaded: bool
    running: int


class Limit(NamedTuple):
    """The limit, since when it holds, and what the present window has seen. `usual`: seconds, 0 = not known yet."""

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
        """Seconds that the handlers of this window took which were not turned away; 0 if there is none."""
        returned = self.ended - self.overloaded
        return max(NOISE, self.seconds / returned) if returned else 0.0


def first(adaptive: Adaptive) -> Limit:
    """The limit of a worker that knows nothing yet."""
    return Limit(adaptive.least)


def after(adaptive: Adaptive, state: Limit, event: Ended) -> Limit:
    """The limit after a handler ended. What began under another limit says nothing about this one."""
    if event.began < state.since:
        return state
    state = _counted(state, event)
    window = max(state.limit, WINDOW)
    if state.overloaded > adaptive.overload * window:
        return _lowered(adaptive, state, event.ended)
    if state.ended < window:
        return state
    slow = state.mean > _bearable(adaptive, state)
    state = state._replace(usual=_learnt(adaptive, state))
    if slow:
        return _lowered(adaptive, state, event.ended)
    used = state.most_running >= state.limit
    return _changed(state, min(adaptive.most, _more(state)) if used else state.limit, event.ended)


def _counted(state: Limit, event: Ended) -> Limit:
    return state._replace(
        ended=state.ended + 1,
        overloaded=state.overloaded + event.overloaded,
        seconds=state.seconds + (0.0 if event.overloaded else event.ended - event.began),
        most_running=max(state.most_running, event.running),
    )


def _bearable(adaptive: Adaptive, state: Limit) -> float:
    if adaptive.target is not None:
        return milliseconds(adaptive.target, "target") / 1000
    return adaptive.tolerance * state.usual if state.usual else math.inf


def _learnt(adaptive: Adaptive, state: Limit) -> float:
    if not state.usual:
        return state.mean
    learns = state.mean < state.usual or state.limit == adaptive.least
    return state.usual + (state.mean - state.usual) * LEARN * learns


def _more(state: Limit) -> int:
    return 2 * state.limit if state.doubling else state.limit + 1


def _lowered(adaptive: Adaptive, state: Limit, now: float) -> Limit:
    return _changed(state._replace(doubling=False), max(adaptive.least, state.limit // 2), now)


def _changed(state: Limit, limit: int, now: float) -> Limit:
    """A new window. Where the limit changed, what still runs from before it is not counted into it."""
    return Limit(limit, state.since if limit == state.limit else now, state.usual, state.doubling)


def _exception(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseException)


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
