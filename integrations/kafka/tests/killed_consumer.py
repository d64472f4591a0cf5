"""A guarded consumer, to be killed:

    python killed_consumer.py ORDER

ORDER is JSON: `store`, perhaps through a proxy that fails, `reports` (the same server, without it), `namespace`,
`settings` of a client, `topics`, `options` of `KafkaConsumer`, `kind` of the handler ("sync" or "async"), `seed`,
`fails` (the share of runs that raise), and `die`: "effect" for SIGKILL after the effect, "commit" for SIGKILL before
the first commit, or "".

It runs until its standard input is closed. Events go to the list `reports-of-NAMESPACE`:

- ["effect", ID, TOKEN, PID]: the effect of one run
- ["ended", ID, TOKEN, PID, OUTCOME]: the outcome of the run's verdict, "not stored" if its completion may not have been
- ["waited", ID]: a record that is in progress elsewhere
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
from pathlib import Path
from typing import Any

import redis
from idemgate_kafka import KafkaConsumer, KafkaMessage, consumer

from idemgate import Gate, current

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

    def cause_effect(self, message: KafkaMessage, token: int) -> None:
        record_id = (message.value or b"").decode()
        if record_id.startswith("poison") or self.drawn.random() < self.order["fails"]:
            raise RuntimeError("a handler that fails")
        self.report("effect", record_id, token, os.getpid())
        if self.order["die"] == "effect":
            os.kill(os.getpid(), signal.SIGKILL)

    def handle(self, message: KafkaMessage) -> None:
        time.sleep(self.drawn.uniform(0, LONGEST_WORK))
        self.cause_effect(message, current().token)
        time.sleep(self.drawn.uniform(0, LONGEST_WORK))

    async def handle_async(self, message: KafkaMessage) -> None:
        await asyncio.sleep(self.drawn.uniform(0, LONGEST_WORK))
        self.cause_effect(message, current().token)
        await asyncio.sleep(self.drawn.uniform(0, LONGEST_WORK))

    def report_verdicts(self) -> None:
        """Report each verdict before its record is settled."""
        settle = consumer._Lane._settle

        async def reporting(this: Any, record: Any, verdict: Any) -> None:
            record_id = (record.message.value or b"").decode()
            if verdict.ran:
                not_stored = verdict.outcome == "handled" and verdict.error is not None
                outcome = "not stored" if not_stored else verdict.outcome
                self.report("ended", record_id, verdict.token, os.getpid(), outcome)
            elif verdict.outcome == "in_progress":
                self.report("waited", record_id)
            await settle(this, record, verdict)

        consumer._Lane._settle = reporting  # type: ignore[method-assign]

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
    asyncio.run(Process(json.loads(sys.argv[1])).run())
