"""Keeping a claim alive while its work runs, and waiting for one to end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING

from idemgate.core.calls import Batch, Call
from idemgate.link.pulse import Kept
from idemgate.once.current import Execution, enter, leave

if TYPE_CHECKING:
    from idemgate.gate import Gate

__all__ = ["beating", "woken"]


class beating(Kept):  # noqa: N801 - used as a function, like the context managers of contextlib
    """`with beating(...)`: heartbeats every sixth of the lease (ms), from the gate's heartbeat thread; says so on
    `execution` when the lease is lost. `inside`: `current()` answers with it, too."""

    __slots__ = ("_ended", "_execution", "_gate", "_inside", "_renew", "_reset")

    def __init__(
        self, gate: Gate, lease: int, renew: Callable[[], Call[bool]], execution: Execution, inside: bool = True
    ) -> None:
        # As `Kept.__init__`, without calling it: each guarded call makes one of these.
        self.lease = lease / 1000
        self.interval = lease / 6000
        self.last = monotonic()
        self.due = self.last + self.interval
        self._gate = gate
        self._inside = inside
        self._renew = renew
        self._execution = execution
        self._ended = False

    def __enter__(self) -> Execution:
        if self._inside:
            self._reset = enter(self._execution)
        self._gate.pulse.add(self)
        return self._execution

    def __exit__(self, *_: object) -> None:
        self._ended = True
        self._gate.pulse.remove(self)
        if self._inside:
            leave(self._reset)

    def renew(self) -> Batch[None]:
        return Batch([self._renew()], self._heard)

    def _heard(self, answers: list[bool]) -> None:
        # A heartbeat that crosses the completion is told that nothing is held any more, and that is no loss.
        if not answers[0] and not self._ended:
            self.overdue()

    def overdue(self) -> None:
        self._gate.pulse.remove(self)
        if self._execution.lose():
            self._gate.counters.add("once.lease_lost_while_running")


async def woken(wake: asyncio.Event, seconds: float) -> None:
    """Returns when woken, or after that many seconds. (`wait_for` of Python 3.11 loses a cancellation that comes with
    the wake-up.)"""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await wake.wait()
    wake.clear()
