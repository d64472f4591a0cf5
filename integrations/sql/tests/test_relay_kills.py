"""kill -9 of relays at each step and at random, one after the other and several at once.

Each committed row is delivered exactly once, in the order of its key, and no row of a transaction that rolled back.
`IDEMGATE_KILLS` says how many relays the slow test kills; the others kill a few.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from idemgate import Gate
from idemgate.testing import Clock, audit
from integrations.sql.tests.flavours import Flavour
from integrations.sql.tests.killed_relay import PLACES
from integrations.sql.tests.test_outbox import _await, transaction
from tests.resilience.forking import Zygote

KILLS = int(os.environ.get("IDEMGATE_KILLS", "0"))
RELAY = "integrations.sql.tests.killed_relay:relay"
KEYS = 5


class Orders:
    """Transactions that write triggers, and relays that die."""

    def __init__(
        self, zygote: Zygote, url: str, flavour: Flavour, inbox: Any, name: str, namespace: str, seed: int
    ) -> None:
        self.zygote, self.inbox, self.drawn = zygote, inbox, random.Random(seed)
        self.clock = Clock(1_700_000_000.0)
        self.gate = Gate(url, namespace=namespace, clock=self.clock)
        self.topic = self.gate.topic("orders", merge="append", slots=4)
        self.order = {
            "scene": RELAY, "url": url, "namespace": self.gate.namespace, "flavour": name, "database": flavour.url,
            "batch": 7, "now": self.clock.microseconds() / 1e6,
        }  # fmt: skip
        self.committed: defaultdict[str, list[int]] = defaultdict(list)
        self.kills = self.number = 0
        self.duration = 0.1

    async def write(self, transactions: int = 6) -> None:
        """Write triggers in transactions, of which some roll back."""
        for _ in range(transactions):
            rows = [(f"k{self.drawn.randrange(KEYS)}", self.number + n) for n in range(self.drawn.randint(1, 5))]
            self.number += len(rows)
            if self.drawn.random() < 0.25:
                with pytest.raises(ZeroDivisionError):
                    await self._commit(rows, ZeroDivisionError())
            else:
                await self._commit(rows)
                for key, value in rows:
                    self.committed[key].append(value)

    async def _commit(self, rows: list[tuple[str, int]], error: Exception | None = None) -> None:
        async with transaction(self.inbox) as connection:
            await _await(self.inbox.trigger_many(connection, self.topic, rows))
            if error is not None:
                raise error

    def relay(self, **more: Any) -> Any:
        """Run a relay. Return the number of rows that it sent, or None if it was killed."""
        ended = self.zygote(**{**self.order, **more})
        self.kills += ended["signal"] == signal.SIGKILL
        return ended["said"]

    def relay_some(self, n: int) -> None:
        """Run relays at once and kill them at random."""
        with ThreadPoolExecutor(n) as threads:
            delays = [self.drawn.uniform(0, self.duration) for _ in range(n)]
            list(threads.map(lambda delay: self.relay(kill_after=delay), delays))

    async def judge(self) -> None:
        """Send the rest, and check what was delivered."""
        began = time.monotonic()
        assert self.relay() is not None
        self.duration = max(0.02, time.monotonic() - began)
        delivered = {one.key: one.payload for one in await self.topic.aio.take(100)}
        assert delivered == dict(self.committed)
        assert (await _await(self.inbox.outbox.backlog()))[:2] == (0, 0)
        report = audit(self.gate)
        assert report.sound, str(report)

    async def close(self) -> None:
        await self.gate.aio.close()
        self.gate.close()


@pytest.fixture(scope="module")
def zygotes() -> Iterator[list[Zygote]]:
    made = [Zygote() for _ in range(3)]
    for one in made:
        one.preload("integrations.sql.tests.killed_relay")
    yield made
    for one in made:
        one.close()


class Relays:
    """A pool of zygotes with the interface of one, for relays that run at once."""

    def __init__(self, zygotes: list[Zygote]) -> None:
        self._free = list(zygotes)

    def __call__(self, **order: Any) -> Any:
        one = self._free.pop()
        try:
            return one(**order)
        finally:
            self._free.append(one)


@pytest.fixture
async def orders(
    zygotes: list[Zygote], url: str, flavour: Flavour, inbox: Any, request: Any, namespace: str, seed: int
) -> Any:
    name = request.node.callspec.params["flavour"]
    made = Orders(Relays(zygotes), url, flavour, inbox, name, namespace, seed)  # type: ignore[arg-type]
    yield made
    await made.close()


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
async def test_killed_at(orders: Orders, place: str) -> None:
    await orders.write()
    # When a relay dies at a step, twice, and transactions go on
    for _ in range(2):
        assert orders.relay(die=place) is None, f"{place} was not reached"
        await orders.write()
    # Then another one sends what is left
    await orders.judge()


@pytest.mark.slow
async def test_several_at_once_killed_at_random(orders: Orders) -> None:
    await orders.write()
    for _ in range(2):
        orders.relay_some(3)
        await orders.write()
    await orders.judge()


@pytest.mark.slow
@pytest.mark.timeout(3600)
async def test_many_killed(orders: Orders) -> None:
    await orders.write()
    while orders.kills < max(KILLS, 30):
        await orders.write(transactions=orders.drawn.randint(0, 12))
        if orders.drawn.random() < 0.5:
            orders.relay(die=orders.drawn.choice(PLACES))
        else:
            orders.relay_some(orders.drawn.randint(1, 3))
    print(f"relays killed: {orders.kills}, rows: {sum(map(len, orders.committed.values()))}")
    await orders.judge()
