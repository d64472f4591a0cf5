"""Heartbeats: one thread with a connection of its own renews every lease of the process.

A thread, because a coroutine of a blocked event loop cannot; a connection of its own, because a pool that the
handlers have emptied cannot. It cannot beat while C code holds the GIL: a lease should be three times the longest
such hold.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from time import monotonic

from idemgate.core.calls import Batch
from idemgate.errors import IdemgateError
from idemgate.link.sync import SyncLink

__all__ = ["Beat", "Pulse"]

log = logging.getLogger("idemgate.lease")


class Beat:
    """Something to keep alive: `renew` builds the calls, whose `join` is told the answers; `lease` is in seconds.

    `lost` is called from the heartbeat's thread, once, when no renewal succeeded for so long that the lease may be
    gone.
    """

    __slots__ = ("due", "interval", "last", "lease", "lost", "renew")

    def __init__(self, lease: float, renew: Callable[[], Batch[None]], lost: Callable[[], None]) -> None:
        self.lease = lease
        self.interval = lease / 6
        self.renew = renew
        self.lost = lost
        self.last = monotonic()
        self.due = self.last + self.interval


class Pulse:
    """The heartbeat thread of one gate, started with the first beat."""

    def __init__(self, link: Callable[[], SyncLink]) -> None:
        self._make = link
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._beats: set[Beat] = set()
        self._wake = threading.Condition()
        self._sleeps_until = 0.0
        self._thread: threading.Thread | None = None
        self._link: SyncLink | None = None
        self._closed = False

    def add(self, beat: Beat) -> None:
        if self._pid != os.getpid():
            self._reset()  # a forked child keeps nothing alive for its parent
        with self._wake:
            self._beats.add(beat)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="idemgate-heartbeat", daemon=True)
                self._thread.start()
            elif beat.due < self._sleeps_until:
                self._wake.notify()

    def remove(self, beat: Beat) -> None:
        with self._wake:
            self._beats.discard(beat)

    def close(self) -> None:
        with self._wake:
            self._closed = True
            self._wake.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(2.0)
        if self._link is not None:
            self._link.close()
        self._reset()

    def _run(self) -> None:
        self._link = self._make()
        while (due := self._next()) is not None:
            for beat in due:
                self._beat(beat)

    def _next(self) -> list[Beat] | None:
        """The beats that are due, after having slept until one is; None when closed."""
        with self._wake:
            while not self._closed:
                now = monotonic()
                due = [beat for beat in self._beats if beat.due <= now]
                if due:
                    return due
                soonest = min((beat.due for beat in self._beats), default=now + 60)
                self._sleeps_until = soonest
                self._wake.wait(soonest - now)
        return None

    def _beat(self, beat: Beat) -> None:
        assert self._link is not None
        started = monotonic()
        beat.due = started + beat.interval
        try:
            self._link.run_all(beat.renew())
            beat.last = started
        except IdemgateError as error:
            log.warning("lease.renewal_failed", extra={"error": str(error)})
            if monotonic() - beat.last > beat.lease - beat.interval:
                self.remove(beat)
                beat.lost()
        except Exception:
            log.exception("lease.renewal_failed")
