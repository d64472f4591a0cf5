"""What an error of redis-py means: may the request be sent again, and may it have been executed?

Every script answers a copy of its request with the same reply and no second effect, so everything that may pass is
sent again, until the deadline. redis-py's own retries stay off: nested under ours they ran one script eleven times.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from time import monotonic
from typing import Any

import redis.exceptions as rx

from idemgate.core.backoff import retry_pause
from idemgate.errors import NotDurable, ServerRejected, StoreUnavailable
from idemgate.lua import names, script

__all__ = ["FAILURES", "Patience", "Short", "is_passing", "unheard"]

FAILURES = (rx.RedisError,)
"""Everything redis-py raises for what went wrong on the way or at the server."""

_PASSING = (
    "BUSY ", "LOADING", "NOREPLICAS", "READONLY", "MOVED", "ASK", "TRYAGAIN", "CLUSTERDOWN", "MASTERDOWN", "MISCONF",
    "max number of clients",
)  # fmt: skip
"""The server refused before executing anything, for a reason that tends to pass."""
_IN_SCRIPT = re.compile(r": -(READONLY|MISCONF|NOREPLICAS|CLUSTERDOWN|MASTERDOWN) ")
"""As Redis 6.2 words it when the first write of a script is refused; later ones begin with the word."""
_NEVER_SENT = ("connecting to", "No connection available", "No master found", "max number of clients")
"""In errors of redis-py that were raised before there was a connection to send the request on."""


class Short(rx.RedisError):
    """A script was executed, but its write is on fewer copies than asked for. `passing`: more may get it by and by."""

    def __init__(self, text: str, passing: bool) -> None:
        Exception.__init__(self, text)
        self.passing = passing


def unheard(reply: Any) -> bool:
    """Whether a call of many has no reply, or an error for one."""
    return reply is None or isinstance(reply, Exception)


def is_passing(error: Exception) -> bool:
    """Whether the same request may succeed a little later."""
    error = _refusal_within(error)
    if isinstance(error, rx.AuthenticationError | rx.AuthorizationError):
        return False
    if isinstance(error, rx.ConnectionError | rx.TimeoutError):
        return True
    return isinstance(error, rx.ResponseError) and (
        isinstance(error, _PASSING_TYPES)
        or str(error).startswith(_PASSING)
        or _IN_SCRIPT.search(str(error)) is not None
    )


# redis-py strips the word from the text of the errors that have a class of their own.
_PASSING_TYPES = (rx.ReadOnlyError, rx.AskError, rx.TryAgainError, rx.ClusterDownError, rx.MasterDownError)


def _refusal_within(error: Exception) -> Exception:
    # While connecting, redis-py's asyncio wraps whatever was wrong, a wrong password too.
    within = error.__cause__ or next(iter(error.args), None)
    return within if type(error) is rx.ConnectionError and isinstance(within, rx.RedisError) else error


def _executed(error: Exception) -> str:
    error = _refusal_within(error)
    if isinstance(error, rx.ResponseError | rx.BusyLoadingError | rx.AuthenticationError | rx.AuthorizationError):
        return "no"
    return "no" if any(text in str(error) for text in _NEVER_SENT) else "unknown"


_DENIED = re.compile(r"NOPERM|no permissions|can't run this command|can't access at least one|ACL failure in script")
_SHA = re.compile(r"(?<![0-9a-f])[0-9a-f]{40}(?![0-9a-f])")


def _refusal(error: Exception) -> str:
    """What the server said, with the names of our scripts; where an access list is the reason, says so, and the fix."""
    text = str(error)
    if not _DENIED.search(text):
        return f"the server refused: {text}"
    known = {script(name).sha.decode(): name for name in names()}
    text = _SHA.sub(lambda found: known.get(found[0], found[0]), text)
    return f"this user's access list does not allow it: {text}. What each role needs, `idemgate acl` prints"


class Patience:
    """How long one call, or a batch of them, is tried: until a deadline, with full-jitter pauses up to 0.5 s.

    `attempt`: the seconds that one try may wait for its reply; None: as long as the connection allows."""

    __slots__ = ("_deadline", "_executed", "_seconds", "_tries", "attempt")

    def __init__(self, seconds: float, started: float | None = None, attempt: float | None = None) -> None:
        self._seconds = seconds
        self.attempt = attempt
        self._deadline = (monotonic() if started is None else started) + seconds
        self._tries = 0
        self._executed = "no"

    def anew(self) -> Patience:
        """For the next of calls that go one after the other: the store has answered just now, and done a part."""
        patience = Patience(self._seconds)
        patience.partly()
        return patience

    def partly(self) -> None:
        """Some of what was asked is done: nobody is told any more that nothing was."""
        self._executed = "unknown"

    @property
    def left(self) -> float:
        """Seconds until the deadline, 0 when it is over."""
        return max(0.0, self._deadline - monotonic())

    def pause(self, error: Exception) -> float:
        """Seconds to wait before the next try, or the error for the caller: ServerRejected, StoreUnavailable."""
        if isinstance(error, Short):
            return self._short(error)
        if not is_passing(error):
            raise ServerRejected(_refusal(error)) from error
        if _executed(error) == "unknown":
            self._executed = "unknown"
        self._tries += 1
        seconds = retry_pause(self._tries)
        if monotonic() + seconds >= self._deadline:
            text = f"no answer from the store after {self._tries} tries, the last one: {type(error).__name__}: {error}"
            raise StoreUnavailable(text, self._executed) from error
        return seconds

    def mind(self, replies: Iterable[Any]) -> None:
        """Raises the first of these that says that a connection was lost, for `pause`: on the other connections of a
        cluster all may be well."""
        for reply in replies:
            if isinstance(reply, rx.ConnectionError | rx.TimeoutError):
                raise reply

    def _short(self, error: Short) -> float:
        # A copy of the request answers from what is there, and asks for the copies of that.
        self._tries += 1
        self._executed = "unknown"
        seconds = retry_pause(self._tries)
        if not error.passing or monotonic() + seconds >= self._deadline:
            raise NotDurable(f"written to the primary's memory, but not as durable as asked: {error}") from error
        return seconds

    def hop(self, hops: int) -> float:
        """Seconds to wait before asking elsewhere, for a call whose slot has moved that many times: none the first
        time, then it is being moved just now. Raises StoreUnavailable."""
        seconds = retry_pause(hops) if hops else 0.0
        if hops == MOST_HOPS or monotonic() + seconds >= self._deadline:
            raise StoreUnavailable("the slots of the topic are being moved", self._executed)
        return seconds


MOST_HOPS = 150
"""Of one call: each is a call within a call, and Python has an end to that. More than half a minute."""
