"""The processes of the demo, each a small program as a user would write it. Started as `python -m`, with its role."""

from __future__ import annotations

import sys
from typing import Any

from idemgate.cli.demo.order import DemoOrder, ReportStream, obey
from idemgate.gate import Gate
from idemgate.subscribers import PubSubMessage
from idemgate.topics.merge import MergeSpec, append
from idemgate.topics.messages import Delivery
from idemgate.topics.topic import Topic
from idemgate.worker.logs import configure as configure_logs

__all__ = ["TOPIC", "topic_of"]

TOPIC = "changes"
LEASE = "2s"
"""So short that the work of a killed process goes on before the demo ends."""
RETENTION = "15m"
"""Longer than a duplicate can take; short, because a demo's keys are of no use afterwards."""


def topic_of(gate: Gate, order: DemoOrder) -> Topic:
    """One delivery a path and window, with the ids of all events in it and the last of their other fields."""
    merge: MergeSpec = {"ids": append(100_000), "*": "last"}
    return gate.topic(TOPIC, window=order.window, merge=merge, dedup_retention=RETENTION, lease=LEASE)


def subscribe(order: DemoOrder, report: ReportStream) -> None:
    """Receive every event, as all subscribers do, and handle those that no other subscriber has handled."""
    gate = Gate(order.url, namespace=order.namespace)
    changes = topic_of(gate, order).aio

    # The other subscribers wait for the one that runs: if it is killed, one of them takes over.
    @gate.once(key="{event[id]}", retention=RETENTION, lease=LEASE, on_done="skip", on_in_progress="wait")
    async def handle(event: dict[str, Any]) -> bool:
        receipt = await changes.trigger(event["path"], {"ids": event["id"], "change": event["change"]})
        report.add("handled", (event["id"], event["path"], receipt.accepted))
        return True

    @gate.subscribe(order.channel)
    async def hear(heard: PubSubMessage) -> None:
        event = heard.json()
        report.add("received", event["id"])
        if await handle(event) is None:
            report.add("dropped", event["id"])

    gate.run()
    report.add("counters", gate.counters.snapshot())


def work(order: DemoOrder, report: ReportStream) -> None:
    """Takes what is due. A real handler would render the path; this one says what it was given, and when."""
    gate = Gate(order.url, namespace=order.namespace)

    @topic_of(gate, order).handler
    async def render(delivery: Delivery[dict[str, Any]]) -> None:
        seconds, micros = await gate.context.aio_link.command("TIME")
        now_ms = int(seconds) * 1000 + int(micros) / 1000
        first_ms = round(delivery.first_at.timestamp() * 1000)
        facts = (delivery.count, delivery.dropped, first_ms, delivery.due_ms, now_ms, delivery.attempt)
        report.add("delivered", (delivery.key, delivery.payload["ids"], *facts))
        report.send()  # before the acknowledgement: if this process is killed between both, the delivery is repeated

    gate.run()
    report.add("counters", gate.counters.snapshot())


ROLES = {"subscriber": subscribe, "worker": work}


def main(role: str) -> int:
    configure_logs("WARNING")
    report = ReportStream()
    try:
        ROLES[role](obey(), report)
    finally:
        report.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
