"""Dispatcher of a worker: runs handlers for fetched deliveries, up to the worker's concurrency."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from idemgate.core.thread_pool import ThreadPool
from idemgate.core.verdict import HANDLED, Verdict, verdict_of
from idemgate.guard.decorator import build_judge_async
from idemgate.store.context import Context
from idemgate.topics.calls import Settlement
from idemgate.topics.results import encode_result
from idemgate.worker.consumer import FinishedDelivery, InFlight, TopicConsumer
from idemgate.worker.handler import judge_partial_failure, run_async_handler, run_blocking_handler
from idemgate.worker.outcome import attempt_number, choose_settlement
from idemgate.worker.prefetch import Prefetch

__all__ = ["Dispatcher"]

log = logging.getLogger("idemgate.worker")


class Dispatcher:
    """The handlers of one run of a worker: async ones run as tasks, blocking ones in a thread pool.

    Attributes:
        held: Number of deliveries that wait or run.
        finished: Ended deliveries with their settlements, to be sent by the worker.
        tasks: Running async handlers.
        freed: Set when there may be room for more deliveries.
        to_settle: Set when `finished` has grown.
    """

    def __init__(self, context: Context, concurrency: int, prefetch: Prefetch, stopping: asyncio.Event) -> None:
        self.held = 0
        self.finished: list[FinishedDelivery] = []
        self.tasks: dict[asyncio.Task[Verdict[Any]], InFlight] = {}
        self.freed, self.to_settle = asyncio.Event(), asyncio.Event()
        self._context = context
        self._concurrency = concurrency
        self._prefetch = prefetch
        self._stopping = stopping
        self._ready: deque[InFlight] = deque()  # for async handlers; `_pool.ready` is for blocking ones
        self._abandoned: set[InFlight] = set()
        self._pool: ThreadPool[InFlight, Verdict[Any] | None] = ThreadPool(
            "idemgate-handler", self._run_in_thread, self._on_threads_finished, self.dispatch, self._threads_must_wait
        )

    @property
    def free(self) -> int:
        """The number of handlers that may start now."""
        return self._concurrency - len(self.tasks) - self._pool.active

    def waiting(self, consumer: TopicConsumer) -> deque[InFlight]:
        """Return the queue of unstarted deliveries that the consumer's topic shares with others of its kind."""
        return self._ready if consumer.is_async else self._pool.ready

    def add(self, consumer: TopicConsumer, entries: list[InFlight]) -> None:
        """Queue fetched deliveries. `dispatch` starts them."""
        self.held += len(entries)
        self.waiting(consumer).extend(entries)

    def dispatch(self) -> None:
        """Start ready deliveries, up to the concurrency. Drop those whose lease was lost while they waited."""
        while self._ready and self.free > 0 and not self._stopping.is_set():
            entry = self._ready.popleft()
            if entry.delivery.lost:
                self._drop(entry)
                continue
            entry.consumer.on_handler_start(entry.delivery)
            self._start_task(entry, entry.consumer.judge)
        if self._pool.ready:
            self._pool.start(self.free)

    # -- unstarted deliveries -----------------------------------------------------------------------------------------

    def return_unstarted(self, keep: Callable[[InFlight], bool] | None = None) -> None:
        """Return unstarted deliveries to their topics, except those for which `keep` is true."""
        for queue in (self._ready, self._pool.ready):
            for _ in range(len(queue)):
                with suppress(IndexError):  # a thread may take the last one
                    entry = queue.popleft()
                    if keep is not None and keep(entry):
                        queue.append(entry)
                    else:
                        self._finish(entry, Settlement("return", entry.delivery))
        self.dispatch()  # a thread may have looked while a kept entry was out of the queue

    def return_stale(self, since: float) -> bool:
        """Return unstarted deliveries taken at `since` or before.

        Returns:
            False if there was none.
        """
        if all(_oldest(queue) > since for queue in (self._ready, self._pool.ready)):
            return False
        self._prefetch.slow_down()
        self.return_unstarted(lambda entry: entry.since > since)
        return True

    # -- async handlers -----------------------------------------------------------------------------------------------

    def _start_task(self, entry: InFlight, judge: Callable[..., Any]) -> None:
        task = asyncio.create_task(run_async_handler(judge, entry.delivery, self._context.namespace))
        self.tasks[task] = entry
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[Verdict[Any]]) -> None:
        entry = self.tasks.pop(task)
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        verdict = task.result() if error is None else verdict_of(error)._replace(ran=True)
        self._prefetch.handled += 1
        self._finish(entry, self._choose_settlement(entry, verdict))
        self.dispatch()

    # -- blocking handlers: the first two functions run in the threads ------------------------------------------------

    def _run_in_thread(self, entry: InFlight) -> Verdict[Any] | None:
        """Run a blocking handler; return None without running it if the lease was lost."""
        if entry.delivery.lost:
            return None
        if entry.consumer.limiter is not None:
            entry.consumer.on_handler_start(entry.delivery)
        return run_blocking_handler(entry.consumer.judge, entry.delivery, self._context.namespace)

    def _threads_must_wait(self) -> bool:
        """Return True while the worker stops, or while async handlers wait for a place."""
        return self._stopping.is_set() or (bool(self._ready) and self.free <= 0)

    def _on_threads_finished(self, ended: list[tuple[InFlight, Verdict[Any] | None]]) -> None:
        for entry, verdict in ended:
            if self._abandoned and entry in self._abandoned:
                continue
            if verdict is HANDLED and entry.consumer.limiter is None:  # shortcut for the most frequent case
                self.finished.append((entry, Settlement("ack", entry.delivery)))
                self._prefetch.handled += 1
                self.held -= 1
            elif verdict is None:
                self._drop(entry)
            else:
                self._on_thread_verdict(entry, verdict)
        self.to_settle.set()
        self.freed.set()

    def _on_thread_verdict(self, entry: InFlight, verdict: Verdict[Any]) -> None:
        value = verdict.value
        if value is not None and inspect.isawaitable(value):  # a plain function that returned a coroutine
            self._start_task(entry, build_judge_async(partial(_await, value)))
        else:
            self._prefetch.handled += 1
            self._finish(entry, self._choose_settlement(entry, judge_partial_failure(verdict)))

    # -- ended deliveries ---------------------------------------------------------------------------------------------

    def _finish(self, entry: InFlight, settlement: Settlement) -> None:
        self.finished.append((entry, settlement))
        self.held -= 1
        self.to_settle.set()
        self.freed.set()

    def _drop(self, entry: InFlight) -> None:
        """Leave a delivery to the expiry of its lease."""
        entry.consumer.drop([entry])
        self.held -= 1
        self.freed.set()

    def _choose_settlement(self, entry: InFlight, verdict: Verdict[Any]) -> Settlement:
        delivery, topic, error = entry.delivery, entry.consumer.topic.name, verdict.error
        entry.consumer.on_handler_end(delivery, error)
        try:
            settlement = choose_settlement(delivery, verdict, entry.consumer.calls.policy, self._stopping.is_set())
        except Exception as invalid:  # an invalid backoff of the user must not end the worker
            log.exception("worker.bad_delay", extra={"topic": topic})
            settlement = Settlement("nack", delivery, 1000, repr(invalid)[:500])
        if settlement.verb == "ack" and entry.consumer.calls.policy.result_retention is not None:
            settlement = self._add_result(entry, settlement, verdict)
        if verdict.outcome == "duplicate":
            self._context.counters.add("worker.duplicate")
        if error is not None and settlement.verb not in ("ack", "defer"):
            facts = {"topic": topic, "attempt": attempt_number(delivery), "token": delivery.token}
            log.warning("worker.handler_failed", exc_info=error, extra=facts)
            self._context.counters.add("worker.failed")
        return settlement

    def _add_result(self, entry: InFlight, settlement: Settlement, verdict: Verdict[Any]) -> Settlement:
        """Add what the handler returned to the acknowledgement. A value that cannot be stored is counted and logged."""
        result = encode_result(self._context.codec, verdict.value)
        if result[:1] == b"n":
            facts = {"topic": entry.consumer.topic.name, "key": entry.delivery.key, "why": result[1:].decode()}
            log.warning("worker.result_not_stored", extra=facts)
            self._context.counters.add("worker.result_not_stored")
        return settlement._replace(result=result)

    # -- stopping -----------------------------------------------------------------------------------------------------

    async def wait_for_threads(self) -> None:
        """Wait until no blocking handler runs."""
        await self._pool.wait_idle()

    def cancel_running(self) -> None:
        """Cancel async handlers and abandon blocking ones.

        A thread cannot be cancelled. Its delivery is left to its lease, so that no worker runs it at the same time.
        """
        for entry in tuple(self._pool.running):
            self._abandoned.add(entry)
            self._report_cut(entry)
            self._drop(entry)
        for task, entry in list(self.tasks.items()):
            if not task.done():  # a done task is about to be finished by its callback
                self._report_cut(entry)
                task.cancel()

    def _report_cut(self, entry: InFlight) -> None:
        log.error("worker.cut_short", extra={"topic": entry.consumer.topic.name, "token": entry.delivery.token})
        self._context.counters.add("worker.cut_short")

    def close(self) -> None:
        """Make the threads end after their current job."""
        self._pool.close()


async def _await(value: Any, _: object) -> Any:
    return await value


def _oldest(queue: deque[InFlight]) -> float:
    """Return when the first entry was taken; infinity for an empty queue."""
    try:
        return queue[0].since
    except IndexError:  # a thread may have taken it
        return float("inf")
