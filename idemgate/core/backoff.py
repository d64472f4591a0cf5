"""Delays before a message is redelivered and before a store call is retried, and retry policies of tenacity."""

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
    import tenacity
    from tenacity.wait import wait_base

__all__ = ["SOCKET_TIMEOUT", "Backoff", "BackoffPolicy", "delays", "retry_pause", "to_async"]

_jitter = random.SystemRandom()
"""Not the generator of `random`: a program may seed that, and its replicas would retry at the same moments."""
SOCKET_TIMEOUT = 2.0
"""Seconds without an answer after which a connection is closed."""

BackoffPolicy: TypeAlias = "Duration | Sequence[Duration] | wait_base | None"
"""A constant, a list whose last delay repeats, a tenacity wait strategy, or None for full jitter of 1 s to 10 min."""


class Backoff(Protocol):
    """The delay after a failed attempt."""

    def ms(self, attempt: int, error: BaseException | None = None) -> int:
        """Return the whole milliseconds to wait after a failed attempt, 0 to 100 years.

        Args:
            attempt: the number of the attempt, from 1.
            error: the exception that ended it.

        Raises:
            InvalidArgument: `attempt` is below 1, or a tenacity strategy did not return a number of seconds.
        """
        ...


def delays(policy: BackoffPolicy) -> Backoff:
    """Return the compiled `backoff=`. A delay of 0 retries at once.

    Raises:
        InvalidArgument: `policy` is not a backoff policy.
    """
    if policy is None:
        return _FullJitter()
    if isinstance(policy, (list, tuple)):
        if not policy:
            raise InvalidArgument("backoff", policy, "has no delays", 'Pass at least one, as in ["1s", "10s", "1m"]')
        return _Delays([milliseconds(delay, f"backoff[{at}]", zero=True) for at, delay in enumerate(policy)])
    if _is_strategy(policy):
        return _Tenacity(policy)
    return _Delays([milliseconds(cast(Duration, policy), "backoff", zero=True)])  # raises for any other type


def _is_strategy(policy: object) -> TypeGuard[wait_base]:
    """Return True for a tenacity strategy. A caller who has one has imported tenacity, so it is not imported here."""
    tenacity_wait = sys.modules.get("tenacity.wait")
    return tenacity_wait is not None and isinstance(policy, tenacity_wait.wait_base)


class _Delays:
    __slots__ = ("_delays",)

    def __init__(self, delays_ms: list[int]) -> None:
        self._delays = delays_ms

    def ms(self, attempt: int, error: BaseException | None = None) -> int:  # noqa: ARG002
        return self._delays[min(_check_attempt(attempt), len(self._delays)) - 1]


class _FullJitter:
    """A random delay between 0 and a doubling limit ("full jitter", Brooker, AWS architecture blog, 2015)."""

    __slots__ = ()

    def ms(self, attempt: int, error: BaseException | None = None) -> int:  # noqa: ARG002
        return _jitter.randint(0, min(600_000, 1_000 << min(_check_attempt(attempt) - 1, 32)))


class _Tenacity:
    """A tenacity wait strategy, used without tenacity's retry loop. It sees the attempt and the error."""

    __slots__ = ("_state", "_wait")

    def __init__(self, wait: wait_base) -> None:
        from tenacity import RetryCallState, Retrying

        self._wait = wait
        self._state = partial(RetryCallState, Retrying(wait=wait), None, (), {})

    def ms(self, attempt: int, error: BaseException | None = None) -> int:
        state = self._state()
        state.attempt_number = _check_attempt(attempt)
        failure = error if error is not None else IdemgateError("the attempt failed")
        state.set_exception((type(failure), failure, failure.__traceback__))
        return self._clamp_ms(self._wait(state))

    def _clamp_ms(self, seconds: object) -> int:
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or math.isnan(seconds):
            raise InvalidArgument("backoff", self._wait, f"returned {seconds!r}", "It has to return seconds")
        return round(min(max(seconds, 0), LONGEST_MS / 1000) * 1000)  # tenacity's default maximum: 10^11 years


def _check_attempt(attempt: object) -> int:
    if isinstance(attempt, bool) or not isinstance(attempt, int) or attempt < 1:
        raise InvalidArgument("attempt", attempt, "is not an attempt", "The first attempt is 1")
    return attempt


def retry_pause(n: int) -> float:
    """Return the seconds to wait before the n-th retry (from 1) of a store call: full jitter, 10 ms to 500 ms."""
    return _jitter.uniform(0, min(0.5, 0.01 * 2 ** min(_check_attempt(n) - 1, 16)))


def to_async(retry: tenacity.BaseRetrying) -> tenacity.AsyncRetrying:
    """Return the same retry policy for a coroutine function. Strategies are shared; tenacity makes the loop."""
    import tenacity

    if isinstance(retry, tenacity.AsyncRetrying):
        return retry.copy()
    strategies = {name: getattr(retry, name) for name in _STRATEGIES}
    return tenacity.AsyncRetrying(**strategies)


_STRATEGIES = (
    "stop",
    "wait",
    "retry",
    "before",
    "after",
    "before_sleep",
    "reraise",
    "retry_error_cls",
    "retry_error_callback",
)
