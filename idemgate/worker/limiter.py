"""Adaptive concurrency limit of one topic in one worker, fed with the duration and outcome of its handlers."""

from __future__ import annotations

import logging
from typing import Any

from idemgate.store.context import Context
from idemgate.topics.limits import Adaptive, HandlerEnd, Limit, initial_limit, update_limit
from idemgate.topics.messages import Delivery

__all__ = ["Limiter"]

log = logging.getLogger("idemgate.worker")


class Limiter:
    """The number of deliveries of a topic that this worker may hold.

    Time is that of the gate's test clock, or monotonic. The rule itself is in `idemgate.topics.limits`.
    """

    def __init__(self, context: Context, topic: str, adaptive: Adaptive) -> None:
        self.context = context
        self.topic = topic
        self.adaptive = adaptive
        self._state = initial_limit(adaptive)
        self._started: dict[tuple[int, bytes, int], float] = {}

    @property
    def limit(self) -> int:
        return self._state.limit

    def on_handler_start(self, delivery: Delivery[Any]) -> None:
        """Record the start of a handler."""
        self._started[delivery.slot, delivery.raw_key, delivery.token] = self.context.now()

    def on_handler_end(self, delivery: Delivery[Any], error: BaseException | None) -> None:
        """Adjust the limit to the end of a handler. Errors unrelated to the downstream's load are ignored."""
        running = len(self._started)
        started = self._started.pop((delivery.slot, delivery.raw_key, delivery.token), None)
        overloaded = isinstance(error, self.adaptive.errors)
        if started is not None and (error is None or overloaded):
            before, event = self._state, HandlerEnd(started, self.context.now(), overloaded, running)
            self._state = update_limit(self.adaptive, before, event)
            self._report_change(before, overloaded)

    def _report_change(self, before: Limit, overloaded: bool) -> None:
        if self.limit > before.limit:
            self.context.counters.add("worker.limit_raised")
            log.debug("worker.limit_raised", extra={"topic": self.topic, "limit": self.limit})
        elif self.limit < before.limit:
            self.context.counters.add("worker.limit_lowered")
            reason = {"usual": round(before.usual, 6), "overloaded": before.overloaded + overloaded}
            log.warning("worker.limit_lowered", extra={"topic": self.topic, "limit": self.limit, **reason})
