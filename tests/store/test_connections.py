"""Several awaiting connections to one server: calls are spread over them, and each fails by itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import redis

from idemgate import Gate, InvalidArgument
from idemgate.testing import Clock
from tests.proxy import Proxy
from tests.store.test_links import claim, eventually, inspect

Making = Callable[..., Gate]


@pytest.fixture
async def making(namespace: str) -> AsyncIterator[Making]:
    """`making(url, connections=4)`: a gate that is closed at the end."""
    made: list[Gate] = []

    def make(url: str, **options: Any) -> Gate:
        made.append(Gate(url, namespace=namespace, **options))
        return made[-1]

    yield make
    for one in made:
        await one.aio.close()
        one.close()


def scripting(own: redis.Redis) -> int:
    """How many connections there are whose last command was a script."""
    return sum(one["cmd"] in ("evalsha", "eval") for one in own.client_list())


async def all_made(gate: Gate, own: redis.Redis, number: int) -> None:
    """Returns when the gate has that many connections, and each was used."""

    async def look() -> None:
        while scripting(own) < number:
            await asyncio.gather(*(gate.aio.context.aio_link.run(inspect(gate, "k")) for _ in range(4 * number)))

    async with asyncio.timeout(30):
        await look()


@pytest.mark.parametrize("number", [0, 65, -1, 1.5, True, "2", None])
def test_a_number_of_connections_that_can_not_be_is_refused(number: Any) -> None:
    with pytest.raises(InvalidArgument, match="connections"):
        Gate("redis://nowhere", connections=number)


async def test_it_is_one_unless_more_are_asked_for(making: Making, own: redis.Redis, own_url: str) -> None:
    gate = making(own_url)
    await asyncio.gather(*(gate.aio.context.aio_link.run(inspect(gate, "k")) for _ in range(100)))
    assert scripting(own) == 1


async def test_calls_are_spread_over_all_and_closing_closes_all(making: Making, own: redis.Redis, own_url: str) -> None:
    # Given a gate with several connections, and as many calls on each
    gate = making(own_url, connections=5)
    await all_made(gate, own, 5)
    connections = [one._connection for one in gate.aio.context.aio_link._state.store._connection._connections]
    calls = [asyncio.ensure_future(gate.aio.context.aio_link.run(claim(gate, f"k{n}"))) for n in range(50)]
    await asyncio.sleep(0)
    assert [connection.load for connection in connections] == [10] * 5
    # Then all are answered, each with its own answer
    assert {entry.state for entry in await asyncio.gather(*calls)} == {"started"}
    answers = await asyncio.gather(*(gate.aio.context.aio_link.run(inspect(gate, f"k{n % 100}")) for n in range(200)))
    assert [one.state for one in answers] == (["in_progress"] * 50 + ["absent"] * 50) * 2
    # And in the end no connection is left
    assert scripting(own) == 5
    await gate.aio.close()
    await eventually(lambda: scripting(own) == 0)


@pytest.mark.parametrize("toxic", ["cut_reply", "reset_reply", "drop_request", "swallow_request"])
async def test_when_a_connection_fails_only_its_calls_are_sent_again(
    making: Making, own: redis.Redis, own_url: str, toxic: str
) -> None:
    with Proxy(own_url) as proxy:
        gate = making(proxy.url, connections=4, timeout="20s")
        await all_made(gate, own, 4)
        # When one of the connections fails with its share of a hundred calls
        before = proxy.count(b"EVALSHA")
        getattr(proxy, toxic)(b"EVALSHA")
        entries = await asyncio.gather(*(gate.aio.context.aio_link.run(claim(gate, f"k{n}")) for n in range(100)))
        # Then all are answered as if nothing had been, and those of the others were sent once
        assert [(entry.state, entry.attempt) for entry in entries] == [("started", 1)] * 100
        arrived = proxy.count(b"EVALSHA") - before
        assert arrived == 100 + (0 if toxic in ("drop_request", "swallow_request") else 25)
        # And the connection is made anew
        await all_made(gate, own, 4)


async def test_a_connection_that_cannot_be_made_is_done_without(making: Making, own: redis.Redis, own_url: str) -> None:
    # Given a server that takes fewer connections than are asked for
    own.config_set("maxclients", len(own.client_list()) + 2)
    gate = making(own_url, connections=8)
    # Then calls go over those that there are
    for _ in range(5):
        entries = await asyncio.gather(*(gate.aio.context.aio_link.run(inspect(gate, "k")) for _ in range(40)))
        assert {one.state for one in entries} == {"absent"}
    own.config_set("maxclients", 1000)
    await all_made(gate, own, 8)


async def test_calls_that_are_cancelled_disturb_no_others(making: Making, own: redis.Redis, own_url: str) -> None:
    gate = making(own_url, connections=3)
    await all_made(gate, own, 3)
    # When every other claim is cancelled while it is under way
    asking = [asyncio.ensure_future(_claimed(gate, f"k{n}")) for n in range(60)]
    await asyncio.sleep(0)
    for one in asking[::2]:
        one.cancel()
    outcomes = await asyncio.gather(*asking, return_exceptions=True)
    await gate.aio.close()
    # Then those are free, and the others held
    assert all(isinstance(one, asyncio.CancelledError) for one in outcomes[::2])
    assert all(one.started for one in outcomes[1::2])
    states = [(await gate.aio.inspect(f"k{n}")).state for n in range(60)]
    assert set(states[::2]) <= {"absent", "released"}
    assert set(states[1::2]) == {"in_progress"}


async def _claimed(gate: Gate, key: str) -> Any:
    return await gate.aio.claim(key)


async def test_what_is_guarded_and_delivered_is_so_once(
    making: Making, url: str, clock: Clock, sound: Callable[[Gate], None]
) -> None:
    gate = making(url, connections=4, clock=clock)
    ran: list[str] = []

    @gate.once(key="{key}", on_in_progress="wait")
    async def handle(key: str) -> str:
        await asyncio.sleep(0)
        ran.append(key)
        return key

    topic = gate.topic("t", slots=4)

    @topic.handler
    async def handled(delivery: Any) -> None:
        await handle(delivery.key)

    # When many trigger and call the same, while a worker runs
    async with gate.aio.worker(grace="5s"):
        keys = [f"k{n % 100}" for n in range(300)]
        await asyncio.gather(*(topic.aio.trigger(key, 1) for key in keys))
        assert await asyncio.gather(*map(handle, keys)) == keys
        async with asyncio.timeout(30):
            while (await topic.aio.stats()).pending or (await topic.aio.stats()).in_flight:
                await asyncio.sleep(0.005)
    # Then each ran once
    assert sorted(ran) == sorted({*keys})
    assert gate.counters["once.lease_lost"] == gate.counters["worker.lost"] == 0
    await gate.aio.close()
    sound(gate)
