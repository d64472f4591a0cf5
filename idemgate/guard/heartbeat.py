"""Renew the lease of a claim until its completion is answered; wait for another owner's claim to end."""

from __future__ import annotations

import logging
from asyncio import _get_running_loop, current_task
from collections.abc import Sequence
from threading import get_ident
from typing import NamedTuple, Self

from idemgate.core.backoff import SOCKET_TIMEOUT
from idemgate.core.calls import Batch
from idemgate.core.clock import monotonic
from idemgate.core.keys import text_of
from idemgate.guard.claim_calls import Renewal, register_retention
from idemgate.guard.current import Execution, get_current, set_current
from idemgate.guard.request import INFINITE, Grant, build_renewal, log_facts
from idemgate.store.context import Context, Running
from idemgate.store.heartbeat import LeaseRenewal

__all__ = ["EndTimeouts", "Heartbeat", "NoHeartbeat", "end_timeouts", "register_scope"]

log = logging.getLogger("idemgate.once")


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
    longer than `max_run` is renewed no more.
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
        self.lease = options.lease / 1000
        self.interval = options.lease / 6000
        self.last = grant.leased_at
        self.due = self.last + self.interval
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
        request = self._grant.request
        return Running(request.options.scope, text_of(request.key), self._grant.leased_at, self._runs_in)

    def renew(self) -> tuple[Batch[None], ...]:
        """Build the renewal; called by the heartbeat thread."""
        now = monotonic()
        if now >= self._ends and not self._execution.has_ended:
            self._stop_hung_run()
            return ()
        return (Batch([build_renewal(self._grant, self._extended_until - now)], self._record_renewal),)

    def _stop_hung_run(self) -> None:
        """Let the lease of a run end that takes longer than `max_run`."""
        self._context.heartbeat.remove(self)
        self._execution.lose()
        self._context.counters.add("once.max_run_exceeded")
        facts = log_facts(self._grant.request)
        log.error("once.max_run_exceeded scope=%r key=%r", *facts.values(), extra=facts)

    def _record_renewal(self, answers: list[Renewal]) -> None:
        """Mark the lease as lost if the server refused the renewal, and the run as cancelled if it says so."""
        if answers[0] == "cancelled":
            self._execution.cancel()
        elif answers[0] == "lost":
            # After the work has ended the completion reports a loss.
            self._lose()

    def overdue(self) -> None:
        """Mark the lease as lost because no renewal succeeded in time."""
        if not self._execution.has_ended:
            self._lose()

    def _lose(self) -> None:
        self._context.heartbeat.remove(self)
        if self._execution.lose():
            self._context.counters.add("once.lease_lost")
            facts = log_facts(self._grant.request)
            log.warning("once.lease_lost scope=%r key=%r", *facts.values(), extra=facts)


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
        self.interval = 60.0
        self.due = self.last + REGISTER_AFTER
        self._context = context
        self._scope = (scope, retention)

    def renew(self) -> Sequence[Batch[None]]:
        """Build the call."""
        return (Batch([register_retention(self._context, *self._scope)], self._end),)

    def _end(self, _: list[int]) -> None:
        self._context.heartbeat.remove(self)

    def overdue(self) -> None:
        """Ignore it: the gate is closed."""
