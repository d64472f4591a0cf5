"""A worker whose topic is given another number of slots while it runs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from idemgate import Delivery, Gate
from idemgate.link.listen import Ear
from idemgate.testing import Clock


@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 1)])
async def test_it_serves_the_new_slots_and_hears_their_hints(
    gate: Gate, url: str, clock: Clock, monkeypatch: pytest.MonkeyPatch, before: int, after: int
) -> None:
    # Given a worker in the middle of a delivery
    heard: set[bytes] = set()
    real = Ear.add

    async def add(self: Ear, name: bytes, *args: Any, **options: Any) -> None:
        heard.add(name)
        await real(self, name, *args, **options)

    monkeypatch.setattr(Ear, "add", add)
    topic, handled, go_on = gate.topic("t", slots=before), list[str](), asyncio.Event()

    @topic.handler
    async def handle(delivery: Delivery[Any]) -> None:
        if delivery.key == "long":
            await go_on.wait()
        handled.append(delivery.key)

    await topic.aio.trigger("long")
    async with gate.aio.worker():
        async with asyncio.timeout(20):
            while not (await topic.aio.stats()).in_flight:
                await asyncio.sleep(0.01)
            # When another program gives the topic other slots
            with Gate(url, namespace=gate.namespace, clock=clock) as other:
                await asyncio.to_thread(other.topic("t").reslot, after)
                await asyncio.to_thread(other.topic("t").trigger_many, [(f"k{i}", i) for i in range(20)])
            # Then it handles what comes there, and settles what it had
            while len(handled) < 20:
                await asyncio.sleep(0.01)
            go_on.set()
            while (await topic.aio.stats())["acked"] < 21:
                await asyncio.sleep(0.01)
            calls = await topic.aio.open()
            assert calls.policy.slots == after
            while not {calls.keys(slot)[0] for slot in range(after)} <= heard:
                await asyncio.sleep(0.01)
    assert sorted(handled) == sorted(["long", *(f"k{i}" for i in range(20))])
    assert gate.counters["worker.lost"] == gate.counters["worker.lapsed"] == 0
