"""A guarded consumer for `test_soak.py`, which reconnects until its standard input is closed:

    python soak_consumer.py ORDER

ORDER is JSON: `store` (through a proxy that fails), `reports` (the same server, without the proxy), `namespace`,
`broker`, `queue`, `client` ("aio" or "blocking"), `options` of `guarded` and `seed`. Events go to the list
`reports-of-NAMESPACE`:

- ["effect", ID, TOKEN, PID]: the effect of one run
- ["ended", ID, TOKEN, PID, OUTCOME]: the outcome of the run's verdict. "handled" says that the completion was stored,
  "not stored" that it may not have been, "cancelled" that the channel closed.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

import aio_pika
import pika
import redis
from aio_pika.exceptions import CONNECTION_EXCEPTIONS
from aio_pika.exceptions import AMQPError as AioAMQPError
from idemgate_rabbitmq import guard, guarded
from pika.exceptions import AMQPError

from idemgate import Gate, current

PREFETCH = 8
FAILURES = 0.03
"""The share of runs that raise, in addition to all runs of a poison message."""


class Consumer:
    """The handler in both flavours, and its reports."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.order = order
        self.gate = Gate(order["store"], namespace=order["namespace"], timeout="1s")
        self.guarded = guarded(self.gate, **order["options"])
        self.drawn = random.Random(order["seed"])
        self.reports = redis.Redis.from_url(order["reports"])
        self.name = f"reports-of-{order['namespace']}"

    def report(self, event: str, *facts: object) -> None:
        self.reports.rpush(self.name, json.dumps([event, *facts]))

    def cause_effect(self, message_id: str, token: int) -> None:
        if message_id.startswith("poison") or self.drawn.random() < FAILURES:
            raise RuntimeError("a handler that fails")
        self.report("effect", message_id, token, os.getpid())

    def report_verdicts(self) -> None:
        """Report the verdict on each run before the guard settles its message."""
        decide = guard._ConsumerGuard._decide

        def reporting(this: Any, hold: Any, verdict: Any) -> Any:
            if verdict.ran:
                not_stored = verdict.outcome == "handled" and verdict.error is not None
                outcome = "not stored" if not_stored else verdict.outcome
                self.report("ended", hold.message_id, verdict.token, os.getpid(), outcome)
            return decide(this, hold, verdict)

        guard._ConsumerGuard._decide = reporting  # type: ignore[method-assign]

    def sample_forever(self) -> None:
        """Report the memory, descriptors and threads of this process each second."""
        while True:
            gc.collect()
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            facts = {
                "rss": pages * os.sysconf("SC_PAGE_SIZE"),
                "descriptors": len(list(Path("/proc/self/fd").iterdir())),
                "threads": threading.active_count(),
            }
            self.reports.rpush(f"{self.name}:{os.getpid()}", json.dumps(facts))
            time.sleep(1)

    async def consume_aio(self) -> None:
        tokens: dict[Any, int] = {}
        running: set[Any] = set()

        @self.guarded
        async def on_message(message: Any) -> None:
            tokens[message] = current().token
            await asyncio.sleep(self.drawn.uniform(0, 0.015))
            self.cause_effect(message.message_id, current().token)
            await asyncio.sleep(self.drawn.uniform(0, 0.015))

        async def track(message: Any) -> None:
            running.add(message)
            try:
                await on_message(message)
            except asyncio.CancelledError:  # with its run, or without one
                if message in tokens:
                    self.report("ended", message.message_id, tokens[message], os.getpid(), "cancelled")
                raise
            finally:
                running.discard(message)
                tokens.pop(message, None)

        stopped = asyncio.ensure_future(asyncio.to_thread(sys.stdin.read))
        while not stopped.done():
            try:
                async with await aio_pika.connect(self.order["broker"]) as connection:
                    channel = await connection.channel()
                    await channel.set_qos(PREFETCH)
                    queue = await channel.get_queue(self.order["queue"])
                    tag = await queue.consume(track)
                    closed = [asyncio.ensure_future(one.closed()) for one in (connection, channel)]
                    await asyncio.wait([stopped, *closed], return_when=asyncio.FIRST_COMPLETED)
                    if stopped.done():
                        await queue.cancel(tag)
                        while running:
                            await asyncio.sleep(0.01)
            except (AioAMQPError, *CONNECTION_EXCEPTIONS, OSError, TimeoutError):
                await asyncio.sleep(0.1)
        await self.gate.aio.close()

    def consume_blocking(self) -> None:
        @self.guarded
        def on_message(channel: Any, method: Any, properties: Any, body: bytes) -> None:
            time.sleep(self.drawn.uniform(0, 0.015))
            self.cause_effect(properties.message_id, current().token)
            time.sleep(self.drawn.uniform(0, 0.015))

        stopped = threading.Event()
        channels: list[Any] = []

        def stop_at_end_of_input() -> None:
            sys.stdin.read()
            stopped.set()
            for channel in channels:
                channel.connection.add_callback_threadsafe(channel.stop_consuming)

        threading.Thread(target=stop_at_end_of_input, daemon=True).start()
        while not stopped.is_set():
            try:
                connection = pika.BlockingConnection(pika.URLParameters(self.order["broker"]))
                channels[:] = [connection.channel()]
                channels[0].basic_qos(prefetch_count=PREFETCH)
                channels[0].basic_consume(self.order["queue"], on_message)
                channels[0].start_consuming()
                connection.close()
            except (AMQPError, OSError):
                time.sleep(0.1)

    def run(self) -> None:
        self.report_verdicts()
        threading.Thread(target=self.sample_forever, daemon=True).start()
        if self.order["client"] == "aio":
            asyncio.run(self.consume_aio())
        else:
            self.consume_blocking()
        self.gate.close()


if __name__ == "__main__":
    logging.getLogger().addHandler(logging.NullHandler())  # faults are part of the test
    Consumer(json.loads(sys.argv[1])).run()
