"""A consumer that kills itself, or runs until its standard input is closed:

    python -m integrations.faststream.tests.killed_consumer STORE NAMESPACE NATS WHEN

WHEN is "effect" (after that of the handler), "reply" (before the reply is published), "acknowledgement" (before it is
sent) or "never". The effects go to the list NAMESPACE-effects, and NAMESPACE is the stream.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Any, NoReturn

import redis
from faststream.nats import JStream, NatsBroker, NatsMessage
from idemgate_faststream import Once
from nats.js.api import ConsumerConfig

from idemgate import Gate


async def main(store: str, namespace: str, url: str, when: str) -> None:
    gate = Gate(store, namespace=namespace)
    once = Once(gate, key="{message.headers[event-id]}", scope="killed", lease="1s")
    broker = NatsBroker(url, middlewares=[once], logger=None)
    stream = JStream(namespace, declare=False)

    async def die(*_: Any, **__: Any) -> NoReturn:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("it lives")

    if when == "acknowledgement":
        NatsMessage.ack = die  # type: ignore[method-assign]

    @broker.subscriber(
        f"{namespace}.orders", stream=stream, durable="billing", pull_sub=True, config=ConsumerConfig(ack_wait=1)
    )
    @broker.publisher(f"{namespace}.invoices", stream=namespace)
    async def bill(order: str) -> str:
        with redis.Redis.from_url(store) as client:
            client.rpush(f"{namespace}-effects", order)
        if when == "effect":
            await die()
        return f"invoice of {order}"

    if when == "reply":
        bill._publishers[0]._publish = die
    await broker.start()
    await asyncio.to_thread(sys.stdin.read)
    await broker.stop()
    await gate.aio.close()
    gate.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
