"""Guarded consumers of aio-pika and pika: a message id that was handled does not run again."""

from __future__ import annotations

import asyncio
import copy
import pickle
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple

import aio_pika
import cloudpickle
import pika
import pytest
from aio_pika.message import IncomingMessage
from idemgate_rabbitmq import guarded
from pika.adapters.blocking_connection import BlockingChannel

from idemgate import Bury, Gate, Guard, InvalidArgument, Retry, errors, verdict_of
from idemgate.testing import Clock
from idemgate.testing.proxy import Proxy
from tests.waiting import eventually

pytestmark = pytest.mark.slow  # beyond the contract, which `poe test` runs


class Received(NamedTuple):
    """The facts of a message that the tests look at."""

    message_id: str
    body: bytes
    redelivered: bool


Body = Callable[[Received], object]
AtRest = Callable[[], Awaitable[None]]
"""Waits until no callback runs, so that every settlement is on its way to the broker."""


@asynccontextmanager
async def aio(gate: Gate, broker: Any, queue: str, body: Body, **options: Any) -> AsyncIterator[AtRest]:
    """Consume with aio-pika, 4 at once; `body` runs in a thread, so that it may block with both clients."""
    running: set[object] = set()

    @guarded(gate, **{"scope": "test", **options})
    async def on_message(message: Any) -> None:
        await asyncio.to_thread(body, Received(message.message_id, message.body, message.redelivered))

    async def track(message: Any) -> None:
        running.add(message)
        try:
            await on_message(message)
        finally:
            running.discard(message)

    async with await aio_pika.connect(broker.url) as connection:
        channel = await connection.channel()
        await channel.set_qos(4)
        await (await channel.get_queue(queue)).consume(track)
        yield lambda: eventually(lambda: not running)


@asynccontextmanager
async def blocking(gate: Gate, broker: Any, queue: str, body: Body, **options: Any) -> AsyncIterator[AtRest]:
    """Consume with pika, in a thread, 4 at once; it ends between two callbacks."""

    @guarded(gate, **{"scope": "test", **options})
    def on_message(channel: Any, method: Any, properties: Any, data: bytes) -> None:
        body(Received(properties.message_id, data, method.redelivered))

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
    """Return a function: `await consume(body, pause=...)` consumes until the test ends."""
    async with AsyncExitStack() as stack:
        yield lambda body, **options: stack.enter_async_context(
            request.param(gate, broker, queue.name, body, **options)
        )


@pytest.fixture
def dead(queue: Any, make_queue: Any) -> Any:
    """Give the queue a dead-letter exchange; return the queue of its dead letters."""
    dead_letters = make_queue()
    queue.channel.queue_delete(queue.name)
    arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": dead_letters.name}
    queue.channel.queue_declare(queue.name, durable=True, arguments=arguments)
    return dead_letters


def put(queue: Any, message_id: str | None, body: bytes = b"x") -> None:
    queue.channel.basic_publish("", queue.name, body, pika.BasicProperties(message_id=message_id, delivery_mode=2))


async def wait_for_counts(gate: Gate, **wanted: int) -> None:
    """Wait until the counters have these values."""
    await eventually(lambda: all(gate.counters[f"rabbitmq.{name}"] >= n for name, n in wanted.items()))
    assert {name: gate.counters[f"rabbitmq.{name}"] for name in wanted} == wanted


async def wait_for_count(gate: Gate, name: str, n: int) -> None:
    """Wait until the counter has at least this value."""
    await eventually(lambda: gate.counters[f"rabbitmq.{name}"] >= n)


async def wait_until_empty(queue: Any) -> None:
    """Wait until no message is ready in the queue."""
    await eventually(lambda: not queue.channel.queue_declare(queue.name, passive=True).method.message_count)


async def test_a_duplicate_does_not_run(gate: Gate, broker: Any, queue: Any) -> None:
    for client in (aio, blocking):
        ran: list[str] = []
        name = client.__name__
        for n in [*range(10), *range(10)]:
            put(queue, f"{name}-{n}", b"%d" % n)
        async with client(
            gate, broker, queue.name, lambda received, ran=ran: ran.append(received.message_id)
        ) as at_rest:
            await wait_for_counts(
                gate, handled=10 * (1 + (client is blocking)), duplicate=10 * (1 + (client is blocking))
            )
            await at_rest()
        # Then every message is acknowledged: none came back when the consumer stopped
        assert sorted(ran) == [f"{name}-{n}" for n in range(10)]
        assert queue.all() == []


@pytest.fixture
def returns(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The methods that returned messages to the broker. RabbitMQ 4.3 counts only `reject` against a delivery limit."""
    found = list[str]()

    def spy(kind: type, name: str) -> None:
        method = getattr(kind, name)

        def record(*args: Any, **options: Any) -> Any:
            found.append(name.removeprefix("basic_"))
            return method(*args, **options)

        monkeypatch.setattr(kind, name, record)

    for kind, prefix in ((IncomingMessage, ""), (BlockingChannel, "basic_")):
        spy(kind, f"{prefix}nack")
        spy(kind, f"{prefix}reject")
    return found


async def test_a_failed_message_is_requeued_after_the_pause(
    gate: Gate, queue: Any, consume: Consume, returns: list[str]
) -> None:
    starts: list[float] = []

    def fail_first(_: Received) -> None:
        starts.append(time.monotonic())
        if len(starts) < 3:
            raise ConnectionError("the bank is closed") if len(starts) == 1 else Retry(delay="600ms")

    await consume(fail_first, pause="300ms")
    put(queue, "a")
    await wait_for_counts(gate, failed=2, handled=1)
    first, second, third = starts
    assert second - first >= 0.3
    assert third - second >= 0.6
    assert returns == ["reject", "reject"]
    # And a duplicate of it does not run
    put(queue, "a")
    await wait_for_counts(gate, duplicate=1)
    assert len(starts) == 3


async def test_a_pausing_message_does_not_delay_the_others(gate: Gate, queue: Any, consume: Consume) -> None:
    done: list[str] = []

    def body(received: Received) -> None:
        if received.message_id == "bad":
            raise ValueError
        done.append(received.message_id)

    await consume(body, pause="15m")
    put(queue, "bad")
    for n in range(10):
        put(queue, str(n))
    await wait_for_counts(gate, failed=1, handled=10)
    assert sorted(done) == [str(n) for n in range(10)]


async def test_a_held_message_runs_when_the_lease_lapses(
    gate: Gate, clock: Clock, queue: Any, consume: Consume
) -> None:
    # Given an owner that was killed
    await gate.aio.claim("a", scope="test", fingerprint=b"x", lease="30s")
    ran: list[Received] = []
    await consume(ran.append, pause="20ms")
    # When the message is redelivered, and many polls later the lease lapses
    put(queue, "a")
    await asyncio.sleep(0.5)
    assert ran == []
    clock.advance("30s")
    # Then it runs, without a requeue
    await wait_for_counts(gate, handled=1)
    assert ran == [Received("a", b"x", redelivered=False)]
    await wait_for_counts(gate, held_in_progress=1, in_progress=0)


async def test_a_held_message_is_acknowledged_when_its_owner_completes(
    gate: Gate, queue: Any, consume: Consume
) -> None:
    # Given another consumer that runs the message
    claim = await gate.aio.claim("a", scope="test", fingerprint=b"x")
    ran: list[Received] = []
    await consume(ran.append, pause="20ms")
    put(queue, "a")
    await asyncio.sleep(0.5)
    # When it completes
    assert await claim.complete()
    # Then the held message is acknowledged, without a requeue
    await wait_for_counts(gate, duplicate=1)
    await wait_for_counts(gate, held_in_progress=1, in_progress=0)
    assert ran == []


async def test_a_held_message_runs_when_its_owner_fails(gate: Gate, queue: Any, consume: Consume) -> None:
    claim = await gate.aio.claim("a", scope="test", fingerprint=b"x")
    ran: list[Received] = []
    await consume(ran.append, pause="20ms")
    put(queue, "a")
    await asyncio.sleep(0.5)
    # When the other consumer fails and releases its claim
    assert await claim.release()
    # Then the held message runs, without a requeue
    await wait_for_counts(gate, handled=1)
    assert ran == [Received("a", b"x", redelivered=False)]


async def test_a_held_message_does_not_delay_the_others(gate: Gate, queue: Any, consume: Consume) -> None:
    # Given a message that another consumer runs
    await gate.aio.claim("held", scope="test", fingerprint=b"x")
    ran: list[str] = []
    await consume(lambda received: ran.append(received.message_id), pause="15m")
    put(queue, "held")
    await wait_for_count(gate, "held_in_progress", 1)
    # When others arrive
    for n in range(10):
        put(queue, str(n))
    # Then they run
    await wait_for_counts(gate, handled=10)
    assert sorted(ran) == [str(n) for n in range(10)]


async def test_a_message_is_requeued_when_its_hold_ends(
    gate: Gate, queue: Any, consume: Consume, returns: list[str]
) -> None:
    # Given another consumer that runs the message for longer than the hold
    claim = await gate.aio.claim("a", scope="test", fingerprint=b"x")
    ran: list[Received] = []
    await consume(ran.append, pause="50ms", lease="1s", hold="1s")
    put(queue, "a")
    await wait_for_count(gate, "in_progress", 2)
    # When it completes
    assert await claim.complete()
    # Then the message is acknowledged
    await wait_for_counts(gate, duplicate=1)
    assert ran == []
    assert set(returns) == {"nack"}
    await wait_until_empty(queue)


@pytest.mark.slow  # below RabbitMQ 4.3 it is skipped
async def test_the_end_of_a_hold_does_not_count_against_the_delivery_limit(
    gate: Gate, queue: Any, make_queue: Any, consume: Consume
) -> None:
    with queue.broker.connect() as connection:
        version = connection._impl.server_properties["version"]
    if tuple(map(int, version.split(".")[:2])) < (4, 3):
        pytest.skip(f"RabbitMQ {version} counts basic.nack, too")
    # Given a quorum queue that delivers a message twice
    lost, limit = make_queue(), 1
    queue.channel.queue_delete(queue.name)
    arguments = {
        "x-queue-type": "quorum", "x-delivery-limit": limit,
        "x-dead-letter-exchange": "", "x-dead-letter-routing-key": lost.name,
    }  # fmt: skip
    queue.channel.queue_declare(queue.name, durable=True, arguments=arguments)
    # When the hold of a message ends more often
    claim = await gate.aio.claim("a", scope="test", fingerprint=b"x")
    await consume(lambda _: None, pause="50ms", lease="1s", hold="1s")
    put(queue, "a")
    await wait_for_count(gate, "in_progress", limit + 3)
    # Then the message is still there
    assert await claim.complete()
    await wait_for_counts(gate, duplicate=1)
    assert lost.all() == []


async def test_a_held_message_of_a_closed_channel_does_not_run(
    gate: Gate, clock: Clock, broker: Any, queue: Any
) -> None:
    for client in ("aio", "blocking"):
        # Given a held message
        message_id, ran = f"of-{client}", list[str]()
        await gate.aio.claim(message_id, scope="test", fingerprint=b"x", lease="30s")
        put(queue, message_id)
        # When its channel closes, and then the lease lapses
        if client == "aio":
            await hold_and_close_aio(gate, clock, broker, queue, ran)
        else:
            await asyncio.to_thread(hold_and_close_blocking, gate, clock, broker, queue, ran)
        # Then it does not run on that channel
        assert ran == []
        # And another consumer runs it
        async with aio(gate, broker, queue.name, lambda received, ran=ran: ran.append(received.message_id)) as at_rest:
            await eventually(lambda ran=ran: ran)
            await at_rest()
        assert ran == [message_id]
    await wait_for_counts(gate, unsettled=2, handled=2)


async def hold_and_close_aio(gate: Gate, clock: Clock, broker: Any, queue: Any, ran: list[str]) -> None:
    @guarded(gate, scope="test", pause="20ms")
    async def on_message(message: Any) -> None:
        ran.append(message.message_id)

    async with await aio_pika.connect(broker.url) as connection:
        channel = await connection.channel()
        message = await (await channel.get_queue(queue.name)).get(timeout=20)
        # In a task of the test, which aio-pika does not cancel
        task = asyncio.create_task(on_message(message))
        await wait_for_count(gate, "held_in_progress", 1)
        await channel.close()
        clock.advance("30s")
        await task


def hold_and_close_blocking(gate: Gate, clock: Clock, broker: Any, queue: Any, ran: list[str]) -> None:
    @guarded(gate, scope="test", pause="20ms")
    def on_message(channel: Any, method: Any, properties: Any, data: bytes) -> None:
        ran.append(properties.message_id)

    with broker.connect() as connection:
        channel = connection.channel()
        channel.basic_consume(queue.name, on_message)
        while gate.counters["rabbitmq.held_in_progress"] < 2:
            connection.process_data_events(0.01)
        channel.close()
        clock.advance("30s")
        while gate.counters["rabbitmq.unsettled"] < 2:
            connection.process_data_events(0.01)


async def test_a_cancelled_hold_is_counted_and_claims_nothing(gate: Gate, broker: Any, queue: Any) -> None:
    # Given a message that is held when its connection closes
    claim = await gate.aio.claim("a", scope="test", fingerprint=b"x")
    put(queue, "a")
    async with aio(gate, broker, queue.name, print, pause="20ms"):
        await wait_for_count(gate, "held_in_progress", 1)
    await wait_for_counts(gate, unsettled=1)
    # When its owner fails
    assert await claim.release()
    # Then the next consumer runs it
    ran: list[Received] = []
    async with aio(gate, broker, queue.name, ran.append):
        await wait_for_counts(gate, handled=1)
    assert ran == [Received("a", b"x", redelivered=True)]


async def test_a_stale_owner_does_not_acknowledge(gate: Gate, clock: Clock, queue: Any, consume: Consume) -> None:
    runs: list[str] = []

    def lose(received: Received) -> None:
        runs.append(received.message_id)
        if len(runs) == 1:  # its process stopped until its lease lapsed, and another consumer completed
            clock.advance("1h")
            with gate.claim("a", scope="test", fingerprint=b"x") as other:
                assert other.started

    await consume(lose, lease="30s")
    put(queue, "a")
    # Then the message is requeued, and its redelivery is a duplicate
    await wait_for_counts(gate, lost=1, duplicate=1)
    assert runs == ["a"]
    await wait_until_empty(queue)


async def test_a_message_that_cannot_succeed_is_dead_lettered(
    gate: Gate, queue: Any, dead: Any, consume: Consume
) -> None:
    def body(received: Received) -> None:
        if received.message_id == "bad":
            raise Bury("no such item")

    await consume(body)
    # Given a message that its callback buries, one without id, and one whose id was used with another body
    put(queue, "bad", b"buried")
    put(queue, None, b"nameless")
    put(queue, "a", b"one")
    await wait_for_counts(gate, handled=1, rejected=2)
    put(queue, "a", b"two")
    await wait_for_counts(gate, handled=1, rejected=3)
    # Then all three are dead letters (read in a thread: this event loop still sends the rejections)
    assert sorted([(await asyncio.to_thread(dead.get))[2] for _ in range(3)]) == [b"buried", b"nameless", b"two"]


ERRORS: list[BaseException] = [
    errors.AlreadyDone("k"), errors.AlreadyInProgress("k", 0.01), errors.AttemptsExhausted("k", 3, "s"),
    errors.Bury("b"), errors.ClaimRejected("k", "text"), errors.DecodeError("why"),
    errors.DeliveryFailed("t", "k", "why"), errors.NoResult("t", "k", "why"), errors.ResultTimeout("t", "k", 1.0),
    errors.DownstreamUnavailable("text"), errors.IdemgateError("text"),
    errors.InvalidArgument("n", 1, "p", "f"), errors.KeyReused("k"), errors.LeaseLost("k", 1),
    errors.MissingKey("n", 1, "p", "f"), errors.NoCurrentExecution("text"), errors.NotConfigured("text"),
    errors.DeliveryFailed("t", "k", "why"), errors.NoResult("t", "k", "why"), errors.ResultTimeout("t", "k", 1),
    errors.NotDrained("text", 1), errors.NotDurable("text"), errors.OutcomeUnknown("k", 1, "s"),
    errors.Overloaded("text"), errors.PartialFailure([1]), errors.PolicyChanged("t", {}, {}),
    errors.ReplayedFailure("k", "ValueError", "text"), errors.ResultUnavailable("k", "why"), errors.Retry("text"),
    errors.ServerRejected("text"),
    errors.SharedFailure("k", "ValueError", "text"), errors.StoreError("text"),
    errors.StoreUnavailable("text", "no"), errors.TooLarge("n", 1, "p", "f"), errors.TopicInUse("t", "why"),
    errors.UnexpectedData("key", "text"),
]  # fmt: skip
"""One error of each class of the library."""


async def test_no_permanent_error_is_requeued(gate: Gate, queue: Any, dead: Any, consume: Consume) -> None:
    assert {type(error).__name__ for error in ERRORS} >= set(errors.__all__)
    # Given every error that each delivery of a message would raise again
    by_name = {type(error).__name__: error for error in ERRORS if verdict_of(error).action != "retry"}
    runs: list[str] = []

    def body(received: Received) -> None:
        runs.append(received.message_id)
        raise by_name[received.message_id]

    # When a callback raises it
    await consume(body, pause="10ms")
    for name in by_name:
        put(queue, name, name.encode())
    duplicates = {name for name, error in by_name.items() if verdict_of(error).action == "ack"}
    rejected = by_name.keys() - duplicates
    assert duplicates >= {"AlreadyDone", "ResultUnavailable"}
    assert rejected >= {"ReplayedFailure", "KeyReused", "AttemptsExhausted", "OutcomeUnknown", "DecodeError"}
    await wait_for_counts(gate, rejected=len(rejected), duplicate=len(duplicates), failed=0)
    # Then each ran once, and those that are no duplicates are dead letters
    assert sorted(runs) == sorted(by_name)
    found = {(await asyncio.to_thread(dead.get))[2].decode() for _ in rejected}
    assert found == rejected
    await wait_until_empty(queue)


@pytest.mark.parametrize("error", [ValueError(), errors.NotDurable("0 of 1 replicas have it")], ids=["own", "written"])
async def test_a_message_is_rejected_after_max_attempts(
    gate: Gate, queue: Any, dead: Any, consume: Consume, error: Exception
) -> None:
    def body(_: Received) -> None:
        raise error

    await consume(body, max_attempts=3, pause="10ms")
    put(queue, "a", b"poison")
    await wait_for_counts(gate, failed=2, rejected=1)  # by the attempt that is the last
    assert (await asyncio.to_thread(dead.get))[2] == b"poison"


async def test_a_store_outage_requeues_no_message(
    store: str, namespace: str, clock: Clock, broker: Any, queue: Any
) -> None:
    for client in (aio, blocking):
        with Proxy(store) as proxy:
            # Given a store that does not answer. A call that is slow after the outage must not look like another one.
            gate, ran = Gate(proxy.url, namespace=namespace, clock=clock, timeout="4s"), list[Received]()
            proxy.black_hole = True
            async with client(gate, broker, queue.name, ran.append, pause="20ms") as at_rest:
                ids = [f"{client.__name__}-{n}" for n in range(3)]
                for message_id in ids:
                    put(queue, message_id)
                # When it answers while they try again
                await wait_for_count(gate, "held_store_unavailable", 3)
                await asyncio.sleep(0.2)
                # (Cut first: a claim that is granted and whose answer is lost would hold its key for its lease.)
                proxy.cut_all()
                proxy.heal()
                # Then the messages run, without a requeue
                await wait_for_count(gate, "handled", 3)
                await at_rest()
            assert sorted(ran) == [Received(message_id, b"x", redelivered=False) for message_id in ids]
            await wait_for_counts(gate, held_store_unavailable=3, store_unavailable=0, failed=0)
            await gate.aio.close()
            gate.close()


async def test_a_store_outage_longer_than_the_hold_requeues(
    namespace: str, broker: Any, queue: Any, returns: list[str]
) -> None:
    for client in (aio, blocking):
        gate, ran = Gate("redis://127.0.0.1:1", namespace=namespace, timeout="50ms"), list[Received]()
        put(queue, "a")
        async with client(gate, broker, queue.name, ran.append, pause="20ms", lease="100ms", hold="100ms"):
            await wait_for_count(gate, "store_unavailable", 3)
        assert ran == []
        assert set(returns) == {"nack"}
        assert len(queue.all()) == 1
        await gate.aio.close()
        gate.close()


async def test_one_message_at_a_time_retries_an_unavailable_store(
    namespace: str, broker: Any, queue: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[object] = []
    run = Guard.run

    def count(self: Guard, key: Any, *message: Any, **options: Any) -> Any:
        tries.append(key)
        return run(self, key, *message, **options)

    monkeypatch.setattr(Guard, "run", count)
    # Given a consumer of pika, whose connection is blocked by each try
    gate = Gate("redis://127.0.0.1:1", namespace=namespace, timeout="50ms")
    async with blocking(gate, broker, queue.name, print, pause="15m"):
        for n in range(4):
            put(queue, str(n))
        # When it holds all messages of its prefetch window
        await wait_for_counts(gate, held_store_unavailable=4)
    # Then one of them tried
    assert len(tries) == 1
    gate.close()


@pytest.mark.parametrize(
    "error",
    [
        errors.DownstreamUnavailable("no connection"),
        errors.StoreUnavailable("the callback's own store", "unknown"),
        errors.AlreadyInProgress("another key", 0.02),
        errors.LeaseLost("another key", 1),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_what_is_not_the_fault_of_a_message_counts_as_no_attempt(
    gate: Gate, queue: Any, consume: Consume, returns: list[str], error: Exception
) -> None:
    ran: list[tuple[float, bool]] = []

    # Given a callback that may fail twice
    def body(received: Received) -> None:
        ran.append((time.monotonic(), received.redelivered))
        if len(ran) <= 4:
            raise error

    # When a service that it needs is away for longer
    await consume(body, pause="50ms", max_attempts=2)
    put(queue, "a")
    # Then each time the message is requeued, after the pause and without a count, and it runs in the end
    lost = 4 if isinstance(error, errors.LeaseLost) else 0
    await wait_for_counts(gate, lost=lost, deferred=4 - lost, handled=1, failed=0, rejected=0, held_store_unavailable=0)
    assert returns == ["nack"] * 4
    assert [redelivered for _, redelivered in ran] == [False, True, True, True, True]
    if not isinstance(error, errors.AlreadyInProgress):  # which names its own delay
        assert ran[-1][0] - ran[0][0] >= 4 * 0.05


async def test_the_log_records_of_a_consumer_start_with_their_event(
    gate: Gate, queue: Any, consume: Consume, caplog: pytest.LogCaptureFixture
) -> None:
    raised = {
        "deferred": errors.DownstreamUnavailable("no\nconnection"), "failed": ValueError("x"), "rejected": Bury("y"),
    }  # fmt: skip
    ran: list[str] = []

    def body(received: Received) -> None:
        ran.append(received.message_id)
        if ran.count(received.message_id) == 1:
            raise raised[received.message_id]

    claim = await gate.aio.claim("held", scope="test", fingerprint=b"x")
    with caplog.at_level("INFO", "idemgate.rabbitmq"):
        await consume(body, pause="20ms", lease="1s", hold="1s")
        for name in (*raised, "held"):
            put(queue, name)
        await wait_for_count(gate, "in_progress", 1)
        await claim.complete()
        await wait_for_counts(gate, deferred=1, failed=1, rejected=1, handled=2, duplicate=1)
    texts = [record.getMessage() for record in caplog.records if record.name == "idemgate.rabbitmq"]
    found = {text.split(" ")[0]: text for text in texts}
    assert found["rabbitmq.deferred"] == (
        "rabbitmq.deferred scope='test' id='deferred': DownstreamUnavailable: no\\nconnection"
    )
    assert found["rabbitmq.held"] == "rabbitmq.held scope='test' id='held' reason=in_progress"
    assert found.keys() == {f"rabbitmq.{event}" for event in (*raised, "held", "hold_ended")}


async def test_the_delay_of_a_retry_ends_with_the_hold(gate: Gate, queue: Any, consume: Consume) -> None:
    ran: list[Received] = []

    def body(received: Received) -> None:
        ran.append(received)
        if len(ran) == 1:
            raise Retry(delay="1h")

    await consume(body, pause="20ms", lease="1s", hold="1s")
    put(queue, "a")
    await wait_for_counts(gate, failed=1, handled=1)


async def test_a_message_that_completed_on_a_broken_connection_is_not_run_again(
    gate: Gate, broker: Any, queue: Any
) -> None:
    ran: list[str] = []
    broken = threading.Event()

    def body(received: Received) -> None:
        ran.append(received.message_id)
        assert broken.wait(120)

    @guarded(gate, scope="test")
    def on_message(channel: Any, method: Any, properties: Any, data: bytes) -> None:
        body(Received(properties.message_id, data, method.redelivered))

    # Given a callback that runs while its connection breaks, so that its message cannot be acknowledged
    put(queue, "a")
    connection = broker.connect()
    channel = connection.channel()
    channel.basic_consume(queue.name, on_message)
    consuming = asyncio.create_task(asyncio.to_thread(channel.start_consuming))
    await eventually(lambda: ran)
    await asyncio.to_thread(broker.close_connections)
    broken.set()
    with pytest.raises(pika.exceptions.AMQPError):  # raised in the consumer's program
        await consuming
    await wait_for_counts(gate, handled=1)
    # When another consumer gets the message
    async with blocking(gate, broker, queue.name, body):
        # Then it is a duplicate
        await wait_for_counts(gate, duplicate=1)
    assert ran == ["a"]


async def test_a_callback_that_raises_a_cancellation_has_failed(gate: Gate, broker: Any, queue: Any) -> None:
    cancellations = [asyncio.CancelledError()]

    def cancel_once(_: Received) -> None:
        if cancellations:
            raise cancellations.pop()

    put(queue, "a")
    async with aio(gate, broker, queue.name, cancel_once, pause="20ms"):
        await wait_for_counts(gate, failed=1, handled=1)


async def test_a_message_of_a_cancelled_callback_runs_again_before_its_lease_ends(
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
        await eventually(lambda: started)
        await asyncio.to_thread(broker.close_connections)
        await eventually(lambda: not connection.connected.is_set())
    # When another consumer gets the message, it runs
    ran: list[str] = []
    async with aio(gate, broker, queue.name, lambda received: ran.append(received.message_id)):
        await wait_for_counts(gate, handled=1)
    assert ran == ["a"]


def test_a_guarded_callback_keeps_its_name(gate: Gate) -> None:
    @guarded(gate)
    async def on_message(message: Any) -> None:
        """Of mails."""

    assert on_message.__name__ == "on_message"
    assert on_message.__doc__ == "Of mails."


@guarded(Gate("redis://nowhere:1"), scope="test")
async def of_module(message: Any) -> None: ...


def test_a_guarded_callback_is_pickled_by_its_name(gate: Gate) -> None:
    @guarded(gate, scope="test")
    async def on_message(message: Any) -> None: ...

    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(of_module, protocol)) is of_module
    assert cloudpickle.loads(cloudpickle.dumps(of_module)) is of_module
    assert copy.copy(of_module) is copy.deepcopy(of_module) is of_module
    # cloudpickle would copy a function without a module
    for each in (on_message, lambda: on_message):
        with pytest.raises(pickle.PicklingError, match="on_message' by value"):
            cloudpickle.dumps(each)


@pytest.mark.parametrize(
    ("options", "name"),
    [({"pause": -1}, "pause"), ({"lease": 0}, "lease"), ({"retention": "x"}, "retention"), ({"scope": ""}, "scope"),
     ({"max_attempts": 0}, "max_attempts"), ({"hold": 0}, "hold")],
)  # fmt: skip
def test_bad_options_are_named(gate: Gate, options: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^{name}="):
        guarded(gate, **options)(print)


@pytest.mark.parametrize("name", ["lease", "pause"])
def test_a_lease_or_pause_longer_than_the_hold_is_refused(gate: Gate, name: str) -> None:
    with pytest.raises(
        InvalidArgument, match=rf"^{name}='16m': is longer than hold='15m': .*hold='16m'.*consumer_timeout"
    ):
        guarded(gate, **{name: "16m"})
    guarded(gate, **{name: "15m"})


def test_a_callback_with_other_parameters_is_refused(gate: Gate) -> None:
    async def without(*, message: Any = None) -> None: ...

    def of_aio(message: Any) -> None: ...

    for callback in (without, of_aio):
        with pytest.raises(InvalidArgument, match="cannot be called with"):
            guarded(gate)(callback)


def test_a_guard_above_a_decorator_that_registers_is_refused(gate: Gate) -> None:
    with pytest.raises(InvalidArgument, match=r"Write @guarded below @gate\.subscribe"):

        @guarded(gate)
        @gate.subscribe("c")
        async def on_message(message: Any) -> None: ...


def test_a_generator_is_refused(gate: Gate) -> None:
    def on_message(channel: Any, method: Any, properties: Any, body: bytes) -> Any:
        yield

    with pytest.raises(InvalidArgument, match="generator"):
        guarded(gate)(on_message)
