"""The Celery program of the contract: `celery -A contract_app worker`. Its settings come from the environment."""

from __future__ import annotations

import base64
import json
import os

from celery import Celery
from idemgate_celery import once_tasks
from kombu.transport.virtual import Channel

from idemgate import Gate
from idemgate.testing import HandlerBridge
from idemgate.testing.contract import LEASE, MAX_ATTEMPTS, SCOPE

settings = json.loads(os.environ["CONTRACT"])
gate = Gate(settings["store"], namespace=settings["namespace"])
app = Celery("contract", broker=settings["broker"], backend=settings["broker"], task_cls=once_tasks(gate))
app.conf.update(settings["conf"])
if not settings["acknowledges"]:
    Channel.basic_ack = lambda *_, **__: None


def key(message_id: str, body: str) -> str:
    HandlerBridge.count(settings["bridge"], message_id)
    return message_id


ONCE = {"key": key, "fingerprint": lambda message_id, body: base64.b64decode(body), "lease": LEASE,
        "max_attempts": MAX_ATTEMPTS, "backoff": "100ms"}  # fmt: skip


@app.task(name=SCOPE, once=ONCE)
def work(message_id: str, body: str) -> str:
    return str(HandlerBridge.call(settings["bridge"], message_id, base64.b64decode(body)))


@app.task(name="count")
def count(parts: list[str]) -> int:
    return len(parts)
