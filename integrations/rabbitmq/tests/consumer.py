"""A guarded consumer, to be killed:

    python consumer.py STORE NAMESPACE BROKER QUEUE aio|blocking LEASE HANG

It prints "ready" when it consumes, and "held ID", "started ID REDELIVERIES" and "handled ID" for messages. The message
with the id HANG never ends. The process settles its messages and exits when its standard input is closed.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from typing import Any

import aio_pika
import pika
from idemgate_rabbitmq import guarded

from idemgate import Gate

PREFETCH = 4


def report(event: str, *facts: object) -> None:
    print(event, *facts, flush=True)


class HeldReporter(logging.Handler):
    """A log handler that reports held messages and drops other records."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith("rabbitmq.held "):
            report("held", record.__dict__["id"])


async def consume_aio(gate: Gate, broker: str, queue: str, lease: str, hang: str) -> None:
    running: set[object] = set()

    @guarded(gate, scope="killed", lease=lease, pause="100ms")
    async def on_message(message: Any) -> None:
        report("started", message.message_id, message.headers.get("x-delivery-count", 0))
        if message.message_id == hang:
            await asyncio.Event().wait()
        report("handled", message.message_id)

    async def track(message: Any) -> None:
        running.add(message)
        try:
            await on_message(message)
        finally:
            running.discard(message)

    async with await aio_pika.connect(broker) as connection:
        channel = await connection.channel()
        await channel.set_qos(PREFETCH)
        found = await channel.get_queue(queue)
        tag = await found.consume(track)
        report("ready")
        await asyncio.to_thread(sys.stdin.read)
        await found.cancel(tag)
        while running:
            await asyncio.sleep(0.01)
    await gate.aio.close()


def consume_blocking(gate: Gate, broker: str, queue: str, lease: str, hang: str) -> None:
    @guarded(gate, scope="killed", lease=lease, pause="100ms")
    def on_message(channel: Any, method: Any, properties: Any, body: bytes) -> None:
        report("started", properties.message_id, (properties.headers or {}).get("x-delivery-count", 0))
        while properties.message_id == hang:
            time.sleep(1)
        report("handled", properties.message_id)

    connection = pika.BlockingConnection(pika.URLParameters(broker))
    channel = connection.channel()
    channel.basic_qos(prefetch_count=PREFETCH)
    channel.basic_consume(queue, on_message)
    report("ready")

    def stop_at_end_of_input() -> None:
        sys.stdin.read()
        connection.add_callback_threadsafe(channel.stop_consuming)

    threading.Thread(target=stop_at_end_of_input, daemon=True).start()
    channel.start_consuming()
    connection.close()


def main(store: str, namespace: str, broker: str, queue: str, client: str, lease: str, hang: str) -> None:
    gate = Gate(store, namespace=namespace)
    if client == "aio":
        asyncio.run(consume_aio(gate, broker, queue, lease, hang))
    else:
        consume_blocking(gate, broker, queue, lease, hang)
    gate.close()


if __name__ == "__main__":
    logging.lastResort = None  # a connection that breaks is part of the test
    guard_log = logging.getLogger("idemgate.rabbitmq")
    guard_log.setLevel(logging.INFO)
    guard_log.addHandler(HeldReporter())
    main(*sys.argv[1:])
