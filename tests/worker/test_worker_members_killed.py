"""Worker processes that are members, come and go, and are killed: every slot is served within the stated bound, and
no message is lost."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from idemgate import Gate, RedisMembership
from idemgate.core.keys import slot_of
from idemgate.testing import Clock
from idemgate.worker.worker import Worker
from tests.worker.crew import GRACE, INTERVAL, TTL, Watched

SLOTS = 64
ALL = frozenset(range(SLOTS))

PROGRAM = """
import asyncio, os, sys
import redis
from idemgate import Gate, RedisMembership
from idemgate.testing import Clock

url, namespace, now, ttl, grace, does = sys.argv[1:]
gate = Gate(url, namespace=namespace, clock=Clock(float(now)) if now else None)
topic = gate.topic("t", slots=64, lease="20s" if now else "2s", backoff=0)
raw = redis.Redis.from_url(url)

@topic.handler
async def handle(delivery):
    raw.rpush(f"{namespace}:runs", f"{delivery.key} {delivery.attempt} {os.getpid()}")
    if does == "hang":
        await asyncio.Event().wait()
    await asyncio.sleep(0.002)

gate.run(concurrency=32, membership=RedisMembership(gate, ttl=ttl, grace=grace), grace=grace)
"""


@pytest.fixture
def spawn(url: str, namespace: str) -> Iterator[Callable[..., Any]]:
    """`process = spawn(now, ttl, grace, "hang")`: a worker process that is a member; `now` "": the server's clock."""
    made: list[subprocess.Popen[bytes]] = []

    def spawn(now: str, ttl: str, grace: str, does: str = "work") -> subprocess.Popen[bytes]:
        made.append(subprocess.Popen([sys.executable, "-c", PROGRAM, url, namespace, now, ttl, grace, does]))
        return made[-1]

    yield spawn
    for process in made:
        with suppress(ProcessLookupError):
            process.kill()
        process.wait()


def keys_in_all_slots(name: str) -> list[str]:
    found: dict[int, str] = {}
    number = 0
    while len(found) < SLOTS:
        found.setdefault(slot_of(f"{name}{number}".encode(), SLOTS), f"{name}{number}")
        number += 1
    return list(found.values())


async def test_the_slots_of_a_killed_process_are_served_within_its_ttl_and_an_interval(
    url: str, gate: Gate, clock: Clock, raw: Any, spawn: Any, eventually: Any
) -> None:
    # Given a process that serves all slots, holds a message of each, and says no more, for it was killed
    topic, lost, new = gate.topic("t", slots=SLOTS, lease="20s", backoff=0), *map(keys_in_all_slots, ("lost", "new"))
    await topic.aio.trigger_many([(key, 1) for key in lost])
    began = clock.microseconds()
    process = spawn(str(began / 1_000_000), f"{TTL}s", f"{GRACE}s", "hang")
    await eventually(lambda: raw.llen(f"{gate.namespace}:runs") >= 32)
    process.kill()
    process.wait()
    held = (await topic.aio.stats()).in_flight
    assert held >= 32
    # Given one that comes afterwards, and new messages
    handled: list[Any] = []

    @topic.handler
    async def handle(delivery: Any) -> None:
        handled.append(delivery)

    membership = Watched(gate)
    async with Worker(gate, membership=membership, concurrency=SLOTS, prefetch=SLOTS):
        await topic.aio.trigger_many([(key, 1) for key in new])

        async def served(seconds: float) -> frozenset[int]:
            """What the newcomer serves when so much time has passed since the kill."""
            while (clock.microseconds() - began) / 1_000_000 < seconds:
                clock.advance("1s")
                await eventually(lambda: membership.at_rest)
            return membership.assigned_slots("t")

        # Then it takes nothing that the dead one may still take from
        assert await served(TTL - 1) < ALL
        # And has everything when that one's announcement lapsed, and an interval has passed
        assert await served(TTL + INTERVAL) == ALL
        assert gate.counters["members.taken_over"] == 0
        await eventually(lambda: {one.key for one in handled} >= set(new))
        # And what the dead one held is handled when its lease is over
        clock.advance("20s")
        await eventually(lambda: gate.counters["worker.acked"] == 2 * SLOTS)
    handled_again = Counter(one.key for one in handled)
    assert handled_again == dict.fromkeys(lost + new, 1)
    stats = await topic.aio.stats()
    assert (stats.pending, stats.in_flight, stats.dead, stats["lapsed"]) == (0, 0, 0, held)


@pytest.mark.timeout(600)
@pytest.mark.slow
async def test_processes_come_go_and_are_killed_under_load_and_nothing_is_lost(
    live: Gate, raw: Any, spawn: Any, eventually: Any, many: Callable[[int], int], record_fault: Callable[..., None]
) -> None:
    # Given three processes under load
    chance, changes, topic = random.Random(3), min(many(8), 60), live.topic("t", slots=SLOTS, lease="2s", backoff=0)
    times = ("", "600ms", "2s")
    alive, killed, sent = [spawn(*times) for _ in range(3)], 0, 0
    for _ in range(changes):
        # When some are killed, some leave, and others come
        for _ in range(5):
            await topic.aio.trigger_many([(f"k{sent + n}", n) for n in range(40)])
            sent += 40
        await eventually(lambda sent=sent: raw.llen(f"{live.namespace}:runs") > sent - 150)
        process = alive.pop(chance.randrange(len(alive)))
        number = chance.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM))
        process.send_signal(number)
        killed += number == signal.SIGKILL
        alive.append(spawn(*times))
    # Then every message is handled in the end
    await eventually(lambda: _done(topic, sent), within=60)
    runs = [line.decode().split() for line in raw.lrange(f"{live.namespace}:runs", 0, -1)]
    stats = await topic.aio.stats()
    assert {key for key, _, _ in runs} == {f"k{n}" for n in range(sent)}
    assert (stats.pending, stats.in_flight, stats.dead) == (0, 0, 0)
    # And was run again only where a process was killed with it
    assert killed >= 3
    assert len(runs) <= sent + stats["lapsed"]
    # And those that are left serve everything, end by themselves, and leave nothing behind
    membership = RedisMembership(live)

    async def seen() -> tuple[int, int]:
        """How many members there are, and how many slots they hold."""
        list_members = await membership.list_members()
        return len(list_members.members), len(list_members.holders)

    await eventually(lambda: _is(seen(), (len(alive), SLOTS)))
    for process in alive:
        process.send_signal(signal.SIGTERM)
    assert [process.wait(60) for process in alive] == [0] * len(alive)
    assert await seen() == (0, 0)
    record_fault(
        "members of a group of workers killed, told to leave, and new ones (processes)",
        changes,
        promises="P3 P7 P14",
        triggers=sent,
        lost=0,
        attempts_again=len(runs) - sent,
    )


async def _is(found: Awaitable[Any], wanted: object) -> bool:
    return bool(await found == wanted)


async def _done(topic: Any, sent: int) -> bool:
    stats = await topic.aio.stats()
    return bool(stats["acked"] == sent)
