"""Three changes of an item are one message in RabbitMQ; a copy of it is dropped.

python example.py [url]        a RabbitMQ has to be there; amqp://guest:guest@localhost/ unless said otherwise
"""

from __future__ import annotations

import asyncio
import sys

import aio_pika
from aio_pika.abc import AbstractIncomingMessage
from idemgate_rabbitmq import AioPublisher, decoded, guarded

from idemgate import Gate

QUEUE = "idemgate-example"
gate = Gate("embedded://", namespace="rabbitmq-example")
topic = gate.topic(QUEUE, window="200ms")
rendered = asyncio.Event()


@guarded(gate)
async def render(message: AbstractIncomingMessage) -> None:
    item, count = message.headers["idemgate-key"], message.headers["idemgate-count"]
    payload = decoded(message.body, message.content_type)
    print(f"rendering {item}: {count} changes, the last is price {payload['price']}")
    rendered.set()


async def main(url: str) -> None:
    publisher = AioPublisher(url)
    topic.handler(publisher)  # to the default exchange; the routing key is the topic's name
    async with await aio_pika.connect(url) as connection, publisher:
        channel = await connection.channel()
        await channel.set_qos(prefetch_count=10)
        queue = await channel.declare_queue(QUEUE, auto_delete=True)
        async with gate.aio.worker():
            for price in (1, 2, 3):
                receipt = await topic.aio.trigger("item-7", {"price": price})
                print("item-7:", receipt.status)
            message = await queue.get(timeout=10, fail=False)
            while message is None:
                await asyncio.sleep(0.05)
                message = await queue.get(timeout=10, fail=False)
        # What a crash between the confirm and the acknowledgement would do: the same message once more.
        await channel.default_exchange.publish(message, QUEUE)
        await message.nack(requeue=True)
        await queue.consume(render)
        async with asyncio.timeout(10):
            while not gate.counters["rabbitmq.duplicate"]:
                await asyncio.sleep(0.05)
        print("a copy came, and was dropped")
    await gate.aio.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "amqp://guest:guest@localhost/"))
    gate.close()
