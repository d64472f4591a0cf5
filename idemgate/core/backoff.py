"""How long to wait: before a message is delivered again, and before a call to the store is sent again."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeGuard, cast

from idemgate.core.durations import LONGEST_MS, Duration, milliseconds
from idemgate.errors import IdemgateError, InvalidArgument

if TYPE_CHECKING:
    from tenacity.wait import wait_base

__all__ = ["SOCKET_TIMEOUT", "Backoff", "BackoffPolicy", "delays", "retry_pause"]

SOCKET_TIMEOUT = 2.0
"""Seconds until a connection that does not answer is given up."""

BackoffPolicy: TypeAlias = "Duration | Sequence[Duration] | wait_base | None"
"""A constant, a list whose last delay repeats, a tenacity wait strategy, None: full jitter, 1 s to 10 min."""


class Backoff(Protocol):
    """The delay after a failed attempt."""

    def ms(self, attempt: int, error: BaseException | None = None) -> int:
        """Whole milliseconds (0 to 100 years) to wait after failed `attempt` (from 1); `error` is why.

        Raises InvalidArgument for attempt < 1, and when a tenacity strategy returns something that is no number
        of seconds.
        """
        ...


def delays(policy: BackoffPolicy) -> Backoff:
    """The compiled `backoff=`. Zero is a delay: at once. Raises InvalidArgument for what is no policy."""
    if policy is None:
        return _FullJitter(1_000, 600_000)
    if isinstance(policy, (list, tuple)):
        if not policy:
            raise InvalidArgument("backoff", policy, "has no delays", 'Pass at least one, as in ["1s", "10s", "1m"]')
        return _Listed([milliseconds(delay, f"backoff[{at}]", zero=True) for at, delay in enumerate(policy)])
    if _is_strategy(policy):
        return _Tenacity(policy)
    return _Listed([milliseconds(cast(Duration, policy), "backoff", zero=True)])  # it refuses the rest


def _is_strategy(policy: object) -> TypeGuard[wait_base]:
    """Whether it is tenacity's, which is imported by whoever has one."""
    theirs = sys.modules.get("tenacity.wait")
    return theirs is not None and isinstance(policy, theirs.wait_base)


class _Listed:
    __slots__ = ("_delays",)

    def __init__(self, delays_ms: list[int]) -> None:
        self._delays = delays_ms

    def ms(self, attempt: int, error: BaseException | None = None) -> int:  # noqa: ARG002
        return self._delays[min(_checked(attempt), len(self._delays)) - 1]


class _FullJitter:
    """Any time between now and the doubled span: "full jitter", Brooker, AWS architecture blog, 2015."""

    __slots__ = ("_base", "_cap")

    def __init__(self, base_ms: int, cap_ms: int) -> None:
        self._base = base_ms
        self._cap = cap_ms

    def ms(self, attempt: int, error: BaseException | None = None) -> int:  # noqa: ARG002
        return random.randint(0, min(self._cap, self._base << min(_checked(attempt) - 1, 32)))


class _Tenacity:
    """Asks the strategy, never the loop. It sees attempt and error, as in a retry of tenacity's own."""

    __slots__ = ("_state", "_wait")

    def __init__(self, wait: wait_base) -> None:
        from tenacity import RetryCallState, Retrying

        self._wait = wait
        self._state = partial(RetryCallState, Retrying(wait=wait), None, (), {})

    def ms(self, attempt: int, error: BaseException | None = None) -> int:
        state = self._state()
        state.attempt_number = _checked(attempt)
        failure = error if error is not None else IdemgateError("the attempt failed")
        state.set_exception((type(failure), failure, failure.__traceback__))
        return self._clamped(self._wait(state))

    def _clamped(self, seconds: object) -> int:
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or math.isnan(seconds):
            raise InvalidArgument("backoff", self._wait, f"returned {seconds!r}", "It has to return seconds")
        return round(min(max(seconds, 0), LONGEST_MS / 1000) * 1000)  # tenacity's default maximum: 10^11 years


def _checked(attempt: object) -> int:
    if isinstance(attempt, bool) or not isinstance(attempt, int) or attempt < 1:
        raise InvalidArgument("attempt", attempt, "is not an attempt", "The first attempt is 1")
    return attempt


def retry_pause(n: int) -> float:
    """Seconds to wait before the n-th retry (from 1) of a store call: full jitter, 10 ms to 500 ms."""
    return random.uniform(0, min(0.5, 0.01 * 2 ** min(_checked(n) - 1, 16)))
