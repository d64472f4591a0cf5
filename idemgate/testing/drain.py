"""Blocking drain of a gate."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from idemgate.errors import InvalidArgument
from idemgate.worker.drain import LIMIT, Drained

if TYPE_CHECKING:
    from idemgate.gate import Gate

__all__ = ["drain"]


def drain(gate: Gate, *, limit: int = LIMIT) -> Drained:
    """Run all handlers and subscribers of a gate until nothing is due, and return what ran; see `AioGate.drain`.

    Blocking handlers run in a thread, and async ones in an event loop of this call, which ends with it. What belongs to
    another event loop, such as a pool of connections, does not work in them: await `gate.aio.drain()` in that loop, or
    make the pool in a `gate.lifespan`.

    Args:
        gate: The gate.
        limit: The most deliveries of a topic, or entries of a subscriber.

    Raises:
        InvalidArgument: An event loop runs in this thread.
    """
    with suppress(RuntimeError):  # and it is over before a handler runs, whose error would have it as its context
        asyncio.get_running_loop()
        raise InvalidArgument("drain", gate, "called in a running event loop", "Use `await gate.aio.drain()`")
    return asyncio.run(_drain(gate, limit))


async def _drain(gate: Gate, limit: int) -> Drained:
    try:
        return await gate.aio.drain(limit=limit)
    finally:
        await gate.aio.close()
