"""Keeping a claim alive while its work runs, and waiting for one to end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from idemgate.core.calls import Batch, Call
from idemgate.link.pulse import Beat
from idemgate.once.current import Execution

if TYPE_CHECKING:
    from idemgate.gate import Gate

__all__ = ["beating", "woken"]


@contextmanager
def beating(gate: Gate, lease: int, renew: Callable[[], Call[bool]], execution: Execution) -> Generator[None]:
    """Heartbeats every sixth of the lease (ms), from the gate's heartbeat thread; says so on `execution` when the
    lease is lost."""

    ended = False

    def lost() -> None:
        gate.pulse.remove(beat)
        execution.lose()
        gate.counters.add("once.lease_lost_while_running")

    def heard(held: bool) -> None:
        # A heartbeat that crosses the completion is told that nothing is held any more, and that is no loss.
        if not held and not ended:
            lost()

    beat = Beat(lease / 1000, lambda: Batch([renew()], lambda answers: heard(answers[0])), lost)
    gate.pulse.add(beat)
    try:
        yield
    finally:
        ended = True
        gate.pulse.remove(beat)


async def woken(wake: asyncio.Event, seconds: float) -> None:
    """Returns when woken, or after that many seconds. (`wait_for` of Python 3.11 loses a cancellation that comes with
    the wake-up.)"""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await wake.wait()
    wake.clear()
