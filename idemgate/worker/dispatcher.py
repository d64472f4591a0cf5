"""Dispatcher of a worker: runs handlers for fetched deliveries, up to the worker's concurrency."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from math import ceil
from typing import Any

from idemgate.core.clock import monotonic
from idemgate.core.thread_pool import ThreadPool
from idemgate.core.verdict import HANDLED, Verdict, verdict_of
from idemgate.errors import DownstreamUnavailable
from idemgate.store.context import Context
from idemgate.topics.deliveries import Settlement, defer_oversize
from idemgate.topics.messages import Delivery
from idemgate.topics.results import encode_result
from idemgate.worker.consumer import FinishedDelivery, InFlight, TopicConsumer
from idemgate.worker.handler import build_run_async, judge_partial_failure
from idemgate.worker.outcome import attempt_number, choose_settlement
from idemgate.worker.places import Places
from idemgate.worker.ready_queue import ReadyQueue

__all__ = ["Dispatcher"]

log = logging.getLogger("idemgate.worker")


class Dispatcher:
    """The handlers of one run of a worker: async ones run as tasks, blocking ones in a thread pool.

    Attributes:
        finished: Ended deliveries with their settlements, to be sent by the worker.
        tasks: Running async handlers.
        to_settle: Set when `finished` has grown.
    """

    def __init__(self, context: Context, concurrency: int, places: Places, stopping: asyncio.Event) -> None:
        self.finished: list[FinishedDelivery] = []
        self.tasks: dict[asyncio.Task[Verdict[Any]], InFlight] = {}
        self.to_settle = asyncio.Event()
        self._context = context
        self._concurrency = concurrency
        self._places = places
        self._stopping = stopping
        self._ready, self._ready_blocking = ReadyQueue(), ReadyQueue()  # for async and for blocking handlers
        self._blocking_next = False
        self._abandoned: set[InFlight] = set()
        self._pool: ThreadPool[InFlight, Verdict[Any] | None] = ThreadPool(
            "idemgate-handler", self._run_in_thread, self._on_threads_finished, self.dispatch, stopping.is_set,
            self._others_wait, self._ready_blocking,  # pyright: ignore[reportArgumentType] - it binds `popleft`
        )  # fmt: skip

    @property
    def free(self) -> int:
        """The number of handlers that may start now."""
        return self._concurrency - len(self.tasks) - self._pool.active

    def waiting(self, consumer: TopicConsumer) -> deque[InFlight]:
        """Return the queue of the topic's unstarted deliveries."""
        return (self._ready if consumer.is_async else self._ready_blocking).of(consumer)

    def add(self, consumer: TopicConsumer, entries: list[InFlight]) -> None:
        """Queue fetched deliveries. `dispatch` starts them. Those that are too large for this gate are deferred."""
        self._places.take(consumer.places, len(entries))
        most = self._context.codec.max_bytes  # no value is larger than its message
        if consumer.misfired:
            entries = self._end_misfired(consumer, entries)
        fitting = [entry for entry in entries if entry.delivery.size <= most or not self._defer_oversize(entry)]
        self.waiting(consumer).extend(fitting)

    def _end_misfired(self, consumer: TopicConsumer, entries: list[InFlight]) -> list[InFlight]:
        """Acknowledge the occurrences that must not run; return the other entries."""
        misfired, consumer.misfired = consumer.misfired, set()
        for entry in misfired:
            settlement = Settlement("ack", entry.delivery)
            if consumer.calls.policy.result_retention is not None:
                settlement = self._add_result(entry, settlement, HANDLED)
            self._finish(entry, settlement)
        return [entry for entry in entries if entry not in misfired]

    def _defer_oversize(self, entry: InFlight) -> bool:
        """Defer a delivery whose payload is larger than `max_bytes`. Return False for any other."""
        settlement = defer_oversize(self._context, entry.delivery)
        if settlement is not None:
            self._finish(entry, settlement)
        return settlement is not None

    def dispatch(self) -> None:
        """Start ready deliveries, up to the concurrency. Topics take turns, and so do async and blocking handlers."""
        if self._blocking_next and self._ready_blocking and self.free > self._places.kept_free:
            self._pool.start(1)
            self._blocking_next = False
        if self._ready:
            kept_free = self._places.kept_free
            while self._ready and self.free > kept_free and not self._stopping.is_set():
                self._start_async(self._ready.popleft())
                self._blocking_next = True
        if self._ready_blocking:
            self._pool.start(self.free - self._places.kept_free)

    def _start_async(self, entry: InFlight) -> None:
        if not entry.can_start():
            self._skip(entry)
            return
        if entry.consumer.limiter is not None:
            entry.consumer.on_handler_start(entry.delivery)
        self._start_task(entry, entry.consumer.run)

    # -- unstarted deliveries -----------------------------------------------------------------------------------------

    def return_unstarted(self, keep: Callable[[InFlight], bool] | None = None) -> None:
        """Return unstarted deliveries to their topics, except those for which `keep` is true."""
        for queue in (*self._ready, *self._ready_blocking):
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
        if all(_oldest(queue) > since for queue in (*self._ready, *self._ready_blocking)):
            return False
        self._places.slow_down()
        self.return_unstarted(lambda entry: entry.since > since)
        return True

    # -- async handlers -----------------------------------------------------------------------------------------------

    def _start_task(self, entry: InFlight, run: Callable[[Delivery[Any]], Coroutine[Any, Any, Verdict[Any]]]) -> None:
        task = asyncio.create_task(run(entry.delivery))
        self.tasks[task] = entry
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[Verdict[Any]]) -> None:
        entry = self.tasks.pop(task)
        try:
            verdict = task.result()
        except BaseException as error:  # noqa: BLE001 - of a cancelled task, or a Ctrl-C that arrived inside it
            verdict = verdict_of(error)._replace(ran=True)
        self._places.count_handled()
        plain = verdict is HANDLED and entry.consumer.is_plain
        self._finish(entry, Settlement("ack", entry.delivery) if plain else self._choose_settlement(entry, verdict))
        self.dispatch()

    # -- blocking handlers: the first two functions run in the threads ------------------------------------------------

    def _run_in_thread(self, entry: InFlight) -> Verdict[Any] | None:
        """Run a blocking handler; return None without running it if its lease has nearly ended."""
        delivery, consumer = entry.delivery, entry.consumer
        if delivery.lost or entry.until <= monotonic() + entry.margin:  # inlined `can_start`
            return None
        if consumer.limiter is not None:
            consumer.on_handler_start(delivery)
        verdict: Verdict[Any] = consumer.run(delivery)
        return verdict

    def _others_wait(self) -> bool:
        """Return True if a thread that ended a job must give its place to an async handler or to a starving topic."""
        # Not `kept_free`: the event loop does not count the room of the ended job yet.
        return self.free < self._places.starving or (bool(self._ready) and self.free <= 0)

    def _on_threads_finished(self, ended: list[tuple[InFlight, Verdict[Any] | None]]) -> None:
        self.to_settle.set()  # before a place is freed: the settlement fetches the next before the line does
        plain: TopicConsumer | None = None  # the last one that `is_plain`, which costs a call
        for entry, verdict in ended:
            if self._abandoned and entry in self._abandoned:
                continue
            consumer = entry.consumer
            if verdict is HANDLED and (consumer is plain or consumer.is_plain):
                plain = consumer
                self.finished.append((entry, Settlement("ack", entry.delivery)))
                self._places.count_handled()
                self._places.free(consumer.places)
            elif verdict is None:
                self._skip(entry)
            else:
                plain = None  # an outage of its downstream may begin here
                self._on_thread_verdict(entry, verdict)

    def _on_thread_verdict(self, entry: InFlight, verdict: Verdict[Any]) -> None:
        value = verdict.value
        if value is not None and inspect.isawaitable(value):  # a plain function that returned a coroutine
            self._start_task(entry, build_run_async(partial(_await, value), self._context.namespace))
        else:
            self._places.count_handled()
            self._finish(entry, self._choose_settlement(entry, judge_partial_failure(verdict)))

    # -- ended deliveries ---------------------------------------------------------------------------------------------

    def _finish(self, entry: InFlight, settlement: Settlement) -> None:
        self.finished.append((entry, settlement))
        self.to_settle.set()  # before the place is freed: the settlement fetches the next before the line does
        self._places.free(entry.consumer.places)

    def _skip(self, entry: InFlight) -> None:
        """Do not start a delivery whose lease is lost or has nearly ended."""
        self._context.counters.add("worker.not_started")
        facts = entry.log_facts()
        log.warning(
            "worker.not_started topic=%r key=%r", *facts.values(), extra=facts | {"token": entry.delivery.token}
        )
        if entry.delivery.lost:
            self._drop(entry)
        else:  # the server may still hold the lease: then this is no attempt
            self._finish(entry, Settlement("return", entry.delivery))

    def _drop(self, entry: InFlight) -> None:
        """Leave a delivery to the expiry of its lease."""
        entry.consumer.drop([entry])
        self._places.free(entry.consumer.places)

    def _choose_settlement(self, entry: InFlight, verdict: Verdict[Any]) -> Settlement:
        delivery, error = entry.delivery, verdict.error
        entry.consumer.on_handler_end(delivery, error)
        if error is None:
            entry.consumer.downstream.end_outage()
        try:
            if isinstance(error, DownstreamUnavailable):
                return self._defer(entry, verdict, error)
            settlement = choose_settlement(delivery, verdict, entry.consumer.calls.policy, self._stopping.is_set())
        except Exception as invalid:  # an invalid backoff of the user must not end the worker
            facts = entry.log_facts()
            log.exception("worker.bad_delay topic=%r key=%r", *facts.values(), extra=facts)
            settlement = Settlement("nack", delivery, 1000, repr(invalid)[:500])
        if settlement.verb == "ack" and entry.consumer.calls.policy.result_retention is not None:
            settlement = self._add_result(entry, settlement, verdict)
        if verdict.outcome == "duplicate":
            self._context.counters.add("worker.duplicate")
        if error is not None and settlement.verb not in ("ack", "defer", "return"):
            facts, attempt = entry.log_facts(), attempt_number(delivery)
            log.warning(
                "worker.handler_failed topic=%r key=%r attempt=%s", *facts.values(), attempt,
                exc_info=error, extra=facts | {"attempt": attempt, "token": delivery.token},
            )  # fmt: skip
            self._context.counters.add("worker.failed")
        return settlement

    def _add_result(self, entry: InFlight, settlement: Settlement, verdict: Verdict[Any]) -> Settlement:
        """Add what the handler returned to the acknowledgement. A value that cannot be stored is counted and logged."""
        result = encode_result(self._context.codec, verdict.value)
        if result[:1] == b"n":
            facts = entry.log_facts() | {"why": result[1:].decode()}
            log.warning("worker.result_not_stored topic=%r key=%r why=%r", *facts.values(), extra=facts)
            self._context.counters.add("worker.result_not_stored")
        return settlement._replace(result=result)

    def _defer(self, entry: InFlight, verdict: Verdict[Any], error: DownstreamUnavailable) -> Settlement:
        """Defer a delivery whose downstream service is unavailable, and pause its topic."""
        consumer, downstream = entry.consumer, entry.consumer.downstream
        self._context.counters.add("worker.downstream_unavailable")
        if not downstream.pause:  # else another delivery of the same outage began it
            seconds = verdict.retry_after
            if seconds is None:
                seconds = consumer.calls.policy.backoff.ms(downstream.failures + 1, error) / 1000
            downstream.begin_pause(seconds, error)
            self.return_unstarted(lambda other: other.consumer is not consumer)
        return Settlement("defer", entry.delivery, delay=ceil(downstream.pause * 1000))

    # -- stopping -----------------------------------------------------------------------------------------------------

    def list_running(self) -> list[InFlight]:
        """Return the deliveries whose handlers run."""
        return [*self.tasks.values(), *tuple(self._pool.running)]

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

    def abandon_running(self) -> None:
        """Leave async handlers that swallowed their cancellation to their leases: nothing can end them."""
        for task, entry in list(self.tasks.items()):
            if not task.done():
                task.remove_done_callback(self._on_task_done)
                del self.tasks[task]
                entry.delivery.lost = True
                facts = entry.log_facts()
                log.error("worker.abandoned topic=%r key=%r", *facts.values(), extra=facts)
                self._context.counters.add("worker.abandoned")
                self._drop(entry)

    def _report_cut(self, entry: InFlight) -> None:
        facts = entry.log_facts()
        log.error("worker.cut_short topic=%r key=%r", *facts.values(), extra=facts | {"token": entry.delivery.token})
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
