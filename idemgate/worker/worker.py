"""The worker: takes what is due, runs handlers, settles; stops without losing or repeating anything that it can
help."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import Any, Protocol, Self

from idemgate.core.durations import Duration, milliseconds
from idemgate.core.numbers import whole
from idemgate.errors import InvalidArgument
from idemgate.membership.member import Membership
from idemgate.store.context import HasContext
from idemgate.store.shielded import to_the_end
from idemgate.topics.calls import Settlement
from idemgate.topics.topic import Topic
from idemgate.worker import prefetch as ahead
from idemgate.worker.consumer import BATCH, Ending, Held, Line
from idemgate.worker.cron import Planner
from idemgate.worker.forwarder import Forwarding
from idemgate.worker.handler import DONE, Ran, handled, ran, said
from idemgate.worker.loop import keep_up
from idemgate.worker.outcome import attempt_of, settlement_of
from idemgate.worker.poller import Due
from idemgate.worker.serving import Serving, membership_of
from idemgate.worker.thread_pool import Hands

__all__ = ["Worker"]

log = logging.getLogger("idemgate.worker")
LAST_WORDS = 1.0
"""Seconds that are left, when the grace time is over, to handlers that were cancelled and to what they leave to
settle."""


class HasTopics(HasContext, Protocol):
    """A gate, as far as a worker knows one."""

    @property
    def topics(self) -> dict[str, Topic]: ...


class Worker:
    """Runs the handlers of topics, and sends on what has to be. `async with Worker(...)`, or `await worker.run(stop)`.

    - `topics`: names; none: every topic of the gate that has a handler or is sent on (`forward`). Their recurring
      triggers are planned, too.
    - `concurrency`: handlers that run at once, all topics together; sync handlers run in as many threads.
    - `prefetch`: deliveries held beyond those that run, so that no handler waits for a round trip; None: as many as
      were handled in the last 50 ms, but at least a quarter of `concurrency` and at most 500; what has waited for a
      second goes back, for other workers, and none is held until handlers are quicker. What was prefetched but not
      started goes back, its attempt undone, when the worker stops.
    - `grace`: how long running handlers may finish when it stops; then async ones are cancelled (and tried again at
      once), while threads, which nothing can end, are left to their leases.
    - `members`: True: it divides the slots of its topics with the other workers that say so, and takes from its own
      only; they are handed over, drained, when workers come and go (see `Membership`). Or a membership of your own,
      one a worker, such as `RedisMembership(context, ttl="5s", grace=grace)`. Recurring triggers are planned by all.

    A handler that returns acknowledges. One that raises is tried again after the topic's backoff; `Bury`, `Retry` and
    `PartialFailure` say otherwise. While the store is away the worker waits, and goes on by itself. `limits` tells where
    adaptive limits stand, `membership` what a member serves.
    """

    def __init__(
        self,
        gate: HasTopics,
        topics: Sequence[str] = (),
        *,
        concurrency: int = 32,
        prefetch: int | None = None,
        grace: Duration = "30s",
        members: bool | Membership = False,
    ) -> None:
        self.context = gate.context
        self._topics = gate.topics
        self.concurrency = whole("concurrency", concurrency, 1)
        self._fetches = None if prefetch is None else whole("prefetch", prefetch, 0)
        self._pace = ahead.first(concurrency)
        self.grace = milliseconds(grace, "grace", zero=True) / 1000
        self.membership = membership_of(gate, members, grace)
        self._names = _chosen(gate.topics, topics)
        self._active = False
        self._lines: list[Line] = []
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
            await to_the_end(task, self.stop)
            raise
        if task.done():
            await task
        self._task = task
        return self

    async def __aexit__(self, *_: object) -> None:
        self._halt.set()
        if self._task is not None:
            await to_the_end(self._task, self.stop)

    def stop(self) -> None:
        """Asks it to stop; a second time: at once, without the rest of the grace time. From its event loop only."""
        if self._halt.is_set():
            self._hurry.set()
        self._halt.set()

    async def run(self, stop: asyncio.Event, started: asyncio.Future[None] | None = None) -> None:
        """Works until `stop` is set, or until cancelled: that, too, leaves the grace time, unless it happens twice.
        Raises PolicyChanged, and StoreError if the store cannot be reached at the start."""
        if self._active:
            raise InvalidArgument("worker", self, "is running already", "Make another one: gate.aio.worker()")
        self._active = True
        self._halt, self._hurry = stop, asyncio.Event()
        self._begin()
        try:
            await self._open()
            await self._work(started)
        finally:
            if self._serving is not None:
                self._serving.close()
            for line in self._lines:
                line.close()
            self._hands.close()
            self._active = False
            await to_the_end(_closed(self._dues))

    async def _open(self) -> None:
        """Raises PolicyChanged, InvalidArgument, StoreError."""
        for name in self._names:
            due = Due(self._topics[name])
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
        self._lines = []
        self._others: list[Forwarding | Planner] = []
        self._serving: Serving | None = None
        self._ready: deque[Held] = deque()  # for handlers that await; `_hands.ready` is for those that block
        self._running: dict[asyncio.Task[BaseException | None], Held] = {}
        self._hands: Hands[Held, Ran | None] = Hands(
            "idemgate-handler", self._run_blocking, self._ran, self._start, self._hands_off
        )
        self._abandoned: set[Held] = set()
        self._pace = ahead.first(self.concurrency)
        self._held = self._asked = self._handled = 0
        self._since = monotonic()
        self._settled: list[Ending] = []
        self._settling: set[asyncio.Task[None]] = set()
        self._freed, self._to_settle, self._over = asyncio.Event(), asyncio.Event(), False
        self._moved = asyncio.Event()

    async def _work(self, started: asyncio.Future[None] | None) -> None:
        await asyncio.gather(*(due.listen() for due in self._dues))
        belonging = await self._join()
        unwatch = self._watch_clock()
        settling = asyncio.create_task(self._settle())
        turning = list(self._turns())
        log.info("worker.started", extra={"topics": list(self._names), "concurrency": self.concurrency})
        if started is not None and not started.done():
            started.set_result(None)
        try:
            await self._halted([*turning, *belonging], settling)
        finally:
            unwatch()
            self._halt.set()
            await to_the_end(self._wind_down(turning, settling, belonging), self.stop)
            log.info("worker.stopped", extra={"topics": list(self._names)})

    def _turns(self) -> Iterator[asyncio.Task[None]]:
        for line in self._lines:
            yield asyncio.create_task(keep_up(line, partial(self._bring, line), self._halt))
        for other in self._others:
            yield asyncio.create_task(keep_up(other, partial(self._turn, other), self._halt))
        if self._fetches is None:
            yield asyncio.create_task(self._relieve())

    def _wake(self) -> None:
        self._moved.set()
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
        watch = getattr(self.context.clock, "on_move", None)
        if watch is None:
            return lambda: None
        loop = asyncio.get_running_loop()

        def moved() -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody sleeps there any more
                loop.call_soon_threadsafe(self._wake)

        unwatch: Callable[[], object] = watch(moved)
        return unwatch

    @property
    def limits(self) -> dict[str, int]:
        """The adaptive limit of each topic that has one, as it is now; empty while it does not run."""
        return {line.topic.name: line.limiter.limit for line in self._lines if line.limiter is not None}

    # -- taking -------------------------------------------------------------------------------------------------------

    async def _bring(self, line: Line) -> None:
        """Takes what there is room for and starts it; waits for room if there is none, or if what is being settled will
        bring more before anything has to wait for it."""
        if self._halt.is_set():
            return
        if line.room(1) <= 0:
            line.wake.clear()
            await line.wake.wait()  # for one of its own to be settled
            return
        room = line.room(self._room())
        if room <= 0 or (self._settling and len(self._waiting(line)) > self._free()):
            self._freed.clear()
            await self._freed.wait()
            return
        self._asked += room  # the other topics share this bound
        try:
            self._brought(line, await line.take(room))
        finally:
            self._asked -= room
            self._freed.set()
            self._look()
        self._start()

    def _room(self) -> int:
        return self.concurrency + self._ahead() - self._held - self._asked

    def _waiting(self, line: Line) -> deque[Held]:
        """Where deliveries of a line wait to be run."""
        return self._ready if line.awaits else self._hands.ready

    def _brought(self, line: Line, found: list[Held]) -> None:
        self._held += len(found)
        self._waiting(line).extend(found)

    def _ahead(self) -> int:
        span = monotonic() - self._since
        if span >= self._pace.window:
            self._pace = ahead.after(self._pace, self.concurrency, self._handled, span)
            self._handled, self._since = 0, monotonic()
        return self.prefetch

    @property
    def prefetch(self) -> int:
        """How many deliveries are held beyond those that run, as it is now."""
        return self._pace.most if self._fetches is None else self._fetches

    async def _relieve(self) -> None:
        """Gives back what waits for too long, since handlers became slow: another worker may have a place for it."""
        while not self._halt.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(ahead.PATIENCE / 2):
                    await self._moved.wait()
            self._moved.clear()
            self._give_back_late(self.context.now() - ahead.PATIENCE)

    def _give_back_late(self, since: float) -> None:
        """What was taken then or before, if there is any; then none is held for a while."""
        if any(_waiting_since(queue) <= since for queue in (self._ready, self._hands.ready)):
            self._pace, self._handled, self._since = ahead.SLOW, 0, monotonic()
            self._give_back(lambda held: held.since > since)

    async def _turn(self, other: Forwarding | Planner) -> None:
        try:
            await other.turn()
        finally:
            self._look()

    # -- being a member -----------------------------------------------------------------------------------------------

    async def _join(self) -> list[asyncio.Task[None]]:
        """The task of its membership, if it has one. Raises StoreError."""
        if self.membership is None:
            return []
        self._serving = Serving(self.membership, self._dues, self._lines, self._reassigned)
        return [await self._serving.join(self._halt)]

    def _reassigned(self) -> None:
        self._give_back(Held.mine)
        self._wake()

    def _look(self) -> None:
        """After each take and settlement: a take under way may have brought what is not to be served here any more,
        and a slot may be drained now."""
        if self._serving is not None:
            self._give_back(Held.mine)
            self._serving.look()

    def _give_back(self, kept: Callable[[Held], bool]) -> None:
        """All that was not started, but for what is kept."""
        for queue in (self._ready, self._hands.ready):
            for _ in range(len(queue)):
                with suppress(IndexError):  # a thread may take the last one
                    ready = queue.popleft()
                    if kept(ready):
                        queue.append(ready)
                    else:
                        self._end(ready, Settlement("return", ready.delivery))
        self._start()  # what was put back may have been missed by a thread that looked for it

    async def _leave(self, belonging: Collection[asyncio.Task[None]]) -> None:
        self._look()
        await self._until(belonging, self.context.timeout)
        await _ended(belonging)
        for task in belonging:
            task.cancel()
        await _ended(belonging)

    # -- running ------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Starts what is ready, up to the concurrency; passes over what was lost while it waited."""
        while self._ready and self._free() > 0 and not self._halt.is_set():
            ready = self._ready.popleft()
            if ready.delivery.lost:
                self._drop(ready)
                continue
            ready.line.began(ready.delivery)
            self._await(ready, partial(ready.line.handler, ready.delivery))
        if self._hands.ready:
            self._hands.start(self._free())

    def _free(self) -> int:
        return self.concurrency - len(self._running) - self._hands.active

    def _await(self, ready: Held, begin: Callable[[], Any]) -> None:
        task = asyncio.create_task(handled(begin, ready.delivery))
        self._running[task] = ready
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[BaseException | None]) -> None:
        ready = self._running.pop(task)
        error = asyncio.CancelledError() if task.cancelled() else task.exception() or task.result()
        self._handled += 1
        self._end(ready, self._settlement(ready, error))
        self._start()

    # In the threads:

    def _run_blocking(self, ready: Held) -> Ran | None:
        """None: not run, since it was lost while it waited."""
        if ready.delivery.lost:
            return None
        if ready.line.limiter is not None:
            ready.line.began(ready.delivery)
        return ran(ready.line.handler, ready.delivery)

    def _hands_off(self) -> bool:
        """Whether threads should take no more: it stops, or what awaits waits for a place of theirs."""
        return self._halt.is_set() or (bool(self._ready) and self._free() <= 0)

    # In the event loop again:

    def _ran(self, ended: list[tuple[Held, Ran | None]]) -> None:
        for ready, outcome in ended:
            if self._abandoned and ready in self._abandoned:
                continue
            if outcome is DONE and ready.line.limiter is None:  # that is most of them
                self._settled.append((ready, Settlement("ack", ready.delivery)))
                self._handled += 1
                self._held -= 1
            elif outcome is None:
                self._drop(ready)
            else:
                self._told(ready, *outcome)
        self._to_settle.set()
        self._freed.set()

    def _told(self, ready: Held, result: object, error: BaseException | None) -> None:
        if result is not None and inspect.isawaitable(result):  # a plain function that hands on a coroutine
            self._await(ready, lambda: result)
        else:
            self._handled += 1
            self._end(ready, self._settlement(ready, error or said(result)))

    def _end(self, ready: Held, settlement: Settlement) -> None:
        self._settled.append((ready, settlement))
        self._held -= 1
        self._to_settle.set()
        self._freed.set()

    def _drop(self, ready: Held) -> None:
        ready.line.drop([ready])
        self._held -= 1
        self._freed.set()

    def _settlement(self, ready: Held, error: BaseException | None) -> Settlement:
        delivery, topic = ready.delivery, ready.line.topic.name
        ready.line.ended(delivery, error)
        try:
            settlement = settlement_of(delivery, error, ready.line.calls.policy, self._halt.is_set())
        except Exception as wrong:  # a user's backoff or Retry(delay=...) that makes no sense must not end the worker
            log.exception("worker.bad_delay", extra={"topic": topic})
            settlement = Settlement("nack", delivery, 1000, repr(wrong)[:500])
        if error is not None and settlement.verb not in ("ack", "defer"):
            facts = {"topic": topic, "attempt": attempt_of(delivery), "token": delivery.token}
            log.warning("worker.handler_failed", exc_info=error, extra=facts)
            self.context.counters.add("worker.failed")
        return settlement

    # -- settling -----------------------------------------------------------------------------------------------------

    async def _settle(self) -> None:
        """Settles what has gathered: at once if nothing is being settled, else when it is a whole batch."""
        while not self._over or self._settled or self._settling:
            await self._to_settle.wait()
            self._to_settle.clear()
            for task in [task for task in self._settling if task.done()]:
                self._settling.discard(task)
                self._freed.set()
                task.result()
            if not self._settling or len(self._settled) >= BATCH:
                self._send_settled()

    def _send_settled(self) -> None:
        by_line: defaultdict[Line, list[Ending]] = defaultdict(list)
        for ending in self._settled:
            by_line[ending[0].line].append(ending)
        self._settled = []
        for line, endings in by_line.items():
            room = 0 if self._halt.is_set() else max(0, line.room(self._room()))
            self._asked += room
            task = asyncio.create_task(self._turn_over(line, endings, room))
            self._settling.add(task)
            task.add_done_callback(lambda _: self._to_settle.set())

    async def _turn_over(self, line: Line, endings: list[Ending], room: int) -> None:
        """Settles, and takes as many in the same step as there is room for."""
        try:
            self._brought(line, await line.settle(endings, room))
        finally:
            self._asked -= room
        if self._halt.is_set():
            self._give_back(lambda _: False)
        self._look()
        self._start()

    # -- stopping -----------------------------------------------------------------------------------------------------

    async def _wind_down(
        self, turning: list[asyncio.Task[None]], settling: asyncio.Task[None], belonging: list[asyncio.Task[None]]
    ) -> None:
        """Gives back what never started, lets the rest finish within the grace time, then cancels what can be
        cancelled."""
        end = monotonic() + self.grace
        self._wake()
        self._freed.set()
        # Not cancelled: what a take under way brings has to be given back, or it would lie there until its lease ends.
        await self._until(turning, self.grace)
        for task in turning:
            task.cancel()
        self._give_back(lambda _: False)
        resting = asyncio.create_task(self._hands.rest())
        await self._until([resting, *self._running], end - monotonic())
        await self._until(self._running, end - monotonic())  # what threads handed on to be awaited
        resting.cancel()
        self._cut_short()
        if self._running:
            await asyncio.wait(self._running, timeout=LAST_WORDS)
        self._over = True
        self._to_settle.set()
        await self._until([settling], max((line.lease for line in self._lines), default=0.0))
        await asyncio.wait({settling}, timeout=LAST_WORDS)
        settling.cancel()
        await self._leave(belonging)

    def _cut_short(self) -> None:
        for ready in tuple(self._hands.running):
            # Its thread goes on: the delivery is left to its lease, so that nobody runs it beside that thread.
            self._abandoned.add(ready)
            self._cut(ready)
            self._drop(ready)
        for task, ready in list(self._running.items()):
            if not task.done():  # else it has ended, and that is about to be heard
                self._cut(ready)
                task.cancel()

    def _cut(self, ready: Held) -> None:
        log.error("worker.cut_short", extra={"topic": ready.line.topic.name, "token": ready.delivery.token})
        self.context.counters.add("worker.cut_short")

    async def _until(self, tasks: Collection[asyncio.Task[Any]], seconds: float) -> None:
        """Until they have ended, or that many seconds are over, or it has to hurry."""
        end, hurry = monotonic() + seconds, asyncio.create_task(self._hurry.wait())
        while (left := end - monotonic()) > 0 and not self._hurry.is_set():
            waiting = {task for task in tasks if not task.done()}
            if not waiting:
                break
            await asyncio.wait({*waiting, hurry}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()


def _chosen(known_topics: Mapping[str, Topic], topics: Sequence[str]) -> tuple[str, ...]:
    named = {name: topic for name, topic in known_topics.items() if not topics or name in topics}
    known = {name for name, topic in named.items() if topic.opening.worked}
    for name in topics:
        if name not in known:
            there = sorted(
                name for name, topic in known_topics.items() if topic.opening.handler or topic.opening.onward
            )
            raise InvalidArgument(
                "topics", name, "no handler is registered for it", f"Topics with a handler: {there or 'none'}"
            )
    if not known:
        raise InvalidArgument(
            "topics", topics, "no topic of this gate has a handler", "Register one: @gate.topic(...).handler"
        )
    return tuple(dict.fromkeys(topics)) or tuple(sorted(known))


def _waiting_since(queue: deque[Held]) -> float:
    """When the first of it was taken; infinity for none."""
    try:
        return queue[0].since
    except IndexError:  # a thread may have taken it
        return float("inf")


async def _closed(dues: Collection[Due]) -> None:
    for due in dues:
        await due.close()


async def _ended(tasks: Collection[asyncio.Task[None]]) -> None:
    if tasks:
        await asyncio.wait(tasks, timeout=LAST_WORDS)
