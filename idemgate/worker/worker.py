"""Worker: fetches due deliveries, runs their handlers and settles them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol, Self

from idemgate.core.clock import monotonic
from idemgate.core.durations import Duration, milliseconds
from idemgate.core.text import event_log
from idemgate.core.validation import check_int
from idemgate.core.waits import finish_despite_cancel, wait_for_wakeup, wait_until_done, wait_within, watch_moves
from idemgate.errors import InvalidArgument, ServerRejected
from idemgate.membership.member import Membership
from idemgate.store.context import Context, HasContext, Runner
from idemgate.store.retry import is_out_of_memory
from idemgate.topics.topic import Topic
from idemgate.worker.consumer import InFlight, TopicConsumer
from idemgate.worker.coordinator import MembershipOption, SlotCoordinator, resolve_membership
from idemgate.worker.cron import CronScheduler
from idemgate.worker.forwarder import Forwarder
from idemgate.worker.loop import DeliveryLoop, StoreOutage, repeat
from idemgate.worker.places import MAX_HOLD, Places
from idemgate.worker.poller import PolicyFollower, Poller
from idemgate.worker.unserved import UnservedTopics

__all__ = ["Worker"]

log: logging.Logger = event_log("idemgate.worker")
MAX_SHOWN = 10
"""Handlers that the text of a log record names. Its fields have all of them."""
CLEANUP_SECONDS = 1.0
"""Seconds after the grace time for cancelled handlers to end, and for their deliveries to be settled."""


class HasTopics(HasContext, Protocol):
    """The part of a gate that a worker needs."""

    @property
    def topics(self) -> dict[str, Topic]: ...


class Worker:
    """A worker: it runs the handlers of topics, forwards messages and schedules recurring triggers.

    Use `async with Worker(...)`, or `await worker.run(stop)`. A handler that returns acknowledges its delivery. One
    that raises is retried after the topic's backoff, unless it raises `Bury`, `Retry` or `PartialFailure`. While the
    store is unavailable the worker waits, and continues once the store is back.

    Args:
        gate: The gate with the topics.
        topics: Names of topics. None given means every topic of the gate that has a handler or is forwarded.
        concurrency: Number of handlers that run at once, over all topics. Blocking handlers use as many threads. A free
            place goes to the waiting topic that holds the fewest deliveries.
        prefetch: Number of deliveries to hold beyond those that run, so that no handler waits for a round trip. None
            means as many as were handled in the last 50 ms, at least a quarter of `concurrency` and at most 500. In
            that mode a delivery that waited for a second is returned for other workers, and nothing is prefetched
            until handlers are faster. Stopping returns unstarted deliveries; that does not count as an attempt.
        grace: How long running handlers may finish after a stop. Then async handlers are cancelled and retried at once,
            which is no attempt. Threads cannot be cancelled, so their deliveries are left to their leases.
        membership: "redis" divides the slots of the topics among all workers with this option. Each worker takes from
            its own slots only, and hands slots over drained when workers join or leave (see `Membership`). Or pass
            your own instance, one for each worker, such as `RedisMembership(gate, ttl="5s", grace=grace)`. Every
            worker schedules recurring triggers.

    Attributes:
        limits: The current adaptive limits.
        membership: The worker's `Membership`, or None.
    """

    def __init__(
        self,
        gate: HasTopics,
        topics: Sequence[str] = (),
        *,
        concurrency: int = 32,
        prefetch: int | None = None,
        grace: Duration = "30s",
        membership: MembershipOption = None,
    ) -> None:
        self.context: Context = gate.context
        self._topics = gate.topics
        self.concurrency: int = check_int("concurrency", concurrency, 1)
        self._prefetch = None if prefetch is None else check_int("prefetch", prefetch, 0)
        self._places = Places(concurrency, self._prefetch)
        self.grace: float = milliseconds(grace, "grace", zero=True) / 1000
        self.membership: Membership | None = resolve_membership(gate, membership, grace)
        self._asked = topics
        self._names = select_topics(gate.topics, topics)
        self._active = False
        self._consumers: list[TopicConsumer] = []
        self._stop_event, self._force_stop = asyncio.Event(), asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        stop = asyncio.Event()
        started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self.run(stop, started))
        try:
            await asyncio.wait({task, started}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            stop.set()
            await finish_despite_cancel(task, self.stop)
            raise
        if task.done():
            await task
        self._task = task
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stop_event.set()
        if self._task is not None:
            await finish_despite_cancel(self._task, self.stop)

    def stop(self) -> None:
        """Ask the worker to stop. A second call ends the grace time. Call it from the worker's event loop only."""
        if self._stop_event.is_set():
            self._force_stop.set()
        self._stop_event.set()

    async def run(self, stop: asyncio.Event, started: asyncio.Future[None] | None = None) -> None:
        """Work until `stop` is set, or until cancelled. A single cancellation also leaves the grace time.

        Args:
            stop: Event that stops the worker.
            started: Future to resolve once the worker runs.

        Raises:
            PolicyChanged: A topic's stored policy differs.
            StoreError: The store cannot be reached at the start. A server without memory to store a topic's policy is
                no error: the worker waits for it, and logs `worker.store_unavailable`.
        """
        if self._active:
            raise InvalidArgument("worker", self, "is running already", "Make another one: gate.aio.worker()")
        self._active = True
        self._stop_event, self._force_stop = stop, asyncio.Event()
        self._reset()
        self._names = select_topics(self._topics, self._asked)  # handlers may have been added since
        try:
            with self.context.runners.running(self._describe()):
                if await self._open_topics():
                    async with self.context.lifespans.hold():
                        await self._run(started)
        finally:
            if self._coordinator is not None:
                self._coordinator.close()
            for consumer in self._consumers:
                consumer.close()
            self._loop.dispatcher.close()
            self._active = False
            await finish_despite_cancel(_close_pollers(self._pollers))

    @property
    def limits(self) -> dict[str, int]:
        """The current adaptive limit of each topic that has one; empty before the first run."""
        limits = {consumer.topic.name: consumer.backpressure.limit for consumer in self._consumers}
        return {topic: limit for topic, limit in limits.items() if limit is not None}

    @property
    def prefetch(self) -> int:
        """The current number of deliveries to hold beyond those that run."""
        return self._places.prefetch

    def _describe(self) -> Runner:
        dispatcher = self._loop.dispatcher
        return Runner(
            "worker", self._serves, lambda: self._names, lambda: (self.concurrency - dispatcher.free, self.concurrency),
            dispatcher.list_started, self._replied_at,
        )  # fmt: skip

    def _replied_at(self) -> float:
        return max((poller.replied_at for poller in tuple(self._pollers)), default=0.0)

    def _serves(self, topic: str | None) -> bool:
        """Return True if this worker serves a topic of this name that is declared before its start."""
        return topic is not None and (not self._asked or topic in self._asked)

    # -- starting -----------------------------------------------------------------------------------------------------

    def _reset(self) -> None:
        """Clear the state of a previous run."""
        self._pollers: list[Poller] = []
        self._consumers = []
        self._background: list[Forwarder | CronScheduler | PolicyFollower] = []
        self._unserved = UnservedTopics(self.context, self._topics)
        self._coordinator: SlotCoordinator | None = None
        self._places = Places(self.concurrency, self._prefetch)
        self._loop = DeliveryLoop(self._places, self.concurrency, self._stop_event, self._release_slots)
        self._clock_moved = asyncio.Event()

    async def _open_topics(self) -> bool:
        """Check each topic's policy; build its consumer or forwarder, its cron scheduler and its follower.

        Return False if the worker was stopped while it waited for the memory to store a policy.
        """
        outage = StoreOutage()
        for name in self._names:
            poller = Poller(self._topics[name])
            self._pollers.append(poller)
            if not await self._open(poller, outage):
                return False
            definition = poller.topic.definition
            if definition.forward is None:
                consumer = TopicConsumer(poller)
                self._consumers.append(consumer)
                self._loop.dispatcher.add(consumer)
            else:
                self._background.append(Forwarder(poller, definition.forward))
            if definition.recurring:
                self._background.append(CronScheduler(poller))
            self._background.append(PolicyFollower(poller))

        return True

    async def _open(self, poller: Poller, outage: StoreOutage) -> bool:
        """Check a topic's policy. Wait while the server has no memory to store it; return False on a stop."""
        while True:
            try:
                await poller.open()
            except ServerRejected as error:
                if not is_out_of_memory(error):
                    raise
                outage.begin(poller, error)
            else:
                outage.end(poller)
                return True
            self.context.counters.add("worker.store_unavailable")
            await wait_within(self._stop_event, 1.0)
            if self._stop_event.is_set():
                return False

    # -- running ------------------------------------------------------------------------------------------------------

    async def _run(self, started: asyncio.Future[None] | None) -> None:
        await asyncio.gather(*(poller.listen() for poller in self._pollers))
        memberships = await self._join_members()
        unwatch = watch_moves(self.context.clock, self._wake_all)
        settle_loop = asyncio.create_task(self._loop.settle_until_drained())
        loops = list(self._start_loops())
        unserved = asyncio.create_task(self._unserved.run())
        log.info("worker.started", extra={"topics": list(self._names), "concurrency": self.concurrency})
        if started is not None and not started.done():
            started.set_result(None)
        try:
            await self._wait_for_stop([*loops, *memberships], settle_loop)
        finally:
            unwatch()
            unserved.cancel()
            self._stop_event.set()
            await finish_despite_cancel(self._shut_down(loops, settle_loop, memberships), self.stop)
            log.info("worker.stopped", extra={"topics": list(self._names)})

    def _start_loops(self) -> Iterator[asyncio.Task[None]]:
        outage = StoreOutage()
        for consumer in self._consumers:
            yield asyncio.create_task(repeat(consumer, partial(self._loop.fetch, consumer), self._stop_event, outage))
        for source in self._background:
            step = partial(self._run_background, source)
            yield asyncio.create_task(repeat(source, step, self._stop_event, outage))
        if self._places.is_adaptive:
            yield asyncio.create_task(self._return_stale())

    async def _run_background(self, source: Forwarder | CronScheduler | PolicyFollower) -> None:
        try:
            await source.run_once()
        finally:
            self._release_slots()

    async def _return_stale(self) -> None:
        """Return deliveries that wait for too long because handlers became slow: another worker may have room."""
        while not self._stop_event.is_set():
            await wait_for_wakeup(self._clock_moved, MAX_HOLD / 2)
            self._loop.return_stale(self.context.now() - MAX_HOLD)

    async def _wait_for_stop(self, loops: list[asyncio.Task[None]], settle_loop: asyncio.Task[None]) -> None:
        """Wait for a stop. Raise the error of a loop that ended: that is a bug, and must not be hidden."""
        stopped = asyncio.create_task(self._stop_event.wait())
        done, _ = await asyncio.wait({stopped, settle_loop, *loops}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        for task in done - {stopped}:
            if (error := task.exception()) is not None:
                log.critical("worker.failed", exc_info=error)  # now: the application may await the worker much later
                raise error

    def _wake_all(self) -> None:
        self._clock_moved.set()
        for source in (*self._consumers, *self._background, self._unserved):
            source.wake.set()

    # -- membership ---------------------------------------------------------------------------------------------------

    async def _join_members(self) -> list[asyncio.Task[None]]:
        """Join the membership, if there is one; return its task."""
        if self.membership is None:
            return []
        self._coordinator = SlotCoordinator(self.membership, self._pollers, self._consumers, self._on_reassigned)
        return [await self._coordinator.join(self._stop_event)]

    def _on_reassigned(self) -> None:
        self._loop.return_unstarted(InFlight.is_assigned)
        self._wake_all()

    def _release_slots(self) -> None:
        """Return deliveries of slots that are not assigned any more, and release drained slots.

        Called after each take and settlement: either may bring such deliveries or drain a slot.
        """
        if self._coordinator is not None:
            self._loop.return_unstarted(InFlight.is_assigned)
            self._coordinator.release_drained()

    async def _leave_members(self, memberships: Collection[asyncio.Task[None]]) -> None:
        self._release_slots()
        await wait_until_done(memberships, self.context.timeout, self._force_stop)
        await _wait_briefly(memberships)
        for task in memberships:
            task.cancel()
        await _wait_briefly(memberships)

    # -- stopping -----------------------------------------------------------------------------------------------------

    async def _shut_down(
        self, loops: list[asyncio.Task[None]], settle_loop: asyncio.Task[None], memberships: list[asyncio.Task[None]]
    ) -> None:
        """Return unstarted deliveries, let running handlers finish within the grace time, then cancel them."""
        dispatcher, force, end = self._loop.dispatcher, self._force_stop, monotonic() + self.grace
        self._log_stopping()
        self._wake_all()
        self._places.freed.set()
        # Not cancelled: the deliveries of a take under way must be returned, or they would wait for their leases.
        await wait_until_done(loops, self.grace, force)
        for task in loops:
            task.cancel()
        self._loop.return_unstarted()
        threads = asyncio.create_task(dispatcher.wait_for_threads())
        await wait_until_done([threads, *dispatcher.tasks], end - monotonic(), force)
        await wait_until_done(dispatcher.tasks, end - monotonic(), force)  # coroutines that threads returned
        threads.cancel()
        self._loop.drop(dispatcher.cancel_running())
        if dispatcher.tasks:
            await asyncio.wait(dispatcher.tasks, timeout=CLEANUP_SECONDS)
            self._loop.drop(dispatcher.abandon_running())
        self._loop.drain()
        longest_lease = max((consumer.lease for consumer in self._consumers), default=0.0)
        # A settlement that waits for replicas takes one timeout, and half of another until it is answered.
        await wait_until_done([settle_loop], min(longest_lease, 2 * self.context.timeout), force)
        await asyncio.wait({settle_loop}, timeout=CLEANUP_SECONDS)
        settle_loop.cancel()
        await self._leave_members(memberships)

    def _log_stopping(self) -> None:
        """Log which handlers run, and for how long the worker waits for them."""
        running = [f"{entry.delivery.topic}/{entry.delivery.key}" for entry in self._loop.dispatcher.list_running()]
        log.info(
            "worker.stopping running=%d grace=%g handlers=%r", len(running), self.grace, running[:MAX_SHOWN],
            extra={"running": len(running), "grace": self.grace, "handlers": running},
        )  # fmt: skip


async def _close_pollers(pollers: Collection[Poller]) -> None:
    for poller in pollers:
        await poller.close()


async def _wait_briefly(tasks: Collection[asyncio.Task[None]]) -> None:
    if tasks:
        await asyncio.wait(tasks, timeout=CLEANUP_SECONDS)


# -- which topics a worker serves -------------------------------------------------------------------------------------


def select_topics(gate_topics: Mapping[str, Topic], names: Sequence[str]) -> tuple[str, ...]:
    """Return the given topics, or all topics with work for a worker.

    Raises:
        InvalidArgument: A topic has no handler, or there is none at all.
    """
    selected = {name: topic for name, topic in gate_topics.items() if not names or name in names}
    workable = {name for name, topic in selected.items() if topic.definition.has_consumer}
    for name in names:
        if name not in workable:
            with_handler = sorted(
                name for name, topic in gate_topics.items() if topic.definition.handler or topic.definition.forward
            )
            raise InvalidArgument(
                "topics", name, "no handler is registered for it", f"Topics with a handler: {with_handler or 'none'}"
            )
    if not workable:
        raise InvalidArgument(
            "topics", names, "no topic of this gate has a handler", "Register one: @gate.topic(...).handler"
        )
    return tuple(dict.fromkeys(names)) or tuple(sorted(workable))
