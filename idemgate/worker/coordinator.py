"""Coordinator between a worker and its membership: assigns slots to pollers and releases drained slots."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

from idemgate.core.durations import Duration
from idemgate.core.waits import finish_despite_cancel
from idemgate.errors import InvalidArgument
from idemgate.membership.member import Membership, RedisMembership
from idemgate.store.context import HasContext
from idemgate.worker.consumer import TopicConsumer
from idemgate.worker.poller import Poller

__all__ = ["MembershipOption", "SlotCoordinator", "resolve_membership"]

MembershipOption = Literal["redis"] | Membership | None


def resolve_membership(gate: HasContext, membership: MembershipOption, grace: Duration) -> Membership | None:
    """Return the membership that an option means: "redis" is a `RedisMembership` of the gate, None is none.

    Raises:
        InvalidArgument: The option is anything else.
    """
    if membership is None:
        return None
    if isinstance(membership, str) and membership == "redis":
        return RedisMembership(gate, grace=grace)
    if not isinstance(membership, Membership) or isinstance(membership, type):
        raise InvalidArgument(
            "membership", membership, "not a membership", 'Pass "redis", or an instance such as RedisMembership(gate)'
        )
    return membership


class SlotCoordinator:
    """One run of a worker as a member. It follows the steps in the docstring of `Membership`.

    Args:
        membership: The worker's membership.
        pollers: The pollers of all topics of the worker.
        consumers: The consumers of those topics that have a handler.
        on_reassigned: Callback for changed assignments. It must return unstarted deliveries of other slots.
    """

    def __init__(
        self,
        membership: Membership,
        pollers: Sequence[Poller],
        consumers: Sequence[TopicConsumer],
        on_reassigned: Callable[[], None],
    ) -> None:
        self._membership = membership
        self._pollers = pollers
        self._consumers = {consumer.topic.name: consumer for consumer in consumers}
        self._on_reassigned = on_reassigned
        self._joined = asyncio.Event()
        self._closed = False
        for poller in pollers:
            poller.assigned_slots = partial(membership.assigned_slots, poller.topic.name)
            poller.on_resize = partial(self._on_resize, poller)
        membership.on_change(self._on_change)

    async def join(self, stop: asyncio.Event) -> asyncio.Task[None]:
        """Join the members, and stay one until `stop` is set.

        If cancelled, it sets `stop` and leaves first. Cancelled again, it ends without leaving, as if killed.

        Returns:
            The task of the membership.

        Raises:
            StoreError: The first announcement failed.
        """
        topics = {poller.topic.name: poller.slot_count for poller in self._pollers}
        task = asyncio.create_task(self._membership.run(stop, topics))
        joined = asyncio.create_task(self._joined.wait())
        try:
            await asyncio.wait({task, joined}, return_when=asyncio.FIRST_COMPLETED)
        except BaseException:
            stop.set()  # the store may know this member already: without leaving it would hold its slots for its ttl
            await finish_despite_cancel(asyncio.wait({task}), task.cancel)
            _ = task.cancelled() or task.exception()  # mark a store error as retrieved
            raise
        finally:
            joined.cancel()
        if task.done():
            await task
        return task

    def close(self) -> None:
        """Ignore the membership from now on: it may serve another worker."""
        self._closed = True

    def release_drained(self) -> None:
        """Release every draining slot without deliveries. Call it whenever a slot may have become drained."""
        for poller in self._pollers:
            name = poller.topic.name
            if not self._closed and (draining := self._membership.draining(name)):
                self._membership.release(name, draining - self._busy_slots(poller))

    def _on_resize(self, poller: Poller) -> None:
        name = poller.topic.name
        if (consumer := self._consumers.get(name)) is not None:
            consumer.update_slots()
        if not self._closed:
            self._membership.resize(name, poller.slot_count)

    def _busy_slots(self, poller: Poller) -> set[int]:
        """Return the slots with deliveries that run, are unsettled or may be on their way."""
        consumer = self._consumers.get(poller.topic.name)
        in_flight = {entry.delivery.slot for entry in consumer.in_flight} if consumer is not None else set[int]()
        return poller.running_slots | in_flight

    def _on_change(self) -> None:
        if self._closed:
            return
        self._joined.set()
        for poller in self._pollers:
            poller.mark_all_due()  # a newly assigned slot may have work
        self._on_reassigned()
        self.release_drained()
