"""A guarded consumer, to be killed:

    python consumer.py ORDER

ORDER is JSON: `store`, perhaps through a proxy that fails, `reports` (the same server, without it), `namespace`,
`endpoint`, `queue`, `client` ("boto3" or "aiobotocore"), `options` of `SqsConsumer`, `seed`, `fails` (the share of runs
that raise), and `die`: "effect" for SIGKILL after the effect, "delete" for SIGKILL before the first deletion, or "".

It runs until its standard input is closed. Events go to the list `reports-of-NAMESPACE`:

- ["effect", ID, TOKEN, PID]: the effect of one run
- ["ended", ID, TOKEN, PID, OUTCOME]: the outcome of the run's verdict, "not stored" if its completion may not have been
- ["waited", ID]: a delivery of a message that is in progress elsewhere
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import random
import signal
import sys
import threading
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import redis
from idemgate_aws import SqsConsumer, SqsMessage, consumer

from idemgate import Gate, current
from integrations.aws.tests.clients import make_client, open_aio_client

LONGEST_WORK = 0.015


class Process:
    """The handler in both flavours, and its reports."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.order = order
        self.gate = Gate(order["store"], namespace=order["namespace"], timeout="1s")
        self.drawn = random.Random(order["seed"])
        self.reports = redis.Redis.from_url(order["reports"])
        self.name = f"reports-of-{order['namespace']}"

    def report(self, event: str, *facts: object) -> None:
        self.reports.rpush(self.name, json.dumps([event, *facts]))

    def cause_effect(self, message: SqsMessage, token: int) -> None:
        if message.body.startswith("poison") or self.drawn.random() < self.order["fails"]:
            raise RuntimeError("a handler that fails")
        self.report("effect", message.body, token, os.getpid())
        if self.order["die"] == "effect":
            os.kill(os.getpid(), signal.SIGKILL)

    def handle(self, message: SqsMessage) -> None:
        time.sleep(self.drawn.uniform(0, LONGEST_WORK))
        self.cause_effect(message, current().token)
        time.sleep(self.drawn.uniform(0, LONGEST_WORK))

    async def handle_async(self, message: SqsMessage) -> None:
        await asyncio.sleep(self.drawn.uniform(0, LONGEST_WORK))
        self.cause_effect(message, current().token)
        await asyncio.sleep(self.drawn.uniform(0, LONGEST_WORK))

    def report_verdicts(self) -> None:
        """Report each verdict before its message is settled."""
        settle = consumer._Reader._settle

        async def reporting(this: Any, line: Any, verdict: Any) -> bool:
            body = line.messages[0].body
            if verdict.ran:
                not_stored = verdict.outcome == "handled" and verdict.error is not None
                self.report("ended", body, verdict.token, os.getpid(), "not stored" if not_stored else verdict.outcome)
            elif verdict.outcome == "in_progress":
                self.report("waited", body)
            return await settle(this, line, verdict)

        consumer._Reader._settle = reporting  # type: ignore[method-assign]

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

    async def run(self) -> None:
        self.report_verdicts()
        threading.Thread(target=self.sample_forever, daemon=True).start()
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
