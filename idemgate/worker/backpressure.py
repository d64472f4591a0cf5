"""Backpressure of one topic in one worker: its adaptive limit, and its pause while a downstream service is away."""

from __future__ import annotations

import logging
from typing import Any

from idemgate.store.context import Context
from idemgate.topics.limits import Adaptive, HandlerEnd, Limit, initial_limit, update_limit
from idemgate.topics.messages import Delivery

__all__ = ["Backpressure"]

log: logging.Logger = logging.getLogger("idemgate.worker")
SHORTEST_PAUSE = 0.1
"""Seconds. A topic without backoff must not ask an unavailable service in a busy loop."""


class Backpressure:
    """The bounds on what a worker holds of one topic, from how the topic's handlers end.

    The adaptive limit follows the duration and the errors of handlers; its rule is in `idemgate.topics.limits`. After a
    `DownstreamUnavailable` the topic pauses. Then one delivery at a time tests the service, until one succeeds. Time is
    that of the gate's test clock, or monotonic.

    Attributes:
        applies: True if the topic has an adaptive limit or an outage. Otherwise handlers need no report.
        failures: Number of pauses since the last success; 0 while the service is available.
    """

    def __init__(self, context: Context, topic: str, adaptive: Adaptive | None) -> None:
        self.applies: bool = adaptive is not None
        self.failures: int = 0
        self._context = context
        self._topic = topic
        self._adaptive = adaptive
        self._state = None if adaptive is None else initial_limit(adaptive)
        self._started: dict[tuple[int, bytes, int], float] = {}
        self._outage_began = self._resumes_at = 0.0

    @property
    def limit(self) -> int | None:
        """The adaptive limit; None if the topic has none."""
        return None if self._state is None else self._state.limit

    @property
    def pause(self) -> float:
        """The seconds until the topic may take messages; 0 if it may now."""
        return max(0.0, self._resumes_at - self._context.now()) if self.failures else 0.0

    def room(self, free: int, in_flight: int) -> int:
        """Return how many of `free` places the topic may use: none in a pause, and one to test the service."""
        if self.failures:
            free = 0 if self.pause else min(free, 1 - in_flight)
        return free if self._state is None else min(free, self._state.limit - in_flight)

    # -- the adaptive limit -------------------------------------------------------------------------------------------

    def on_handler_start(self, delivery: Delivery[Any]) -> None:
        """Record the start of a handler."""
        if self._state is not None:
            self._started[delivery.slot, delivery.raw_key, delivery.token] = self._context.now()

    def on_handler_end(self, delivery: Delivery[Any], error: BaseException | None) -> None:
        """Adjust the limit to the end of a handler, and end an outage after a success.

        The limit ignores errors unrelated to the downstream's load.
        """
        if error is None:
            self._end_outage()
        if self._adaptive is None or self._state is None:
            return
        running = len(self._started)
        started = self._started.pop((delivery.slot, delivery.raw_key, delivery.token), None)
        overloaded = isinstance(error, self._adaptive.errors)
        if started is not None and (error is None or overloaded):
            before, event = self._state, HandlerEnd(started, self._context.now(), overloaded, running)
            self._state = update_limit(self._adaptive, before, event)
            self._report_change(before, self._state.limit, overloaded)

    def _report_change(self, before: Limit, limit: int, overloaded: bool) -> None:
        if limit > before.limit:
            self._context.counters.add("worker.limit_raised")
            log.debug("worker.limit_raised", extra={"topic": self._topic, "limit": limit})
        elif limit < before.limit:
            self._context.counters.add("worker.limit_lowered")
            reason = {"usual": round(before.usual, 6), "overloaded": before.overloaded + overloaded}
            log.warning("worker.limit_lowered", extra={"topic": self._topic, "limit": limit, **reason})

    # -- outages of the downstream service ----------------------------------------------------------------------------

    def begin_pause(self, seconds: float, error: BaseException) -> None:
        """Pause the topic after a failure. Log the first failure of an outage."""
        now = self._context.now()
        if not self.failures:
            self._outage_began = now
            facts = {"topic": self._topic, "error": str(error)}
            log.warning("worker.downstream_unavailable topic=%r error=%r", *facts.values(), extra=facts)
        self.applies = True
        self.failures += 1
        self._resumes_at = now + max(SHORTEST_PAUSE, seconds)

    def _end_outage(self) -> None:
        if self.failures:
            self.failures = 0
            self.applies = self._adaptive is not None
            facts = {"topic": self._topic, "seconds": round(self._context.now() - self._outage_began, 3)}
            log.warning("worker.downstream_back topic=%r seconds=%g", *facts.values(), extra=facts)
