"""A worker's side of its membership: takes from the slots that are its own, and lets go what it has drained."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from idemgate.core.durations import Duration
from idemgate.errors import InvalidArgument
from idemgate.membership.member import Membership, RedisMembership
from idemgate.store.context import HasContext
from idemgate.store.shielded import to_the_end
from idemgate.worker.consumer import Line
from idemgate.worker.poller import Due

__all__ = ["Serving", "membership_of"]


def membership_of(gate: HasContext, members: bool | Membership, grace: Duration) -> Membership | None:
    """What `members=` means: True is Redis' own, False none at all. InvalidArgument for anything else."""
    if isinstance(members, bool):
        return RedisMembership(gate, grace=grace) if members else None
    if not isinstance(members, Membership) or isinstance(members, type):
        raise InvalidArgument("members", members, "not a membership", "Pass True, or one such as RedisMembership(gate)")
    return members


class Serving:
    """One run of a worker as a member: what the docstring of `Membership` asks of it.

    `changed` is called whenever other slots are to be taken from: what is held of the others and not started has to go
    back. `look` has to be called whenever a slot may have become drained.
    """

    def __init__(
        self, membership: Membership, dues: Sequence[Due], lines: Sequence[Line], changed: Callable[[], None]
    ) -> None:
        self._membership = membership
        self._dues = dues
        self._lines = {line.topic.name: line for line in lines}
        self._changed = changed
        self._heard = asyncio.Event()
        self._over = False
        for due in dues:
            due.mine = partial(membership.assigned, due.topic.name)
            due.resized = partial(self._resized, due)
        membership.on_change(self._on_change)

    async def join(self, stop: asyncio.Event) -> asyncio.Task[None]:
        """Becomes a member until `stop` is set; returns when it is one. StoreError if it cannot announce itself.
        Cancelled meanwhile, it sets `stop` and leaves first; cancelled again, it says nothing, as if killed."""
        topics = {due.topic.name: due.number for due in self._dues}
        task = asyncio.create_task(self._membership.run(stop, topics))
        heard = asyncio.create_task(self._heard.wait())
        try:
            await asyncio.wait({task, heard}, return_when=asyncio.FIRST_COMPLETED)
        except BaseException:
            stop.set()  # an announcement may have been heard: cut short, it would hold its slots for its whole ttl
            await to_the_end(asyncio.wait({task}), task.cancel)
            _ = task.cancelled() or task.exception()  # that the store is away is nobody's business any more
            raise
        finally:
            heard.cancel()
        if task.done():
            await task
        return task

    def close(self) -> None:
        """The membership may serve another worker from here on."""
        self._over = True

    def look(self) -> None:
        """Lets go every slot that is to be given up and of which nothing is left."""
        for due in self._dues:
            name = due.topic.name
            if not self._over and (draining := self._membership.draining(name)):
                self._membership.release(name, draining - self._busy(due))

    def _resized(self, due: Due) -> None:
        name = due.topic.name
        if (line := self._lines.get(name)) is not None:
            line.rehome()
        if not self._over:
            self._membership.resize(name, due.number)

    def _busy(self, due: Due) -> set[int]:
        """Slots of which something runs, is unsettled, or may be on its way."""
        line = self._lines.get(due.topic.name)
        return due.asking | ({one.delivery.slot for one in line.held} if line is not None else set())

    def _on_change(self) -> None:
        if self._over:
            return
        self._heard.set()
        for due in self._dues:
            due.look_again()  # a slot that is new here may have work
        self._changed()
        self.look()
