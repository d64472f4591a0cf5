"""The demo's subscribers and worker as a user would write them. Each is a process of `main`.

The process reads its order from stdin. It reports what happens as JSON lines on stdout, not through Redis: these
reports show whether the promises were kept.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any, NamedTuple

from idemgate.gate import Gate
from idemgate.subscribers import PubSubMessage
from idemgate.topics.merge import MergeSpec, append
from idemgate.topics.messages import Delivery
from idemgate.topics.topic import Topic
from idemgate.worker.logs import configure_logs

__all__ = ["DemoOrder", "main", "topic_of"]

LEASE = "2s"
"""So short that the work of a killed process goes on before the demo ends."""
RETENTION = "15m"
"""Longer than a duplicate can take but short because a demo's keys are of no use afterwards."""


class DemoOrder(NamedTuple):
    """The settings of one demo for its processes: `name` is its namespace and its channel, `window` is in seconds."""

    url: str
    name: str
    window: float


def topic_of(gate: Gate, order: DemoOrder) -> Topic:
    """Return the topic: one delivery a path and window with the ids of all events in it."""
    merge: MergeSpec = {"ids": append(100_000), "*": "last"}
    return gate.topic("changes", window=order.window, merge=merge, dedup_retention=RETENTION, lease=LEASE)


def subscribe(gate: Gate, order: DemoOrder) -> None:
    """Receive every event as all subscribers do and handle those that no other subscriber has handled."""
    changes = topic_of(gate, order).aio

    # The other subscribers wait for the one that runs: if it is killed, one of them takes over.
    @gate.once(key="{event[id]}", retention=RETENTION, lease=LEASE, on_done="skip", on_in_progress="wait")
    async def handle(event: dict[str, Any]) -> bool:
        receipt = await changes.trigger(event["path"], {"ids": event["id"], "change": event["change"]})
        report("copy", event["id"], receipt.accepted)
        return True

    @gate.subscribe(order.name)
    async def receive(message: PubSubMessage) -> None:
        event = message.json()
        if event is None:  # from the start of the demo, which waits for all subscribers
            report("ready")
        elif await handle(event) is None:
            report("copy", event["id"], None)


def work(gate: Gate, order: DemoOrder) -> None:
    """Take what is due. A real handler would render the path; this one reports it and the server's time."""

    @topic_of(gate, order).handler
    async def render(delivery: Delivery[dict[str, Any]]) -> None:
        seconds, micros = await gate.context.aio_link.command("TIME")
        now_ms = int(seconds) * 1000 + int(micros) / 1000
        first_ms = round(delivery.first_at.timestamp() * 1000)
        report("delivery", delivery.key, delivery.payload["ids"], first_ms, now_ms)


def report(*facts: object) -> None:
    """Send facts to the parent at once: it reads them even if this process is killed then."""
    print(json.dumps(facts), flush=True)


def _end_with_parent() -> None:
    sys.stdin.read()  # the parent writes no more: its end closes the pipe
    os._exit(1)


def main() -> None:
    """Be the process whose name is in argv."""
    order = DemoOrder(*json.loads(sys.stdin.readline()))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    configure_logs("ERROR")
    gate = Gate(order.url, namespace=order.name)
    (work if "worker" in sys.argv[1] else subscribe)(gate, order)
    gate.run()
