"""kill -9 of publishers, between the confirm and the acknowledgement and at random moments, and of the broker.

What must hold: every accepted trigger reaches the effect of a guarded consumer, and each once: what was sent twice is
dropped. Consumers live here; those that die between their effect and its record are the guard's affair
(`tests/resilience`). `IDEMGATE_KILLS` says how many publishers are killed more than the few of the suite.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any, cast

import aio_pika
import pytest
from idemgate_rabbitmq import AioPublisher, Publisher, guarded

from idemgate import Duration, Gate
from idemgate.testing import Clock
from tests.waiting import eventually

KILLS = int(os.environ.get("IDEMGATE_KILLS", "0"))


class Case:
    """A topic, the queue that it is sent to, processes that send and die, and the effects of a guarded consumer."""

    def __init__(
        self,
        gate: Gate,
        store: str,
        broker: Any,
        queue: Any,
        python: Any,
        drawn: random.Random,
        *,
        backoff: Duration = 0,
    ) -> None:
        self.gate, self.drawn = gate, drawn
        self.topic = gate.topic("jobs", merge="append", slots=2, backoff=backoff, max_attempts=1000)
        self.store, self.broker, self.queue, self.python = store, broker, queue, python
        self.sent: Counter[str] = Counter()
        self.effects: Counter[str] = Counter()
        self.kills = 0
        self._keys = iter(range(1 << 30))

    async def trigger(self, keys: int = 20) -> None:
        """New keys, each triggered once or a few times; all due now."""
        for _ in range(keys):
            key = next(self._keys)
            triggers = [(str(key), f"{key}.{n}") for n in range(self.drawn.randint(1, 3))]
            await self.topic.aio.trigger_many(triggers)
            self.sent.update(payload for _, payload in triggers)

    async def send(self, client: str, die: int = 0, after: float | None = None) -> None:
        """Run a process that sends. It kills itself at a confirm, or is killed here `after` so many seconds."""
        clock = cast(Clock, self.gate.context.clock)
        now = f"{clock.microseconds() / 1_000_000:.6f}"
        process = self.python(
            "sender.py", self.store, self.gate.namespace, now, self.broker.url, self.queue.name, client, str(die),
            stdout=-1,
        )  # fmt: skip
        try:
            assert await asyncio.to_thread(process.stdout.readline) == "started\n"
            if after is not None:
                await asyncio.sleep(after)
                process.kill()
            code = await asyncio.to_thread(process.wait, 60)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
        assert code in (0, -9)
        self.kills += code == -9
        clock.advance("31s")  # what it had in flight lapses

    async def finish(self, client: str) -> None:
        """Until nothing is left: a lease that lapses the second time is tried again some time within a lease."""
        while (stats := await self.topic.aio.stats()).pending + stats.in_flight:
            await self.send(client)
        assert stats.dead == 0
        assert stats["acked_triggers"] == sum(self.sent.values())

    def empty(self) -> bool:
        stats = self.topic.stats()
        return not stats.pending + stats.in_flight

    async def consumed(self) -> None:
        """A guarded consumer empties the queue."""

        @guarded(self.gate, scope="effects")
        async def on_message(message: Any) -> None:
            self.effects.update(json.loads(message.body))

        async with await aio_pika.connect(self.broker.url) as connection:
            channel = await connection.channel()
            found = await channel.get_queue(self.queue.name)
            # Of a publisher killed just now more may arrive at any time: until nothing is left, whatever was counted.
            while batch := [message async for message in arrived(found, 50)]:
                await asyncio.gather(*map(on_message, batch))

    @property
    def copies(self) -> int:
        return self.gate.counters["rabbitmq.duplicate"]

    def check(self) -> None:
        """Nothing lost, nothing twice."""
        assert self.effects == self.sent
        assert self.gate.counters["rabbitmq.rejected"] == self.gate.counters["rabbitmq.failed"] == 0


@pytest.fixture
def case(gate: Gate, store: str, broker: Any, queue: Any, python: Any, drawn: random.Random) -> Case:
    return Case(gate, store, broker, queue, python, drawn)


@pytest.mark.parametrize("client", ["aio", "blocking"])
@pytest.mark.slow
async def test_killed_between_the_confirm_and_the_acknowledgement(case: Case, client: str) -> None:
    # Given messages, each the merge of one to three triggers
    await case.trigger(20)
    # When a publisher dies right after the first confirm, and another after some
    await case.send(client, die=1)
    await case.send(client, die=8)
    assert case.kills == 2
    # And others send the rest
    await case.finish(client)
    await case.consumed()
    # Then some came twice, and each trigger had its effect once
    assert case.copies >= 2
    case.check()


@pytest.mark.parametrize("client", ["aio", "blocking"])
@pytest.mark.slow
async def test_killed_at_random_moments(case: Case, client: str) -> None:
    for _ in range(3):
        await case.trigger(60)
        await case.send(client, after=case.drawn.uniform(0, 0.08))
        await case.consumed()
    await case.finish(client)
    await case.consumed()
    case.check()


@pytest.mark.timeout(0)
@pytest.mark.slow
async def test_many_kills(case: Case) -> None:
    """Only with IDEMGATE_KILLS."""
    if not KILLS:
        pytest.skip("IDEMGATE_KILLS says how many")
    while case.kills < KILLS:
        await case.trigger(60)
        client = case.drawn.choice(["aio", "blocking"])
        if case.drawn.random() < 0.5:
            await case.send(client, die=case.drawn.randint(1, 50))
        else:
            await case.send(client, after=case.drawn.uniform(0, 0.08))
        if case.drawn.random() < 0.3:
            await case.consumed()
    await case.finish("aio")
    await case.consumed()
    case.check()
    print(
        f"\n{case.kills} kills, {sum(case.sent.values())} triggers, {case.gate.counters['rabbitmq.handled']} messages, "
        f"{case.copies} copies dropped: lost 0, twice 0; 95 % bound 3/N = {3 / case.kills:.4f}"
    )


@pytest.mark.parametrize("client", [AioPublisher, Publisher])
@pytest.mark.slow
async def test_the_broker_is_killed_and_comes_back(
    client: Any, store: str, namespace: str, broker: Any, queue: Any, python: Any, drawn: random.Random
) -> None:
    # Given a worker that sends all the time, to a durable queue, in real time
    gate = Gate(store, namespace=namespace)
    case = Case(gate, store, broker, queue, python, drawn, backoff="50ms")
    publisher = client(broker.url, routing_key=queue.name, timeout="2s")
    case.topic.handler(publisher)
    stop = asyncio.Event()

    async def keep_triggering() -> None:
        while not stop.is_set():
            await case.trigger(5)
            await asyncio.sleep(0.02)

    triggering = asyncio.create_task(keep_triggering())
    async with gate.aio.worker():
        await eventually(lambda: gate.counters["worker.acked"] > 100)
        # When the broker is killed in the middle, and started again
        await asyncio.to_thread(broker.kill)
        await eventually(lambda: gate.counters["worker.downstream_unavailable"] > 0)
        await asyncio.to_thread(broker.start)
        before = gate.counters["worker.acked"]
        await eventually(lambda: gate.counters["worker.acked"] > before + 100)
        stop.set()
        await triggering
        await eventually(case.empty)
    # Then what it had confirmed is in the queue, and the rest was sent again
    await case.consumed()
    case.check()
    closing = publisher.close()
    if closing is not None:
        await closing
    await gate.aio.close()
    gate.close()


async def arrived(queue: Any, most: int) -> AsyncIterator[Any]:
    """Return the messages of the queue. The caller settles them."""
    while most and (message := await queue.get(fail=False)) is not None:
        yield message
        most -= 1
