"""Blocking handlers: as many at once as the worker may run, whenever their messages come."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

from idemgate import Gate
from idemgate.core.thread_pool import ThreadPool
from idemgate.topics.topic import Topic


def slow_topic(gate: Gate) -> tuple[Topic, threading.Event, list[str]]:
    """Return a topic, the event for which the handlers of its slow keys wait, and the keys that were started."""
    topic, go, seen = gate.topic("t"), threading.Event(), list[str]()

    @topic.handler
    def handle(delivery: Any) -> None:
        seen.append(delivery.key)
        if delivery.key.startswith("slow"):
            go.wait(60)

    return topic, go, seen


async def test_what_comes_later_does_not_wait_behind_what_runs(gate: Gate, eventually: Any) -> None:
    # Given a blocking handler that runs, and will until another one has
    topic, go, seen = slow_topic(gate)

    async with gate.aio.worker(concurrency=4):
        for number, key in enumerate(["slow-1", "slow-2", "slow-3", "quick"], 1):
            # When one message more comes, each alone
            await topic.aio.trigger(key)
            # Then it starts, beside those that run
            await eventually(lambda number=number: len(seen) == number)
        go.set()
    assert seen == ["slow-1", "slow-2", "slow-3", "quick"]


async def test_what_is_slow_after_much_that_was_quick_holds_nothing_up(gate: Gate, eventually: Any) -> None:
    # Given a thousand quick ones, so that one thread is enough
    topic, go, seen = slow_topic(gate)

    async with gate.aio.worker(concurrency=4):
        await topic.aio.trigger_many([(f"k{n}", n) for n in range(1000)])
        await eventually(lambda: len(seen) == 1000)
        # When slow ones come, then all four places are in use
        await topic.aio.trigger_many([(f"slow-{n}", n) for n in range(4)])
        await eventually(lambda: len(seen) == 1004)
        go.set()


class Waiting:
    """A hundred jobs that run until an event."""

    def __init__(self) -> None:
        self.go, self.ended, self.ready = threading.Event(), list[tuple[int, bool]](), deque(range(100))
        self.pool = ThreadPool[int, bool]("test", self)

    def count_ready(self) -> int:
        return len(self.ready)

    def next_job(self, first: bool) -> int:
        return self.ready.popleft()

    def run_job(self, job: int) -> bool:
        return self.go.wait(60)

    def on_jobs_ended(self, ended: list[tuple[int, bool]]) -> None:
        self.ended += ended
        self.pool.start(100 - self.pool.active)


async def test_few_threads_start_before_the_first_jobs_turn_out_to_be_slow(eventually: Any) -> None:
    # Given a hundred jobs that run until an event
    jobs = Waiting()
    # When they may start
    jobs.pool.start(100)
    # Then few threads start at once, and all soon
    assert jobs.pool.active < 10
    await eventually(lambda: len(jobs.pool.running) == 100)
    jobs.go.set()
    await jobs.pool.wait_idle()
    assert len(jobs.ended) == 100
    jobs.pool.close()
