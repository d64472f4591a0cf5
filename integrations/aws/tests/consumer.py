"""A guarded consumer, until its standard input is closed, or to be killed:

    python consumer.py ORDER

ORDER is that of `tests/resilience/consumer_process.py`, with `endpoint`, `queue`, `client` ("boto3" or "aiobotocore")
and `options` of `SqsConsumer`. `die`: "delete" is SIGKILL before the first deletion.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from contextlib import AsyncExitStack
from typing import Any

from idemgate_aws import SqsConsumer, SqsMessage, consumer

from integrations.aws.tests.clients import make_client, open_aio_client
from tests.resilience.consumer_process import ConsumerProcess


class Process(ConsumerProcess):
    def handle(self, message: SqsMessage) -> None:
        self.work(message.body)

    async def handle_async(self, message: SqsMessage) -> None:
        await self.work_async(message.body)

    def report_verdicts(self) -> None:
        settle = consumer._Reader._settle

        async def reporting(this: Any, line: Any, verdict: Any) -> bool:
            self.report_verdict(line.messages[0].body, verdict)
            return await settle(this, line, verdict)

        consumer._Reader._settle = reporting  # type: ignore[method-assign]

    async def run(self) -> None:
        self.report_verdicts()
        self.start_samples()
        order = self.order
        async with AsyncExitStack() as clients:
            if order["client"] == "boto3":
                client, handler = make_client(order["endpoint"]), self.handle
            else:
                client = await clients.enter_async_context(open_aio_client(order["endpoint"]))
                handler = self.handle_async
            if order["die"] == "delete":
                client.meta.events.register("before-call.sqs.DeleteMessageBatch", _die)
            stop = asyncio.Event()
            running = asyncio.create_task(
                SqsConsumer(self.gate, client, order["queue"], handler, **order["options"]).run(stop)
            )
            await asyncio.to_thread(sys.stdin.read)
            stop.set()
            await running
        await self.gate.aio.close()


def _die(**_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    logging.getLogger().addHandler(logging.NullHandler())  # faults are part of the test
    asyncio.run(Process(json.loads(sys.argv[1])).run())
