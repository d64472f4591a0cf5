"""A program whose machine has the wrong time: `python elsewhen.py URL NAMESPACE` says what it was answered, as JSON."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

from idemgate import Gate


def asked(gate: Gate) -> dict[str, Any]:
    """Everything whose answer has to do with the time."""
    topic = gate.topic("t", window="1h", lease="30s", backoff=0)
    done = gate.claim("done", retention="1h")
    done.complete("receipt")
    held = gate.claim("held", lease="30s")
    topic.trigger("window", 1)
    topic.trigger("later", 1, delay="90m")
    topic.trigger("soon", 1, delay=0)
    (soon,) = topic.take(10)
    return {
        "now": time.time(),
        "taken": [soon.key, topic.ack(soon)],
        "theirs": gate.claim("theirs").state,
        "first": [gate.first("mark", "1h"), gate.first("mark", "1h")],
        "dedup": [gate.dedup("s", "1h").add("mark"), gate.dedup("s", "1h").add("mark")],
        "token": held.token,
        "done": done.token,
    }


async def planned(gate: Gate) -> None:
    """A worker that plans the next of what recurs."""
    topic = gate.topic("hourly")
    topic.handler(print)
    topic.every("0 * * * *", name="hour")
    async with gate.aio.worker():
        while not gate.counters["worker.planned"]:
            await asyncio.sleep(0.01)
    await gate.aio.close()


if __name__ == "__main__":
    with Gate(sys.argv[1], namespace=sys.argv[2]) as gate:
        asyncio.run(planned(gate))
        print(json.dumps(asked(gate)))
