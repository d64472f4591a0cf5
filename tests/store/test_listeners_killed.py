"""Pub/Sub connections are killed at any moment, also while somebody subscribes. No caller gets an error, and a worker
goes on."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import pytest

from idemgate import Delivery, Gate
from idemgate.testing import Clock
from idemgate.worker.worker import Worker
from tests.conftest import Face
from tests.waiting import eventually


class Killer:
    """Kills all Pub/Sub connections of the server again and again, each time after a few turns of the event loop."""

    def __init__(self, raw: Any, drawn: random.Random) -> None:
        self.raw = raw
        self.drawn = drawn
        self.killed = 0

    @asynccontextmanager
    async def at_work(self) -> AsyncIterator[None]:
        killing = asyncio.create_task(self._kill())
        try:
            yield
        finally:
            killing.cancel()
            await asyncio.wait([killing])
        assert killing.cancelled(), killing.exception()

    async def _kill(self) -> None:
        while True:
            for _ in range(self.drawn.randrange(60)):
                await asyncio.sleep(0)
            killed = await asyncio.to_thread(self.raw.execute_command, "CLIENT", "KILL", "TYPE", "pubsub")
            self.killed += killed
            if not killed:  # the next connection is opened after a pause
                await asyncio.sleep(0.005)


@pytest.fixture
def killer(raw: Any, drawn: random.Random) -> Killer:
    return Killer(raw, drawn)


@pytest.mark.usefixtures("no_polls")
async def test_who_waits_for_a_result_gets_it_whatever_connections_are_killed(
    face: Face, killer: Killer, many: Callable[[int], int], record_fault: Callable[..., None], seed: int
) -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(64))
    ran = Counter[int]()

    @face.once(key="{n}", scope="s", on_in_progress="wait", wait="1h")
    def handle(n: int) -> str:
        ran[n] += 1
        return f"{n} ran here"

    async def run_key(n: int) -> None:
        # Given a key that runs elsewhere, and callers that wait for its result without any poll
        owner = await face.claim(str(n), scope="s", lease="1h")
        callers = [asyncio.create_task(handle(n)) for _ in range(3)]
        for _ in range(n % 7):
            await asyncio.sleep(0)
        # When it ends while Pub/Sub connections are killed
        if n % 3:
            await owner.complete(f"{n} ran there")
        else:
            await owner.release()
        # Then all of them have its result, or that of the one of them that ran
        results = await asyncio.gather(*callers)
        assert results == [f"{n} ran {'there' if n % 3 else 'here'}"] * 3
        assert ran[n] == (not n % 3)

    keys = 0
    async with asyncio.timeout(240), killer.at_work():
        while killer.killed < many(30):
            async with asyncio.TaskGroup() as group:
                for n in range(keys, keys + 6):
                    group.create_task(run_key(n))
            keys += 6
    record_fault("a Pub/Sub connection killed under callers that wait", killer.killed, promises="P1 P5", seed=seed)


async def test_a_worker_goes_on_whatever_connections_are_killed_while_it_subscribes(
    gate: Gate, url: str, namespace: str, clock: Clock, killer: Killer, many: Callable[[int], int],
    record_fault: Callable[..., None], seed: int,
) -> None:  # fmt: skip
    handled = Counter[int]()
    topic, triggered = gate.topic("t"), 0

    @topic.handler
    async def handle(delivery: Delivery[Any]) -> None:
        handled[delivery.payload] += 1

    # Given a worker, and another program that gives its topic other slots again and again
    with Gate(url, namespace=namespace, clock=clock) as other:
        theirs, slots = other.topic("t"), [4, 1, 16, 2]
        async with asyncio.timeout(240), Worker(gate), killer.at_work():
            # When Pub/Sub connections are killed while it listens for the hints of the new slots
            while killer.killed < many(30):
                await asyncio.to_thread(theirs.reshard, slots[triggered // 10 % 4])
                new = range(triggered, triggered + 10)
                await asyncio.to_thread(theirs.trigger_many, [(f"k{n}", n) for n in new])
                triggered += 10
                await eventually(lambda new=new: all(handled[n] for n in new))
    # Then it has handled everything once, and did not end before it was told to
    assert handled == Counter(range(triggered))
    assert gate.counters["worker.failed"] == 0
    record_fault("a Pub/Sub connection killed under a worker", killer.killed, promises="P7", seed=seed)
