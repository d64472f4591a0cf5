"""A consumer of FastStream for `test_soak.py`, until its standard input is closed:

    python -m integrations.faststream.tests.soak_consumer ORDER

ORDER is that of the soak of RabbitMQ: `broker` is the URL of NATS, `queue` the stream, and `client` the kind of handler
("aio" for async). The events are the same, too.
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

from faststream.nats import JStream, NatsBroker, NatsMessage
from idemgate_faststream import Once, middleware
from nats.js.api import ConsumerConfig

from idemgate import current
from integrations.faststream.tests.transports import ignore
from integrations.rabbitmq.tests.soak_consumer import Consumer

WORKERS = 8
ACK_WAIT = 2.0


class NatsConsumer(Consumer):
    def report_verdicts(self) -> None:
        """Report the verdict on each run before FastStream settles its message."""
        watch = middleware._OnceMiddleware._watch

        def reporting(this: Any, message: Any, scope: str, verdict: Any) -> None:
            if verdict.ran:
                not_stored = verdict.outcome == "handled" and verdict.error is not None
                outcome = "not stored" if not_stored else verdict.outcome
                self.report("ended", message.headers["event-id"], verdict.token, os.getpid(), outcome)
            watch(this, message, scope, verdict)

        middleware._OnceMiddleware._watch = reporting  # type: ignore[method-assign]

    async def consume_aio(self) -> None:
        async def on_message_async(message: NatsMessage) -> None:
            await asyncio.sleep(self.drawn.uniform(0, 0.015))
            self.cause_effect(message.headers["event-id"], current().token)
            await asyncio.sleep(self.drawn.uniform(0, 0.015))

        def on_message(message: NatsMessage) -> None:
            time.sleep(self.drawn.uniform(0, 0.015))
            self.cause_effect(message.headers["event-id"], current().token)
            time.sleep(self.drawn.uniform(0, 0.015))

        async def on_reject(message: Any, _: Exception) -> None:
            await broker.publish(message.body, f"{name}-dead", stream=f"{name}-dead", timeout=5)

        name = self.order["queue"]
        once = Once(
            self.gate, key="{message.headers[event-id]}", backoff="50ms", on_reject=on_reject, **self.order["options"]
        )
        broker = NatsBroker(
            self.order["broker"], middlewares=[once], reconnect_time_wait=0.1, max_reconnect_attempts=-1,
            error_cb=ignore, graceful_timeout=20, logger=None,
        )  # fmt: skip
        subscriber = broker.subscriber(
            f"{name}.>", stream=JStream(name, declare=False), durable="billing", pull_sub=True, max_workers=WORKERS,
            config=ConsumerConfig(ack_wait=ACK_WAIT, max_ack_pending=1000),
        )  # fmt: skip
        subscriber(on_message_async if self.order["client"] == "aio" else on_message)
        await broker.start()
        await asyncio.to_thread(sys.stdin.read)
        await broker.stop()
        await self.gate.aio.close()

    def run(self) -> None:
        self.report_verdicts()
        threading.Thread(target=self.sample_forever, daemon=True).start()
        asyncio.run(self.consume_aio())
        self.gate.close()


if __name__ == "__main__":
    logging.getLogger().addHandler(logging.NullHandler())  # faults are part of the test
    NatsConsumer(json.loads(sys.argv[1])).run()
