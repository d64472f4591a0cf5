"""A downstream service that is unavailable costs no attempts, and its topic pauses until the service is back."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import pytest

from idemgate import Gate
from idemgate.errors import DownstreamUnavailable
from idemgate.subscribers import Entry
from idemgate.testing import Clock
from idemgate.worker.worker import Worker
from tests.waiting import eventually as until


class Service:
    """A downstream service that can be taken away."""

    def __init__(self, topic: Any, awaiting: bool, delay: Any = None) -> None:
        self.available = False
        self.calls = 0
        self.attempts: list[int] = []
        self._delay = delay

        async def call_awaiting(delivery: Any) -> None:
            self.call(delivery)

        topic.handler(call_awaiting if awaiting else self.call)

    def call(self, delivery: Any) -> None:
        self.calls += 1
        if not self.available:
            raise DownstreamUnavailable("no connection", delay=self._delay)
        self.attempts.append(delivery.attempt)


@pytest.mark.parametrize("awaiting", [False, True])
async def test_an_outage_costs_no_attempt_and_pauses_the_topic(
    gate: Gate, clock: Clock, eventually: Any, caplog: pytest.LogCaptureFixture, awaiting: bool
) -> None:
    # Given messages that may fail once, and a service that is away
    caplog.set_level(logging.WARNING, logger="idemgate.worker")
    topic = gate.topic("mails", max_attempts=1, backoff="10s")
    service = Service(topic, awaiting)
    await topic.aio.trigger_many([(n, n) for n in range(20)])
    async with Worker(gate, concurrency=4):
        await eventually(lambda: gate.counters["worker.downstream_unavailable"] >= 1)

        async def all_returned() -> bool:
            return (await topic.aio.stats()).in_flight == 0

        await eventually(all_returned)
        # When the pause has not passed, then the worker takes nothing, whatever is triggered
        tried = service.calls
        assert tried <= 4 + 1  # those that ran at once, and one that a thread took meanwhile
        for n in range(20, 25):
            await topic.aio.trigger(n)
        clock.advance("100ms")
        assert service.calls == tried
        # And after each pause one delivery tests the service
        for test in range(1, 4):
            clock.advance("1h")
            await eventually(lambda test=test: service.calls == tried + test)
            await eventually(all_returned)
        assert gate.counters["worker.downstream_unavailable"] == tried + 3
        # When the service is back, then everything is handled, in its first attempt
        service.available = True
        clock.advance("1h")
        await eventually(lambda: gate.counters["worker.acked"] == 25)
    assert service.attempts == [1] * 25
    assert (gate.counters["worker.dead"], gate.counters["worker.failed"], (await topic.aio.stats()).dead) == (0, 0, 0)
    # And the outage was logged once, and so was its end
    events = [record.getMessage().split()[0] for record in caplog.records]
    assert events == ["worker.downstream_unavailable", "worker.downstream_back"]
    assert caplog.records[1].seconds > 3 * 3600  # type: ignore[attr-defined]


async def test_an_outage_pauses_no_other_topic(gate: Gate, eventually: Any) -> None:
    # Given two topics of one worker, one of which has no service
    mails, other, handled = gate.topic("mails", backoff="1h"), gate.topic("other"), []
    Service(mails, True)
    other.handler(lambda delivery: handled.append(delivery.key))
    await mails.aio.trigger_many([(n, n) for n in range(20)])
    async with Worker(gate, concurrency=2):
        await eventually(lambda: gate.counters["worker.downstream_unavailable"])
        # Then the other one goes on
        await other.aio.trigger_many([(n, n) for n in range(20)])
        await eventually(lambda: len(handled) == 20)


async def test_a_handler_may_name_the_pause(gate: Gate, clock: Clock, eventually: Any) -> None:
    topic = gate.topic("mails", max_attempts=1, backoff="1h")
    service = Service(topic, True, delay="5s")
    await topic.aio.trigger("a")
    async with Worker(gate):
        await eventually(lambda: gate.counters["worker.deferred"] == 1)
        service.available = True
        clock.advance("4999ms")
        await topic.aio.stats()
        assert service.calls == 1
        clock.advance("1ms")
        await eventually(lambda: gate.counters["worker.acked"] == 1)


async def test_a_failure_that_the_guard_stored_is_buried_at_once_and_pauses_the_topic(
    gate: Gate, clock: Clock, eventually: Any
) -> None:
    # Given a guarded handler whose failures are final, and a service that is away
    topic = gate.topic("mails", backoff="10s")

    @topic.handler
    @gate.once(key="{delivery.key}", on_error="store")
    async def handle(delivery: Any) -> None:
        raise DownstreamUnavailable("no connection")

    await topic.aio.trigger("a")
    async with Worker(gate):
        # Then no further delivery replays the failure: the dead letter names its cause
        await eventually(lambda: gate.counters["worker.buried"] == 1)
        (letter,) = await topic.aio.dead.list()
        assert (letter.attempts, letter.reason) == (1, "idemgate.errors.DownstreamUnavailable: no connection")
        # And the topic pauses all the same
        assert gate.counters["worker.downstream_unavailable"] == 1
        await topic.aio.trigger("b")
        clock.advance("1s")
        assert (await topic.aio.stats()).pending == 1


async def test_entries_of_a_stream_lose_no_attempt(one: Gate, raw: Any, namespace: str) -> None:
    # Given an entry that may be delivered twice, and a service that is away
    seen: list[int] = []
    raw.xadd(namespace, {"n": 1})

    @one.stream(namespace, group="billing", reclaim="30ms", max_deliveries=2)
    async def handle(entry: Entry) -> None:
        seen.append(entry.deliveries)
        if len(seen) < 6:
            raise DownstreamUnavailable("no connection")

    began = time.monotonic()
    async with one.aio.subscribers():
        # Then it is tried until the service is back, and is no dead letter
        await until(lambda: one.counters["stream.acked"] == 1)
    assert (len(seen), one.counters["stream.dead"]) == (6, 0)
    assert max(seen) == 1
    assert one.counters["stream.downstream_unavailable"] == 5
    # And the reading paused before each try
    assert time.monotonic() - began >= 5 * 0.03
    raw.delete(namespace)
    await asyncio.sleep(0)
