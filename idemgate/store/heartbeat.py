"""Heartbeats: one thread with its own connection renews every lease of the process.

A thread still runs when the event loop is blocked. A separate connection is still free when the handlers use the whole
pool. The thread cannot run while C code holds the GIL: choose a lease three times the longest such hold.

The thread refers to a renewal weakly, so its owner keeps it alive. An exception of a signal handler may end the owner
before it can remove the renewal. The lease then ends, too, and does not block its key until the process ends.

An exception about one lease never stops the renewal of the others. It is counted (`lease.renewal_error`) and logged.
The renewal is tried again like one without a reply. If no try succeeds before the lease may end, the lease is lost.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from time import sleep
from typing import TYPE_CHECKING
from weakref import ReferenceType, ref

from idemgate.core.backoff import retry_pause
from idemgate.core.calls import Batch
from idemgate.core.clock import monotonic
from idemgate.core.counters import Counters
from idemgate.core.forks import fork_counter
from idemgate.core.text import event_log, one_line
from idemgate.errors import StoreError

if TYPE_CHECKING:
    from idemgate.store.sync import SyncLink

__all__ = ["HeartbeatThread", "LeaseRenewal"]

log: logging.Logger = event_log("idemgate.lease")
NEVER = float("inf")
BUG_PAUSE = 0.1
"""Seconds until the thread goes on after an exception that concerns no single lease."""


class LeaseRenewal(ABC):
    """A lease to renew. `lease` is in seconds. `failures` is the number of failed renewals since the last success.

    The heartbeat thread calls its methods, and the `join` of each batch that `renew` returns. It renews the lease only
    as long as another object refers to this one. A failure of an `optional` one is not reported, except to itself.
    """

    optional = False

    __slots__ = ("__weakref__", "due", "failures", "interval", "last", "lease")

    def __init__(self, lease: float) -> None:
        self.failures: int = 0
        self.lease: float = lease
        self.interval: float = lease / 6
        self.last: float = monotonic()
        self.due: float = self.last + self.interval

    @abstractmethod
    def renew(self) -> Sequence[Batch[None]]:
        """Return the calls that renew the lease, in batches that fail independently of each other.

        The `join` of a batch receives its answers. The lease counts as renewed if all batches succeed.
        """

    def note_error(self, error: Exception) -> None:  # noqa: B027 - most renewals need no hook
        """Handle the first error of a renewal that failed, before the next try."""

    @abstractmethod
    def overdue(self) -> None:
        """Handle a lease that may end before the next renewal: renewals failed for too long, or the gate was closed.

        It is called again after every further failure until the renewal is removed.
        """


class HeartbeatThread:
    """The heartbeat thread of one gate. The first lease starts it."""

    def __init__(self, link: Callable[[], SyncLink], counters: Counters) -> None:
        self._open_link = link
        self._counters = counters
        self._reset()

    def _reset(self) -> None:
        # A forked child renews no leases of its parent, and must not wait for a lock held at the fork.
        self._forks = fork_counter.count
        self._renewals: set[ReferenceType[LeaseRenewal]] = set()
        self._optional: set[LeaseRenewal] = set()
        self._wake = threading.Condition()
        self._sleeps_until = NEVER
        self._shortest_interval = 60.0
        self._thread: threading.Thread | None = None

    def add(self, renewal: LeaseRenewal) -> None:
        """Start renewing a lease. Safe to call from any thread."""
        if self._forks != fork_counter.count:
            self._reset()
        self._renewals.add(ref(renewal))
        # The lock costs more than the rest, so take it only to wake the thread. While the thread reads the renewals,
        # `_sleeps_until` is NEVER, and `add` always takes the lock.
        if renewal.due < self._sleeps_until:
            with self._wake:
                self._shortest_interval = min(self._shortest_interval, renewal.interval)
                # A thread may have failed to start, or a signal handler may have raised while it did, which ends it.
                if self._thread is None or not self._thread.is_alive():
                    self._thread = threading.Thread(target=self._run, name="idemgate-heartbeat", daemon=True)
                    self._thread.start()
                self._wake.notify()

    def add_optional(self, renewal: LeaseRenewal) -> None:
        """Add a renewal of no lease, which neither starts the thread nor wakes it. It stays until `remove`."""
        if self._forks != fork_counter.count:
            self._reset()
        self._optional.add(renewal)

    def remove(self, renewal: LeaseRenewal) -> None:
        """Stop renewing a lease. An unknown one is ignored."""
        if self._forks != fork_counter.count:
            self._reset()
        self._renewals.discard(ref(renewal))
        if renewal.optional:
            self._optional.discard(renewal)

    def hasten(self, renewal: LeaseRenewal) -> None:
        """Renew a lease that was added at once, without waiting for its interval. Safe to call from any thread."""
        if self._forks != fork_counter.count:
            self._reset()
        renewal.due = monotonic()
        with self._wake:
            self._wake.notify()

    def close(self) -> None:
        """Stop the thread. A renewal in flight ends with its reply. Leases that are held become overdue."""
        if self._forks != fork_counter.count:
            self._reset()
        with self._wake:
            thread, self._thread = self._thread, None
            self._sleeps_until = NEVER
            unrenewed = [*self.living()]
            self._renewals.clear()
            self._optional.clear()
            self._wake.notify()
        for renewal in unrenewed:
            self._mark_overdue(renewal)
        if thread is not None and thread.is_alive() and thread is not threading.current_thread():
            thread.join(2.0)

    def _run(self) -> None:
        link: SyncLink | None = None
        try:
            while self._wait_due():
                try:
                    link = self._open_link() if link is None else link
                    self._renew_all(link, self._collect_due())
                except Exception as error:  # noqa: BLE001 - the leases of the gate must not end with this thread
                    with suppress(Exception):  # a filter of the user's logging may be what raised it
                        self._report_error(error)
                    sleep(BUG_PAUSE)
        finally:
            if link is not None:
                link.close()

    def _wait_due(self) -> bool:
        """Sleep until a renewal is due. Return False after `close`."""
        with self._wake:
            while self._thread is threading.current_thread():
                self._sleeps_until = NEVER
                now = monotonic()
                # Without renewals it wakes after the shortest interval, so that `add` need not wake it. While it
                # sleeps, no variable refers to a renewal.
                soonest = min((renewal.due for renewal in self.living()), default=now + self._shortest_interval)
                if soonest <= now:
                    return True
                self._sleeps_until = soonest
                self._wake.wait(soonest - now)
        return False

    def _collect_due(self) -> list[LeaseRenewal]:
        """Return the renewals that are due."""
        now = monotonic()
        return [renewal for renewal in self.living() if renewal.due <= now]

    def living(self) -> Iterator[LeaseRenewal]:
        """Yield the renewals whose owners live and drop the others. Any thread may call it."""
        # Not `tuple`: while it allocates, a finalizer or another thread may change the set, which raises RuntimeError.
        for reference in self._renewals.copy():
            if (renewal := reference()) is not None:
                yield renewal
            else:
                self._renewals.discard(reference)
        yield from self._optional.copy()

    def _renew_all(self, link: SyncLink, renewals: Sequence[LeaseRenewal]) -> None:
        """Renew leases in one round trip. A renewal without a reply is sent again soon, and delays the others little.

        A reply that does not come must leave time for another try before the shortest lease ends, due now or not.
        """
        started, batches = monotonic(), list[tuple[LeaseRenewal, Batch[None]]]()
        errors = dict[LeaseRenewal, Exception]()
        shortest = min((renewal.lease for renewal in (*renewals, *self.living())), default=0.0)
        for renewal in renewals:
            renewal.due = started + renewal.interval
            try:
                batches += [(renewal, batch) for batch in renewal.renew()]
            except Exception as error:  # noqa: BLE001 - an error about one lease must not stop the others
                errors[renewal] = error
        outcomes = _try_each(link, [batch for _, batch in batches], shortest / 3)
        for (renewal, _), outcome in zip(batches, outcomes, strict=True):
            if outcome is not None:
                errors.setdefault(renewal, outcome)
        for renewal in renewals:
            if renewal not in errors:
                renewal.last, renewal.failures = started, 0
        for renewal in [renewal for renewal in errors if renewal.optional]:
            renewal.note_error(errors.pop(renewal))
        if errors:
            self._report_failures(errors)

    def _report_failures(self, errors: Mapping[LeaseRenewal, Exception]) -> None:
        """Schedule another try of renewals that failed together. Log the first, second, fourth, eighth ... failure."""
        self._counters.add("lease.renewal_failed", len(errors))
        for renewal, error in errors.items():
            renewal.failures += 1
            renewal.due = monotonic() + min(renewal.interval, retry_pause(renewal.failures))
            if not isinstance(error, StoreError):
                self._report_error(error)
            renewal.note_error(error)
            if monotonic() - renewal.last > renewal.lease - renewal.interval:
                self._mark_overdue(renewal)
        if any(renewal.failures & (renewal.failures - 1) == 0 for renewal in errors):
            facts = {"leases": len(errors), "error": str(next(iter(errors.values())))}
            log.warning("lease.renewal_failed leases=%d: %s", len(errors), one_line(facts["error"]), extra=facts)

    def _mark_overdue(self, renewal: LeaseRenewal) -> None:
        """Call `overdue`. An exception concerns this lease only."""
        try:
            renewal.overdue()
        except Exception as error:  # noqa: BLE001 - an error about one lease must not stop the others
            self._report_error(error)

    def _report_error(self, error: Exception) -> None:
        """Count and log an exception that is no failure of the store."""
        self._counters.add("lease.renewal_error")
        log.error("lease.renewal_error error=%r", error, exc_info=error, extra={"error": repr(error)})


def _try_each(link: SyncLink, batches: list[Batch[None]], attempt: float) -> list[Exception | None]:
    """Send batches together. If they cannot even be sent because of one of them, send each alone."""
    try:
        return link.try_each(batches, attempt)
    except Exception as error:  # noqa: BLE001 - an error about one lease must not stop the others
        if len(batches) == 1:
            return [error]
        return [outcome for batch in batches for outcome in _try_each(link, [batch], attempt)]
