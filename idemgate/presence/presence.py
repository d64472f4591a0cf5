"""The thread that reports what this process does, every ten seconds and for each gate that it uses.

One thread serves all gates of the process, with a connection for each. It is not the thread that renews leases: a
report calls the user's `redact`, and a store that answers slowly keeps it waiting. Neither may delay a renewal. It
refers to gates weakly, so a gate that is dropped needs no `close`.

A gate that did nothing reports nothing. Its first call starts the reports, the first one a second later. So a short
program sends none. A gate with a test clock does not report: `beat` sends one report.
"""

from __future__ import annotations

import atexit
import logging
import threading
from contextlib import suppress
from typing import TYPE_CHECKING
from weakref import WeakSet

from idemgate.core.calls import new_id
from idemgate.core.clock import monotonic
from idemgate.core.forks import fork_counter, lock_reset_at_fork, run_in_child
from idemgate.core.text import one_line
from idemgate.core.validation import check_blocking
from idemgate.errors import InvalidArgument, StoreUnavailable
from idemgate.presence.calls import EXPIRES, INTERVAL, beat, leave
from idemgate.presence.compose import Composer
from idemgate.store.context import Context, Redact

if TYPE_CHECKING:
    from idemgate.store.sync import SyncLink

__all__ = ["Presence", "make_observer"]

log: logging.Logger = logging.getLogger("idemgate.presence")
FIRST_AFTER = 1.0
"""Seconds from the first call of a gate to its first report."""
TIMEOUT = 1.0
"""Seconds that one report may take."""
NAMED_EVERY = 6
"""Each so many reports, once a minute, the name of the process is stored again: so its end is known for 30 days."""
LEAVE_TIMEOUT = 0.5
"""Seconds by which the end of a program may be delayed."""
NEVER = float("inf")


def make_observer(context: Context, presence: bool, redact: Redact | None) -> Presence | None:
    """Return the reports of a gate, or None without `presence`. Raises InvalidArgument; see `Gate`."""
    if not isinstance(presence, bool):
        raise InvalidArgument("presence", presence, "neither True nor False", "Pass one of them")
    if redact is not None:
        check_blocking(redact, "redact", "Pass a plain function of the kind and the text")
    return Presence(context) if presence else None


class Presence:
    """The reports of one gate in this process. It is the observer of the gate's context."""

    def __init__(self, context: Context) -> None:
        self.due: float = NEVER
        self._ended = False
        self._context = context
        self._lock = lock_reset_at_fork(self, "_lock")
        self._link: SyncLink | None = None
        self._refused = False
        self._reset()

    def _reset(self) -> None:
        # A forked child is another process.
        self._forks = fork_counter.count
        self._id = new_id().hex()
        self._stored_until = 0.0
        self._sent = 0
        self._composer = Composer(self._context)

    def begin(self) -> None:
        """Start the reports, unless a test clock or the access list of the user prevents them."""
        if self._context.clock is None and not self._refused:
            self.due, self._ended = monotonic() + FIRST_AFTER, False
            beats.add(self)

    def end(self) -> None:
        """Stop the reports and remove this process from the store. It waits for half a second at most."""
        beats.discard(self)
        namespace, clock = self._context.namespace, self._context.clock
        with self._lock:  # a report under way ends first, or it would bring the process back
            self.due, self._ended = NEVER, True
            link, self._link = self._link, None
            if link is None:
                return
            if self._forks == fork_counter.count and monotonic() < self._stored_until:
                with suppress(Exception):  # then it expires
                    link.run(leave(namespace, clock, self._id), LEAVE_TIMEOUT, LEAVE_TIMEOUT)
            link.close()

    def beat(self) -> None:
        """Send one report. An error is counted and logged; after a refusal by the access list no other is sent."""
        try:
            with self._lock:
                if self._ended:  # since the thread looked
                    return
                self.due = monotonic() + INTERVAL
                self._send()
        except StoreUnavailable:
            self._context.counters.add("presence.failed")
        except Exception as error:  # noqa: BLE001 - no error of a report may end those of other gates
            self._context.counters.add("presence.failed")
            self._report_error(error)

    def _send(self) -> None:
        from idemgate.store.sync import SyncLink  # late: importing redis-py is slow

        if self._forks != fork_counter.count:
            self._reset()
        context, started = self._context, monotonic()
        if self._link is None:
            self._link = SyncLink(context.endpoint, TIMEOUT)
        report = self._composer.compose()
        named = self._sent % NAMED_EVERY == 0
        self._link.run(beat(context.namespace, context.clock, self._id, report, named=named), TIMEOUT, TIMEOUT)
        self._sent += 1
        self._stored_until = started + EXPIRES

    def _report_error(self, error: Exception) -> None:
        from idemgate.store.retry import is_refused  # late: it imports redis-py

        if is_refused(error):
            self._refused, self.due = True, NEVER
            beats.discard(self)
            fix = "Give the user the rights that `idemgate acl` prints, or make the gate with presence=False"
            log.warning("presence.refused error=%s. %s", one_line(error), fix, extra={"error": str(error)})
        else:
            log.warning("presence.failed error=%s", one_line(error), extra={"error": str(error)})


class _Beats:
    """The thread of this process. The first gate starts it, and it ends when no gate reports any more."""

    def __init__(self) -> None:
        self._registered = False
        self.reset()

    def reset(self) -> None:
        """Forget the thread and the gates of the parent, in a forked child."""
        self._gates: WeakSet[Presence] = WeakSet()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(self, gate: Presence) -> None:
        """Call `gate.beat` each time it is due."""
        with self._changed:
            self._gates.add(gate)
            if not self._registered:  # after the embedded server, so that it runs before that one is stopped
                atexit.register(self.end_all)
                self._registered = True
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="idemgate-presence", daemon=True)
                self._thread.start()
            self._changed.notify()

    def discard(self, gate: Presence) -> None:
        """Call `gate.beat` no more."""
        with self._changed:
            self._gates.discard(gate)
            self._changed.notify()

    def end_all(self) -> None:
        """Remove all gates of this process from their stores."""
        for gate in self._copy():
            gate.end()

    def _copy(self) -> list[Presence]:
        with self._changed:
            return list(self._gates)

    def _run(self) -> None:
        while self._wait_due():
            self._beat_due()

    def _beat_due(self) -> None:
        """Call each gate that is due. It is a function so that no variable refers to a gate while the thread waits."""
        now = monotonic()
        for gate in self._copy():
            if gate.due <= now:
                gate.beat()

    def _wait_due(self) -> bool:
        """Wait until a gate is due. Return False if there is none any more."""
        with self._changed:
            while True:
                soonest = min((gate.due for gate in self._gates), default=NEVER)
                if soonest == NEVER:
                    self._thread = None
                    return False
                if (left := soonest - monotonic()) <= 0:
                    return True
                self._changed.wait(left)


beats: _Beats = _Beats()
run_in_child(beats.reset)
