"""Guarded handlers that go on after their client or their server task has gone."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from idemgate.core.text import event_log
from idemgate_http.core import Admission, HttpGuard, log_facts

__all__ = ["Outliving"]

log: logging.Logger = event_log("idemgate.http")
_LAST = 1.0
"""Seconds that a cancelled handler has for its cleanup, and for the release of its claim."""


class Outliving:
    """The tasks that outlive their request. They are referenced here, so that none is collected while it runs."""

    def __init__(self, core: HttpGuard) -> None:
        self._core = core
        self._tasks: set[asyncio.Task[Any]] = set()

    def add(self, admission: Admission, *tasks: asyncio.Task[Any]) -> None:
        """Keep the tasks of a request until they end. Count and log it."""
        self._core.counters.add("http.outlived")
        facts = log_facts(admission)
        log.warning("http.outlived method=%s path=%s record=%s", *facts.values(), extra=facts)
        for task in tasks:
            self._tasks.add(task)
            task.add_done_callback(lambda task: self._end(task, admission))

    def _end(self, task: asyncio.Task[Any], admission: Admission) -> None:
        """Forget a task, and log the exception that no request will raise."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._core.counters.add("http.outlived_failed")
            facts = log_facts(admission)
            log.error("http.outlived_failed method=%s path=%s record=%s", *facts.values(), exc_info=error, extra=facts)

    async def drain(self, seconds: float) -> None:
        """Wait for the tasks that go on. Cancel those that still run after `seconds`."""
        if not self._tasks:
            return
        _, pending = await asyncio.wait(self._tasks, timeout=seconds)
        if pending:
            self._core.counters.add("http.cut_short", len(pending))
            log.warning("http.cut_short tasks=%d", len(pending), extra={"tasks": len(pending)})
            for task in pending:
                task.cancel()
            await asyncio.wait(pending, timeout=_LAST)
