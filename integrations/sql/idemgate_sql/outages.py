"""The log of a relay: each outage once and its end once."""

from __future__ import annotations

import logging
from time import monotonic

from idemgate import Gate
from idemgate.core.text import one_line
from idemgate_sql.failures import is_lock_timeout
from idemgate_sql.outbox_statements import Backlog

__all__ = ["Lag", "Outages", "describe"]

log: logging.Logger = logging.getLogger("idemgate.sql")
LOCK_TIMEOUTS = 3
"""How many lock time-outs in turn are an outage. Another writer of SQLite may cause a few."""
LATE = 60.0
"""Seconds after which a row is late."""


def describe(error: BaseException) -> str:
    """Return the type and text of an error in one line, with its notes. Control characters are escaped."""
    lines = [line for text in (str(error), *getattr(error, "__notes__", ())) for line in text.splitlines()]
    return one_line(f"{type(error).__name__}: {'; '.join(line.strip() for line in lines if line.strip())}"[:1000])


class Outages:
    """What a relay cannot do now: send anything, or the rows of one topic. `name` is the outbox or the topic."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._since: dict[str, float] = {}
        self._lock_timeouts = 0

    def begin(self, name: str, error: BaseException) -> None:
        """Count a failure, and log the first one of an outage."""
        self._gate.counters.add("sql.relay_failed")
        self._lock_timeouts = self._lock_timeouts + 1 if is_lock_timeout(error) else 0
        if name in self._since or 0 < self._lock_timeouts < LOCK_TIMEOUTS:
            return
        self._since[name] = monotonic()
        facts = {"outbox": name, "error": describe(error)}
        log.error("sql.relay_stalled outbox=%r: %s", *facts.values(), extra=facts)

    def end(self, name: str) -> None:
        """Log the end of an outage, if there was one."""
        self._lock_timeouts = 0
        if (since := self._since.pop(name, None)) is not None:
            facts = {"outbox": name, "seconds": round(monotonic() - since, 3)}
            log.warning("sql.relay_resumed outbox=%r seconds=%g", *facts.values(), extra=facts)


class Lag:
    """The age of the rows that a relay reads."""

    def __init__(self, gate: Gate, name: str) -> None:
        self._gate = gate
        self._name = name
        self._is_behind = False

    def begins(self, ages: list[float]) -> bool:
        """Count late rows by their ages. Return True if they are the first late ones. Log the end of a lag."""
        late = sum(age > LATE for age in ages)
        self._gate.counters.add("sql.relay_late", late)
        begins, ends = late > 0 and not self._is_behind, self._is_behind and late == 0
        self._is_behind = late > 0
        if ends:
            log.info("sql.relay_caught_up outbox=%r", self._name, extra={"outbox": self._name})
        return begins

    def report(self, backlog: Backlog) -> None:
        """Log that rows are late."""
        facts = {"outbox": self._name, "rows": backlog.rows, "seconds": round(backlog.age, 3)}
        log.warning("sql.relay_behind outbox=%r rows=%d seconds=%g", *facts.values(), extra=facts)
