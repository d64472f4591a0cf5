"""huey: its consumer with eight threads in this process, results not kept. It has no keys, so nothing merges."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from huey import RedisHuey

from benchmarks.peers.blocking import steps
from benchmarks.peers.scheduling import late
from benchmarks.peers.speak import Tally, main, url

huey = RedisHuey("bench", url=url(), results=False)
tallies: list[Tally] = []


@huey.task()
def handle(data: dict[str, Any]) -> None:
    tallies[-1].one(late(data["due"]) if "due" in data else None)


def send(data: dict[str, Any], delay: float) -> object:
    return handle.schedule(args=(data,), delay=delay)


def start(tally: Tally) -> Callable[[], object]:
    tallies.append(tally)
    consumer = huey.create_consumer(workers=8, periodic=False, check_worker_health=False)
    consumer.start()
    return lambda: consumer.stop(graceful=True)


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    main(**steps(send, start))
