"""What an error of redis-py means: whether to retry, whether the request may have been executed, and what to correct.

Each script answers a copy of its request with the same reply and without a second effect. So every transient error is
retried until the deadline. The retries of redis-py stay off: nested under these they ran one script eleven times.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import redis.exceptions as rx

from idemgate.core.backoff import SOCKET_TIMEOUT, retry_pause
from idemgate.core.calls import KEY_ERRORS, Call, Incomplete, PerKeyCall, SlotMoved
from idemgate.core.clock import monotonic
from idemgate.errors import NotDurable, ServerRejected, StoreError, StoreUnavailable
from idemgate.lua import names, script
from idemgate.lua.checked import checked_script

__all__ = [
    "FAILURES",
    "NotReplicated",
    "RetryBudget",
    "Send",
    "SendAll",
    "SendPlain",
    "explain_redirect",
    "is_of_store",
    "is_out_of_memory",
    "is_transient",
    "lacks_cluster_url",
    "needs_retry",
    "resolve_reply",
    "retry_call",
    "retry_or_resolve",
    "run_batch",
    "run_each",
    "suggests_failover",
    "undo_is_lost",
]

T = TypeVar("T")

FAILURES = (rx.RedisError,)
"""The base class of all errors of redis-py: of the connection and of the server."""

_TRANSIENT = (
    "BUSY ", "LOADING", "NOREPLICAS", "READONLY", "MOVED", "ASK", "TRYAGAIN", "CLUSTERDOWN", "MASTERDOWN", "MISCONF",
    "UNBLOCKED", "max number of clients",
)  # fmt: skip
"""Errors for a temporary state. The server refused the request before it executed anything."""
_TRANSIENT_IN_SCRIPT = re.compile(r": -(READONLY|MISCONF|NOREPLICAS|CLUSTERDOWN|MASTERDOWN) ")
"""The wording of Redis 6.2 when the first write of a script is refused. Later versions begin with the word."""
_NEVER_SENT = (
    "connecting to", "No connection available", "No master found", "max number of clients",
    "lost before the request was sent",
)  # fmt: skip
"""Texts of the errors that were raised before the request was sent."""


class NotReplicated(rx.RedisError):
    """A script was executed, but its write is less durable than required.

    `transient` is True when a retry may find the write durable.
    """

    def __init__(self, text: str, transient: bool = False) -> None:  # pickle calls it with the text only
        rx.RedisError.__init__(self, text)  # pyright: ignore[reportUnknownMemberType]
        self.transient = transient


def needs_retry(reply: Any) -> bool:
    """Return whether a call of a batch has no reply, or an error instead of one."""
    return reply is None or isinstance(reply, Exception)


def is_transient(error: Exception) -> bool:
    """Return whether the same request may succeed later."""
    error = _unwrap(error)
    if isinstance(error, rx.AuthenticationError | rx.AuthorizationError):
        return False
    if isinstance(error, rx.ConnectionError | rx.TimeoutError):
        return True
    return isinstance(error, rx.ResponseError) and (
        isinstance(error, _TRANSIENT_TYPES)
        or str(error).startswith(_TRANSIENT)
        or _TRANSIENT_IN_SCRIPT.search(str(error)) is not None
    )


# redis-py strips the first word from errors that have a class.
_TRANSIENT_TYPES = (rx.ReadOnlyError, rx.AskError, rx.TryAgainError, rx.ClusterDownError, rx.MasterDownError)


def _unwrap(error: Exception) -> Exception:
    # redis-py's asyncio client wraps every error raised while connecting, also a wrong password.
    cause = error.__cause__ or next(iter(error.args), None)
    return cause if type(error) is rx.ConnectionError and isinstance(cause, rx.RedisError) else error


def _execution_state(error: Exception) -> str:
    error = _unwrap(error)
    if isinstance(error, rx.ResponseError | rx.BusyLoadingError | rx.AuthenticationError | rx.AuthorizationError):
        return "no"
    return "no" if any(text in str(error) for text in _NEVER_SENT) else "unknown"


class RetryBudget:
    """The time in which one call, or a batch of calls, is retried. Pauses have full jitter and last at most 0.5 s.

    Args:
        seconds: the time until the deadline.
        started: the value of `monotonic()` from which `seconds` count; None: now.
        attempt: the seconds one try may wait for its reply; None: the timeout of the connection.
    """

    __slots__ = ("_attempt", "_deadline", "_executed", "_reason", "_seconds", "_tries")

    def __init__(self, seconds: float, started: float | None = None, attempt: float | None = None) -> None:
        self._seconds = seconds
        self._attempt = attempt
        self._deadline = (monotonic() if started is None else started) + seconds
        self._tries = 0
        self._executed = "no"
        self._reason: Exception | None = None

    def renew(self) -> RetryBudget:
        """Return a fresh budget for the next of several sequential calls.

        The server has just answered, and a part of the work is done.
        """
        budget = RetryBudget(self._seconds, attempt=self._attempt)
        budget.mark_partial()
        return budget

    def mark_partial(self) -> None:
        """Mark the request as partly executed, so that a later failure reports executed="unknown"."""
        self._executed = "unknown"

    @property
    def remaining(self) -> float:
        """Seconds until the deadline, 0 when it has passed."""
        return max(0.0, self._deadline - monotonic())

    @property
    def attempt(self) -> float | None:
        """The seconds that the next try may take, never beyond the deadline. None: the timeout of the connection."""
        remaining = self.remaining
        if self._attempt is not None:
            return min(self._attempt, max(remaining, _SHORTEST_TRY))
        return None if remaining >= SOCKET_TIMEOUT else max(remaining, _SHORTEST_TRY)

    def next_delay(self, error: Exception) -> float:
        """Return the seconds to wait before the next try, or raise the final error.

        Raises:
            ServerRejected: the error is permanent.
            StoreUnavailable: the next try would begin after the deadline. `executed` is "no" or "unknown".
            NotDurable: the call was executed, but its write is not durable in time.
        """
        if isinstance(error, NotReplicated):
            return self._replication_delay(error)
        if not is_transient(error):
            raise ServerRejected(describe_rejection(error)) from error
        if _execution_state(error) == "unknown":
            self._executed = "unknown"
        if self._reason is None or not isinstance(error, rx.TimeoutError):
            self._reason = error  # the deadline cuts the last try short, and its time-out explains nothing
        self._tries += 1
        seconds = retry_pause(self._tries)
        if monotonic() + seconds >= self._deadline:
            reason = self._reason
            text = f"no answer from the store after {self._tries} tries: {type(reason).__name__}: {reason}"
            raise StoreUnavailable(text + suggest_server(reason), self._executed) from reason
        return seconds

    def _replication_delay(self, error: NotReplicated) -> float:
        # A retry returns the stored reply and waits for the durability of the first write.
        self._tries += 1
        self._executed = "unknown"
        seconds = retry_pause(self._tries)
        if not error.transient or monotonic() + seconds >= self._deadline:
            raise NotDurable(f"written to the primary's memory, but not as durable as asked: {error}") from error
        return seconds

    def redirect_delay(self, redirects: int) -> float:
        """Return the seconds to wait before a call follows a moved slot.

        Args:
            redirects: how often this call was redirected before. The first redirect does not wait.

        Raises:
            StoreUnavailable: too many redirects, or the deadline is near.
        """
        seconds = retry_pause(redirects) if redirects else 0.0
        if redirects == MAX_REDIRECTS or monotonic() + seconds >= self._deadline:
            raise StoreUnavailable("the slots of the topic are being moved", self._executed)
        return seconds


_SHORTEST_TRY = 0.05
"""Seconds that a try has even if the deadline has passed: a call with `timeout=0` is sent, too."""
MAX_REDIRECTS = 150
"""The most redirects of one call. Each is a nested call, and Python bounds the depth. They take over half a minute."""


# -- the steps of a call ----------------------------------------------------------------------------------------------


class Send(NamedTuple):
    """A step: send one call. It gives the reply, or one of `FAILURES` as a value."""

    call: Call[Any]
    budget: RetryBudget


class SendAll(NamedTuple):
    """A step: send calls together. It gives their replies with errors among them, or one of `FAILURES` as a value."""

    calls: Sequence[Call[Any]]
    budget: RetryBudget


class SendPlain(NamedTuple):
    """A step: send the plain commands of calls of many keys together.

    It gives the replies, errors among them, or one of `FAILURES` as a value. None: nothing was sent, because the server
    is not known to have these commands.
    """

    calls: Sequence[PerKeyCall[Any]]
    budget: RetryBudget


Steps = Generator[Send | SendAll | SendPlain | float, Any, T]
"""The steps to an answer; a number is a pause in seconds. `SyncLink` takes them blocking, `AsyncLink` awaiting."""


def retry_call(call: Call[T], budget: RetryBudget, redirects: int = 0) -> Steps[T]:
    """Send a call until it has an answer. Retries carry the same ids."""
    reply = yield Send(call, budget)
    while isinstance(reply, FAILURES):
        yield budget.next_delay(reply)
        reply = yield Send(call, budget)
    return (yield from resolve_reply(call, reply, budget, redirects))


def resolve_reply(call: Call[T], reply: list[Any], budget: RetryBudget, redirects: int = 0) -> Steps[T]:
    """Return the answer in a reply. Follow a moved slot, and continue an incomplete call."""
    try:
        return call.answer(reply)
    except Incomplete as incomplete:
        rest = incomplete.rest
        return rest.join((yield from _retry_all(rest.calls, budget.renew)))  # type: ignore[no-any-return]
    except SlotMoved as moved:
        redirect, by = call.redirect, moved.by
    assert redirect is not None, "SlotMoved needs a redirect"
    yield budget.redirect_delay(redirects)
    destination = redirect.resolve((yield from retry_call(redirect.lookup(), budget)), by)
    return destination.join((yield from _retry_all(destination.calls, lambda: budget, redirects + 1)))  # type: ignore[no-any-return]


def _retry_all(calls: Iterable[Call[Any]], budget: Callable[[], RetryBudget], redirects: int = 0) -> Steps[list[Any]]:
    answers: list[Any] = []
    for call in calls:
        answer = yield from retry_call(call, budget(), redirects)
        answers.append(answer)
    return answers


def run_batch(calls: Sequence[Call[Any]], budget: RetryBudget) -> Steps[list[Any]]:
    """Send calls together and return their answers."""
    replies, answers = (yield from _send_together(calls, budget)), list[Any]()
    for call, reply in zip(calls, replies, strict=True):
        answers.append((yield from retry_or_resolve(call, reply, budget)))
        budget.mark_partial()
    return answers


def run_each(calls: Sequence[PerKeyCall[Any]], budget: RetryBudget) -> Steps[list[Any]]:
    """Send calls together and return one outcome for each of their keys: an answer, or a StoreError as a value.

    Plain commands go first, where the calls and the server have them. Scripts get the keys for which they gave no
    answer.
    """
    answers = None
    if calls and all(call.plain_terms is not None for call in calls):
        try:
            answers = yield from _run_plain(calls, budget)
        except StoreError as error:
            return [error for call in calls for _ in call.keys]
    if answers is None:
        return (yield from _run_scripts(calls, budget))
    left, end = list[PerKeyCall[Any]](), 0
    for call in calls:
        start, end = end, end + len(call.keys)
        if None in (own := answers[start:end]):
            left.append(call.only([place for place, answer in enumerate(own) if answer is None]))
    outcomes = iter((yield from _run_scripts(left, budget)))
    return [next(outcomes) if answer is None else answer for answer in answers]


def _run_plain(calls: Sequence[PerKeyCall[Any]], budget: RetryBudget) -> Steps[list[Any] | None]:
    """Send the plain commands of calls once. Return an answer for each key, and None where its script must be asked.

    None: the scripts must be asked for all.
    """
    asked = monotonic()
    replies: list[Any] | rx.RedisError | None = yield SendPlain(calls, budget)
    if isinstance(replies, FAILURES):
        yield budget.next_delay(replies)
    if not isinstance(replies, list):
        return None
    budget.mark_partial()
    answers, undo, end = list[Any](), list[Call[Any]](), 0
    for call in calls:
        start, end = end, end + len(call.keys) * (2 if call.pair else 1)
        own, more = call.read_plain(replies[start:end], asked)
        answers += own
        undo += more
    if undo:
        undone: list[Any] | rx.RedisError = yield SendAll(undo, budget)
        for one in [undone] if isinstance(undone, Exception) else undone:
            if isinstance(one, Exception) and not isinstance(one, rx.ResponseError):
                lost = undo_is_lost(one)
                return [lost if answer is None else answer for answer in answers]
    return answers


def undo_is_lost(error: BaseException) -> StoreUnavailable:
    """Return the error of a call whose second plain command was refused, and the undo of the first got no reply.

    The script must not be asked then: the undo may still arrive, and delete what the script has granted.
    """
    return StoreUnavailable(f"the claim was not taken back: {type(error).__name__}: {error}", "unknown")


def _run_scripts(calls: Sequence[PerKeyCall[Any]], budget: RetryBudget) -> Steps[list[Any]]:
    outage, outcomes = None, list[Any]()
    try:
        replies = yield from _send_together(calls, budget)
    except StoreError as error:
        return [error for call in calls for _ in call.keys]
    for call, reply in zip(calls, replies, strict=True):
        if outage is not None and needs_retry(reply):
            outcomes += [outage] * len(call.keys)
            continue
        try:
            outcomes += yield from retry_or_resolve(call, reply, budget)
        except StoreError as error:
            outcomes += [error] * len(call.keys)
            outage = outage if isinstance(error, KEY_ERRORS) else error
    return outcomes


def retry_or_resolve(call: Call[T], reply: Any, budget: RetryBudget) -> Steps[T]:
    """Resolve a reply of a batch. Without a reply, send the call again with the same ids."""
    return retry_call(call, budget) if needs_retry(reply) else resolve_reply(call, reply, budget)


def _send_together(calls: Sequence[Call[Any]], budget: RetryBudget) -> Steps[Sequence[Any]]:
    if len(calls) < 2:
        return [None] * len(calls)
    replies: Sequence[Any] | rx.RedisError = yield SendAll(calls, budget)
    if isinstance(replies, FAILURES):
        yield budget.next_delay(replies)
        return [None] * len(calls)
    if not all(map(needs_retry, replies)):
        budget.mark_partial()
    lost = next((reply for reply in replies if isinstance(reply, rx.ConnectionError | rx.TimeoutError)), None)
    if lost is not None:  # the other nodes of a cluster may have answered well
        yield budget.next_delay(lost)
    return replies


# -- texts for the user, and failovers ---------------------------------------------------------------------------------

_FAILOVER = re.compile(
    r"(READONLY|LOADING|MASTERDOWN|NOREPLICAS|UNBLOCKED)\b"
    r"|.*: -(READONLY|MASTERDOWN|NOREPLICAS) "  # the wording of Redis 6.2 when the first write of a script is refused
    r"|.*replica instances",  # a replica answers this to WAIT and WAITAOF
    re.DOTALL,
)
_CLUSTER_URL = "use redis+cluster://HOST:PORT[,HOST:PORT...], without the number of a database"
_FIXES = (
    (r"CROSSSLOT|not allowed in cluster mode", f"The server is a node of a cluster: {_CLUSTER_URL}"),
    (
        r"unknown command '?`?(EVAL|SELECT)",
        "A sentinel answers like this: if it is one, use redis+sentinel://HOST:PORT[,HOST:PORT...]/SERVICE",
    ),
    (r"unknown command '?`?SENTINEL", "The URL must name sentinels; for a server without them use redis://HOST:PORT"),
    (r"cluster support disabled", "The server is no node of a cluster: use redis://HOST:PORT"),
    (r"NOAUTH|unauthenticated|Authentication required", "Add the password: redis://USER:PASSWORD@HOST:PORT"),
    (r"WRONGPASS|invalid username-password", "Correct the user name and the password of the URL or the client"),
    (r"without any password configured", "The server has no password: leave it out, or set requirepass there"),
)


def suggests_failover(error: object) -> bool:
    """Return whether an error suggests that the address now leads to another server, which is the primary."""
    return isinstance(error, rx.ResponseError) and _FAILOVER.match(str(error)) is not None


_NOT_ALLOWED = "this user's access list does not allow it"
_NAMED_ALONE = "but the URL names it alone"


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if the server refused a write because it is out of memory. It may refuse to create what exists."""
    return isinstance(error, ServerRejected) and "'maxmemory'" in str(error)


def is_refused(error: BaseException) -> bool:
    """Return True if the access list of the user refused the call."""
    return isinstance(error, ServerRejected) and _NOT_ALLOWED in str(error)


_CLIENTS = ("redis.exceptions", "valkey.exceptions")
_MOST_CAUSES = 20
_OF_SERVER = frozenset({
    "ConnectionError", "TimeoutError", "ReadOnlyError", "OutOfMemoryError", "NoPermissionError", "ClusterDownError",
    "MasterDownError",
})  # fmt: skip
"""The errors of redis-py and valkey-py that tell a handler of a failed server."""


def is_of_store(error: BaseException | None) -> bool:
    """Return True if this error, or a cause of it, says that a server failed."""
    for _ in range(_MOST_CAUSES):
        if error is None:
            return False
        names = {one.__name__ for one in type(error).__mro__ if one.__module__ in _CLIENTS}
        if (
            isinstance(error, StoreUnavailable | ServerRejected)
            or names & _OF_SERVER
            or ("ResponseError" in names and str(error).startswith(_TRANSIENT))
        ):
            return True
        error = error.__cause__
    return False


def lacks_cluster_url(error: Exception) -> bool:
    """Return whether a node of a cluster redirected a request of a gate whose URL names no cluster.

    No retry helps. The node may serve other requests, since it has some of the keys.
    """
    return isinstance(error, ServerRejected) and _NAMED_ALONE in str(error)


def explain_redirect(error: T) -> T | rx.ResponseError:
    """Return the error to raise for a reply to a client that does not follow redirects. Others pass unchanged.

    MOVED and ASK then never go away. A cluster that is down may come up: only the text changes.
    """
    word = str(error).partition(" ")[0] if isinstance(error, rx.ResponseError) else ""
    if word in ("MOVED", "ASK"):
        return rx.ResponseError(f"the server is a node of a cluster ({error}), {_NAMED_ALONE}: {_CLUSTER_URL}")
    if word == "CLUSTERDOWN":
        return rx.ResponseError(f"{error}. The server is a node of a cluster: {_CLUSTER_URL}")
    return error


_DENIED = re.compile(r"NOPERM|no permissions|can't run this command|can't access at least one|ACL failure in script")
_SHA = re.compile(r"(?<![0-9a-f])[0-9a-f]{40}(?![0-9a-f])")
_ARGUMENTS = re.compile(r", with args beginning with:.*", re.DOTALL)


def describe_rejection(error: Exception) -> str:
    """Return the server's text with script names instead of SHA-1 digests, without arguments, and with the fix."""
    text = _ARGUMENTS.sub("", str(error))
    if not _DENIED.search(text):
        fix = next((f". {fix}" for pattern, fix in _FIXES if re.search(pattern, text)), "")
        return f"the server refused: {text.removesuffix('.') if fix else text}{fix}"
    script_names = {variant(name).sha.decode(): name for name in names() for variant in (script, checked_script)}
    text = _SHA.sub(lambda match: script_names.get(match[0], match[0]), text)
    return f"{_NOT_ALLOWED}: {text}. Run `idemgate acl` to print what each role needs"


_REFUSED = re.compile(r"[Cc]onnection refused|Connect call failed|Err(?:or|no) (?:2|61|111) connecting to")
"""Texts of the errors for an address at which no server listens: Linux, macOS, asyncio, a missing unix socket."""


def suggest_server(error: Exception) -> str:
    """Return the fix for an address at which no server listens, or an empty text."""
    if not _REFUSED.search(str(error)):
        return ""
    return " No server listens there: correct the address, or start a server, for example with `idemgate server`"
