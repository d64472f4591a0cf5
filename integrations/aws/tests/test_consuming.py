"""What `SqsConsumer` does beyond the contract: delays, groups, dead letters, outages, and the limits of SQS."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from idemgate_aws import SqsConsumer, SqsMessage, consumer
from moto.core import DEFAULT_ACCOUNT_ID
from moto.sqs.models import sqs_backends

from idemgate import Gate, InvalidArgument, Retry
from idemgate.errors import DownstreamUnavailable
from idemgate.testing import Proxy
from integrations.aws.tests.clients import ACCOUNT, make_client
from integrations.aws.tests.conftest import Queue
from tests.for_each import for_each
from tests.waiting import eventually

pytestmark = pytest.mark.slow  # beyond the contract, which `poe test` runs

KEY = "{message.attributes[id]}"


@pytest.fixture
def make_consumer(gate: Gate, endpoint: str) -> Callable[..., SqsConsumer]:
    """`make_consumer(queue, handler, ...)`: with short times, and a client of boto3 unless one is given."""

    def make(queue: Queue, handler: Any, client: Any = None, gate: Gate = gate, **options: Any) -> SqsConsumer:
        options = {"key": KEY, "scope": "orders", "poll": 1, "backoff": 0, **options}
        return SqsConsumer(gate, client or make_client(endpoint), queue.url, handler, **options)

    return make


@asynccontextmanager
async def running(consumer: SqsConsumer) -> AsyncIterator[asyncio.Event]:
    """Run a consumer while the block runs."""
    stop = asyncio.Event()
    task = asyncio.create_task(consumer.run(stop))
    try:
        yield stop
    finally:
        stop.set()
        await task


def hidden_for(queue: Queue) -> list[float]:
    """Return for how many seconds from now each message of a queue is hidden."""
    name = queue.url.rpartition("/")[2]
    found = sqs_backends[DEFAULT_ACCOUNT_ID][ACCOUNT["region_name"]].queues[name]
    return [each.visible_at / 1000 - time.time() for each in found._messages]


async def test_a_dead_letter_has_the_error_of_the_last_attempt(
    gate: Gate, make_queue: Any, make_consumer: Any, client: Any
) -> None:
    queue = make_queue()
    queue.send("one", id="a", tenant="acme")
    runs = []

    async def fail(message: SqsMessage) -> None:
        runs.append(message.receives)
        raise ValueError(f"no stock\x00 for {message.body}")

    # When all attempts of a message fail
    async with running(make_consumer(queue, fail, client, max_attempts=3)):
        await eventually(lambda: gate.counters["consumer.rejected"])
    # Then the dead letter is a copy with the error of the handler
    (letter,) = queue.take_dead_letters()
    assert letter["Body"] == "one"
    found = {name: each["StringValue"] for name, each in letter["MessageAttributes"].items()}
    assert found == {"id": "a", "tenant": "acme", "idemgate-error": "ValueError: no stock\\x00 for one"}
    assert (runs, queue.count()) == ([1, 2, 3], (0, 0))
    assert (gate.counters["consumer.failed"], gate.counters["consumer.rejected"]) == (2, 1)


async def test_a_dead_letter_without_room_for_the_error_is_sent_without_it(
    gate: Gate, make_queue: Any, make_consumer: Any, sqs: Any
) -> None:
    queue = make_queue()
    attributes = {f"a{n}": {"DataType": "Binary.gzip", "BinaryValue": bytes([n, 255])} for n in range(10)}
    # Given a message with as many attributes as SQS allows, and without a key
    sqs.send_message(QueueUrl=queue.url, MessageBody="one", MessageAttributes=attributes)
    async with running(make_consumer(queue, print)):
        await eventually(lambda: gate.counters["consumer.rejected"])
    (letter,) = queue.take_dead_letters()
    assert letter["MessageAttributes"] == attributes


async def test_a_failed_message_is_hidden_for_its_delay(gate: Gate, make_queue: Any, make_consumer: Any) -> None:
    queue = make_queue()
    queue.send("one", id="a")

    def fail(message: SqsMessage) -> None:
        raise Retry(delay="10m")

    async with running(make_consumer(queue, fail)):
        await eventually(lambda: gate.counters["consumer.failed"])
    assert 590 < hidden_for(queue)[0] <= 600


@pytest.mark.parametrize("kind", ["async", "sync"])
async def test_a_handler_that_raises_a_cancellation_has_failed(
    gate: Gate, make_queue: Any, make_consumer: Any, kind: str
) -> None:
    queue = make_queue()
    queue.send("one", id="a")

    def fail(message: SqsMessage) -> None:
        raise asyncio.CancelledError

    async def fail_async(message: SqsMessage) -> None:
        fail(message)

    async with running(make_consumer(queue, fail if kind == "sync" else fail_async, backoff="10m")):
        await eventually(lambda: gate.counters["consumer.failed"])
    assert 590 < hidden_for(queue)[0] <= 600


async def test_a_delay_ends_with_the_visibility_that_sqs_allows(
    gate: Gate, make_queue: Any, make_consumer: Any
) -> None:
    queue = make_queue()
    queue.send("one", id="a")
    async with running(make_consumer(queue, lambda _: 1 / 0, backoff="30h")):
        await eventually(lambda: gate.counters["consumer.failed"])
    assert 43_000 < hidden_for(queue)[0] < 43_200


async def test_a_message_is_hidden_no_longer_than_sqs_allows(
    gate: Gate, make_queue: Any, make_consumer: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Given a queue whose messages are hidden for three seconds at most, instead of twelve hours
    monkeypatch.setattr(consumer, "LONGEST", consumer.MARGIN + 3)
    queue, runs = make_queue(), list[str]()
    message_id = queue.send("one", id="a")

    async def work(message: SqsMessage) -> None:
        runs.append(message.id)
        await eventually(lambda: gate.counters["consumer.in_progress"])

    # When a handler runs for longer
    async with running(make_consumer(queue, work, lease="2s")):
        await eventually(lambda: gate.counters["consumer.handled"])
    # Then SQS delivers a copy, which waits for the handler. That is said once
    assert runs == [message_id]
    assert gate.counters["sqs.visibility_ended"] == 1
    (said,) = (each.getMessage() for each in caplog.records if each.name == "idemgate.sqs")
    assert said.startswith(f"sqs.visibility_ended queue='{queue.url}' id='{message_id}'")


async def test_a_failure_holds_up_its_group_only(gate: Gate, make_queue: Any, make_consumer: Any) -> None:
    queue, runs = make_queue(fifo=True), list[str]()
    for body, group in [("a1", "a"), ("a2", "a"), ("b1", "b"), ("b2", "b")]:
        queue.send(body, group, id=body)

    def work(message: SqsMessage) -> None:
        runs.append(message.body)
        if runs.count("a1") == 1 and message.body == "a1":
            raise Retry(delay="1s")

    async with running(make_consumer(queue, work)):
        await eventually(lambda: gate.counters["consumer.handled"] == 4)
    assert [each for each in runs if each[0] == "a"] == ["a1", "a1", "a2"]
    assert [each for each in runs if each[0] == "b"] == ["b1", "b2"]
    assert runs.index("b2") < runs.index("a2")


async def test_messages_that_wait_for_their_group_stay_hidden(gate: Gate, make_queue: Any, make_consumer: Any) -> None:
    queue, runs = make_queue(fifo=True), list[tuple[str, int]]()
    for body in "abc":
        queue.send(body, id=body)

    async def work(message: SqsMessage) -> None:
        runs.append((message.body, message.receives))
        await asyncio.sleep(0.8)  # all three take longer than their visibility

    async with running(make_consumer(queue, work, lease="1s")):
        await eventually(lambda: gate.counters["consumer.handled"] == 3)
    assert runs == [("a", 1), ("b", 1), ("c", 1)]


async def test_a_stop_returns_the_messages_that_wait_for_their_group(
    gate: Gate, make_queue: Any, make_consumer: Any
) -> None:
    queue, runs = make_queue(fifo=True), list[str]()
    for body in "abc":
        queue.send(body, id=body)
    async with running(make_consumer(queue, lambda message: runs.append(message.body) or stop.set())) as stop:
        await stop.wait()
    assert (runs, queue.count()) == (["a"], (2, 0))


async def test_deletions_share_requests(gate: Gate, make_queue: Any, make_consumer: Any, endpoint: str) -> None:
    queue = make_queue()
    for n in range(10):
        queue.send("one", id=str(n))
    with Proxy(endpoint) as proxy:
        async with running(make_consumer(queue, lambda _: None, make_client(proxy.url))):
            await eventually(lambda: gate.counters["consumer.handled"] == 10)
        assert proxy.count(b"AmazonSQS.DeleteMessageBatch") < 10
        assert proxy.count(b"AmazonSQS.ChangeMessageVisibilityBatch") == 0  # short handlers need none


async def test_a_message_that_cannot_be_deleted_returns_as_a_duplicate(
    gate: Gate, make_queue: Any, make_consumer: Any, endpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    queue, runs = make_queue(), list[str]()
    message_id = queue.send("one", id="a")
    with Proxy(endpoint) as proxy:
        proxy.drop_request(b"AmazonSQS.DeleteMessageBatch")
        async with running(
            make_consumer(queue, lambda message: runs.append(message.id), make_client(proxy.url), lease="1s")
        ):
            await eventually(lambda: gate.counters["consumer.duplicate"])
    assert (runs, queue.count()) == ([message_id], (0, 0))
    assert gate.counters["consumer.unsettled"] == 1
    assert f"consumer.unsettled scope='orders' id='{message_id}' outcome=handled: " in caplog.text


async def test_an_unavailable_service_pauses_the_consumer(
    gate: Gate, make_queue: Any, make_consumer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    queue = make_queue()
    for n in range(5):
        queue.send("one", id=str(n))

    def work(message: SqsMessage) -> None:
        raise DownstreamUnavailable("no connection", delay="10m")

    async with running(make_consumer(queue, work, concurrency=1)):
        await eventually(lambda: gate.counters["consumer.failed"])
        await asyncio.sleep(0.2)
    # The others were not delivered: SQS counts each delivery, and its redrive policy would move them
    assert queue.count() == (4, 1)
    assert gate.counters["sqs.paused"] == 1
    assert f"sqs.paused queue='{queue.url}' seconds=600.0: DownstreamUnavailable: no connection" in caplog.text


async def test_an_unavailable_store_pauses_the_consumer(make_queue: Any, make_consumer: Any) -> None:
    queue, runs = make_queue(), list[str]()
    for n in range(3):
        queue.send("one", id=str(n))
    gate = Gate("redis://127.0.0.1:1", timeout="200ms")
    async with running(make_consumer(queue, lambda _: runs.append(""), gate=gate, concurrency=1, backoff="10m")):
        await eventually(lambda: gate.counters["consumer.failed"])
    assert (runs, queue.count(), gate.counters["sqs.paused"]) == ([], (2, 1), 1)
    await gate.aio.close()
    gate.close()


async def test_after_an_outage_one_message_at_a_time_tests_the_service(
    gate: Gate, make_queue: Any, make_consumer: Any
) -> None:
    queue, at_once, most = make_queue(), 0, list[int]()
    for n in range(6):
        queue.send("one", id=str(n))

    async def work(message: SqsMessage) -> None:
        nonlocal at_once
        at_once += 1
        most.append(at_once)
        await asyncio.sleep(0.05)
        at_once -= 1
        if len(most) == 1 or (gate.counters["sqs.paused"] == 1 and len(most) == 2):
            raise DownstreamUnavailable("no connection", delay="1s")

    async with running(make_consumer(queue, work, concurrency=1)) as stop:
        await eventually(lambda: gate.counters["consumer.handled"] >= 1)
        stop.set()
    assert most[:3] == [1, 1, 1]
    assert gate.counters["sqs.paused"] == 2


async def test_a_queue_that_cannot_be_read_is_read_again(
    gate: Gate, make_queue: Any, make_consumer: Any, endpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    queue = make_queue()
    with Proxy(endpoint) as proxy:
        proxy.drop_request(b"AmazonSQS.GetQueueAttributes")
        proxy.drop_request(b"AmazonSQS.ReceiveMessage", times=2)
        async with running(make_consumer(queue, lambda _: None, make_client(proxy.url))):
            await eventually(lambda: gate.counters["sqs.receive_failed"] == 2)
            queue.send("one", id="a")
            await eventually(lambda: gate.counters["consumer.handled"])
    assert f"sqs.receive_failed queue='{queue.url}': " in caplog.text


async def test_a_gate_runs_its_consumers(gate: Gate, make_queue: Any, make_consumer: Any, client: Any) -> None:
    queue, bodies = make_queue(), list[str]()
    gate.add_subscriber(
        make_consumer(queue, lambda message: bodies.append(message.json["id"]), client, key="{message.json[id]}")
    )
    async with gate.aio.subscribers():
        assert [runner.role for runner in gate.context.runners.now()] == ["subscriber"]
        for outcome in ("handled", "duplicate"):
            queue.send('{"id": "o-1"}')
            await eventually(lambda outcome=outcome: gate.counters[f"consumer.{outcome}"])
    assert bodies == ["o-1"]


async def test_an_exception_that_is_no_error_ends_the_consumer(make_queue: Any, make_consumer: Any) -> None:
    class Abort(BaseException):
        pass

    def work(message: SqsMessage) -> None:
        raise Abort

    queue = make_queue()
    queue.send("one", id="a")
    with pytest.raises(Abort):
        await make_consumer(queue, work).run(asyncio.Event())
    assert queue.count() == (0, 1)


@for_each(
    ("options", "name"),
    [
        ({"client": object()}, "client"),
        ({"url": "orders"}, "url"),
        ({"handler": None}, "handler"),
        ({"handler": lambda: None}, "handler"),
        ({"dead_letters": 5}, "dead_letters"),
        ({"dead_letters": "http://x/orders"}, "dead_letters"),
        ({"concurrency": 0}, "concurrency"),
        ({"backoff": []}, "backoff"),
        ({"poll": "21s"}, "poll"),
        ({"lease": "13h"}, "lease"),
        ({"key": 7}, "key"),
        ({"key": "{message.order}"}, "key"),
        ({"fingerprint": ["message.text"]}, "fingerprint"),
        ({"scope": None}, "scope"),
    ],
)
def test_a_wrong_argument_is_named(gate: Gate, sqs: Any, options: dict[str, Any], name: str) -> None:
    given = {"client": sqs, "url": "http://x/orders", "handler": lambda _: None, "key": KEY, "scope": "s", **options}
    with pytest.raises(InvalidArgument) as raised:
        SqsConsumer(gate, **given)
    assert raised.value.name == name


async def test_a_queue_without_dead_letters_is_refused(make_consumer: Any, sqs: Any) -> None:
    queue = type("Plain", (), {"url": sqs.create_queue(QueueName="plain")["QueueUrl"]})
    with pytest.raises(InvalidArgument, match=r"dead_letters=None: .*/plain has no redrive policy"):
        await make_consumer(queue, print).run(asyncio.Event())


async def test_a_policy_that_moves_messages_before_their_last_attempt_is_refused(
    make_queue: Any, make_consumer: Any
) -> None:
    with pytest.raises(InvalidArgument, match=r"max_attempts=5: the redrive policy of .* after 3 deliveries"):
        await make_consumer(make_queue(receives=3), print, max_attempts=5).run(asyncio.Event())


@for_each(
    ("deleted", "is_passed", "refused"),
    [
        ("url", False, r"^url='http://\S+/q[\d-]+': SQS has no such queue"),
        ("dead_url", False, r"^dead_letters='arn:aws:sqs:\S+-dead': SQS has no such queue"),  # of the redrive policy
        ("dead_url", True, r"^dead_letters='http://\S+-dead': SQS has no such queue"),
    ],
)
async def test_a_missing_queue_is_refused_at_the_start(
    make_queue: Any, make_consumer: Any, client: Any, deleted: str, is_passed: bool, refused: str
) -> None:
    queue = make_queue()
    queue.sqs.delete_queue(QueueUrl=getattr(queue, deleted))
    made = make_consumer(queue, print, client, **({"dead_letters": queue.dead_url} if is_passed else {}))
    with pytest.raises(InvalidArgument, match=refused):
        await asyncio.wait_for(made.run(asyncio.Event()), 60)
