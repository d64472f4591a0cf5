"""`KafkaSender`: the messages of a topic of idemgate in Kafka."""

from __future__ import annotations

import json
from typing import Any

import pytest
from idemgate_kafka import KafkaConsumer, KafkaMessage, KafkaSender

from idemgate import Gate, InvalidArgument
from idemgate.errors import DownstreamUnavailable
from idemgate.testing import Clock
from integrations.kafka.tests.kafka_topics import LIBRARIES, Topics
from integrations.kafka.tests.test_consuming import AIO, CONFLUENT
from tests.for_each import for_each
from tests.waiting import eventually


@pytest.fixture
async def delivery(store: str, namespace: str) -> Any:
    """A delivery whose key has characters that are no text for a log."""
    gate = Gate(store, namespace=namespace, clock=Clock())
    topic, found = gate.topic("images"), list[Any]()
    topic.handler(found.append)
    await topic.aio.trigger("a b\x00", {"price": 3})
    await gate.aio.drain()
    await gate.aio.close()
    gate.close()
    return found[0]


@pytest.mark.slow
@pytest.mark.parametrize("library", LIBRARIES)
async def test_a_topic_sends_its_merged_payload_and_a_copy_is_dropped(
    gate: Gate, topics: Topics, library: str, delivery: Any
) -> None:
    found, settings = list[KafkaMessage](), topics.settings(library)
    consumer = KafkaConsumer(
        gate, settings, topics.name, found.append, key="{message.headers[idemgate-id]}", scope="s", dead_topic=None
    )
    gate.add_subscriber(consumer)
    async with KafkaSender(settings, topics.name) as sender:

        @gate.merge(key="{item}", name="items", deliver=sender, window="100ms")
        def render(item: str, price: int) -> None:
            raise AssertionError("Kafka gets it")

        async with gate.aio.subscribers():
            async with gate.aio.worker():
                for price in (1, 3):
                    await render.aio.trigger("item-7", price=price)
                await eventually(lambda: gate.counters["consumer.handled"])
            for _ in range(2):  # a worker that sends again, because the answer was lost
                await sender(delivery)
            await eventually(lambda: gate.counters["consumer.duplicate"])
    first, second = found
    assert (first.key, json.loads(first.value or b"")) == (b"item-7", {"item": "item-7", "price": 3})
    headers = {name.removeprefix("idemgate-"): text for name, text in first.headers.items()}
    assert {*headers} == {"id", "topic", "key", "count", "first-at", "last-at", "reason", "attempt"}
    assert (headers["topic"], headers["count"], headers["attempt"]) == ("items", "2", "1")
    assert (second.key, second.headers["idemgate-id"]) == (b"a b\x00", delivery.id)


@pytest.mark.parametrize("settings", [AIO, CONFLUENT], ids=LIBRARIES)
async def test_no_answer_is_an_outage_and_a_payload_that_is_not_json_a_mistake(
    settings: Any, delivery: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("aio_client", "confluent_client"):
        monkeypatch.setattr(f"idemgate_kafka.{module}.REQUEST_MS", 200)
    async with KafkaSender(settings, "orders") as sender:  # in-process: nothing listens there
        for _ in range(2):
            with pytest.raises(DownstreamUnavailable, match=r"^Kafka\w+: "):
                await sender(delivery)
        delivery.payload["price"] = b"\xff"
        with pytest.raises(InvalidArgument, match=r"payload=.*not JSON"):
            await sender(delivery)


@for_each(
    ("settings", "topic", "name"),
    [({}, "orders", "settings"), (AIO, "", "topic"), (AIO, 5, "topic"), ({**AIO, "linger": 5}, "orders", "settings")],
)
def test_a_wrong_argument_is_named(settings: Any, topic: Any, name: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        KafkaSender(settings, topic)
    assert raised.value.name == name
