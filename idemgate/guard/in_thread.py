"""Plain functions as handlers of an async guard: each call runs in its own thread."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine
from contextlib import suppress
from threading import Thread
from typing import Any, TypeVar

__all__ = ["in_thread", "outlive_caller"]

T = TypeVar("T")
_calls: set[asyncio.Task[Any]] = set()
"""The calls of `outlive_caller`: an event loop refers to its tasks weakly."""


def in_thread(handler: Callable[..., Any]) -> Callable[..., Coroutine[Any, Any, Any]]:
    """Return an async handler that calls a plain one in a thread, in a copy of the context, and awaits what it returns.

    A thread cannot be stopped. So a cancellation has no effect while it runs, and the claim lasts until it has ended.
    """

    async def run(*message: Any) -> Any:
        returned = await _call(handler, message)
        return await returned if hasattr(returned, "__await__") else returned

    return run


async def outlive_caller(call: Coroutine[Any, Any, T]) -> T:
    """Await a call whose handler may run in a thread. A cancelled caller does not wait for the thread.

    The call is cancelled, too, and ends when its thread has ended: what has not started does not start.
    """
    task = asyncio.create_task(call)
    _calls.add(task)
    task.add_done_callback(_calls.discard)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.cancel()
        raise


async def _call(handler: Callable[..., Any], message: tuple[Any, ...]) -> Any:
    loop, context = asyncio.get_running_loop(), contextvars.copy_context()
    ended: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

    def work() -> None:
        try:
            outcome: tuple[Any, BaseException | None] = context.run(handler, *message), None
        except BaseException as error:  # noqa: BLE001 - it is raised in the event loop
            outcome = None, error
        with suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(ended.set_result, outcome)

    # Not of a pool: a handler that waits for another one would wait for ever for a thread.
    Thread(target=work, name="idemgate-handler", daemon=True).start()
    while not ended.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait({ended})
    value, error = ended.result()
    if error is not None:
        raise error
    return value
