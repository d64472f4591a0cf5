"""The worker: takes what is due, runs handlers, settles; stops without losing or repeating anything that it can
help."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from idemgate.core.durations import Duration, milliseconds
from idemgate.core.functions import awaited
from idemgate.core.messages import Delivery
from idemgate.core.numbers import whole
from idemgate.core.topics import Settlement
from idemgate.errors import BadInput
from idemgate.work.due import Due
from idemgate.work.forwarding import Forwarding
from idemgate.work.handling import handled
from idemgate.work.line import Line
from idemgate.work.loop import keep_up
from idemgate.work.outcome import settlement_of
from idemgate.work.planner import Planner
from idemgate.work.threads import Threads

if TYPE_CHECKING:
    from idemgate.gate import Gate

__all__ = ["Worker"]

log = logging.getLogger("idemgate.worker")
LAST_WORDS = 1.0
"""Seconds that are left, when the grace time is over, to handlers that were cancelled and to what they leave to
settle."""


class _Ready(NamedTuple):
    line: Line
    delivery: Delivery[Any]


class Worker:
    """Runs the handlers of topics, and sends on what has to be. `async with Worker(...)`, or `await worker.run(stop)`.

    - `topics`: names; none: every topic of the gate that has a handler or is sent on (`forward`). Their recurring
      triggers are planned, too.
    - `concurrency`: handlers that run at once, all topics together; sync handlers run in as many threads.
    - `prefetch`: deliveries held beyond those that run, so that no handler waits for a round trip; None: a quarter of
      `concurrency`. What was prefetched but not started goes back, its attempt undone, when the worker stops.
    - `grace`: how long running handlers may finish when it stops; then async ones are cancelled (and tried again at
      once), while threads, which nothing can end, are left to their leases.

    A handler that returns acknowledges. One that raises is tried again after the topic's backoff; `Bury`, `Retry` and
    `Failed` say otherwise. While the store is away the worker waits, and goes on by itself.
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
        self.concurrency = whole("concurrency", concurrency, 1)
        self.prefetch = max(1, concurrency // 4) if prefetch is None else whole("prefetch", prefetch, 0)
        self.grace = milliseconds(grace, "grace", zero=True) / 1000
        self._names = _chosen(gate, topics)
        self._active = False
        self._halt, self._hurry = asyncio.Event(), asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        halt = asyncio.Event()
        started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self.run(halt, started))
        try:
            await asyncio.wait({task, started}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            halt.set()
            await _to_the_end(task, self.stop)
            raise
        if task.done():
            await task
        self._task = task
        return self

    async def __aexit__(self, *_: object) -> None:
        self._halt.set()
        if self._task is not None:
            await _to_the_end(self._task, self.stop)

    def stop(self) -> None:
        """Asks it to stop; a second time: at once, without the rest of the grace time. From its event loop only."""
        if self._halt.is_set():
            self._hurry.set()
        self._halt.set()

    async def run(self, stop: asyncio.Event, started: asyncio.Future[None] | None = None) -> None:
        """Works until `stop` is set, or until cancelled: that, too, leaves the grace time, unless it happens twice.
        Raises PolicyChanged, and StoreError if the store cannot be reached at the start."""
        if self._active:
            raise BadInput("worker", self, "is running already", "Make another one: gate.aio.worker()")
        self._active = True
        self._halt, self._hurry = stop, asyncio.Event()
        self._begin()
        try:
            await self._open()
            await self._work(started)
        finally:
            for line in self._lines:
                line.close()
            for due in self._dues:
                await due.close()
            self._threads.close()
            self._active = False

    async def _open(self) -> None:
        """Raises PolicyChanged, BadInput, StoreError."""
        for name in self._names:
            due = Due(self.gate.topics[name])
            self._dues.append(due)
            await due.open()
            opening = due.topic.opening
            if opening.onward is None:
                self._lines.append(Line(due))
            else:
                self._others.append(Forwarding(due, opening.onward))
            if opening.recurring:
                self._others.append(Planner(due))

    def _begin(self) -> None:
        self._dues: list[Due] = []
        self._lines: list[Line] = []
        self._others: list[Forwarding | Planner] = []
        self._ready: deque[_Ready] = deque()
        self._running: dict[asyncio.Task[BaseException | None], _Ready] = {}
        self._asked = 0
        self._settled: list[tuple[Line, Settlement]] = []
        self._freed, self._to_settle, self._over = asyncio.Event(), asyncio.Event(), False
        self._threads = Threads("idemgate-handler")

    async def _work(self, started: asyncio.Future[None] | None) -> None:
        await asyncio.gather(*(due.listen() for due in self._dues))
        unwatch = self._watch_clock()
        settling = asyncio.create_task(self._settle())
        turning = list(self._turns())
        log.info("worker.started", extra={"topics": list(self._names), "concurrency": self.concurrency})
        if started is not None and not started.done():
            started.set_result(None)
        try:
            await self._halted(turning, settling)
        finally:
            unwatch()
            self._halt.set()
            await _to_the_end(self._wind_down(turning, settling), self.stop)
            log.info("worker.stopped", extra={"topics": list(self._names)})

    def _turns(self) -> Iterator[asyncio.Task[None]]:
        for line in self._lines:
            yield asyncio.create_task(keep_up(line, partial(self._bring, line), self._halt))
        for other in self._others:
            yield asyncio.create_task(keep_up(other, other.turn, self._halt))

    def _wake(self) -> None:
        for post in (*self._lines, *self._others):
            post.wake.set()

    async def _halted(self, turning: list[asyncio.Task[None]], settling: asyncio.Task[None]) -> None:
        """Until told to stop, or until a loop of ours ends, which is a fault of this program and not to be hidden."""
        halted = asyncio.create_task(self._halt.wait())
        done, _ = await asyncio.wait({halted, settling, *turning}, return_when=asyncio.FIRST_COMPLETED)
        halted.cancel()
        for task in done - {halted}:
            if (error := task.exception()) is not None:
                log.critical("worker.failed", exc_info=error)  # now: an application may not look before it leaves
                raise error

    def _watch_clock(self) -> Callable[[], object]:
        watch = getattr(self.gate.clock, "on_move", None)
        if watch is None:
            return lambda: None
        loop = asyncio.get_running_loop()

        def moved() -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody sleeps there any more
                loop.call_soon_threadsafe(self._wake)

        unwatch: Callable[[], object] = watch(moved)
        return unwatch

    # -- taking -------------------------------------------------------------------------------------------------------

    async def _bring(self, line: Line) -> None:
        """Takes what there is room for and starts it; waits for room if there is none."""
        room = self.concurrency + self.prefetch - len(self._ready) - len(self._running) - self._asked
        if self._halt.is_set():
            return
        if room <= 0:
            self._freed.clear()
            await self._freed.wait()
            return
        self._asked += room  # the other topics share this bound
        try:
            found = await line.take(room)
            self._ready.extend(_Ready(line, delivery) for delivery in found)
        finally:
            self._asked -= room
            self._freed.set()
        self._start()

    # -- running ------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Starts what is ready, up to the concurrency; passes over what was lost while it waited."""
        while self._ready and len(self._running) < self.concurrency and not self._halt.is_set():
            ready = self._ready.popleft()
            if ready.delivery.lost:
                ready.line.drop([ready.delivery])
                continue
            handler = ready.line.topic.opening.handler
            assert handler is not None, "chosen for having one"
            task = asyncio.create_task(handled(handler, ready.delivery, self._threads))
            self._running[task] = ready
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[BaseException | None]) -> None:
        ready = self._running.pop(task)
        error = asyncio.CancelledError() if task.cancelled() else task.exception() or task.result()
        self._settled.append((ready.line, self._settlement(ready, error)))
        self._to_settle.set()
        self._freed.set()
        self._start()

    def _settlement(self, ready: _Ready, error: BaseException | None) -> Settlement:
        delivery, topic = ready.delivery, ready.line.topic.name
        try:
            settlement = settlement_of(delivery, error, ready.line.calls.policy, self._halt.is_set())
        except Exception as wrong:  # a user's backoff or Retry(delay=...) that makes no sense must not end the worker
            log.exception("worker.bad_delay", extra={"topic": topic})
            settlement = Settlement("nack", delivery, 1000, repr(wrong)[:500])
        if error is not None and settlement.verb not in ("ack", "defer"):
            facts = {"topic": topic, "attempt": delivery.attempt, "token": delivery.token}
            log.warning("worker.handler_failed", exc_info=error, extra=facts)
            self.gate.counters.add("worker.failed")
        return settlement

    # -- settling -----------------------------------------------------------------------------------------------------

    async def _settle(self) -> None:
        """Settles what has gathered, one batch a topic; what ends meanwhile makes the next batch."""
        while not self._over or self._settled:
            await self._to_settle.wait()
            self._to_settle.clear()
            by_line: defaultdict[Line, list[Settlement]] = defaultdict(list)
            for line, settlement in self._settled:
                by_line[line].append(settlement)
            self._settled = []
            await asyncio.gather(*(line.settle(batch) for line, batch in by_line.items()))

    # -- stopping -----------------------------------------------------------------------------------------------------

    async def _wind_down(self, turning: list[asyncio.Task[None]], settling: asyncio.Task[None]) -> None:
        """Gives back what never started, lets the rest finish within the grace time, then cancels what can be
        cancelled."""
        end = monotonic() + self.grace
        self._wake()
        self._freed.set()
        # Not cancelled: what a take under way brings has to be given back, or it would lie there until its lease ends.
        await self._until(turning, self.grace)
        for task in turning:
            task.cancel()
        self._settled += [(line, Settlement("return", delivery)) for line, delivery in self._ready]
        self._ready.clear()
        self._to_settle.set()
        await self._until(self._running, end - monotonic())
        self._cut_short()
        if self._running:
            await asyncio.wait(self._running, timeout=LAST_WORDS)
        self._over = True
        self._to_settle.set()
        await self._until([settling], max((line.lease for line in self._lines), default=0.0))
        await asyncio.wait({settling}, timeout=LAST_WORDS)
        settling.cancel()

    def _cut_short(self) -> None:
        for task, (line, delivery) in list(self._running.items()):
            log.error("worker.cut_short", extra={"topic": line.topic.name, "token": delivery.token})
            self.gate.counters.add("worker.cut_short")
            if not awaited(line.topic.opening.handler):
                # Its thread goes on: the delivery is left to its lease, so that nobody runs it beside that thread.
                task.remove_done_callback(self._ended)
                del self._running[task]
                line.drop([delivery])
            task.cancel()

    async def _until(self, tasks: Collection[asyncio.Task[Any]], seconds: float) -> None:
        """Until they have ended, or that many seconds are over, or it has to hurry."""
        end, hurry = monotonic() + seconds, asyncio.create_task(self._hurry.wait())
        while (left := end - monotonic()) > 0 and not self._hurry.is_set():
            waiting = {task for task in tasks if not task.done()}
            if not waiting:
                break
            await asyncio.wait({*waiting, hurry}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()


def _chosen(gate: Gate, topics: Sequence[str]) -> tuple[str, ...]:
    named = {name: topic for name, topic in gate.topics.items() if not topics or name in topics}
    known = {name for name, topic in named.items() if topic.opening.worked}
    for name in topics:
        if name not in known:
            there = sorted(name for name, topic in gate.topics.items() if topic.opening.handler or topic.opening.onward)
            raise BadInput(
                "topics", name, "no handler is registered for it", f"Topics with a handler: {there or 'none'}"
            )
    if not known:
        raise BadInput(
            "topics", topics, "no topic of this gate has a handler", "Register one: @gate.topic(...).handler"
        )
    return tuple(dict.fromkeys(topics)) or tuple(sorted(known))


async def _to_the_end(work: Coroutine[Any, Any, None] | asyncio.Task[None], hurry: Callable[[], None]) -> None:
    """Not left half-way: being cancelled meanwhile only makes it hurry, and is passed on when it has ended."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            hurry()
            cancelled = error
    if cancelled is not None:
        raise cancelled from (None if task.cancelled() else task.exception())
    task.result()
