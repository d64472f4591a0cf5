"""The adaptive limit of one topic in one worker: times its handlers and tells the rule of `core/aimd.py` how they
fared."""

from __future__ import annotations

import logging
from typing import Any

from idemgate.store.context import Context
from idemgate.topics.adaptive import Adaptive, Ended, Limit, after, first
from idemgate.topics.messages import Delivery

__all__ = ["Limiter"]

log = logging.getLogger("idemgate.worker")


class Limiter:
    """How many deliveries of a topic this worker may hold. Time is the gate's test clock's, or a monotonic one."""

    def __init__(self, context: Context, topic: str, adaptive: Adaptive) -> None:
        self.context = context
        self.topic = topic
        self.adaptive = adaptive
        self._state = first(adaptive)
        self._began: dict[tuple[int, int], float] = {}

    @property
    def limit(self) -> int:
        return self._state.limit

    def began(self, delivery: Delivery[Any]) -> None:
        """Its handler starts now."""
        self._began[delivery.slot, delivery.token] = self.context.now()

    def ended(self, delivery: Delivery[Any], error: BaseException | None) -> None:
        """Its handler ended. Errors that say nothing of the downstream's load are left out."""
        running = len(self._began)
        began = self._began.pop((delivery.slot, delivery.token), None)
        overloaded = isinstance(error, self.adaptive.errors)
        if began is not None and (error is None or overloaded):
            before, event = self._state, Ended(began, self.context.now(), overloaded, running)
            self._state = after(self.adaptive, before, event)
            self._tell(before, overloaded)

    def _tell(self, before: Limit, overloaded: bool) -> None:
        if self.limit > before.limit:
            self.context.counters.add("worker.limit_raised")
            log.debug("worker.limit_raised", extra={"topic": self.topic, "limit": self.limit})
        elif self.limit < before.limit:
            self.context.counters.add("worker.limit_lowered")
            why = {"usual": round(before.usual, 6), "overloaded": before.overloaded + overloaded}
            log.warning("worker.limit_lowered", extra={"topic": self.topic, "limit": self.limit, **why})
