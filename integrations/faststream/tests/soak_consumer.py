"""A consumer of FastStream for `test_soak.py`, until its standard input is closed:

    python -m integrations.faststream.tests.soak_consumer ORDER

ORDER is that of `tests/resilience/consumer_process.py`, with `broker`, the URL of NATS, `queue`, the stream, `client`,
the kind of handler ("aio" for async), and `options` of `Once`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from time import monotonic
from typing import Any

from faststream.nats import JStream, NatsBroker, NatsMessage
from idemgate_faststream import Once, middleware
from nats.errors import Error as NatsError
from nats.js.api import ConsumerConfig

from integrations.faststream.tests.transports import ignore
from tests.resilience.consumer_process import ConsumerProcess
from tests.resilience.consumers import STALLED

WORKERS = 8
ACK_WAIT = 2.0


class NatsConsumer(ConsumerProcess):
    def report_verdicts(self) -> None:
        """Report the verdict on each run before FastStream settles its message."""
        watch = middleware._OnceMiddleware._watch

        def reporting(this: Any, message: Any, scope: str, verdict: Any) -> None:
            self.report_verdict(message.headers["event-id"], verdict)
            watch(this, message, scope, verdict)

        middleware._OnceMiddleware._watch = reporting  # type: ignore[method-assign]

    async def consume_aio(self) -> None:
        async def on_message_async(message: NatsMessage) -> None:
            await self.work_async(message.headers["event-id"])

        def on_message(message: NatsMessage) -> None:
            self.work(message.headers["event-id"])

        async def on_reject(message: Any, _: Exception) -> None:
            await broker.publish(message.body, f"{name}-dead", stream=f"{name}-dead", timeout=5)

        name = self.order["queue"]
        once = Once(
            self.gate, key="{message.headers[event-id]}", backoff="50ms", on_reject=on_reject, **self.order["options"]
        )
        end = monotonic() + STALLED
        while True:
            broker = NatsBroker(
                self.order["broker"], middlewares=[once], reconnect_time_wait=0.1, max_reconnect_attempts=-1,
                error_cb=ignore, graceful_timeout=20, logger=None,
            )  # fmt: skip
            subscriber = broker.subscriber(
                f"{name}.>", stream=JStream(name, declare=False), durable="billing", pull_sub=True, max_workers=WORKERS,
                config=ConsumerConfig(ack_wait=ACK_WAIT, max_ack_pending=1000),
            )  # fmt: skip
            subscriber(on_message_async if self.order["client"] == "aio" else on_message)
            try:
                await broker.start()
                break
            except (TimeoutError, NatsError, OSError):  # a fault has cut the connection before it asked for messages
                if monotonic() > end:
                    raise
                await broker.stop()
        await asyncio.to_thread(sys.stdin.read)
        await broker.stop()
        await self.gate.aio.close()

    def run(self) -> None:
        self.report_verdicts()
        self.start_samples()
        asyncio.run(self.consume_aio())
        self.gate.close()


if __name__ == "__main__":
    logging.getLogger().addHandler(logging.NullHandler())  # faults are part of the test
    NatsConsumer(json.loads(sys.argv[1])).run()
