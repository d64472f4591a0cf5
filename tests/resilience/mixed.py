"""A program of whatever version of the package is on its path: `python -P mixed.py ORDER`, a JSON object.

It opens its gate and says "ready", begins with a line from its standard input, says "produced" when it has asked for
everything, works on until its standard input ends, and then says what it did. It uses only what every version has.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import idemgate

TRIGGERED, GUARDED, CLAIMED = 20, 4, 3
"""Keys of the topic, and how many numbers make one key of a guarded function and of a claim."""


def say(what: Any) -> None:
    print(json.dumps(what), flush=True)


async def main(order: dict[str, Any]) -> None:
    gate = idemgate.Gate(order["url"], namespace=order["namespace"], timeout="60s")
    topic = gate.topic("t", slots=2, merge="append", lease="60s", backoff=0)
    did: dict[str, Any] = {"handled": [], "guarded": [], "claimed": [], "answers": {}}

    @topic.handler
    async def handle(delivery: Any) -> None:
        did["handled"].append([delivery.key, delivery.token, delivery.payload])
        await asyncio.sleep(0)

    @gate.once(key="{key}", scope="charge", lease="60s", on_in_progress="wait")
    async def charge(key: str) -> str:
        did["guarded"].append(key)
        await asyncio.sleep(0)
        return f"{key} by {order['name']}"

    def claim(key: str) -> None:
        claim = gate.claim(key, lease="60s")
        if claim.started and claim.complete(order["name"]):
            did["claimed"].append(key)

    def taken() -> None:
        """Some of what the worker takes else."""
        for delivery in topic.take(2):
            if topic.ack(delivery) == "ok":
                did["handled"].append([delivery.key, delivery.token, delivery.payload])

    async def produce() -> None:
        for n in range(order["part"], order["numbers"], order["parts"]):
            for status in ({"scheduled", "merged"}, {"duplicate"}):
                receipt = await topic.aio.trigger(f"k{n % TRIGGERED}", n, event_id=n)
                assert receipt.status in status, receipt
        for n in range(order["numbers"]):
            did["answers"][f"g{n // GUARDED}"] = await charge(f"g{n // GUARDED}")
            await asyncio.to_thread(claim, f"c{n // CLAIMED}")
            if n % 10 == 0:
                await asyncio.to_thread(taken)

    await gate.aio.first(order["name"], "1h")
    say("ready")
    await asyncio.to_thread(sys.stdin.readline)
    async with gate.aio.worker(concurrency=4):
        await produce()
        say("produced")
        await asyncio.to_thread(sys.stdin.readline)
    await gate.aio.close()
    gate.close()
    say({**did, "from": str(Path(idemgate.__file__).parents[1])})


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
