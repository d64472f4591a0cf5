"""`gate.run()`: a worker and the subscribers of a gate as a whole program, stopped by SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from idemgate.core.durations import Duration, milliseconds
from idemgate.errors import InvalidArgument
from idemgate.subscribers.subscribers import Subscriber
from idemgate.worker.coordinator import MembershipOption
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
    """Run until SIGTERM or SIGINT. The first signal begins the grace time, a second one ends it."""
    here = threading.current_thread()
    if here is not threading.main_thread():
        raise InvalidArgument(
            "run", here.name, "signals reach the main thread only", "Use `async with gate.aio.worker()` elsewhere"
        )
    asyncio.run(_run(gate, topics, concurrency, prefetch, grace, membership))


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
    stop = asyncio.Event()
    _stop_on_signals(stop, worker)
    try:
        async with asyncio.TaskGroup() as group:
            if worker is not None:
                group.create_task(worker.run(stop))
            for subscriber in gate.subscribers:
                group.create_task(subscriber.run(stop, grace=milliseconds(grace, "grace", zero=True) / 1000))
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None  # the cause; the others were stopped because of it
    finally:
        await gate.context.close_aio()
        gate.context.close()


def _stop_on_signals(stop: asyncio.Event, worker: Worker | None) -> None:
    def request_stop() -> None:
        if stop.is_set() and worker is not None:
            worker.stop()
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        with suppress(NotImplementedError):  # event loops on Windows do not support it
            loop.add_signal_handler(number, request_stop)
