"""Guarded consumers of aio-pika and pika: a message id that was handled is acknowledged and not run again."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aio_pika
import pika
import pytest
from idemgate_rabbitmq import guarded

from idemgate import BadInput, Bury, Gate, Retry
from idemgate.testing import Clock

Body = Callable[[str, bytes], object]
AtRest = Callable[[], Awaitable[None]]
"""Waits until no callback runs: what they say to the broker is on its way."""


@asynccontextmanager
async def aio(gate: Gate, broker: Any, queue: str, body: Body, **options: Any) -> AsyncIterator[AtRest]:
    """Consumes with aio-pika, 4 at once; `body` runs in a thread, so that it may block in both flavours."""
    running: set[object] = set()

    @guarded(gate, **{"scope": "test", **options})
    async def on_message(message: Any) -> None:
        await asyncio.to_thread(body, message.message_id, message.body)

    async def noted(message: Any) -> None:
        running.add(message)
        try:
            await on_message(message)
        finally:
            running.discard(message)

    async with await aio_pika.connect(broker.url) as connection:
        channel = await connection.channel()
        await channel.set_qos(4)
        await (await channel.get_queue(queue)).consume(noted)
        yield lambda: until(lambda: not running)


@asynccontextmanager
async def blocking(gate: Gate, broker: Any, queue: str, body: Body, **options: Any) -> AsyncIterator[AtRest]:
    """Consumes with pika, in a thread, 4 at once; it ends between two callbacks."""

    @guarded(gate, **{"scope": "test", **options})
    def on_message(channel: Any, method: Any, properties: Any, data: bytes) -> None:
        body(properties.message_id, data)

    connection = broker.connect()
    channel = connection.channel()
    channel.basic_qos(prefetch_count=4)
    channel.basic_consume(queue, on_message)
    thread = threading.Thread(target=channel.start_consuming)
    thread.start()
    try:
        yield lambda: asyncio.sleep(0)
    finally:
        connection.add_callback_threadsafe(channel.stop_consuming)
        await asyncio.to_thread(thread.join, 20)
        connection.close()


Consume = Callable[..., Any]


@pytest.fixture(params=[aio, blocking], ids=["aio", "blocking"])
async def consume(request: pytest.FixtureRequest, gate: Gate, broker: Any, queue: Any) -> AsyncIterator[Consume]:
    """`await consume(body, pause=...)`: until the test ends."""
    async with AsyncExitStack() as stack:
        yield lambda body, **options: stack.enter_async_context(
            request.param(gate, broker, queue.name, body, **options)
        )


@pytest.fixture
def dead(queue: Any, make_queue: Any) -> Any:
    """Where the queue's rejected messages go."""
    letters = make_queue()
    queue.channel.queue_delete(queue.name)
    arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": letters.name}
    queue.channel.queue_declare(queue.name, durable=True, arguments=arguments)
    return letters


def put(queue: Any, message_id: str | None, body: bytes = b"x") -> None:
    queue.channel.basic_publish("", queue.name, body, pika.BasicProperties(message_id=message_id, delivery_mode=2))


async def counted(gate: Gate, **wanted: int) -> None:
    """Until the counters say so."""
    await until(lambda: all(gate.counters[f"rabbitmq.{name}"] >= n for name, n in wanted.items()))
    assert {name: gate.counters[f"rabbitmq.{name}"] for name in wanted} == wanted


async def empty(queue: Any) -> None:
    """Until nothing is in it, not even unacknowledged: what was not acknowledged comes back when it is consumed no
    more."""
    await until(lambda: not queue.channel.queue_declare(queue.name, passive=True).method.message_count)


async def test_what_comes_twice_runs_once(gate: Gate, broker: Any, queue: Any) -> None:
    for flavour in (aio, blocking):
        ran: list[str] = []
        name = flavour.__name__
        for n in [*range(10), *range(10)]:
            put(queue, f"{name}-{n}", b"%d" % n)
        async with flavour(gate, broker, queue.name, lambda message_id, _, ran=ran: ran.append(message_id)) as at_rest:
            await counted(gate, handled=10 * (1 + (flavour is blocking)), duplicate=10 * (1 + (flavour is blocking)))
            await at_rest()
        # Then everything is acknowledged: nothing came back when the consumer went
        assert sorted(ran) == [f"{name}-{n}" for n in range(10)]
        assert queue.all() == []


async def test_what_failed_comes_again_after_the_pause(gate: Gate, queue: Any, consume: Consume) -> None:
    starts: list[float] = []

    def fail_first(message_id: str, body: bytes) -> None:
        starts.append(time.monotonic())
        if len(starts) < 3:
            raise ConnectionError("the bank is closed") if len(starts) == 1 else Retry(delay="600ms")

    await consume(fail_first, pause="300ms")
    put(queue, "a")
    await counted(gate, failed=2, handled=1)
    first, second, third = starts
    assert second - first >= 0.3
    assert third - second >= 0.6
    # And a copy of it is dropped
    put(queue, "a")
    await counted(gate, duplicate=1)
    assert len(starts) == 3


async def test_one_that_pauses_does_not_hold_up_the_others(gate: Gate, queue: Any, consume: Consume) -> None:
    done: list[str] = []

    def body(message_id: str, _: bytes) -> None:
        if message_id == "bad":
            raise ValueError
        done.append(message_id)

    await consume(body, pause="1h")
    put(queue, "bad")
    for n in range(10):
        put(queue, str(n))
    await counted(gate, failed=1, handled=10)
    assert sorted(done) == [str(n) for n in range(10)]


async def test_a_copy_waits_for_the_one_that_runs_elsewhere(gate: Gate, queue: Any, consume: Consume) -> None:
    # Given another consumer that runs the message
    claim = await gate.aio.claim("a", scope="test", fingerprint=b"x")
    ran: list[str] = []
    await consume(lambda message_id, _: ran.append(message_id), pause="300ms")
    put(queue, "a")
    # When it takes longer than the pause, the copy goes back to the queue
    await counted_at_least(gate, "in_progress", 2)
    # And when it is done, the copy is dropped
    assert await claim.complete()
    await counted(gate, duplicate=1)
    assert ran == []
    await empty(queue)


async def counted_at_least(gate: Gate, name: str, n: int) -> None:
    await until(lambda: gate.counters[f"rabbitmq.{name}"] >= n)


async def test_a_copy_runs_when_its_owner_fell_silent(gate: Gate, clock: Clock, queue: Any, consume: Consume) -> None:
    # Given an owner that was killed
    await gate.aio.claim("a", scope="test", fingerprint=b"x", lease="30s")
    ran: list[str] = []
    await consume(lambda message_id, _: ran.append(message_id), pause="100ms")
    put(queue, "a")
    await counted_at_least(gate, "in_progress", 1)
    assert ran == []
    # When its lease ends
    clock.advance("30s")
    # Then the copy runs
    await counted(gate, handled=1)
    assert ran == ["a"]


async def test_who_lost_its_lease_does_not_acknowledge(gate: Gate, clock: Clock, queue: Any, consume: Consume) -> None:
    runs: list[str] = []

    def lose(message_id: str, body: bytes) -> None:
        runs.append(message_id)
        if len(runs) == 1:  # it stood still until its lease was over, and another took over and ended
            clock.advance("1h")
            with gate.claim("a", scope="test", fingerprint=b"x") as other:
                assert other.started

    await consume(lose, lease="30s")
    put(queue, "a")
    # Then the message comes again, and is found done
    await counted(gate, lost=1, duplicate=1)
    assert runs == ["a"]
    await empty(queue)


async def test_what_repeating_cannot_mend_goes_to_the_dead_letters(
    gate: Gate, queue: Any, dead: Any, consume: Consume
) -> None:
    def body(message_id: str, _: bytes) -> None:
        if message_id == "bad":
            raise Bury("no such item")

    await consume(body)
    # Given a message that is given up, one without id, and one whose id was used with another body
    put(queue, "bad", b"buried")
    put(queue, None, b"nameless")
    put(queue, "a", b"one")
    await counted(gate, handled=1, rejected=2)
    put(queue, "a", b"two")
    await counted(gate, handled=1, rejected=3)
    # Then all three are where the queue's rejected messages go
    # (Aside: what is counted is rejected by this loop, a moment later.)
    assert sorted([(await asyncio.to_thread(dead.get))[2] for _ in range(3)]) == [b"buried", b"nameless", b"two"]


async def test_attempts_can_be_limited(gate: Gate, queue: Any, dead: Any, consume: Consume) -> None:
    def body(message_id: str, _: bytes) -> None:
        raise ValueError

    await consume(body, max_attempts=3, pause="10ms")
    put(queue, "a", b"poison")
    await counted(gate, failed=3, rejected=1)
    assert (await asyncio.to_thread(dead.get))[2] == b"poison"


async def test_while_the_store_is_away_messages_stay(namespace: str, broker: Any, queue: Any) -> None:
    for flavour in (aio, blocking):
        gate, ran = Gate("redis://127.0.0.1:1", namespace=namespace, timeout="50ms"), []
        put(queue, "a")
        async with flavour(gate, broker, queue.name, lambda *_, ran=ran: ran.append(1), pause="20ms"):
            await counted_at_least(gate, "failed", 3)
        assert ran == []
        assert len(queue.all()) == 1
        await gate.aio.close()
        gate.close()


async def until(fact: Callable[[], Any]) -> None:
    async with asyncio.timeout(20):
        while not fact():
            await asyncio.sleep(0.01)


async def test_what_ran_while_its_connection_broke_is_not_run_again(gate: Gate, broker: Any, queue: Any) -> None:
    ran: list[str] = []
    broken = threading.Event()

    def body(message_id: str, _: bytes) -> None:
        ran.append(message_id)
        assert broken.wait(20)

    @guarded(gate, scope="test")
    def on_message(channel: Any, method: Any, properties: Any, data: bytes) -> None:
        body(properties.message_id, data)

    # Given a callback that runs while its connection breaks, so that its message cannot be acknowledged
    put(queue, "a")
    connection = broker.connect()
    channel = connection.channel()
    channel.basic_consume(queue.name, on_message)
    consuming = asyncio.create_task(asyncio.to_thread(channel.start_consuming))
    await until(lambda: ran)
    await asyncio.to_thread(broker.close_connections)
    broken.set()
    with pytest.raises(pika.exceptions.AMQPError):  # what the consumer's own program hears of it
        await consuming
    await counted(gate, handled=1)
    # When another consumer gets the message
    async with blocking(gate, broker, queue.name, body):
        # Then it is known to be done
        await counted(gate, duplicate=1)
    assert ran == ["a"]


async def test_what_aio_pika_cancelled_runs_again_without_waiting_for_a_lease(
    gate: Gate, broker: Any, queue: Any
) -> None:
    started: list[str] = []

    @guarded(gate, scope="test")
    async def on_message(message: Any) -> None:
        started.append(message.message_id)
        await asyncio.Event().wait()

    # Given a callback that is cancelled, because its connection broke
    put(queue, "a")
    async with await aio_pika.connect(broker.url) as connection:
        await (await (await connection.channel()).get_queue(queue.name)).consume(on_message)
        await until(lambda: started)
        await asyncio.to_thread(broker.close_connections)
        await until(lambda: not connection.connected.is_set())
    # When another consumer gets the message, it runs
    ran: list[str] = []
    async with aio(gate, broker, queue.name, lambda message_id, _: ran.append(message_id)):
        await counted(gate, handled=1)
    assert ran == ["a"]


def test_a_guarded_callback_keeps_its_name(gate: Gate) -> None:
    @guarded(gate)
    async def on_message(message: Any) -> None:
        """Of mails."""

    assert on_message.__name__ == "on_message"
    assert on_message.__doc__ == "Of mails."


@pytest.mark.parametrize(
    ("options", "name"),
    [({"pause": -1}, "pause"), ({"lease": 0}, "lease"), ({"retention": "x"}, "retention"), ({"scope": ""}, "scope"),
     ({"max_attempts": 0}, "max_attempts")],
)  # fmt: skip
def test_bad_options_are_named(gate: Gate, options: dict[str, Any], name: str) -> None:
    with pytest.raises(BadInput, match=f"^{name}="):
        guarded(gate, **options)(print)


def test_a_generator_is_refused(gate: Gate) -> None:
    def on_message(channel: Any, method: Any, properties: Any, body: bytes) -> Any:
        yield

    with pytest.raises(BadInput, match="yield"):
        guarded(gate)(on_message)
