"""The downstream service of one topic: while it is unavailable, the worker takes no messages of the topic."""

from __future__ import annotations

import logging

from idemgate.store.context import Context

__all__ = ["Downstream"]

log = logging.getLogger("idemgate.worker")
SHORTEST_PAUSE = 0.1
"""Seconds. A topic without backoff must not ask an unavailable service in a busy loop."""


class Downstream:
    """The state of a downstream service, from what the handlers of a topic raise.

    After a failure the topic pauses. Then one delivery at a time tests the service, until one succeeds. Time is that of
    the gate's test clock, or monotonic.

    Attributes:
        failures: Number of pauses since the last success; 0 while the service is available.
    """

    def __init__(self, context: Context, topic: str) -> None:
        self.failures = 0
        self._context = context
        self._topic = topic
        self._began = 0.0
        self._resumes_at = 0.0

    @property
    def pause(self) -> float:
        """The seconds until the topic may take messages; 0 if it may now."""
        return max(0.0, self._resumes_at - self._context.now()) if self.failures else 0.0

    def begin_pause(self, seconds: float, error: BaseException) -> None:
        """Pause the topic after a failure. Log the first failure of an outage."""
        now = self._context.now()
        if not self.failures:
            self._began = now
            facts = {"topic": self._topic, "error": str(error)}
            log.warning("worker.downstream_unavailable topic=%r error=%r", *facts.values(), extra=facts)
        self.failures += 1
        self._resumes_at = now + max(SHORTEST_PAUSE, seconds)

    def end_outage(self) -> None:
        """Take messages without limit again, after a success."""
        if self.failures:
            self.failures = 0
            facts = {"topic": self._topic, "seconds": round(self._context.now() - self._began, 3)}
            log.warning("worker.downstream_back topic=%r seconds=%g", *facts.values(), extra=facts)

    def room(self, free: int, in_flight: int) -> int:
        """Return how many of `free` places the topic may use: none in a pause, and one to test the service."""
        if not self.failures:
            return free
        return 0 if self.pause else min(free, 1 - in_flight)
