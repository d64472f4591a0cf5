"""A guarded consumer, until its standard input is closed, or to be killed:

    python -m integrations.kafka.tests.killed_consumer ORDER

ORDER is that of `tests/resilience/consumer_process.py`, with `settings` of a client, `topics`, `options` of
`KafkaConsumer`, and `kind` of the handler ("sync" or "async"). `die`: "commit" is SIGKILL before the first commit.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from typing import Any

from idemgate_kafka import KafkaConsumer, KafkaMessage, consumer

from tests.resilience.consumer_process import ConsumerProcess


def id_of(message: KafkaMessage) -> str:
    return (message.value or b"").decode()


class KafkaProcess(ConsumerProcess):
    def handle(self, message: KafkaMessage) -> None:
        self.work(id_of(message))

    async def handle_async(self, message: KafkaMessage) -> None:
        await self.work_async(id_of(message))

    def report_verdicts(self) -> None:
        settle = consumer._Lane._settle

        async def reporting(this: Any, record: Any, verdict: Any) -> None:
            self.report_verdict(id_of(record.message), verdict)
            await settle(this, record, verdict)

        consumer._Lane._settle = reporting  # type: ignore[method-assign]

    async def run(self) -> None:
        self.report_verdicts()
        self.start_samples()
        order = self.order
        handler: Any = self.handle if order["kind"] == "sync" else self.handle_async
        made = KafkaConsumer(self.gate, order["settings"], order["topics"], handler, **order["options"])
        if order["die"] == "commit":
            consumer._Commits.commit = die  # type: ignore[method-assign,assignment]
        stop = asyncio.Event()
        running = asyncio.create_task(made.run(stop))
        reading = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
        await asyncio.wait({reading, running}, return_when=asyncio.FIRST_COMPLETED)
        stop.set()
        await running
        await self.gate.aio.close()


async def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    logging.getLogger().addHandler(logging.NullHandler())  # faults are part of the test
    asyncio.run(KafkaProcess(json.loads(sys.argv[1])).run())
