"""The consumer contract for Celery: each consumer is a `celery worker` with child processes, on Redis."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery

from idemgate import Gate
from idemgate.testing import ConsumerContract, HandlerBridge, Transport
from idemgate.testing.contract import SCOPE, Handler

_numbers = itertools.count(1)
VISIBILITY = 2
START = 240
"""Seconds until a worker is ready, which needs two seconds of processor time."""
CONF = {
    "task_acks_late": True, "task_reject_on_worker_lost": True, "worker_prefetch_multiplier": 1,
    "broker_connection_retry_on_startup": True, "worker_cancel_long_running_tasks_on_connection_loss": True,
    "broker_transport_options": {
        "visibility_timeout": VISIBILITY, "unacked_restore_interval": 1, "unacked_restore_throttle": 1,
    },
}  # fmt: skip


class CeleryTransport(Transport):
    visibility = VISIBILITY

    def __init__(self, gate: Gate, store: str, broker: str, folder: Path, pool: str = "prefork") -> None:
        super().__init__(gate)
        self.store, self.broker, self.folder, self.pool = store, broker, folder, pool
        self.redis = redis.Redis.from_url(f"{store}?db=1")
        self.app = Celery("contract", broker=broker, backend=broker, set_as_current=False)
        self.sent: list[tuple[str, bytes]] = []
        self.consumers: list[CeleryConsumer] = []

    async def publish(self, message_id: str, body: bytes) -> None:
        result = await asyncio.to_thread(self.send, message_id, body)
        self.sent.append((result.id, body))

    def send(self, message_id: str, body: bytes = b"", **options: Any) -> Any:
        return self.app.send_task(SCOPE, [message_id, base64.b64encode(body).decode()], **options)

    async def start(self, handler: Handler, *, acknowledges: bool = True) -> CeleryConsumer:
        consumer = CeleryConsumer(self)
        self.consumers.append(consumer)
        await consumer.start(handler, acknowledges)
        return consumer

    async def is_empty(self) -> bool:
        return not self.redis.llen("celery") and not self.redis.hlen("unacked")

    async def list_dead_letters(self) -> list[bytes]:
        metas = {task_id: self.redis.get(f"celery-task-meta-{task_id}") for task_id, _ in self.sent}
        return [body for task_id, body in self.sent if json.loads(metas[task_id] or b"{}").get("status") == "FAILURE"]

    def close(self) -> None:
        for consumer in self.consumers:
            consumer.end()
        self.app.close()
        self.redis.close()


class CeleryConsumer:
    def __init__(self, transport: CeleryTransport) -> None:
        self.transport = transport

    async def start(self, handler: Handler, acknowledges: bool) -> None:
        self.bridge = HandlerBridge(handler, self.transport.count)
        settings = {
            "bridge": await self.bridge.start(), "store": self.transport.store, "broker": self.transport.broker,
            "namespace": self.transport.gate.namespace, "acknowledges": acknowledges, "conf": CONF,
        }  # fmt: skip
        log = self._spawn(settings)
        end = time.monotonic() + START
        while b"ready." not in log.read_bytes():
            assert self.process.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            await asyncio.sleep(0.05)

    def _spawn(self, settings: dict[str, Any]) -> Path:
        """Start a worker and return its log."""
        number = next(_numbers)
        command = [sys.executable, "-m", "celery", "-A", "contract_app", "worker", "-P", self.transport.pool, "-c", "4",
                   "--without-gossip", "--without-mingle", "-l", "INFO", "-n", f"w{number}@test"]  # fmt: skip
        log = self.transport.folder / f"log{number}"
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                command, cwd=Path(__file__).parent, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                env=os.environ | {"CONTRACT": json.dumps(settings), "C_FORCE_ROOT": "1"}, start_new_session=True,
            )  # fmt: skip
        return log

    async def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(self.process.wait)
        self.bridge.close()

    async def kill(self) -> None:
        self.end()

    def end(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.bridge.close()


@pytest.mark.slow  # two seconds of processor time for each worker
class TestCelery(ConsumerContract):
    kinds = ("sync",)
    patience = 120.0
    test_messages_stay_in_order = None  # Celery keeps no order

    @pytest.fixture
    def transport(self, gate: Gate, store: str, broker: str, tmp_path: Path) -> Iterator[Any]:
        made = CeleryTransport(gate, store, broker, tmp_path)
        yield made
        made.close()
