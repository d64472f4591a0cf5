"""Due messages published to a real broker, with both clients; acknowledged when it has confirmed them."""

from __future__ import annotations

import asyncio
import inspect
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgpack
import pytest
from idemgate_rabbitmq import AioPublisher, NotPublished, Publisher, Unroutable, decoded

from idemgate import Delivery, Gate, InvalidArgument
from idemgate.testing import Clock
from idemgate.testing.proxy import Proxy
from tests.for_each import for_each
from tests.waiting import eventually

pytestmark = pytest.mark.slow  # beyond the contract, which `poe test` runs


async def send(publisher: Any, delivery: Delivery[Any]) -> None:
    """Publishes as a worker would: in the loop, or in a thread."""
    result = await asyncio.to_thread(publisher, delivery)
    if inspect.isawaitable(result):
        await result


async def send_until_confirmed(publisher: Any, delivery: Delivery[Any]) -> None:
    """Publish until the broker confirms within the publisher's timeout: on a busy machine it may answer late."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await send(publisher, delivery)
            except NotPublished:
                continue


async def delivered(gate: Gate, key: Any = "a", payload: object = 1, topic: str = "jobs", **options: Any) -> Any:
    """One delivery, in flight."""
    made = gate.aio.topic(topic)
    await made.trigger(key, payload, **options)
    (delivery,) = await made.take()
    return delivery


@asynccontextmanager
async def away(broker: Any) -> AsyncIterator[None]:
    broker.away()
    try:
        yield
    finally:
        broker.back()


# -- what is sent -----------------------------------------------------------------------------------------------------


async def test_a_merged_message_arrives_once_with_its_facts(gate: Gate, clock: Clock, queue: Any, publish: Any) -> None:
    # Given a topic that is sent on, and a key that is triggered twice
    topic = gate.topic("mails", window="10s", merge="append")
    topic.handler(publish(routing_key=queue.name))
    await topic.aio.trigger("ann", {"n": 1})
    clock.advance("4s")
    await topic.aio.trigger("ann", {"n": 2})
    first_at = (await topic.aio.peek("ann")).pending
    # When its window ends
    async with gate.aio.worker():
        clock.advance("6s")
        _, properties, body = await asyncio.to_thread(queue.get)
        await eventually(lambda: gate.counters["worker.acked"] == 1)
    # Then one message came, persistent, with what is known of it
    assert queue.all() == []
    assert json.loads(body) == decoded(body, properties.content_type) == [{"n": 1}, {"n": 2}]
    assert (properties.delivery_mode, properties.content_type) == (2, "application/json")
    assert properties.message_id == f"mails/ann@{first_at.last_ms}-2+2"
    headers = properties.headers
    assert {name: headers[f"idemgate-{name}"] for name in ("topic", "key", "count", "reason", "attempt")} == {
        "topic": "mails", "key": "ann", "count": 2, "reason": "window", "attempt": 1,
    }  # fmt: skip
    assert headers["idemgate-first-at"] < headers["idemgate-last-at"]
    assert headers["idemgate-last-at"].endswith("+00:00")
    stats = await topic.aio.stats()
    assert (stats.pending, stats.in_flight, stats["acked"]) == (0, 0, 1)


async def test_the_id_is_the_same_when_it_is_sent_again(gate: Gate, clock: Clock, queue: Any, publish: Any) -> None:
    # Given a worker that died between the confirm and its acknowledgement
    publisher = publish(routing_key=queue.name)
    await send(publisher, await delivered(gate))
    # When the lease ends, and another sends it
    clock.advance("30s")
    (again,) = await gate.aio.topic("jobs").take()
    await send(publisher, again)
    # Then both bear the same id and body, and say which attempt they are
    (_, one, body), (_, two, same) = queue.get(), queue.get()
    assert (one.message_id, body) == (two.message_id, same)
    assert [message.headers["idemgate-attempt"] for message in (one, two)] == [1, 2]


async def test_an_exchange_routes_by_a_key_of_each_delivery(gate: Gate, make_queue: Any, publish: Any) -> None:
    # Given a topic exchange with two queues
    one, two = make_queue(), make_queue()
    exchange = f"x-{one.name}"
    one.channel.exchange_declare(exchange, "topic", durable=True)
    one.channel.queue_bind(one.name, exchange, "mail.#")
    two.channel.queue_bind(two.name, exchange, "sms.#")
    publisher = publish(exchange, routing_key=lambda delivery: f"{delivery.payload}.{delivery.key}")
    # When two are published
    await send(publisher, await delivered(gate, "ann", "mail"))
    await send(publisher, await delivered(gate, "bob", "sms"))
    # Then each came to its queue
    assert [queue.get()[0].routing_key for queue in (one, two)] == ["mail.ann", "sms.bob"]
    assert one.all() == two.all() == []
    one.channel.exchange_delete(exchange)


async def test_without_a_routing_key_it_is_the_name_of_the_topic(gate: Gate, queue: Any, publish: Any) -> None:
    await send(publish(), await delivered(gate, topic=queue.name))
    assert queue.get()[1].headers["idemgate-topic"] == queue.name


@pytest.mark.parametrize(
    ("encoding", "payload", "body", "content_type"),
    [
        ("json", {"ä": [1, None, 2.5]}, '{"ä":[1,null,2.5]}'.encode(), "application/json"),
        ("msgpack", {"a": b"\0", 1: 2}, msgpack.packb({"a": b"\0", 1: 2}), "application/msgpack"),
        ("json", b"\xff raw", b"\xff raw", "application/octet-stream"),
    ],
)
async def test_payloads_travel_in_what_others_can_read(
    gate: Gate, queue: Any, publish: Any, encoding: str, payload: Any, body: bytes, content_type: str
) -> None:
    await send(publish(routing_key=queue.name, encoding=encoding), await delivered(gate, payload=payload))
    _, properties, came = queue.get()
    assert (came, properties.content_type) == (body, content_type)
    assert decoded(came, properties.content_type) == payload


async def test_sent_on_in_two_steps_a_message_keeps_its_id_whatever_is_triggered_meanwhile(
    store: str, namespace: str, queue: Any, publish: Any
) -> None:
    # Given a topic whose messages leave it for a stream, and a subscriber that publishes them but once fails to
    gate = Gate(store, namespace=namespace)
    topic, publisher, tried = gate.topic("jobs", merge="append"), publish(routing_key=queue.name), []
    topic.forward("stream")

    @gate.stream(topic.forward_targets()[0], group="rabbitmq", reclaim="200ms")
    async def forward(entry: Any) -> None:
        first = not tried
        tried.append(entry.id)
        await send(publisher, topic.decode_forwarded(entry.fields))
        if first:
            raise ConnectionError("killed between the confirm and the acknowledgement")

    async with gate.aio.worker(), gate.aio.subscribers():
        await topic.aio.trigger("a", 1)
        await eventually(lambda: tried)
        # When its key is triggered again before the next attempt
        await topic.aio.trigger("a", 2)
        found = [await asyncio.to_thread(queue.get) for _ in range(3)]
    # Then the copy has the id and the body of the first, and the other trigger came alone
    by_id = {properties.message_id: body for _, properties, body in found}
    assert sorted(by_id.values()) == [b"[1]", b"[2]"]
    assert sorted(body for _, _, body in found) == [b"[1]", b"[1]", b"[2]"]
    await gate.aio.close()
    gate.close()


async def test_a_long_key_makes_a_short_id(gate: Gate, queue: Any, publish: Any) -> None:
    publisher, key = publish(routing_key=queue.name), "ä" * 200
    await send(publisher, await delivered(gate, key))
    await send(publisher, await delivered(gate, key + "x"))
    one, two = queue.get()[1], queue.get()[1]
    assert one.headers["idemgate-key"] == key
    assert one.message_id != two.message_id
    assert len(one.message_id.encode()) <= 255


# -- when it is not ---------------------------------------------------------------------------------------------------


async def test_what_no_queue_is_bound_for_is_tried_again_until_one_is(
    gate: Gate, clock: Clock, queue: Any, publish: Any
) -> None:
    # Given an exchange that leads nowhere
    exchange = f"x-{queue.name}"
    queue.channel.exchange_declare(exchange, "direct", durable=True)
    topic = gate.topic("jobs", backoff="10s")
    topic.handler(publish(exchange, routing_key="there"))
    async with gate.aio.worker():
        # When a message is due
        await topic.aio.trigger("a", 1)
        await eventually(lambda: gate.counters["worker.nacked"] == 1)
        # Then it is not lost, and says what is wrong
        pending = (await topic.aio.peek("a")).pending
        assert "Unroutable: returned as unroutable (312 NO_ROUTE): no queue is bound" in pending.failure
        assert exchange in pending.failure
        # And it comes when a queue is bound, after the backoff
        queue.channel.queue_bind(queue.name, exchange, "there")
        clock.advance("10s")
        _, properties, _ = await asyncio.to_thread(queue.get)
        assert properties.headers["idemgate-attempt"] == 2
        await eventually(lambda: gate.counters["worker.acked"] == 1)
    queue.channel.exchange_delete(exchange)


async def test_one_that_is_returned_does_not_hold_up_the_others(gate: Gate, queue: Any, publish: Any) -> None:
    publisher = publish(routing_key=lambda delivery: delivery.payload)
    many = [await delivered(gate, n, queue.name if n % 2 else "nowhere") for n in range(40)]
    ended = await asyncio.gather(*(send(publisher, one) for one in many), return_exceptions=True)
    assert [type(one) for one in ended] == [Unroutable, type(None)] * 20
    assert (ended[0].exchange, ended[0].routing_key) == ("", "nowhere")
    assert len(queue.all()) == 20


async def test_what_the_broker_refuses_is_not_published(gate: Gate, make_queue: Any, publish: Any) -> None:
    # Given a queue that takes one message and refuses the next
    queue = make_queue()
    full = f"{queue.name}-full"
    arguments = {"x-max-length": 1, "x-overflow": "reject-publish"}
    queue.channel.queue_declare(full, arguments=arguments)
    publisher = publish(routing_key=full)
    await send(publisher, await delivered(gate, "a"))
    with pytest.raises(NotPublished, match="refused it"):
        await send(publisher, await delivered(gate, "b"))
    # When there is room again
    queue.channel.queue_purge(full)
    await send(publisher, await delivered(gate, "c"))
    queue.channel.queue_delete(full)


async def test_an_exchange_that_is_missing_is_named_and_comes_to_be_used(gate: Gate, queue: Any, publish: Any) -> None:
    exchange = f"x-{queue.name}"
    publisher = publish(exchange, routing_key="k")
    delivery = await delivered(gate)
    for _ in range(2):
        with pytest.raises(NotPublished, match=f"NOT_FOUND - no exchange '{exchange}'"):
            await send(publisher, delivery)
    # When it is made
    queue.channel.exchange_declare(exchange, "fanout")
    queue.channel.queue_bind(queue.name, exchange)
    await send(publisher, delivery)
    assert len(queue.all()) == 1
    # And when it is deleted behind the publisher's back
    queue.channel.exchange_delete(exchange)
    for _ in range(2):
        with pytest.raises(NotPublished, match="NOT_FOUND"):
            await send(publisher, delivery)


async def test_a_connection_that_the_broker_closed_is_made_anew(
    gate: Gate, broker: Any, queue: Any, publish: Any
) -> None:
    publisher = publish(routing_key=queue.name)
    await send(publisher, await delivered(gate, "a"))
    # When the broker closes all connections
    broker.close_connections()
    # Then at most what was under way at that moment fails
    delivery = await delivered(gate, "b")
    async with asyncio.timeout(20):
        while True:
            try:
                await send(publisher, delivery)
                break
            except NotPublished:
                await asyncio.sleep(0.01)
    assert len(queue.all()) == 2


async def test_a_broker_that_is_silent_is_given_up_and_found_again(
    gate: Gate, broker: Any, queue: Any, publish: Any
) -> None:
    # Given a publisher that is connected, and one that is not yet
    one, two = (publish(routing_key=queue.name, timeout="500ms") for _ in range(2))
    await send_until_confirmed(one, await delivered(gate, "a"))
    delivery = await delivered(gate, "b")
    # When the broker does not answer
    async with away(broker):
        for publisher in (one, two, one):
            with pytest.raises(NotPublished, match=r"not confirmed within 0.5 s|ConnectionOpenAborted"):
                await send(publisher, delivery)
    # Then both go on when it does: what it had got from them meanwhile comes too, with the same id
    for publisher in (one, two):
        await send_until_confirmed(publisher, delivery)
    ids = [properties.message_id for _, properties, _ in queue.all()]
    assert len(set(ids)) == 2
    assert len(ids) >= 3


async def test_a_broker_that_is_away_costs_no_attempts(
    gate: Gate, clock: Clock, broker: Any, queue: Any, publish: Any
) -> None:
    # Given messages that may fail once, and a broker that is away
    topic = gate.topic("jobs", max_attempts=1, backoff="10s", lease="2400h")
    topic.handler(publish(routing_key=queue.name, timeout="300ms"))
    await topic.aio.trigger_many([(n, n) for n in range(10)])
    async with gate.aio.worker(concurrency=3):
        async with away(broker):
            # When the worker tries again after each pause
            async with asyncio.timeout(60):
                while gate.counters["worker.downstream_unavailable"] < 3:
                    clock.advance("1h")
                    await asyncio.sleep(0.05)
        # Then all messages are published once the broker is back, and none is a dead letter
        async with asyncio.timeout(60):
            while gate.counters["worker.acked"] < 10:
                clock.advance("1h")
                await asyncio.sleep(0.05)
    assert {properties.headers["idemgate-key"] for _, properties, _ in queue.all()} == {str(n) for n in range(10)}
    assert (await topic.aio.stats()).dead == 0


async def test_a_confirm_that_is_lost_means_once_more(gate: Gate, broker: Any, queue: Any, publish: Any) -> None:
    with Proxy(f"tcp://127.0.0.1:{broker.port}") as proxy:
        publisher = publish(url=f"amqp://guest:guest@127.0.0.1:{proxy.port}/", routing_key=queue.name)
        await send(publisher, await delivered(gate, "a"))
        # When the connection breaks in the place of the confirm
        proxy.cut_reply(b"lost and found")
        delivery = await delivered(gate, "b", "lost and found")
        with pytest.raises(NotPublished):
            await send(publisher, delivery)
        await send(publisher, delivery)
    # Then the message is there twice, with one id
    found = [properties.message_id for _, properties, _ in queue.all()]
    assert len(found) == 3
    assert found[1] == found[2]


async def test_many_are_under_way_at_once_on_one_connection(gate: Gate, broker: Any, queue: Any, publish: Any) -> None:
    topic = gate.topic("jobs")
    with Proxy(f"tcp://127.0.0.1:{broker.port}") as proxy:
        topic.handler(publish(url=f"amqp://guest:guest@127.0.0.1:{proxy.port}/", routing_key=queue.name))
        async with gate.aio.worker(concurrency=25):
            await topic.aio.trigger("first", "first")
            await eventually(lambda: gate.counters["worker.acked"] == 1)
            # Given a broker that confirms nothing for the moment
            async with away(broker):
                await topic.aio.trigger_many([(n, "under way") for n in range(60)])
                # Then as many are sent as handlers may run
                await eventually(lambda: proxy.count(b"under way") == 25)
                assert gate.counters["worker.acked"] == 1
            await eventually(lambda: gate.counters["worker.acked"] == 61)
        assert proxy.count(b"AMQP\x00\x00\x09\x01") == 1
    assert len(queue.all()) == 61


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("amqp://guest:geheim@127.0.0.1:1/", "refused|Connect|111"),
        ("amqp://guest:geheim@127.0.0.1:{port}/", "ACCESS_REFUSED|[Aa]uthentication"),
        ("amqp://guest:guest@127.0.0.1:{port}/geheim", "NOT_ALLOWED|Connection.Close"),
    ],
)
async def test_what_keeps_it_from_connecting_is_said_without_the_password(
    gate: Gate, broker: Any, publish: Any, url: str, text: str
) -> None:
    publisher = publish(url=url.format(port=broker.port))
    with pytest.raises(NotPublished, match=text) as caught:
        await send(publisher, await delivered(gate))
    assert "guest:" not in str(caught.value)
    assert "geheim@" not in str(caught.value) + repr(publisher)


async def test_after_close_it_connects_anew(gate: Gate, queue: Any, publish: Any) -> None:
    publisher = publish(routing_key=queue.name)
    for key in "ab":
        await send(publisher, await delivered(gate, key))
        closing = publisher.close()
        if inspect.isawaitable(closing):
            await closing
    assert len(queue.all()) == 2


def test_a_publisher_serves_one_event_loop_after_the_other(store: str, namespace: str, broker: Any, queue: Any) -> None:
    publisher = AioPublisher(broker.url, routing_key=queue.name)

    async def run(key: str) -> None:
        gate = Gate(store, namespace=namespace)
        async with publisher:
            await publisher(await delivered(gate, key))
        await gate.aio.close()

    asyncio.run(run("a"))
    asyncio.run(run("b"))
    assert len(queue.all()) == 2


# -- what is refused --------------------------------------------------------------------------------------------------


@for_each(
    ("options", "name"),
    [
        ({"url": "redis://127.0.0.1"}, "url"),
        ({"url": "amqp://"}, "url"),
        ({"url": "amqp://guest:geheim@host:bad/"}, "url"),
        ({"url": None}, "url"),
        ({"exchange": "x" * 256}, "exchange"),
        ({"exchange": b"x"}, "exchange"),
        ({"routing_key": "ä" * 128}, "routing_key"),
        ({"routing_key": 7}, "routing_key"),
        ({"encoding": "pickle"}, "encoding"),
        ({"timeout": "0s"}, "timeout"),
        ({"timeout": "soon"}, "timeout"),
    ],
)
def test_bad_input_is_named(publisher_of: Any, options: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^{name}=") as caught:
        publisher_of(**{"url": "amqp://guest:guest@127.0.0.1/", **options})
    assert "geheim" not in str(caught.value)


def test_an_option_that_pika_does_not_know_is_named() -> None:
    with pytest.raises(InvalidArgument, match="heartbeats"):
        Publisher("amqp://guest:guest@127.0.0.1/", heartbeats=3)


@pytest.mark.parametrize(
    ("options", "payload", "key", "name"),
    [
        ({}, {"at": {1, 2}}, "a", "payload"),
        ({}, float("nan"), "a", "payload"),
        ({"encoding": "msgpack"}, {"n": 2**80}, "a", "payload"),
        ({"routing_key": lambda delivery: None}, 1, "a", "routing_key"),
        ({}, 1, "k" * 10_000, "key"),
    ],
)
async def test_what_can_never_be_sent_goes_to_the_dead_letters_at_once(
    gate: Gate, publish: Any, options: dict[str, Any], payload: object, key: str, name: str
) -> None:
    topic = gate.topic("jobs")
    topic.handler(publish(**options))
    async with gate.aio.worker():
        await topic.aio.trigger(key, payload)
        await eventually(lambda: gate.counters["worker.buried"] == 1)
    (letter,) = await topic.aio.dead.list()
    assert f"InvalidArgument: {name}=" in letter.reason


@pytest.mark.parametrize(
    ("body", "content_type"), [(b"{", "application/json"), (b"\xc1", "application/msgpack"), (b"a", "text/plain")]
)
def test_a_body_that_is_not_ours_is_refused(body: bytes, content_type: str) -> None:
    with pytest.raises(InvalidArgument):
        decoded(body, content_type)


def test_the_example_runs_as_it_stands(broker: Any) -> None:
    example = Path(__file__).parents[1] / "example.py"
    command = [sys.executable, str(example), broker.url]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "item-7: scheduled", "item-7: merged", "item-7: merged", "rendering item-7: 3 changes, the last is price 3",
        "a copy came, and was dropped",
    ]  # fmt: skip
