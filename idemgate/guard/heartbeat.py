"""Renew the lease of a claim until its completion is answered; wait for another owner's claim to end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import Self

from idemgate.core.backoff import SOCKET_TIMEOUT
from idemgate.core.calls import Batch, Call
from idemgate.guard.current import Execution, enter, leave
from idemgate.store.context import Context
from idemgate.store.heartbeat import Kept

__all__ = ["attempt_seconds", "beating", "woken"]


def attempt_seconds(lease: int) -> float | None:
    """Return how long one try of a completion may wait for its reply: a third of the lease (ms), in seconds.

    None where a connection that does not answer is given up sooner anyway."""
    third = lease / 3000
    return third if third < SOCKET_TIMEOUT else None


class beating(Kept):  # noqa: N801 - used as a function, like the context managers of contextlib
    """Renew a lease from the gate's heartbeat thread, every sixth of it, until the block is left.

    The block holds the completion, too: call `end_work` when the work has returned, and leave the block when the store
    has answered. If the renewals ended with the work, a completion on a connection that does not answer could outlast
    the lease, and another caller would run the work again.

    `lease` is in ms. `execution` is marked when the lease is lost while the work runs. With `inside`, `current()`
    returns `execution` until `end_work`.
    """

    __slots__ = ("_context", "_execution", "_handed_over", "_inside", "_renew", "_reset")

    def __init__(
        self, context: Context, lease: int, renew: Callable[[], Call[bool]], execution: Execution, inside: bool = True
    ) -> None:
        # As `Kept.__init__`, without calling it: each guarded call makes one of these.
        self.lease = lease / 1000
        self.interval = lease / 6000
        self.last = monotonic()
        self.due = self.last + self.interval
        self._context = context
        self._inside = inside
        self._renew = renew
        self._execution = execution
        self._handed_over = False

    def __enter__(self) -> Self:
        if self._inside:
            self._reset = enter(self._execution)
        self._context.heartbeat.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        if self._inside:
            self._leave()
        if not self._handed_over:
            self._context.heartbeat.remove(self)

    def end_work(self) -> None:
        """Call this when the work has returned or raised. Renewals go on."""
        self._execution.end()
        if self._inside:
            self._leave()

    def hand_over(self) -> None:
        """Keep the renewals running when the block is left, until `stop`."""
        self._handed_over = True

    def stop(self) -> None:
        """End the renewals that `hand_over` kept running."""
        self._context.heartbeat.remove(self)

    def _leave(self) -> None:
        self._inside = False
        leave(self._reset)

    def renew(self) -> Batch[None]:
        return Batch([self._renew()], self._heard)

    def _heard(self, answers: list[bool]) -> None:
        if not answers[0]:
            # Refused after the work has ended: the completion arrived first, or its own answer will report the loss.
            self._lose()

    def overdue(self) -> None:
        if not self._execution.ended:
            self._lose()

    def _lose(self) -> None:
        self._context.heartbeat.remove(self)
        if self._execution.lose():
            self._context.counters.add("once.lease_lost_while_running")


async def woken(wake: asyncio.Event, seconds: float) -> None:
    """Returns when woken, or after that many seconds. (`wait_for` of Python 3.11 loses a cancellation that comes with
    the wake-up.)"""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await wake.wait()
    wake.clear()
