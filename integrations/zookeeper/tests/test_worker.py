"""Workers whose slots are divided by ZooKeeper: real messages, a real server for them, and a real ZooKeeper."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
from idemgate_zookeeper import ZooKeeperMembership

from idemgate import Gate
from tests.waiting import eventually

pytestmark = pytest.mark.slow  # `test_zookeeper.py` shows the membership

SLOTS, TTL = 32, 2.0
ALL = frozenset(range(SLOTS))


class Hand:
    """A worker and which slots its messages were of."""

    def __init__(self, hosts: str, namespace: str) -> None:
        self.gate = Gate("embedded://", namespace=namespace)
        self.topic = self.gate.topic("t", slots=SLOTS)
        self.topic.handler(self._handle)
        self.membership = ZooKeeperMembership(self.gate, hosts, ttl=TTL, grace=10)
        self.worker = self.gate.aio.worker(membership=self.membership, grace=10)
        self.handled: list[Any] = []

    async def _handle(self, delivery: Any) -> None:
        self.handled.append(delivery)

    @property
    def assigned(self) -> frozenset[int]:
        return self.membership.assigned_slots("t")


Join = Callable[[], Awaitable[Hand]]


@pytest.fixture
async def join(server: Any, request: pytest.FixtureRequest) -> AsyncIterator[Join]:
    async with AsyncExitStack() as stack:

        async def join() -> Hand:
            hand = Hand(server.hosts, request.node.name)
            stack.callback(hand.gate.close)
            stack.push_async_callback(hand.gate.aio.close)
            await stack.enter_async_context(hand.worker)
            return hand

        yield join


async def test_workers_divide_the_slots_and_take_over(join: Join) -> None:
    # Given two workers
    first, second = await join(), await join()
    await eventually(lambda: bool(second.assigned) and first.assigned | second.assigned == ALL)
    await eventually(lambda: not first.assigned & second.assigned)
    # When there is work
    await first.topic.aio.trigger_many([(n, n) for n in range(200)])
    await eventually(lambda: len(first.handled) + len(second.handled) == 200)
    # Then each did that of its slots
    for hand in (first, second):
        assert {delivery.slot for delivery in hand.handled} <= hand.assigned
    # And when one stops, the other one does all of it
    first.worker.stop()
    await eventually(lambda: second.assigned == ALL)
    await second.topic.aio.trigger_many([(n, n) for n in range(200, 400)])
    await eventually(lambda: len(first.handled) + len(second.handled) == 400)
    await eventually(lambda: first.gate.counters["worker.acked"] + second.gate.counters["worker.acked"] == 400)
    assert (await second.topic.aio.stats())["taken"] == 400


async def test_while_zookeeper_is_away_messages_wait(join: Join, server: Any) -> None:
    # Given a worker whose ZooKeeper stands still, for longer than its announcement holds
    hand = await join()
    await eventually(lambda: hand.assigned == ALL)
    server.away()
    try:
        await eventually(lambda: not hand.assigned)
        # When messages come
        await hand.topic.aio.trigger_many([(n, n) for n in range(100)])
        await eventually(lambda: hand.gate.counters["members.lapsed"] == 1)
        assert hand.handled == []
    finally:
        server.back()
    # Then they are handled when it is back
    await eventually(lambda: hand.gate.counters["worker.acked"] == 100)
    assert (await hand.topic.aio.stats()).in_flight == 0
