"""The worker: takes what is due, runs handlers, settles; stops without losing or repeating anything that it can
help."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections import defaultdict, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from idemgate.core.durations import Duration, milliseconds
from idemgate.core.functions import awaited
from idemgate.core.messages import Delivery
from idemgate.core.topics import Settlement
from idemgate.errors import BadInput, StoreError
from idemgate.once.current import Execution, executing
from idemgate.work.line import POLL, Line
from idemgate.work.outcome import settlement_of

if TYPE_CHECKING:
    from idemgate.gate import Gate

__all__ = ["Worker"]

log = logging.getLogger("idemgate.worker")


class _Ready(NamedTuple):
    line: Line
    delivery: Delivery[Any]


class Worker:
    """Runs the handlers of topics. `async with Worker(...)`, or `await worker.run(stop)`.

    - `topics`: names; none: every topic of the gate that has a handler.
    - `concurrency`: handlers that run at once, all topics together; sync handlers run in as many threads.
    - `prefetch`: deliveries held beyond those that run, so that no handler waits for a round trip; None: a quarter of
      `concurrency`.
    What was prefetched but not started goes back, its attempt undone, when the worker stops.
    - `grace`: how long running handlers may finish when it stops; then async ones are cancelled (and tried again at
      once), while threads, which nothing can end, are left to their leases.

    A handler that returns acknowledges. One that raises is tried again after the topic's backoff; `Bury` and `Retry`
    say otherwise.
    While the store is away the worker waits, and goes on by itself.
    """

    def __init__(
        self,
        gate: Gate,
        topics: Sequence[str] = (),
        *,
        concurrency: int = 32,
        prefetch: int | None = None,
        grace: Duration = "30s",
    ) -> None:
        self.gate = gate
        self.concurrency = _at_least("concurrency", concurrency, 1)
        self.prefetch = max(1, concurrency // 4) if prefetch is None else _at_least("prefetch", prefetch, 0)
        self.grace = milliseconds(grace, "grace", zero=True) / 1000
        self._names = _chosen(gate, topics)
        self._ready: deque[_Ready] = deque()
        self._running: dict[asyncio.Task[None], _Ready] = {}
        self._settled: list[tuple[Line, Settlement]] = []
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._halt = asyncio.Event()
        started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self.run(self._halt, started))
        await asyncio.wait({self._task, started}, return_when=asyncio.FIRST_COMPLETED)
        if self._task.done():
            await self._task
        return self

    async def __aexit__(self, *_: object) -> None:
        self._halt.set()
        if self._task is not None:
            await self._task

    def stop(self) -> None:
        """Asks it to stop; a second time: at once, without the rest of the grace time."""
        if self._halt.is_set():
            self._hurry.set()
        self._halt.set()

    async def run(self, stop: asyncio.Event, started: asyncio.Future[None] | None = None) -> None:
        """Works until `stop` is set. Raises PolicyChanged, and StoreError if the store cannot be reached at the
        start."""
        self._halt, self._hurry = stop, asyncio.Event()
        self._freed, self._to_settle, self._over = asyncio.Event(), asyncio.Event(), False
        self._threads = ThreadPoolExecutor(self.concurrency, thread_name_prefix="idemgate-handler")
        lines = [Line(self.gate.topics[name]) for name in self._names]
        try:
            for line in lines:
                await line.open()
            await self._work(lines, started)
        finally:
            for line in lines:
                await line.close()
            self._threads.shutdown(wait=False, cancel_futures=True)

    async def _work(self, lines: list[Line], started: asyncio.Future[None] | None) -> None:
        for line in lines:
            self._watch_clock(line)
        await asyncio.gather(*(line.listen() for line in lines))
        settling = asyncio.create_task(self._settle())
        fetching = [asyncio.create_task(self._fetch(line)) for line in lines]
        log.info("worker.started", extra={"topics": list(self._names), "concurrency": self.concurrency})
        if started is not None and not started.done():
            started.set_result(None)
        try:
            await self._halted(fetching, settling)
        finally:
            self._halt.set()
            for line in lines:
                line.wake.set()
            self._freed.set()
            # Not cancelled: what a take under way brings has to be given back, or it would lie there until its lease
            # ends.
            await asyncio.gather(*fetching, return_exceptions=True)
            await self._wind_down()
            await settling
            log.info("worker.stopped", extra={"topics": list(self._names)})

    async def _halted(self, fetching: list[asyncio.Task[None]], settling: asyncio.Task[None]) -> None:
        """Until told to stop, or until a loop of ours ends, which is a fault of this program and not to be hidden."""
        halted = asyncio.create_task(self._halt.wait())
        done, _ = await asyncio.wait({halted, settling, *fetching}, return_when=asyncio.FIRST_COMPLETED)
        halted.cancel()
        for task in done - {halted}:
            task.result()

    def _watch_clock(self, line: Line) -> None:
        watch = getattr(self.gate.clock, "on_move", None)
        if watch is not None:
            loop = asyncio.get_running_loop()

            def moved() -> None:
                if not loop.is_closed():
                    loop.call_soon_threadsafe(line.wake.set)

            watch(moved)

    # -- taking -------------------------------------------------------------------------------------------------------

    async def _fetch(self, line: Line) -> None:
        failures, looked = 0, monotonic()
        while not self._halt.is_set():
            try:
                if (room := self.concurrency + self.prefetch - self._held()) <= 0:
                    self._freed.clear()
                    await self._freed.wait()
                    continue
                if (pause := line.pause()) > 0:
                    await _nap(line.wake, pause)
                if monotonic() - looked >= POLL:
                    line.look_again()
                    looked = monotonic()
                for delivery in await line.take(room):
                    self._ready.append(_Ready(line, delivery))
                self._start()
                failures = 0
            except StoreError as error:
                if failures == 0:
                    log.warning("worker.store_away", extra={"topic": line.topic.name, "error": str(error)})
                failures += 1
                self.gate.counters.add("worker.store_away")
                await _nap(line.wake, min(1.0, 0.02 * 2 ** min(failures, 6)))

    def _held(self) -> int:
        return len(self._ready) + len(self._running)

    # -- running ------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Starts what is ready, up to the concurrency; passes over what was lost while it waited."""
        while self._ready and len(self._running) < self.concurrency and not self._halt.is_set():
            ready = self._ready.popleft()
            if ready.delivery.lost:
                ready.line.drop([ready.delivery])
                continue
            task = asyncio.create_task(self._handle(ready))
            self._running[task] = ready
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        ready = self._running.pop(task)
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, asyncio.CancelledError):
            facts = {
                "topic": ready.line.topic.name,
                "attempt": ready.delivery.attempt,
                "token": ready.delivery.token,
            }
            log.warning("worker.handler_failed", exc_info=error, extra=facts)
            self.gate.counters.add("worker.failed")
        try:
            settlement = settlement_of(ready.delivery, error, ready.line.calls.policy)
        except Exception as wrong:  # a user's backoff or Retry(delay=...) that makes no sense must not end the worker
            log.exception("worker.bad_delay", extra={"topic": ready.line.topic.name})
            settlement = Settlement("nack", ready.delivery, 1000, str(wrong)[:500])
        self._settled.append((ready.line, settlement))
        self._to_settle.set()
        self._freed.set()
        self._start()

    async def _handle(self, ready: _Ready) -> None:
        handler, delivery = ready.line.topic.opening.handler, ready.delivery
        assert handler is not None, "chosen for having one"
        with executing(DeliveryExecution(delivery)):
            if awaited(handler):
                await handler(delivery)
                return
            context = contextvars.copy_context()
            await asyncio.get_running_loop().run_in_executor(self._threads, partial(context.run, handler, delivery))

    # -- settling -----------------------------------------------------------------------------------------------------

    async def _settle(self) -> None:
        while not self._over or self._settled:
            await self._to_settle.wait()
            await self._settle_now()

    async def _settle_now(self) -> None:
        """Settles what has gathered, one batch a topic; what ends meanwhile makes the next batch."""
        self._to_settle.clear()
        by_line: defaultdict[Line, list[Settlement]] = defaultdict(list)
        for line, settlement in self._settled:
            by_line[line].append(settlement)
        self._settled = []
        await asyncio.gather(*(asyncio.shield(line.settle(batch)) for line, batch in by_line.items()))

    # -- stopping -----------------------------------------------------------------------------------------------------

    async def _wind_down(self) -> None:
        """Gives back what never started, lets the rest finish within the grace time, then cancels what can be
        cancelled."""
        while self._ready:
            line, delivery = self._ready.popleft()
            self._settled.append((line, Settlement("return", delivery)))
        self._to_settle.set()
        await self._finish(self.grace)
        for task, ready in list(self._running.items()):
            log.error("worker.cut_short", extra={"topic": ready.line.topic.name, "token": ready.delivery.token})
            self.gate.counters.add("worker.cut_short")
            if awaited(ready.line.topic.opening.handler):
                task.cancel()
            else:
                # A thread goes on: its delivery is left to its lease, so that nobody runs it beside that thread.
                self._abandon(task)
        await self._finish(1.0)
        self._over = True
        self._to_settle.set()

    def _abandon(self, task: asyncio.Task[None]) -> None:
        task.remove_done_callback(self._ended)
        ready = self._running.pop(task)
        ready.line.drop([ready.delivery])
        task.cancel()

    async def _finish(self, seconds: float) -> None:
        hurry = asyncio.create_task(self._hurry.wait())
        end = monotonic() + seconds
        while self._running and (left := end - monotonic()) > 0 and not self._hurry.is_set():
            await asyncio.wait({*self._running, hurry}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()


class DeliveryExecution(Execution):
    """What `current()` tells inside of a topic's handler: the delivery's own facts."""

    __slots__ = ("_delivery",)

    def __init__(self, delivery: Delivery[Any]) -> None:
        super().__init__(delivery.key, delivery.token, delivery.attempt, None, None)
        self._delivery = delivery

    @property
    def lease_lost(self) -> bool:
        return self._delivery.lost


def _chosen(gate: Gate, topics: Sequence[str]) -> tuple[str, ...]:
    known = {name for name, topic in gate.topics.items() if topic.opening.handler is not None}
    for name in topics:
        if name not in known:
            raise BadInput(
                "topics",
                name,
                "no handler is registered for it",
                f"Topics with a handler: {sorted(known) or 'none'}",
            )
    if not topics and not known:
        raise BadInput(
            "topics", topics, "no topic of this gate has a handler", "Register one: @gate.topic(...).handler"
        )
    return tuple(topics) or tuple(sorted(known))


def _at_least(name: str, value: int, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise BadInput(name, value, f"not a whole number of at least {least}", "Pass an int")
    return value


async def _nap(wake: asyncio.Event, seconds: float) -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(wake.wait(), seconds)
    wake.clear()
