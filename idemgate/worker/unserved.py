"""The stored topics whose messages wait and that no program serves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress

from idemgate.core.calls import run_plan_async
from idemgate.core.text import event_log, one_line
from idemgate.core.waits import wait_for_wakeup
from idemgate.errors import StoreError
from idemgate.store.context import Context
from idemgate.topics.messages import Stats
from idemgate.topics.registry import stored_topics
from idemgate.topics.topic import Topic
from idemgate.worker.poller import POLL

__all__ = ["UnservedTopics"]

log: logging.Logger = event_log("idemgate.worker")
MAX_SHOWN = 10
"""Topics that the text of a log record names. Its fields have all of them."""
LOOK = 30.0
"""Seconds between two looks. Each reads all slots of the topics that the program does not serve."""
PATIENCE = 300.0
"""Seconds without a take after which a topic with deliveries in flight is unserved: their worker is gone."""


class UnservedTopics:
    """The look at the stored topics that this program does not serve.

    At the start of a worker each of them with pending messages is logged. Another program may serve it. So the later
    looks log a topic only if messages have been due for at least `LOOK` seconds and no program took any of them. A
    topic is logged once, and again if a program took from it meanwhile.
    """

    def __init__(self, context: Context, topics: Mapping[str, Topic]) -> None:
        self.wake: asyncio.Event = asyncio.Event()
        self._context = context
        self._topics = topics
        self._idle = dict[str, tuple[int, float]]()  # messages taken so far, and since when none was taken
        self._logged = set[str]()

    async def run(self) -> None:
        """Look again and again. A look that fails is left out: the worker reports errors of the store."""
        is_first, clock = True, self._context.clock
        while True:
            with suppress(StoreError):
                await self._look(is_first)
                is_first = False
            end = self._context.now() + LOOK
            while (left := end - self._context.now()) > 0:
                await wait_for_wakeup(self.wake, left if clock is None else POLL)

    async def _look(self, is_first: bool) -> None:
        """Log and count the topics that are found unserved. It takes one round trip, and one more if there are any."""
        served = {name for name, topic in self._topics.items() if topic.definition.handler or topic.definition.forward}
        found = await run_plan_async(stored_topics(self._context, without=served), self._context.aio_link.run_all)
        waiting = dict[str, int]()
        for topic in found:
            is_stuck = self._note(topic.name, topic.stats)
            if topic.name not in self._logged and (is_stuck or (is_first and topic.stats.pending)):
                self._logged.add(topic.name)
                waiting[topic.name] = topic.stats.pending
        if waiting:
            self._context.counters.add("worker.unserved", len(waiting))
            _warn(waiting)

    def _note(self, name: str, stats: Stats) -> bool:
        """Record what was taken from a topic. Return whether its due messages have waited for too long."""
        now, taken = self._context.now(), stats["taken"] + stats["forwarded"]
        before, since = self._idle.get(name, (taken, now))
        if taken != before or not stats.pending:
            self._logged.discard(name)
        if taken != before or stats.paused or not stats.ready + stats.blocked:
            since = now
        self._idle[name] = taken, since
        return now - since >= (PATIENCE if stats.in_flight else LOOK)


def _warn(waiting: Mapping[str, int]) -> None:
    shown = ", ".join(f"{one_line(name)} ({pending})" for name, pending in [*waiting.items()][:MAX_SHOWN])
    more = f" and {len(waiting) - MAX_SHOWN} more" if len(waiting) > MAX_SHOWN else ""
    log.warning(
        "worker.unserved topics=%s%s: their messages wait, and this program has no handler for them. Register one, "
        "run the program that has it, or delete them: idemgate topic ls", shown, more, extra={"waiting": waiting},
    )  # fmt: skip
