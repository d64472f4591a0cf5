"""A guarded consumer for `test_soak.py`, which reconnects until its standard input is closed:

    python -m integrations.rabbitmq.tests.soak_consumer ORDER

ORDER is that of `tests/resilience/consumer_process.py`, with `broker`, `queue`, `client` ("aio" or "blocking") and
`options` of `guarded`. An outcome "cancelled" says that the channel closed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import threading
import time
from typing import Any

import aio_pika
import pika
from aio_pika.exceptions import CONNECTION_EXCEPTIONS
from aio_pika.exceptions import AMQPError as AioAMQPError
from idemgate_rabbitmq import guard, guarded
from pika.exceptions import AMQPError

from idemgate import current
from tests.resilience.consumer_process import ConsumerProcess

PREFETCH = 8


class Consumer(ConsumerProcess):
    def report_verdicts(self) -> None:
        decide = guard._ConsumerGuard._decide

        def reporting(this: Any, hold: Any, verdict: Any) -> Any:
            if verdict.ran:  # a message that is held is decided again and again
                self.report_verdict(hold.message_id, verdict)
            return decide(this, hold, verdict)

        guard._ConsumerGuard._decide = reporting  # type: ignore[method-assign]

    async def consume_aio(self) -> None:
        tokens: dict[Any, int] = {}
        running: set[Any] = set()

        @guarded(self.gate, **self.order["options"])
        async def on_message(message: Any) -> None:
            tokens[message] = current().token
            await self.work_async(message.message_id)

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
        @guarded(self.gate, **self.order["options"])
        def on_message(channel: Any, method: Any, properties: Any, body: bytes) -> None:
            self.work(properties.message_id)

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
        self.start_samples()
        if self.order["client"] == "aio":
            asyncio.run(self.consume_aio())
        else:
            self.consume_blocking()
        self.gate.close()


if __name__ == "__main__":
    logging.getLogger().addHandler(logging.NullHandler())  # faults are part of the test
    Consumer(json.loads(sys.argv[1])).run()
