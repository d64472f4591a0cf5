"""`gate.run()`: a worker and the subscribers of a gate as a whole program, stopped by SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Protocol

from idemgate.core.clock import monotonic
from idemgate.core.durations import Duration
from idemgate.core.text import printable
from idemgate.errors import InvalidArgument, PolicyChanged
from idemgate.subscribers.subscribers import Subscriber, Subscribers
from idemgate.worker.coordinator import MembershipOption
from idemgate.worker.logs import configure_logs
from idemgate.worker.worker import CLEANUP_SECONDS, HasTopics, Worker

__all__ = ["run"]

log: logging.Logger = logging.getLogger("idemgate.worker")
SAME_REQUEST = 1.0
"""Seconds in which further signals count as the first one: a terminal sends SIGINT, and its supervisor SIGTERM."""


class RunnableGate(HasTopics, Protocol):
    """The part of a gate that `run` needs."""

    @property
    def subscribers(self) -> Sequence[Subscriber]: ...


def run(
    gate: RunnableGate,
    topics: Sequence[str] = (),
    *,
    concurrency: int = 32,
    prefetch: int | None = None,
    grace: Duration = "30s",
    membership: MembershipOption = None,
) -> None:
    """Run until SIGTERM or SIGINT. The first signal begins the grace time, a second one ends it.

    All signals within a second of the first count as one.

    A handler or task that swallows its cancellation is left behind: it cannot keep the process alive.

    Without a handler for the events of idemgate, logging is configured: they go to stderr, from INFO.
    """
    here = threading.current_thread()
    if here is not threading.main_thread():
        raise InvalidArgument(
            "run", here.name, "signals reach the main thread only", "Use `async with gate.aio.worker()` elsewhere"
        )
    configure_logs()
    try:
        asyncio.run(_run(gate, topics, concurrency, prefetch, grace, membership))
    except PolicyChanged as error:  # of a deployment, not a bug: a traceback would hide the fix
        raise SystemExit(f"idemgate: {printable(str(error))}") from error


async def _run(
    gate: RunnableGate,
    topics: Sequence[str],
    concurrency: int,
    prefetch: int | None,
    grace: Duration,
    membership: MembershipOption,
) -> None:
    worked = any(topic.definition.has_consumer for topic in gate.topics.values())
    if not worked and not gate.subscribers:
        raise InvalidArgument(
            "topics",
            list(topics),
            "the gate has no topic with a handler and no subscriber",
            "Register one before run()",
        )
    worker = None
    if worked or topics:
        worker = Worker(gate, topics, concurrency=concurrency, prefetch=prefetch, grace=grace, membership=membership)
    subscribers = Subscribers(gate.subscribers, grace, gate.context) if gate.subscribers else None
    stop = asyncio.Event()
    _stop_on_signals(stop, worker, subscribers)
    executor = ThreadPoolExecutor(thread_name_prefix="asyncio")
    asyncio.get_running_loop().set_default_executor(executor)
    try:
        async with gate.context.lifespans.hold():  # once for both
            runs = [runner.run(stop) for runner in (worker, subscribers) if runner is not None]
            ends = await asyncio.gather(*(_stop_on_failure(run, stop) for run in runs), return_exceptions=True)
    finally:
        await gate.context.close_aio()
        gate.context.close()
        await _leave_endless_work(executor)
    for end in ends:
        if isinstance(end, BaseException):
            raise end


async def _leave_endless_work(executor: ThreadPoolExecutor) -> None:
    """Cancel all other tasks of the event loop. Hide those that do not end from `asyncio.run`, which would wait."""
    loop = asyncio.get_running_loop()
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    ended = asyncio.Event()
    threading.Thread(target=_end_threads, args=(executor, loop, ended), daemon=True).start()
    waits = asyncio.create_task(ended.wait())
    _, left = await asyncio.wait({*tasks, waits}, timeout=CLEANUP_SECONDS)
    if waits in left:
        loop.set_default_executor(ThreadPoolExecutor(1))
        waits.cancel()
    if endless := left - {waits}:
        log.error("worker.tasks_left tasks=%r", [*map(repr, endless)], extra={"tasks": len(endless)})
        for task in endless:
            asyncio._unregister_task(task)  # documented in "Extending asyncio"
        # Python would close their coroutines when it ends, which may loop for ever. It leaves the frames of daemon
        # threads alone.
        threading.Thread(target=_hold, args=(endless,), daemon=True).start()


def _end_threads(executor: ThreadPoolExecutor, loop: asyncio.AbstractEventLoop, ended: asyncio.Event) -> None:
    executor.shutdown(cancel_futures=True)
    with suppress(RuntimeError):  # the event loop is closed
        loop.call_soon_threadsafe(ended.set)


def _hold(_: object) -> None:
    threading.Event().wait()


async def _stop_on_failure(run: Coroutine[Any, Any, None], stop: asyncio.Event) -> None:
    """Run the worker or the subscribers. A failure of one lets the other finish within its grace time."""
    try:
        await run
    except BaseException:
        stop.set()
        raise


def _stop_on_signals(stop: asyncio.Event, worker: Worker | None, subscribers: Subscribers | None) -> None:
    first: float | None = None

    def request_stop() -> None:
        nonlocal first
        if first is not None and monotonic() - first < SAME_REQUEST:
            return
        first = first or monotonic()
        if stop.is_set():
            if worker is not None:
                worker.stop()
            if subscribers is not None:
                subscribers.hurry()
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        with suppress(NotImplementedError):  # event loops on Windows do not support it
            loop.add_signal_handler(number, request_stop)
