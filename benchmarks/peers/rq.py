"""rq: its SimpleWorker (no fork a job) with its scheduler, a process of its own; results not kept.

The worker wants the main thread and takes its functions by name, so they live in the module as imported.
"""

from __future__ import annotations

import logging
import time
from datetime import timedelta
from importlib import import_module
from typing import Any

from redis import Redis
from rq import Queue, SimpleWorker

from benchmarks.peers.blocking import beside, enqueuing, paced
from benchmarks.peers.scheduling import late
from benchmarks.peers.speak import Answer, Tally, drained, main, url

queue = Queue("bench", connection=Redis.from_url(url()))
tallies: list[Tally] = []
HANDLE = "benchmarks.peers.rq.handle"


def handle(data: dict[str, Any]) -> None:
    tallies[-1].one(late(data["due"]) if "due" in data else None)


def send(data: dict[str, Any], delay: float) -> object:
    return queue.enqueue_in(timedelta(seconds=delay), HANDLE, data, result_ttl=0)


def work(tally: Tally) -> Answer:
    tallies.append(tally)
    SimpleWorker([queue], connection=queue.connection).work(with_scheduler=True, max_jobs=tally.wanted)
    return drained(tally)


def drain(tag: str, n: int, wait: float) -> Answer:
    time.sleep(wait)
    return work(Tally(n))


def steady(tag: str, rate: int, seconds: float, delay: float) -> Answer:
    beside(lambda: paced(send, rate, seconds, delay))
    return work(Tally(int(rate * seconds)))


def run() -> None:
    logging.disable(logging.WARNING)
    main(enqueue=enqueuing(send), drain=drain, steady=steady)


if __name__ == "__main__":
    import_module("benchmarks.peers.rq").run()
