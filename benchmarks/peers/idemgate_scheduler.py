"""idemgate's topics: triggers one at a time and in batches of 500, a worker with sync and async handlers, `take`."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from benchmarks.peers.scheduling import adrain, late, pace, settled
from benchmarks.peers.speak import Answer, Tally, drained, main, payload, timed, url
from idemgate import Delivery, Gate, Topic, Trigger

gate = Gate(url(), namespace="bench")
runner = asyncio.Runner()
BATCH = 500


def enqueue(tag: str, n: int, delay: float) -> Answer:
    topic = gate.topic(tag)
    with timed(n) as answer:
        for number in range(n):
            topic.trigger(f"key:{number}", payload(number), delay=delay)
    return answer


def enqueue_many(tag: str, n: int, delay: float) -> Answer:
    topic = gate.topic(tag)
    with timed(n) as answer:
        for start in range(0, n, BATCH):
            numbers = range(start, min(n, start + BATCH))
            topic.trigger_many([Trigger(f"key:{number}", payload(number), delay=delay) for number in numbers])
    return answer


def send(tag: str, n: int, tasks: int) -> Answer:
    """As `enqueue_many`, awaiting: while one batch is under way, the next is built."""
    with timed(n) as answer:
        runner.run(_sent(gate.topic(tag), n, n, tasks))
    return answer


async def _sent(topic: Topic, n: int, keys: int, tasks: int) -> None:
    async def batches() -> None:
        for start in starts:
            numbers = range(start, min(n, start + BATCH))
            await topic.aio.trigger_many([(f"key:{number % keys}", payload(number)) for number in numbers])

    starts = iter(range(0, n, BATCH))
    await asyncio.gather(*(batches() for _ in range(tasks)))


def drain(tag: str, n: int, wait: float, kind: str = "sync") -> Answer:
    """By a worker."""
    topic = gate.topic(tag)

    async def work(tally: Tally) -> None:
        handle(topic, tally, kind)
        async with gate.aio.worker(tag, concurrency=100):
            await asyncio.Event().wait()

    return runner.run(adrain(work, n, wait))


def handle(topic: Topic, tally: Tally, kind: str) -> None:
    def blocking(delivery: Delivery[Any]) -> None:
        tally.one()

    async def awaiting(delivery: Delivery[Any]) -> None:
        tally.one()

    topic.handler(blocking if kind == "sync" else awaiting)


def take(tag: str, n: int, wait: float) -> Answer:
    """By a loop of one's own: take 100, do nothing with each, acknowledge them."""
    topic = gate.topic(tag)
    time.sleep(wait)
    with timed(n) as answer:
        done = 0
        while done < n:
            deliveries = topic.take(100)
            done += len(deliveries)
            topic.ack(deliveries)
    return answer


def steady(tag: str, rate: int, seconds: float, delay: float) -> Answer:
    """A worker, and beside it triggers that are due `delay` seconds later."""

    async def go() -> Answer:
        tally, topic = Tally(int(rate * seconds)), gate.topic(tag)
        topic.handler(lambda delivery: tally.one(late(delivery.payload["due"])))
        async with gate.aio.worker(tag, concurrency=100):
            await _send(topic, rate, seconds, delay)
            await asyncio.to_thread(settled, tally)
        return drained(tally)

    return runner.run(go())


async def _send(topic: Topic, rate: int, seconds: float, delay: float) -> None:
    began = time.time()
    for number, after in enumerate(pace(rate, seconds)):
        await asyncio.sleep(max(0.0, began + after - time.time()))
        await topic.aio.trigger(f"key:{number}", {"due": time.time() + delay}, delay=delay)


def merge(tag: str, n: int, keys: int, keep: str, several: bool) -> Answer:
    """`several`: as `send` with two tasks. `left`: the messages that these triggers made."""
    topic = gate.topic(tag, window="10m", merge=keep)
    topic.trigger("first", None)
    topic.cancel("first")
    with timed(n) as answer:
        if several:
            runner.run(_sent(topic, n, keys, 2))
        else:
            for start in range(0, n, BATCH):
                numbers = range(start, min(n, start + BATCH))
                topic.trigger_many([(f"key:{number % keys}", payload(number)) for number in numbers])
    topic.flush()
    drained_by = drain(tag, keys, 0.0)
    stats = topic.stats()
    return answer | {"left": drained_by["ops"] + stats.scheduled + stats.in_flight}


def slots(tag: str, n: int) -> Answer:
    """Sent, taken and settled in a topic of eight slots, by this one process."""
    topic = gate.topic(tag, slots=8)
    with timed(n) as answer:
        for start in range(0, n, BATCH):
            topic.trigger_many([(f"key:{number}", payload(number)) for number in range(start, start + BATCH)])
        while deliveries := topic.take(100):
            topic.ack(deliveries)
    return answer


if __name__ == "__main__":
    main(
        slots=slots,
        enqueue=enqueue,
        enqueue_many=enqueue_many,
        send=send,
        drain=drain,
        take=take,
        steady=steady,
        merge=merge,
    )
