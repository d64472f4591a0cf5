"""A worker that sends the topic "jobs" on, to be killed:

    python sender.py STORE NAMESPACE NOW BROKER QUEUE aio|blocking DIE

It says "started" when it works, ends when nothing is due any more, and kills itself instead of acknowledging the
DIE-th message that the broker has confirmed; 0: never.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import sys
from typing import Any

from idemgate_rabbitmq import AioPublisher, Publisher

from idemgate import Gate
from idemgate.testing import Clock


async def main(store: str, namespace: str, now: str, broker: str, queue: str, client: str, die: str) -> None:
    gate = Gate(store, namespace=namespace, clock=Clock(float(now)))
    topic = gate.topic("jobs", merge="append", slots=2, backoff=0, max_attempts=1000)
    confirmed = itertools.count(1)

    def reached() -> None:
        """Between the confirm and the acknowledgement."""
        if next(confirmed) == int(die):
            os.kill(os.getpid(), signal.SIGKILL)

    if client == "aio":
        aio = AioPublisher(broker, routing_key=queue)

        @topic.handler
        async def send(delivery: Any) -> None:
            await aio(delivery)
            reached()
    else:
        blocking = Publisher(broker, routing_key=queue)

        @topic.handler
        def send_blocking(delivery: Any) -> None:
            blocking(delivery)
            reached()

    async with gate.aio.worker(concurrency=8):
        print("started", flush=True)
        while (stats := await topic.aio.stats()).ready or stats.in_flight:
            await asyncio.sleep(0.005)


if __name__ == "__main__":
    logging.disable()  # a broken connection now and then is the normal case here
    asyncio.run(main(*sys.argv[1:]))
