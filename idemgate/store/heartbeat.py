"""Heartbeats: one thread with a connection of its own renews every lease of the process.

A thread, because a coroutine of a blocked event loop cannot; a connection of its own, because a pool that the handlers
have emptied cannot. It cannot beat while C code holds the GIL: a lease should be three times the longest such hold.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from time import monotonic
from typing import TYPE_CHECKING

from idemgate.core.calls import Batch
from idemgate.errors import StoreUnavailable
from idemgate.store.forks import forks

if TYPE_CHECKING:
    from idemgate.store.sync import SyncLink

__all__ = ["Beat", "Kept", "Pulse"]

log = logging.getLogger("idemgate.lease")
NEVER = float("inf")


class Kept(ABC):
    """Something to keep alive; `lease` is in seconds. Its methods, and the `join` of what `renew` builds, are called
    from the heartbeat's thread."""

    __slots__ = ("due", "interval", "last", "lease")

    def __init__(self, lease: float) -> None:
        self.lease = lease
        self.interval = lease / 6
        self.last = monotonic()
        self.due = self.last + self.interval

    @abstractmethod
    def renew(self) -> Batch[None]:
        """The calls that renew it, whose `join` is told the answers."""

    @abstractmethod
    def overdue(self) -> None:
        """Called when no renewal succeeded for so long that the lease may end before the next one, and again with every
        further failure until this is removed."""


class Beat(Kept):
    """One that is made of functions."""

    __slots__ = ("_overdue", "_renew")

    def __init__(self, lease: float, renew: Callable[[], Batch[None]], overdue: Callable[[], None]) -> None:
        super().__init__(lease)
        self._renew = renew
        self._overdue = overdue

    def renew(self) -> Batch[None]:
        return self._renew()

    def overdue(self) -> None:
        self._overdue()


class Pulse:
    """The heartbeat thread of one gate, started with the first beat."""

    def __init__(self, link: Callable[[], SyncLink]) -> None:
        self._make = link
        self._reset()

    def _reset(self) -> None:
        # A forked child keeps nothing alive for its parent, and must not wait for a lock that was held at the fork.
        self._forks = forks.count
        self._beats: set[Kept] = set()
        self._wake = threading.Condition()
        self._sleeps_until = NEVER
        self._shortest = 60.0
        self._thread: threading.Thread | None = None

    def add(self, beat: Kept) -> None:
        if self._forks != forks.count:
            self._reset()
        self._beats.add(beat)
        # Without the lock, which costs more than the rest: while the thread looks at the beats, it sleeps until never.
        if beat.due < self._sleeps_until:
            with self._wake:
                self._shortest = min(self._shortest, beat.interval)
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="idemgate-heartbeat", daemon=True)
                    self._thread.start()
                self._wake.notify()

    def remove(self, beat: Kept) -> None:
        if self._forks != forks.count:
            self._reset()
        self._beats.discard(beat)

    def close(self) -> None:
        """Ends the thread; one that waits for the store ends when it has its answer."""
        if self._forks != forks.count:
            self._reset()
        with self._wake:
            thread, self._thread = self._thread, None
            self._sleeps_until = NEVER
            self._beats.clear()
            self._wake.notify()
        if thread is not None and thread is not threading.current_thread():
            thread.join(2.0)

    def _run(self) -> None:
        link = self._make()
        try:
            while due := self._next():
                self._beat(link, due)
        finally:
            link.close()

    def _next(self) -> list[Kept]:
        """The beats that are due, after having slept until one is; none when closed."""
        with self._wake:
            while self._thread is threading.current_thread():
                self._sleeps_until = NEVER
                beats, now = tuple(self._beats), monotonic()
                due = [beat for beat in beats if beat.due <= now]
                if due:
                    return due
                # With nothing to keep alive it wakes as if there were: what is added next then need not wake it.
                soonest = min((beat.due for beat in beats), default=now + self._shortest)
                self._sleeps_until = soonest
                self._wake.wait(soonest - now)
        return []

    def _beat(self, link: SyncLink, beats: Sequence[Kept]) -> None:
        """Renews all that are due in one round trip: while the store is away, the last to fail must not fail late."""
        started = monotonic()
        for beat in beats:
            beat.due = started + beat.interval
        try:
            batches = [beat.renew() for beat in beats]
            answers = iter(link.run_all(Batch([call for batch in batches for call in batch.calls], list)))
            for beat, batch in zip(beats, batches, strict=True):
                batch.join([next(answers) for _ in batch.calls])
                beat.last = started
        except Exception as error:  # noqa: BLE001 - whatever is wrong with one lease, the others need their heartbeat
            if len(beats) == 1 or isinstance(error, StoreUnavailable):
                self._failed(beats, error)
            else:
                for beat in beats:
                    self._beat(link, [beat])

    def _failed(self, beats: Sequence[Kept], error: Exception) -> None:
        log.warning("lease.renewal_failed", extra={"leases": len(beats), "error": str(error)})
        for beat in beats:
            if monotonic() - beat.last > beat.lease - beat.interval:
                beat.overdue()
