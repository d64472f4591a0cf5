"""One process that asks everything once: each call of the guard and of topics, a worker that is a member, and a change
of the number of slots. Killed anywhere, the next one does the same from the beginning."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

from idemgate import Gate, OutcomeUnknown, PartialFailure
from idemgate.errors import ResultTimeout
from idemgate.guard.claim import Claim
from idemgate.testing import Clock
from idemgate.topics.topic import Topic
from tests.resilience import points

__all__ = ["ITEMS", "LEASE", "chores", "topic_of"]

ITEMS = {key: f"item {key}" for key in "abcdefghij"}
LEASE = 5
Order = dict[str, Any]


def topic_of(gate: Gate) -> Topic:
    return gate.topic("t", merge="append", slots=2, lease=LEASE, backoff=0, max_attempts=1000, dedup_retention="24h")


def chores(order: Order) -> Callable[[], object]:
    """Says which places it reached, and how often each."""
    clock = Clock(order["now"])
    gate = Gate(order["url"], namespace=order["namespace"], clock=clock)

    def scene() -> object:
        _mend(gate)
        _guard(gate, clock)
        topic = topic_of(gate)
        _produce(topic)
        _take(topic, clock)
        _bury(topic)
        asyncio.run(_work(gate, topic))
        topic.reshard(4 if topic.open().policy.slots == 2 else 2)
        _send_on(gate)
        _keep_results(gate)
        gate.topic("gone").trigger("x", event_id="x")
        gate.topic("gone").delete(discard=True)
        gate.close()
        return points.reached()

    return scene


def _keep_results(gate: Gate) -> None:
    topic = gate.topic("results", lease=LEASE, backoff=0, max_attempts=1000, result_retention="1h")
    receipt = topic.trigger("r", 1)
    topic.ack(topic.take(), result="done")
    with suppress(ResultTimeout):  # a process that was killed has the delivery
        topic.result(receipt, 0)


def _mend(gate: Gate) -> None:
    """What was killed in the middle of a change is called again."""
    for found in gate.stored_topics():
        topic = topic_of(gate) if found.name == "t" else gate.topic(found.name)
        if found.changing_to:
            topic.reshard(found.changing_to)
        elif found.changing_to == 0:
            topic.delete(discard=True)


def _guard(gate: Gate, clock: Clock) -> None:
    gate.once(key="{key}", scope="chores")(lambda key: key)("k")
    gate.first("k", "1h")
    gate.first_many(["k", "l"], "1h")
    dedup = gate.dedup("chores", "1h")
    dedup.add("k")
    dedup.get_or_set("k", 7)
    dedup.get("k")
    _claim(gate, "released").release()
    _claim(gate, "forgotten")
    with suppress(OutcomeUnknown):  # a process that was killed had it: so it has to be decided
        _claim(gate, "resolved", on_lease_loss="hold")
    gate.cancel("forgotten")
    gate.forget("forgotten", force=True)
    clock.advance(timedelta(seconds=LEASE))
    gate.resolve("resolved", done=True)


def _claim(gate: Gate, key: str, **options: Any) -> Claim:
    claim = gate.claim(key, lease=LEASE, **options)
    if claim.started:
        claim.extend()
        claim.checkpoint("so far")
    return claim


def _produce(topic: Topic) -> None:
    for key, item in ITEMS.items():
        topic.trigger(key, item, event_id=key)
    topic.cancel("a")
    topic.reschedule("b", delay="1ms")
    topic.flush("b")
    topic.flush()
    topic.pause()
    topic.resume()
    topic.peek("b")
    topic.stats()


def _take(topic: Topic, clock: Clock) -> None:
    taken = topic.take(4)
    for delivery, verb in zip(taken, (topic.ack, topic.nack, topic.bury, topic.release), strict=False):
        topic.extend(delivery)
        verb(delivery)
    clock.advance("1s")


def _bury(topic: Topic) -> None:
    topic.bury(topic.take(2))
    topic.dead.list()
    topic.dead.redrive(limit=1)


async def _work(gate: Gate, topic: Topic) -> None:
    """A member among workers, until nothing is left to do: it takes the next with the end of the last. Of what is tried
    for the first time, it fails an item."""
    left = asyncio.Event()

    async def handle(delivery: Any) -> PartialFailure | None:
        return PartialFailure([delivery.payload[0]], "at first") if delivery.attempt == 1 else None

    topic.handler(handle)
    async with asyncio.timeout(60), gate.aio.worker("t", membership="redis", concurrency=1, prefetch=0):
        while not left.is_set():
            stats = await topic.aio.stats()
            if stats.ready + stats.in_flight == 0:
                left.set()
            await asyncio.sleep(0.005)


def _send_on(gate: Gate) -> None:
    out = gate.topic("out", lease=LEASE)
    out.forward(to="list")
    out.trigger("o", "sent on", event_id="o")
    out.forward_once()
