"""A worker whose topic is given another number of slots while it runs."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest

from idemgate import Delivery, Gate
from idemgate.membership.rendezvous import owned_slots
from idemgate.store.pubsub import Subscription
from idemgate.testing import Clock
from idemgate.worker.worker import Worker


@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 1)])
async def test_it_serves_the_new_slots_and_hears_their_hints(
    gate: Gate, url: str, clock: Clock, monkeypatch: pytest.MonkeyPatch, before: int, after: int
) -> None:
    # Given a worker in the middle of a delivery
    heard: set[bytes] = set()
    real = Subscription.add

    async def add(self: Subscription, name: bytes, *args: Any, **options: Any) -> None:
        heard.add(name)
        await real(self, name, *args, **options)

    monkeypatch.setattr(Subscription, "add", add)
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
                await asyncio.to_thread(other.topic("t").reshard, after)
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


class Hand:
    """A worker that is a member, on a gate of its own. What is triggered as "long..." ends when `go` is set."""

    def __init__(self, gate: Gate, slots: int) -> None:
        self.gate = gate
        self.topic = gate.topic("t", slots=slots)
        self.topic.handler(self._handle)
        self.handled: list[tuple[str, int]] = []
        self.go = asyncio.Event()
        self.worker = Worker(gate, membership="redis")

    async def _handle(self, delivery: Delivery[Any]) -> None:
        if delivery.key.startswith("long"):
            await self.go.wait()
        self.handled.append((delivery.key, delivery.slot))

    @property
    def assigned(self) -> frozenset[int]:
        assert self.worker.membership is not None
        return frozenset(self.worker.membership.assigned_slots("t"))

    def share(self, slots: int) -> frozenset[int]:
        assert self.worker.membership is not None
        return owned_slots(self.worker.membership.member, self.worker.membership.members, "t", slots)


@pytest.mark.parametrize(("before", "after"), [(2, 16), (16, 2), (1, 2)])
async def test_members_share_the_new_slots(
    gate: Gate, url: str, clock: Clock, eventually: Any, before: int, after: int
) -> None:
    # Given members that share the slots of a topic, some of them without one, and run something
    async with AsyncExitStack() as stack:
        hands = list[Hand]()
        for _ in range(4):
            one = Gate(url, namespace=gate.namespace, clock=clock)
            stack.push_async_callback(one.aio.close)
            stack.callback(one.close)
            hands.append(Hand(one, before))
            await stack.enter_async_context(hands[-1].worker)
        topic = gate.topic("t", slots=before).aio
        await eventually(lambda: shared(hands, before))
        await topic.trigger_many([(f"long{i}", i) for i in range(10)])
        await eventually(lambda: sum(hand.gate.counters["worker.taken"] for hand in hands) == 10)
        # When the topic is given other slots
        await topic.reshard(after)
        # Then they share these, and nobody was started anew
        await eventually(lambda: shared(hands, after))
        assert {slot for hand in hands for slot in hand.assigned} == set(range(after))
        # And each handles what is in its own, and ends what it ran
        await topic.trigger_many([(f"k{i}", i) for i in range(40)])
        await eventually(lambda: sum(len(hand.handled) for hand in hands) == 40)
        assert all(slot in hand.assigned for hand in hands for _, slot in hand.handled)
        for hand in hands:
            hand.go.set()
        await eventually(lambda: sum(hand.gate.counters["worker.acked"] for hand in hands) == 50)
    for hand in hands:
        assert hand.gate.counters["worker.lost"] == hand.gate.counters["worker.lapsed"] == 0
        assert hand.gate.counters["members.undrained"] == 0


def shared(hands: list[Hand], slots: int) -> bool:
    """Whether each has its share of that many slots, and all know all."""
    known = {hand.worker.membership.members for hand in hands if hand.worker.membership is not None}
    return len(known) == 1 and all(hand.assigned == hand.share(slots) for hand in hands)
