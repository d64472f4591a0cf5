"""The handler of a guarded consumer in a process that may be killed, and its reports for `consumers.py`.

The ORDER of such a process is JSON. It has `store`, perhaps through a proxy that fails, `reports` (the same server,
without it), `namespace`, `seed`, `fails` (the share of runs that raise), and `die`: "effect" for SIGKILL after the
effect, another word for another moment, or "".
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import redis

from idemgate import Gate, current

__all__ = ["ConsumerProcess"]

LONGEST_WORK = 0.015


class ConsumerProcess:
    """The work in both flavours, and its reports."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.order = order
        self.gate = Gate(order["store"], namespace=order["namespace"], timeout="1s")
        self.drawn = random.Random(order["seed"])
        self.reports = redis.Redis.from_url(order["reports"])
        self.name = f"reports-of-{order['namespace']}"

    def work(self, message_id: str) -> None:
        time.sleep(self.drawn.uniform(0, LONGEST_WORK))
        self._cause_effect(message_id)
        time.sleep(self.drawn.uniform(0, LONGEST_WORK))

    async def work_async(self, message_id: str) -> None:
        await asyncio.sleep(self.drawn.uniform(0, LONGEST_WORK))
        self._cause_effect(message_id)
        await asyncio.sleep(self.drawn.uniform(0, LONGEST_WORK))

    def report(self, event: str, *facts: object) -> None:
        self.reports.rpush(self.name, json.dumps([event, *facts]))

    def report_verdict(self, message_id: str, verdict: Any) -> None:
        """Report a verdict, before its message is settled."""
        if verdict.ran:
            not_stored = verdict.outcome == "handled" and verdict.error is not None
            outcome = "not stored" if not_stored else verdict.outcome
            self.report("ended", message_id, verdict.token, os.getpid(), outcome)
        elif verdict.outcome == "in_progress":
            self.report("waited", message_id, time.time())

    def start_samples(self) -> None:
        """Report the memory, descriptors and threads of this process each second."""
        threading.Thread(target=self._sample_forever, daemon=True).start()

    def _cause_effect(self, message_id: str) -> None:
        if message_id.startswith("poison") or self.drawn.random() < self.order["fails"]:
            raise RuntimeError("a handler that fails")
        self.report("effect", message_id, current().token, os.getpid())
        if self.order["die"] == "effect":
            os.kill(os.getpid(), signal.SIGKILL)

    def _sample_forever(self) -> None:
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
