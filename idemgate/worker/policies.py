"""Follower of a topic's stored policy: a running worker adopts one with a higher revision."""

from __future__ import annotations

import asyncio

from idemgate.topics.slots import stored_policy
from idemgate.worker.poller import POLL, Poller

__all__ = ["FOLLOW", "PolicyFollower"]

FOLLOW = 10.0
"""Seconds between two looks at the stored policy of a topic."""


class PolicyFollower:
    """A follower of the stored policy of one topic.

    Deliveries in flight go on. The lease and the other options that are not stored stay as the program declared them.
    """

    def __init__(self, poller: Poller) -> None:
        self.topic, self.context = poller.topic, poller.context
        self.wake = asyncio.Event()
        self._poller = poller
        self._looked_at = self.context.now()

    def pause(self) -> float:
        """Return the seconds until the next look."""
        left = self._looked_at + FOLLOW - self.context.now()
        # A test clock stands still between its moves, and each move wakes the worker.
        return left if left <= 0 or self.context.clock is None else POLL

    async def run_once(self) -> None:
        """Adopt the stored policy if its revision is higher."""
        if self.context.now() < self._looked_at + FOLLOW:
            return
        self._looked_at = self.context.now()
        context = self.context
        stored = await context.aio_link.run(stored_policy(context.namespace, context.clock, self.topic.name))
        if stored is not None:
            self._poller.adopt_policy(stored)
