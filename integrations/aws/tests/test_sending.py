"""`SqsSender`: the messages of a topic in a queue."""

from __future__ import annotations

import json
from typing import Any

import pytest
from botocore.exceptions import ClientError
from idemgate_aws import SqsConsumer, SqsMessage, SqsSender

from idemgate import Gate, InvalidArgument
from idemgate.errors import DownstreamUnavailable
from idemgate.testing import Clock, Proxy
from integrations.aws.tests.clients import make_client
from tests.waiting import eventually

pytestmark = pytest.mark.slow  # beyond the contract, which `poe test` runs


async def test_a_topic_sends_its_merged_payload(gate: Gate, make_queue: Any, client: Any) -> None:
    queue, topic = make_queue(), gate.topic("images", window="100ms", merge="append")
    topic.handler(SqsSender(client, queue.url))
    async with gate.aio.worker():
        for price in (1, 2):
            await topic.aio.trigger("item-7", {"price": price})
        await eventually(lambda: queue.count() == (1, 0))
    (sent,) = queue.take()
    found = {name: (each["DataType"], each["StringValue"]) for name, each in sent["MessageAttributes"].items()}
    assert json.loads(sent["Body"]) == [{"price": 1}, {"price": 2}]
    assert {found.pop(f"idemgate-{name}")[0] for name in ("id", "first-at", "last-at")} == {"String"}
    assert found == {
        "idemgate-topic": ("String", "images"), "idemgate-key": ("String", "item-7"),
        "idemgate-reason": ("String", "window"), "idemgate-count": ("Number", "2"), "idemgate-attempt": ("Number", "1"),
    }  # fmt: skip


async def test_a_copy_of_a_sent_message_is_dropped(gate: Gate, make_queue: Any, endpoint: str) -> None:
    # Given a queue whose answer to a send is lost
    queue, found = make_queue(), list[SqsMessage]()
    with Proxy(endpoint) as proxy:
        proxy.cut_reply(b"AmazonSQS.SendMessage")

        @gate.merge(key="{item}", name="items", deliver=SqsSender(make_client(proxy.url), queue.url), backoff=0)
        def render(item: str, price: int) -> None:
            raise AssertionError("the queue gets it")

        consumer = SqsConsumer(
            gate, make_client(endpoint), queue.url, found.append, key="{message.attributes[idemgate-id]}", scope="s",
            poll=1, lease="1s",
        )  # fmt: skip
        gate.add_subscriber(consumer)
        async with gate.aio.worker(), gate.aio.subscribers():
            await render.aio.trigger("item-7", price=3)
            await eventually(lambda: gate.counters["consumer.duplicate"])
    # Then the topic has sent it twice, and no attempt counted
    assert [message.json for message in found] == [{"item": "item-7", "price": 3}]
    assert found[0].attributes["idemgate-attempt"] == "1"
    assert gate.counters["worker.downstream_unavailable"] == 1


@pytest.fixture
async def delivery(store: str, namespace: str) -> Any:
    """A delivery of a key that SQS accepts neither as an id nor as an attribute."""
    gate = Gate(store, namespace=namespace, clock=Clock())
    topic, found = gate.topic("images"), list[Any]()
    topic.handler(found.append)
    await topic.aio.trigger("a b\x00", {"price": 3})
    await gate.aio.drain()
    await gate.aio.close()
    gate.close()
    return found[0]


async def test_a_fifo_queue_gets_the_key_as_group(make_queue: Any, client: Any, delivery: Any) -> None:
    queue = make_queue(fifo=True)
    for sender in (SqsSender(client, queue.url), SqsSender(client, queue.url, group=lambda delivery: delivery.topic)):
        await sender(delivery)
    (sent,) = queue.take()  # SQS has dropped the second one, which has the same deduplication id
    assert sent["MessageAttributes"]["idemgate-key"]["StringValue"] == "a b\\x00"
    assert len(sent["Attributes"]["MessageGroupId"]) == 32  # a hash
    assert sent["Attributes"]["MessageDeduplicationId"] == delivery.id


async def test_an_answer_of_sqs_is_a_failure_and_no_answer_an_outage(
    make_queue: Any, sqs: Any, endpoint: str, delivery: Any
) -> None:
    with pytest.raises(ClientError, match=r"NonExistentQueue|QueueDoesNotExist"):
        await SqsSender(sqs, f"{endpoint}/123456789012/missing")(delivery)
    with pytest.raises(DownstreamUnavailable, match="EndpointConnectionError: Could not connect"):
        await SqsSender(make_client("http://127.0.0.1:1"), make_queue().url)(delivery)
    delivery.payload["price"] = b"\xff"
    with pytest.raises(InvalidArgument, match=r"payload=.*not JSON"):
        await SqsSender(sqs, make_queue().url)(delivery)
