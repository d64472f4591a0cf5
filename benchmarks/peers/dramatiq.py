"""dramatiq: its worker with eight threads in this process. It has no keys, so nothing merges."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import dramatiq
from dramatiq.brokers.redis import RedisBroker

from benchmarks.peers.blocking import steps
from benchmarks.peers.scheduling import late
from benchmarks.peers.speak import Tally, main, url

broker = RedisBroker(url=url())
dramatiq.set_broker(broker)
tallies: list[Tally] = []


@dramatiq.actor
def handle(data: dict[str, Any]) -> None:
    tallies[-1].one(late(data["due"]) if "due" in data else None)


def send(data: dict[str, Any], delay: float) -> object:
    return handle.send_with_options(args=(data,), delay=int(delay * 1000))


def start(tally: Tally) -> Callable[[], object]:
    tallies.append(tally)
    worker = dramatiq.Worker(broker, worker_threads=8)
    worker.start()
    return worker.stop


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    main(**steps(send, start))
