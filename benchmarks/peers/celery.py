"""celery: a worker with eight threads in this process, results ignored. It has no keys, so nothing merges."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from celery import Celery
from celery.contrib.testing.worker import start_worker

from benchmarks.peers.blocking import steps
from benchmarks.peers.scheduling import late
from benchmarks.peers.speak import Tally, main, url

app = Celery("bench", broker=url())
app.conf.update(task_ignore_result=True, worker_prefetch_multiplier=100, broker_connection_retry_on_startup=True)
tallies: list[Tally] = []


@app.task(name="handle")
def handle(data: dict[str, Any]) -> None:
    tallies[-1].one(late(data["due"]) if "due" in data else None)


def send(data: dict[str, Any], delay: float) -> object:
    return handle.apply_async((data,), countdown=delay)


def start(tally: Tally) -> Callable[[], object]:
    tallies.append(tally)
    stack = ExitStack()
    stack.enter_context(start_worker(app, pool="threads", concurrency=8, perform_ping_check=False, loglevel="CRITICAL"))
    return stack.close


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    main(**steps(send, start))
