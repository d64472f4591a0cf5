"""What an error of redis-py means: may the request be sent again, and may it have been executed?

Every script answers a copy of its request with the same reply and no second effect, so everything that may pass is
sent again, until the deadline. redis-py's own retries stay off: nested under ours they ran one script eleven times.
"""

from __future__ import annotations

import random
from time import monotonic

import redis.exceptions as rx

from idemgate.errors import StoreRefused, StoreUnavailable

__all__ = ["Patience", "is_passing"]

_PASSING = (
    "BUSY ", "LOADING", "NOREPLICAS", "READONLY", "MOVED", "ASK", "TRYAGAIN", "CLUSTERDOWN", "MASTERDOWN", "MISCONF",
    "max number of clients",
)  # fmt: skip
"""The server refused before executing anything, for a reason that tends to pass."""


def is_passing(error: rx.RedisError) -> bool:
    """Whether the same request may succeed a little later."""
    if isinstance(error, rx.AuthenticationError | rx.AuthorizationError):
        return False
    if isinstance(error, rx.ConnectionError | rx.TimeoutError | rx.ClusterError | rx.RedisClusterException):
        return True
    return isinstance(error, rx.ResponseError) and (
        str(error).startswith(_PASSING) or isinstance(error, _PASSING_TYPES)
    )


# redis-py strips the word from the text of the errors that have a class of their own.
_PASSING_TYPES = (rx.ReadOnlyError, rx.AskError, rx.TryAgainError, rx.ClusterDownError, rx.MasterDownError)


def _executed(error: rx.RedisError) -> str:
    if isinstance(error, rx.ConnectionError | rx.TimeoutError) and "connecting to" not in str(error):
        return "no" if isinstance(error, rx.BusyLoadingError) else "unknown"
    return "no"


class Patience:
    """How long one call is tried: until a deadline, with full-jitter pauses from 10 ms to 0.5 s."""

    __slots__ = ("_deadline", "_executed", "_tries")

    def __init__(self, seconds: float) -> None:
        self._deadline = monotonic() + seconds
        self._tries = 0
        self._executed = "no"

    def pause(self, error: rx.RedisError) -> float:
        """Seconds to wait before the next try, or the error for the caller: StoreRefused, StoreUnavailable."""
        if not is_passing(error):
            raise StoreRefused(f"the server refused: {error}") from error
        if _executed(error) == "unknown":
            self._executed = "unknown"
        self._tries += 1
        seconds = random.uniform(0, min(0.5, 0.01 * 2**self._tries))
        if monotonic() + seconds >= self._deadline:
            text = f"no answer from the store after {self._tries} tries, the last one: {type(error).__name__}: {error}"
            raise StoreUnavailable(text, self._executed) from error
        return seconds
