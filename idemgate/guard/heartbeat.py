"""Jobs of the heartbeat thread for guarded keys: renew leases, store the retention of scopes, send notes."""

from __future__ import annotations

import logging
from asyncio import _get_running_loop, current_task
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from threading import get_ident
from typing import Any, NamedTuple, Self

from idemgate.core import keys
from idemgate.core.backoff import SOCKET_TIMEOUT
from idemgate.core.calls import MAX_ENTRIES, Batch, Call, call, stamp
from idemgate.core.clock import monotonic
from idemgate.core.history import HISTORY_LASTS, KEPT, pack_transition, stored_key
from idemgate.core.keys import Key, text_of
from idemgate.core.process import actor_name
from idemgate.core.text import cut
from idemgate.guard.claim_calls import ClaimReply, Renewal, register_retention
from idemgate.guard.current import Execution, get_current, set_current
from idemgate.guard.request import INFINITE, Grant, Request, build_renewal, log_facts
from idemgate.store.context import Context, Running
from idemgate.store.heartbeat import LeaseRenewal

__all__ = [
    "EndTimeouts", "Heartbeat", "NoHeartbeat", "end_timeouts", "note", "note_history", "note_run", "register_scope",
]  # fmt: skip

log: logging.Logger = logging.getLogger("idemgate.once")


class EndTimeouts(NamedTuple):
    """The timeouts for the end of a claim, in seconds: the arguments `within` and `attempt` of `link.run`."""

    within: float
    attempt: float | None


def end_timeouts(context: Context, lease: int, *, renewed: bool = True) -> EndTimeouts:
    """Return the timeouts for the end of a claim with this lease (ms).

    A heartbeat that renews the lease lets the end be retried for the lease, where that is longer than the timeout of
    the gate. One try waits for a third of the lease at most. `attempt` is None if the socket timeout is shorter.
    """
    third = lease / 3000
    within = max(context.timeout, lease / 1000) if renewed else context.timeout
    return EndTimeouts(within, third if third < SOCKET_TIMEOUT else None)


class Heartbeat(LeaseRenewal):
    """A context manager that renews a lease every sixth of it, from the gate's heartbeat thread.

    The block includes the completion. Call `end_work` when the work has returned, and leave the block when the store
    has answered. Otherwise a completion on a slow connection could outlast the lease, and another caller would run the
    work again.

    The lease is that of `grant`, and counts from the request that started it. `execution` is marked when the lease is
    lost while the work runs. With `with_current`, `current()` returns `execution` until `end_work`. Work that runs for
    longer than `max_run` is renewed no more, and still described.
    """

    __slots__ = (
        "_context", "_ends", "_execution", "_extended_until", "_grant", "_handed_over", "_previous", "_runs_in",
        "_with_current", "_works",
    )  # fmt: skip

    def __init__(
        self,
        context: Context,
        grant: Grant,
        execution: Execution,
        with_current: bool = True,
    ) -> None:
        # As `LeaseRenewal.__init__`, inlined for speed: each guarded call makes one heartbeat.
        options = grant.request.options
        self.failures = 0
        self.lease: float = options.lease / 1000
        self.interval: float = options.lease / 6000
        self.last: float = grant.leased_at
        self.due: float = self.last + self.interval
        self._ends = monotonic() + options.max_run / 1000 if options.max_run else INFINITE
        self._context = context
        self._with_current = with_current
        self._grant = grant
        self._extended_until = 0.0
        self._execution = execution
        self._handed_over = False
        self._works = True
        self._previous = get_current() if with_current else None
        loop = _get_running_loop()
        self._runs_in: object = get_ident() if loop is None else current_task(loop)

    def __enter__(self) -> Self:
        try:
            if self._with_current:
                set_current(self._execution)
            self._context.heartbeat.add(self)
        except BaseException:  # of a signal handler: no `with` block leaves what was not entered
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if not self._handed_over:
                self._context.heartbeat.remove(self)
        finally:
            if self._works:
                self._execution.leave()
                if self._with_current:
                    set_current(self._previous)

    @property
    def execution(self) -> Execution:
        """The execution that is marked when the lease is lost."""
        return self._execution

    def end_work(self) -> None:
        """Call this when the work has returned or raised. Renewals go on."""
        self._execution.end()
        if self._with_current:
            set_current(self._previous)
        self._works = False

    def extend(self, until: float) -> None:
        """Shorten no lease that the owner has extended: until this time of the process's clock."""
        self._extended_until = until

    def hand_over(self) -> None:
        """Keep the renewals running when the block is left, until `stop`."""
        self._handed_over = True

    @property
    def is_handed_over(self) -> bool:
        """True if the renewals run until `stop`."""
        return self._handed_over

    def stop(self) -> None:
        """End the renewals that `hand_over` kept running."""
        self._context.heartbeat.remove(self)

    def describe(self) -> Running | None:
        """Return the call whose lease this renews, or None once its work has ended. Any thread may call it."""
        if self._execution.has_ended:
            return None
        request, options = self._grant.request, self._grant.request.options
        return Running(options.scope, text_of(request.key), self._grant.leased_at, self._runs_in, options.max_run)

    def renew(self) -> tuple[Batch[None], ...]:
        """Build the renewal; called by the heartbeat thread."""
        now, execution = monotonic(), self._execution
        if now >= self._ends and not (execution.has_ended or execution.lease_lost):
            self._stop_hung_run()
        if execution.lease_lost:  # by `max_run`: reports show the run until it ends
            return ()
        return (Batch([build_renewal(self._grant, self._extended_until - now)], self._record_renewal),)

    def _stop_hung_run(self) -> None:
        """Let the lease of a run end that takes longer than `max_run`."""
        self._context.counters.add("once.max_run_exceeded")
        self._execution.lose()
        facts = log_facts(self._grant.request)
        log.error("once.max_run_exceeded scope=%r key=%r", *facts.values(), extra=facts)
        note_run(self._context, self._grant.request, self._grant.reply, "max_run_exceeded")

    def _record_renewal(self, answers: list[Renewal]) -> None:
        """Mark the lease as lost if the server refused the renewal, and the run as cancelled if it says so."""
        if answers[0] == "cancelled":
            self._execution.cancel()
        elif answers[0] == "lost":
            # After the work has ended the completion reports a loss.
            self._lose()

    def overdue(self) -> None:
        """Mark the lease as lost because no renewal succeeded in time."""
        if not (self._execution.has_ended or self._execution.lease_lost):
            self._lose()

    def _lose(self) -> None:
        self._context.heartbeat.remove(self)
        if self._execution.lose():
            self._context.counters.add("once.lease_lost")
            facts = log_facts(self._grant.request)
            log.warning("once.lease_lost scope=%r key=%r", *facts.values(), extra=facts)
            note_run(self._context, self._grant.request, self._grant.reply, "lease_lost")


class NoHeartbeat:
    """The block of a run without a lease to renew. `current()` returns its execution until `end_work`."""

    __slots__ = ("_execution", "_previous")
    is_handed_over = False

    def __init__(self, execution: Execution) -> None:
        self._execution = execution
        self._previous = get_current()

    def __enter__(self) -> Self:
        try:
            set_current(self._execution)
        except BaseException:  # of a signal handler, as in `Heartbeat`
            self.end_work()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.end_work()

    def end_work(self) -> None:
        """Call this when the work has returned or raised."""
        set_current(self._previous)


def register_scope(context: Context, scope: str, retention: int) -> None:
    """Let the heartbeat thread store the retention of a scope (ms). Do nothing if this process did it before."""
    context.note_scope(scope, retention)
    known = context.registered_scopes
    if scope in context.scopes and known.get(scope, -1) < retention:
        known[scope] = retention
        context.heartbeat.add_optional(ScopeRegistration(context, scope, retention))


REGISTER_AFTER = 1.0
"""Seconds until a scope is stored. A process that ends before opens no connection for it."""


class ScopeRegistration(LeaseRenewal):
    """A call that stores the retention of a scope. The heartbeat thread repeats it each minute until it succeeds."""

    __slots__ = ("_context", "_scope")
    optional = True

    def __init__(self, context: Context, scope: str, retention: int) -> None:
        super().__init__(lease=6.0)  # a call without a reply delays other leases by a third of this
        self.interval: float = 60.0
        self.due: float = self.last + REGISTER_AFTER
        self._context = context
        self._scope = (scope, retention)

    def renew(self) -> Sequence[Batch[None]]:
        """Build the call."""
        return (Batch([register_retention(self._context, *self._scope)], self._end),)

    def _end(self, _: list[int]) -> None:
        self._context.heartbeat.remove(self)

    def overdue(self) -> None:
        """Ignore it: the gate is closed."""


# -- notes ------------------------------------------------------------------------------------------------------------
# What happened to keys outside the usual path. No caller waits for a note. What cannot be sent is dropped and counted.
# The store has a list for each scope and shard of its keys, because a record shares its cluster slot with no other key.

NOTES_AFTER = 1.0
"""Seconds until a note is sent, with all others of that second."""
MAX_NOTES = 1000
"""The most notes that wait to be sent. Older ones are dropped."""
FLUSH_TIMEOUT = 0.5
"""Seconds by which notes may delay the end of a gate."""
LONGEST_ERROR = 160
"""The most characters of the error of a note."""
_numbers = count(1)


class _Note(NamedTuple):
    """A transition of a key: its list, what is packed, when it happened (`monotonic`), and how many the list keeps."""

    history: bytes
    packed: bytes
    at: float
    kept: int


def note(
    context: Context,
    scope: str,
    key: Key,
    what: str,
    *,
    token: int = 0,
    attempt: int = 0,
    error: str = "",
    kept: int = 0,
) -> None:
    """Note what happened to a key. Any thread may call it; it does not wait.

    Args:
        context: the context of the gate.
        scope: the scope of the key.
        key: the key.
        what: the transition, one of those in docs/operations.md.
        token: the fencing token of the run, 0 for none.
        attempt: the number of the attempt, 0 if it is unknown.
        error: the error of a run that failed. The gate's `redact` changes it.
        kept: the number of transitions that its list keeps; the usual one at least.
    """
    raw_key = keys.raw(key)
    name = stored_key(raw_key, hidden=context.redact is not None)
    shown = cut(context.redact_text("error", error), LONGEST_ERROR) if error else ""
    # The number tells it from another one with the same facts (`guard/note`).
    packed = pack_transition(what, name, token, attempt, next(_numbers), actor_name(), shown)
    sender = context.notes
    if not isinstance(sender, _Sender):
        sender = context.notes = _Sender(context)
    if not sender.waiting:
        sender.due = monotonic() + NOTES_AFTER
    if len(sender.waiting) == MAX_NOTES:
        context.counters.add("history.dropped")
    sender.waiting.append(_Note(keys.scope_history(context.namespace, scope, raw_key), packed, monotonic(), kept))
    context.heartbeat.add(sender)


def note_run(context: Context, request: Request, reply: ClaimReply, what: str, error: str = "") -> None:
    """Note what happened to a run; see `note`."""
    options = request.options
    facts = {"token": reply.token, "attempt": reply.attempt, "kept": options.history}
    note(context, options.scope, request.key, what, error=error, **facts)


def note_history(context: Context, history: bytes, notes: Sequence[tuple[int, bytes]], kept: int = KEPT) -> Call[int]:
    """Build the call that stores notes of one list: the age of each in ms, and what is packed. Return their number."""
    args: list[Any] = [stamp(context.clock), kept, HISTORY_LASTS]
    for age, packed in notes:
        args += [age, packed]
    return call("guard/note", (history,), args, lambda _: len(notes))


class _Sender(LeaseRenewal):
    """Sends the notes of one gate, each once."""

    __slots__ = ("_context", "_unsent", "waiting")
    optional = True

    def __init__(self, context: Context) -> None:
        super().__init__(lease=6.0)  # a call without a reply delays other leases by a third of this
        self.due = self.last
        self.waiting: deque[_Note] = deque(maxlen=MAX_NOTES)
        self._unsent = 0
        self._context = context

    def renew(self) -> Sequence[Batch[None]]:
        """Build the calls. What they cannot store is dropped."""
        self._context.heartbeat.remove(self)
        return [Batch([one], self._confirm) for one in self._take()]

    def _confirm(self, answers: list[int]) -> None:
        self._unsent -= sum(answers)

    def note_error(self, error: Exception) -> None:  # noqa: ARG002 - each error drops what was not stored
        """Count what was not stored."""
        self._context.counters.add("history.dropped", self._unsent)

    def _take(self) -> list[Call[int]]:
        """Return the calls that store what waits: one for each list, and for each hundred of its notes."""
        self._unsent = len(self.waiting)
        taken: dict[bytes, list[tuple[int, bytes]]] = {}
        kept: dict[bytes, int] = {}
        with suppress(IndexError):
            while True:
                one = self.waiting.popleft()
                taken.setdefault(one.history, []).append((round(1000 * (monotonic() - one.at)), one.packed))
                kept[one.history] = max(one.kept, kept.get(one.history, KEPT))
        return [
            note_history(self._context, history, notes[start : start + MAX_ENTRIES], kept[history])
            for history, notes in taken.items() for start in range(0, len(notes), MAX_ENTRIES)
        ]  # fmt: skip

    def flush(self) -> None:
        """Send what waits, at the end of the gate. Drop it if the store does not take it at once."""
        try:
            for one in self._take():
                self._confirm([self._context.link.run(one, FLUSH_TIMEOUT, FLUSH_TIMEOUT)])
        except Exception as error:  # noqa: BLE001 - the end of a gate goes on
            self.note_error(error)

    def overdue(self) -> None:
        """Ignore it: the gate is closed."""
