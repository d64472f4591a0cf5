"""`gate.run()`: a worker and the subscribers of a gate as a whole program, stopped by SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any, Protocol

from idemgate.core.durations import Duration
from idemgate.core.key_text import printable
from idemgate.errors import InvalidArgument, PolicyChanged
from idemgate.subscribers.subscribers import Subscriber, Subscribers
from idemgate.worker.coordinator import MembershipOption
from idemgate.worker.logs import configure as configure_logs
from idemgate.worker.worker import HasTopics, Worker

__all__ = ["run"]


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
    runs = [runner.run(stop) for runner in (worker, subscribers) if runner is not None]
    try:
        ends = await asyncio.gather(*(_stop_on_failure(run, stop) for run in runs), return_exceptions=True)
    finally:
        await gate.context.close_aio()
        gate.context.close()
    for end in ends:
        if isinstance(end, BaseException):
            raise end


async def _stop_on_failure(run: Coroutine[Any, Any, None], stop: asyncio.Event) -> None:
    """Run the worker or the subscribers. A failure of one lets the other finish within its grace time."""
    try:
        await run
    except BaseException:
        stop.set()
        raise


def _stop_on_signals(stop: asyncio.Event, worker: Worker | None, subscribers: Subscribers | None) -> None:
    def request_stop() -> None:
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
