"""Dispatcher of a worker: starts handlers, async ones as tasks and blocking ones in threads, and reports their ends."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from functools import partial
from operator import attrgetter
from typing import Any

from idemgate.core.thread_pool import ThreadPool
from idemgate.core.verdict import HANDLED, Verdict, judge_error
from idemgate.store.context import Running
from idemgate.topics.messages import Delivery
from idemgate.worker.consumer import InFlight, TopicConsumer
from idemgate.worker.handler import build_run_async
from idemgate.worker.places import Places

__all__ = ["Dispatcher", "Ended"]

log: logging.Logger = logging.getLogger("idemgate.worker")
Ended = tuple[InFlight, Verdict[Any] | None]
"""A delivery and the verdict on it; None if its handler was not started, because its lease has nearly ended."""


class Dispatcher:
    """The handlers of one run of a worker.

    Topics take turns, and so do async and blocking handlers. It implements the `Jobs` of its thread pool.

    Attributes:
        tasks: Running async handlers.
    """

    def __init__(
        self,
        concurrency: int,
        places: Places,
        stopping: asyncio.Event,
        on_ended: Callable[[Sequence[Ended]], None],
    ) -> None:
        """Build a dispatcher. `on_ended` is called in the event loop, with deliveries that ended."""
        self.tasks: dict[asyncio.Task[Verdict[Any]], InFlight] = {}
        self._concurrency = concurrency
        self._places = places
        self._stopping = stopping
        self._on_ended = on_ended
        self._ready, self._ready_blocking = ReadyQueue(), ReadyQueue()  # for async and for blocking handlers
        self._blocking_next = False
        self._abandoned: set[InFlight] = set()
        self._create_task = asyncio.get_running_loop().create_task
        self._pool: ThreadPool[InFlight, Verdict[Any] | None] = ThreadPool("idemgate-handler", self)

    def add(self, consumer: TopicConsumer) -> None:
        """Start the handlers of a topic, too, from now on."""
        (self._ready if consumer.is_async else self._ready_blocking).consumers.append(consumer)

    @property
    def free(self) -> int:
        """The number of handlers that may start now."""
        return self._concurrency - len(self.tasks) - self._pool.active

    def start_ready(self) -> None:
        """Start ready deliveries, up to the concurrency. It is called at each end of a handler."""
        room = self._concurrency - len(self.tasks) - self._pool.active  # inlined `free`
        if self._places.starving:
            room -= self._places.kept_free
        if room <= 0 or self._stopping.is_set():
            return
        threads_wait = bool(self._ready_blocking.consumers) and self._ready_blocking.any()
        if threads_wait and self._blocking_next:
            room -= self._pool.start(1)
            self._blocking_next = False
        while room > 0 and (entry := self._ready.pop()) is not None:
            self._blocking_next = True
            if entry.start():
                room -= 1
                self._start_task(entry, entry.consumer.run)
            else:
                self._on_ended([(entry, None)])
        if threads_wait and room > 0:
            self._pool.start(room)

    # -- async handlers -----------------------------------------------------------------------------------------------

    def _start_task(self, entry: InFlight, run: Callable[[Delivery[Any]], Coroutine[Any, Any, Verdict[Any]]]) -> None:
        task = self._create_task(run(entry.delivery))
        self.tasks[task] = entry
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[Verdict[Any]]) -> None:
        entry = self.tasks.pop(task)
        try:
            verdict = task.result()
        except BaseException as error:  # noqa: BLE001 - of a cancelled task, or a Ctrl-C that arrived inside it
            verdict = judge_error(error)
        self._on_ended([(entry, verdict)])
        self.start_ready()

    # -- blocking handlers: the first three functions run in the threads ----------------------------------------------

    def next_job(self, first: bool) -> InFlight:
        """Return the next delivery for a thread. Raises IndexError if there is none, or if others need its place."""
        if self._stopping.is_set():
            raise IndexError("no delivery may start")
        if not first:  # it may have to give its place to a starving topic or to an async handler
            free = self.free  # not `kept_free`: the event loop does not count the room of the ended job yet
            if free < self._places.starving or (free <= 0 and self._ready.any()):
                raise IndexError("others need the place")
        if (entry := self._ready_blocking.pop()) is None:
            raise IndexError("no delivery is ready")
        return entry

    def run_job(self, entry: InFlight, /) -> Verdict[Any] | None:
        """Run a blocking handler; return None without running it if its lease has nearly ended."""
        return entry.consumer.run(entry.delivery) if entry.start() else None

    def count_ready(self) -> int:
        """Return how many deliveries may start in threads."""
        return 0 if self._stopping.is_set() else self._ready_blocking.count()

    def on_jobs_ended(self, ended: list[Ended]) -> None:
        """Report ended deliveries and start others."""
        if self._abandoned:
            ended = [pair for pair in ended if pair[0] not in self._abandoned]
        self._on_ended([pair for pair in ended if pair[1] is HANDLED or self._has_ended(*pair)])
        self.start_ready()

    def _has_ended(self, entry: InFlight, verdict: Verdict[Any] | None) -> bool:
        """Return False if a plain function returned a coroutine, which runs next."""
        if verdict is None or verdict.value is None or not inspect.isawaitable(verdict.value):
            return True
        self._start_task(entry, build_run_async(partial(_await, verdict.value), entry.consumer.context))
        return False

    # -- unstarted deliveries -----------------------------------------------------------------------------------------

    def remove_unstarted(self, keep: Callable[[InFlight], bool]) -> Iterator[InFlight]:
        """Remove and yield the unstarted deliveries, except those for which `keep` is true."""
        for ready in self._list_queues():
            for _ in range(len(ready)):
                with suppress(IndexError):  # a thread may take the last one
                    entry = ready.popleft()
                    if keep(entry):
                        ready.append(entry)
                    else:
                        yield entry

    def has_stale(self, since: float) -> bool:
        """Return True if an unstarted delivery was taken at `since` or before."""
        return any(_oldest(ready) <= since for ready in self._list_queues())

    def _list_queues(self) -> list[deque[InFlight]]:
        return [consumer.ready for queue in (self._ready, self._ready_blocking) for consumer in queue.consumers]

    # -- stopping -----------------------------------------------------------------------------------------------------

    def list_running(self) -> list[InFlight]:
        """Return the deliveries whose handlers run."""
        return [*self.tasks.values(), *tuple(self._pool.running)]

    def list_started(self) -> Iterator[Running]:
        """Yield the deliveries whose handlers run. Any thread may call it."""
        runs = [*((entry, task) for task, entry in self.tasks.copy().items()), *self._pool.running.copy().items()]
        for entry, runs_in in runs:
            if entry.started:
                yield Running(entry.delivery.topic, entry.delivery.key, entry.started, runs_in)

    async def wait_for_threads(self) -> None:
        """Wait until no blocking handler runs."""
        await self._pool.wait_idle()

    def cancel_running(self) -> list[InFlight]:
        """Cancel async handlers and abandon blocking ones.

        Returns:
            The deliveries of blocking handlers. A thread cannot be cancelled. Leave them to their leases, so that no
            worker runs them at the same time.
        """
        blocking = list(self._pool.running)
        self._abandoned.update(blocking)
        for entry in blocking:
            _report_cut(entry)
        for task, entry in list(self.tasks.items()):
            if not task.done():  # a done task is about to end by its callback
                _report_cut(entry)
                task.cancel()
        return blocking

    def abandon_running(self) -> list[InFlight]:
        """Return the deliveries of async handlers that swallowed their cancellation. Leave them to their leases."""
        left = [(task, entry) for task, entry in self.tasks.items() if not task.done()]
        for task, entry in left:
            task.remove_done_callback(self._on_task_done)
            del self.tasks[task]
            entry.delivery.lost = True
            facts = entry.log_facts()
            log.error("worker.abandoned topic=%r key=%r", *facts.values(), extra=facts)
            entry.consumer.context.counters.add("worker.abandoned")
        return [entry for _, entry in left]

    def close(self) -> None:
        """Make the threads end after their current job."""
        self._pool.close()


class ReadyQueue:
    """The unstarted deliveries of one kind of handler.

    The topic whose last turn is the longest ago is next. So a topic with many slow deliveries delays another topic by
    one turn only. Any thread may call `pop`.

    Attributes:
        consumers: The topics, each with its queue.
    """

    __slots__ = ("_turn", "consumers")

    def __init__(self) -> None:
        self.consumers: list[TopicConsumer] = []
        self._turn = 0

    def pop(self) -> InFlight | None:
        """Remove and return the oldest delivery of the next topic that has one."""
        consumers = self.consumers
        if len(consumers) > 1:
            consumers = sorted(consumers, key=_turn_of)
        for consumer in consumers:
            if consumer.ready:  # often it is not, and an exception would cost more than all the rest
                try:
                    entry = consumer.ready.popleft()
                except IndexError:  # another thread took the last one
                    continue
                self._turn = consumer.turn = self._turn + 1
                return entry
        return None

    def any(self) -> bool:
        """Return True if a delivery is ready."""
        for consumer in self.consumers:  # noqa: SIM110 - asked at each end of a handler; `any` costs three times as much
            if consumer.ready:
                return True
        return False

    def count(self) -> int:
        """Return how many deliveries are ready."""
        return sum(len(consumer.ready) for consumer in self.consumers)


_turn_of = attrgetter("turn")


async def _await(value: Any, _: object) -> Any:
    return await value


def _oldest(ready: deque[InFlight]) -> float:
    """Return when the first entry was taken; infinity for an empty queue."""
    try:
        return ready[0].since
    except IndexError:  # a thread may have taken it
        return float("inf")


def _report_cut(entry: InFlight) -> None:
    facts = entry.log_facts()
    log.error("worker.cut_short topic=%r key=%r", *facts.values(), extra=facts | {"token": entry.delivery.token})
    entry.consumer.context.counters.add("worker.cut_short")
