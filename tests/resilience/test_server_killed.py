"""kill -9 of the server in the middle of the work: what it had accepted it still has, and workers go on by
themselves."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import redis

from idemgate import Gate
from idemgate.store.embedded.server import Embedded, start
from idemgate.worker.worker import Worker
from tests.cluster import wait_for
from tests.waiting import wait_until
from tools.reliability import server_of


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Embedded]:
    """A persistent server of this test's own, which its supervisor starts again when it dies."""
    with start(str(tmp_path / "data")) as made:
        _write_at_once(made)
        yield made


def _write_at_once(server: Embedded) -> None:
    """With `everysec`, which is an embedded server's policy, it puts off writing while a sync takes long, as on a busy
    disk, and a kill then takes what was acknowledged last (docs/promises.md)."""
    with redis.Redis.from_url(server.url) as client:
        wait_for(lambda: client.config_set("appendfsync", "no"))


async def kill(server: Embedded) -> None:
    """Kills the server, and returns when another one has taken its place."""
    dead = await asyncio.to_thread(lambda: server.pid)
    os.kill(dead, signal.SIGKILL)
    await asyncio.to_thread(wait_until, lambda: server.pid not in (0, dead), 60)
    await asyncio.to_thread(_write_at_once, server)


@pytest.mark.parametrize("awaiting", [False, True])
async def test_nothing_that_was_accepted_is_lost_and_the_worker_goes_on(
    server: Embedded, awaiting: bool, sound: Any, record_fault: Any
) -> None:
    gate = Gate(server.url, namespace="shop", timeout="20s")
    topic, runs = gate.topic("t", merge="append", slots=2, lease="2s", backoff=0), Counter[str]()
    handled: dict[str, list[int]] = {}
    accepted: Counter[str] = Counter()
    guarded: Counter[str] = Counter()

    @gate.once(key="{key}", scope="charge", lease="2s", on_in_progress="wait")
    def charge(key: str) -> str:
        guarded[key] += 1
        return f"receipt for {key}"

    def note(delivery: Any) -> None:
        runs[delivery.key] += 1
        handled.setdefault(delivery.key, []).extend(delivery.payload)

    async def handle(delivery: Any) -> None:
        note(delivery)
        await asyncio.sleep(0.001)

    topic.handler(handle if awaiting else note)

    async def produce(part: int) -> None:
        # Asked again by the link while the server is away, with the same ids.
        for number in range(part, 600, 6):
            receipt = await topic.aio.trigger(f"k{number % 40}", number, event_id=number)
            accepted[receipt.status] += 1
            assert await asyncio.to_thread(charge, f"c{number % 40}") == f"receipt for c{number % 40}"

    # Given producers, guarded calls and a worker at work
    async with Worker(gate, concurrency=4):
        producing = asyncio.gather(*(produce(part) for part in range(6)))
        # When the server is killed three times
        for n in (1, 2, 3):
            end = monotonic() + 30
            while sum(accepted.values()) < 120 * n and monotonic() < end:
                await asyncio.sleep(0.002)
            await kill(server)
        await producing
        end = monotonic() + 30
        while (stats := await topic.aio.stats()).pending + stats.in_flight:
            assert monotonic() < end, stats
            await asyncio.sleep(0.02)
    # Then every trigger was accepted, once, and ended in a delivery that was completed
    assert accepted["scheduled"] + accepted["merged"] == 600
    assert (stats["accepted"], stats["acked_triggers"], stats.dead) == (600, 600, 0)
    assert sorted({number for payload in handled.values() for number in payload}) == list(range(600))
    # Runs are bounded by lost leases
    assert sum(runs.values()) <= stats["acked"] + stats["lapsed"]
    assert guarded.keys() == {f"c{number}" for number in range(40)}
    assert sum(guarded.values()) <= 40 + gate.counters["once.taken_over"]
    record_fault(
        "SIGKILL of the server under load", 3, promises="P2 P3 P7", server=server_of(server.url), triggers=600, lost=0
    )
    await gate.aio.close()
    gate.close()
    sound(gate)


async def test_a_worker_resumes_after_the_server_is_back(server: Embedded, sound: Any) -> None:
    # Given a worker that sleeps
    gate = Gate(server.url, namespace="shop", timeout="20s")
    topic, seen = gate.topic("t"), asyncio.Queue[str]()

    @topic.handler
    async def handle(delivery: Any) -> None:
        seen.put_nowait(delivery.key)

    async with gate.aio.worker():
        await topic.aio.trigger("before")
        assert await asyncio.wait_for(seen.get(), 60) == "before"
        # When the server dies and is started again
        await kill(server)
        await topic.aio.trigger("after")
        # Then the next message is handled
        assert await asyncio.wait_for(seen.get(), 60) == "after"
    with contextlib.suppress(asyncio.QueueEmpty):
        raise AssertionError(f"handled twice: {seen.get_nowait()}")
    await gate.aio.close()
    gate.close()
    sound(gate)
