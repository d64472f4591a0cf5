"""`keep`: while a handler works on a message, its broker must not redeliver it.

`run_kept` takes the steps of `call.run`, and calls the user's `keep` beside them.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable
from threading import Event, Thread
from typing import Any, Self

from idemgate.core.backoff import SOCKET_TIMEOUT
from idemgate.core.clock import monotonic
from idemgate.core.counters import Counters
from idemgate.core.text import message_of, one_line
from idemgate.core.validation import call_blocking, is_async
from idemgate.core.verdict import Verdict
from idemgate.errors import MissingKey
from idemgate.guard.call import run, run_async, run_without_key, run_without_key_async
from idemgate.guard.context import GuardContext
from idemgate.guard.current import get_current
from idemgate.guard.judge import judge
from idemgate.guard.options import OnceOptions
from idemgate.guard.request import INFINITE, Request

__all__ = ["AioKeeper", "Keep", "Keeper", "run_kept", "run_kept_async"]

log: logging.Logger = logging.getLogger("idemgate.once")
Keep = Callable[[float], Awaitable[object] | object]
"""A function that gets the seconds for which the message must stay invisible from now on."""
FIRST = 0.1
"""Seconds until the first call: the messages of most handlers are settled by then, and cost the broker no request."""


def run_kept(
    guard: GuardContext,
    request: Request | MissingKey,
    keep: Callable[[float], object],
    work: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Verdict[Any]:
    """Run one guarded call and return its verdict. Call `keep` as long as it waits for another owner or works."""
    with Keeper(guard.context.counters, guard.options, keep) as keeper:
        kept = functools.partial(keeper.run, work)
        if isinstance(request, MissingKey):
            return run_without_key(guard, request, kept, args, kwargs)
        if request.wait:
            keeper.start()
        return judge(request, run(guard, request, kept, args, kwargs))


async def run_kept_async(
    guard: GuardContext,
    request: Request | MissingKey,
    keep: Keep,
    work: Callable[..., Awaitable[Any]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Verdict[Any]:
    """Run one guarded call and return its verdict; see `run_kept`."""
    async with AioKeeper(guard.context.counters, guard.options, keep) as keeper:
        kept = functools.partial(keeper.run, work)
        if isinstance(request, MissingKey):
            return await run_without_key_async(guard, request, kept, args, kwargs)
        if request.wait:
            keeper.start()
        return judge(request, await run_async(guard, request, kept, args, kwargs))


class _BaseKeeper:
    """The common part of both keepers: when they go on.

    Leaving the block waits for a call that has begun, within bounds: it could undo what the caller then tells the
    broker.
    """

    def __init__(self, counters: Counters, options: OnceOptions, keep: Keep) -> None:
        self._counters = counters
        self._keep = keep
        self._lease = options.lease / 1000
        self._first = min(FIRST, self._lease / 3)
        self._patience = min(SOCKET_TIMEOUT, self._lease / 3)
        self._max_run = options.max_run / 1000 or INFINITE
        self._ends = INFINITE
        self._is_lost: Callable[[], bool] = bool

    def start(self) -> None:
        """Call `keep` from now on every third of the lease. A second start does nothing."""
        raise NotImplementedError

    def start_work(self, is_lost: Callable[[], bool] = bool) -> None:
        """Start, and end when the work takes longer than `max_run`, or when `is_lost` returns True."""
        self._is_lost, self._ends = is_lost, min(self._ends, monotonic() + self._max_run)
        self.start()

    def _start_run(self) -> None:
        """Start for the run that the caller is part of."""
        execution = get_current()
        self.start_work(lambda: execution is not None and execution.lease_lost)

    def _goes_on(self) -> bool:
        return monotonic() < self._ends and not self._is_lost()

    def _record_failure(self, error: Exception) -> None:
        self._counters.add("once.keep_failed")
        text = message_of(error)
        log.warning("once.keep_failed: %s: %s", type(error).__name__, one_line(text), extra={"error": text})


class Keeper(_BaseKeeper):
    """Calls `keep` in its own thread until the block ends, the lease is lost, or `max_run` has passed."""

    def __init__(self, counters: Counters, options: OnceOptions, keep: Callable[[float], object]) -> None:
        super().__init__(counters, options, keep)
        self._stop = Event()
        self._thread: Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(self._patience)

    def start(self) -> None:
        if self._thread is None:
            self._thread = Thread(target=self._loop, name="idemgate-keep", daemon=True)
            self._thread.start()

    def run(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the work of the call."""
        self._start_run()
        return work(*args, **kwargs)

    def _loop(self) -> None:
        pause = self._first
        while not self._stop.wait(pause) and self._goes_on():
            pause = self._lease / 3
            try:
                call_blocking(self._keep, (self._lease,), {})
            except Exception as error:  # noqa: BLE001 - the handler goes on; its lease is renewed all the same
                if not self._stop.is_set():
                    self._record_failure(error)


class AioKeeper(_BaseKeeper):
    """Calls `keep` in a task of the event loop: a coroutine function is awaited, others run in a thread."""

    def __init__(self, counters: Counters, options: OnceOptions, keep: Keep) -> None:
        super().__init__(counters, options, keep)
        self._task: asyncio.Task[None] | None = None
        self._calling = self._stopped = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        if self._task is None:
            return
        self._stopped = True
        try:
            if self._calling and kind is None:  # no cancellation waits for it
                await asyncio.wait({self._task}, timeout=self._patience)
        finally:
            self._task.cancel()

    def start(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._loop(), name="idemgate-keep")

    async def run(self, work: Callable[..., Awaitable[Any]], *args: Any, **kwargs: Any) -> Any:
        """Run the work of the call."""
        self._start_run()
        return await work(*args, **kwargs)

    async def _loop(self) -> None:
        keep = self._keep
        await asyncio.sleep(self._first)
        while self._goes_on() and not self._stopped:
            self._calling = True
            try:
                called = keep(self._lease) if is_async(keep) else await asyncio.to_thread(keep, self._lease)
                if isinstance(called, Awaitable):  # also of a lambda around a coroutine function
                    await called
            except Exception as error:  # noqa: BLE001 - the handler goes on; its lease is renewed all the same
                if not self._stopped:
                    self._record_failure(error)
            self._calling = False
            if not self._stopped:
                await asyncio.sleep(self._lease / 3)
