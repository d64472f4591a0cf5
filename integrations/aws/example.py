"""Orders from SQS: a copy is dropped, a failure is retried, and what cannot succeed is a dead letter.

python example.py        moto's server, which is part of this process, stands for AWS
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from typing import Any

import boto3
from idemgate_aws import SqsConsumer, SqsMessage, SqsSender
from moto.server import ThreadedMotoServer

from idemgate import Bury, Gate

gate = Gate("embedded://", namespace="aws-example")
receipts = gate.topic("receipts", window="200ms", merge="append")
failing = {"o-2"}


def charge(message: SqsMessage) -> None:
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


def connect() -> tuple[Any, list[str]]:
    """Return a client, and the URLs of three queues."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        os.environ.setdefault(name, "x")
    sqs = boto3.client("sqs", endpoint_url=f"http://{host}:{port}", region_name="eu-west-1")
    names = "orders", "orders-failed", "receipts"
    return sqs, [sqs.create_queue(QueueName=name)["QueueUrl"] for name in names]


async def main() -> None:
    sqs, (orders, failed, mails) = connect()
    receipts.handler(SqsSender(sqs, mails))
    gate.add_subscriber(
        SqsConsumer(gate, sqs, orders, charge, key="{message.json[order]}", dead_letters=failed, backoff=0, poll="1s")
    )
    async with gate.aio.worker(), gate.aio.subscribers():
        for order in ("o-1", "o-1", "o-2", "o-3"):
            sqs.send_message(QueueUrl=orders, MessageBody=json.dumps({"order": order}))
            await asyncio.sleep(0.3)
        async with asyncio.timeout(30):
            wanted = {"consumer.handled": 2, "consumer.rejected": 1, "consumer.duplicate": 1}
            while any(gate.counters[name] < n for name, n in wanted.items()):
                await asyncio.sleep(0.05)
        print("copies dropped:", gate.counters["consumer.duplicate"])
    (letter,) = sqs.receive_message(QueueUrl=failed, MessageAttributeNames=["All"])["Messages"]
    print("dead letter:", letter["MessageAttributes"]["idemgate-error"]["StringValue"])
    receipt = sqs.receive_message(QueueUrl=mails, WaitTimeSeconds=5)["Messages"][0]
    print("receipt for", receipt["Body"])
    await gate.aio.close()


if __name__ == "__main__":
    sys.tracebacklimit = 0  # the log shows each failure, without its traceback
    asyncio.run(main())
    gate.close()
