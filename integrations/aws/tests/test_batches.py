"""`lambda_batch`: the contract behind a trigger as Lambda makes it, and what it does beyond the contract."""

from __future__ import annotations

import asyncio
import base64
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from idemgate_aws import SqsMessage, lambda_batch

from idemgate import Gate, InvalidArgument, Retry
from idemgate.testing import ConsumerContract, ContractConsumer, Proxy, adapt_handler
from idemgate.testing.contract import Handler
from integrations.aws.tests.clients import make_client
from integrations.aws.tests.conftest import Queue
from integrations.aws.tests.test_consuming import hidden_for
from integrations.aws.tests.test_contract import OPTIONS, SqsTransport, read
from tests.for_each import for_each

pytestmark = pytest.mark.slow  # beyond the contract, which `poe test` runs

KEY = "{message.attributes[id]}"


class Context:
    """The context of an invocation. `steps`: the milliseconds that are left at each question."""

    def __init__(self, *steps: int) -> None:
        self._steps = list(steps)

    def get_remaining_time_in_millis(self) -> int:
        return self._steps.pop(0) if self._steps else 60_000


def build_event(received: list[dict[str, Any]], url: str) -> dict[str, Any]:
    """Return the event that Lambda makes of received messages."""

    def build_attribute(each: dict[str, Any]) -> dict[str, Any]:
        binary = base64.b64encode(each["BinaryValue"]).decode() if "BinaryValue" in each else None
        return {"dataType": each["DataType"], "stringValue": each.get("StringValue"), "binaryValue": binary}

    return {
        "Records": [
            {
                "messageId": each["MessageId"], "receiptHandle": each["ReceiptHandle"], "body": each["Body"],
                "attributes": each["Attributes"], "eventSource": "aws:sqs",
                "eventSourceARN": "arn:aws:sqs:eu-west-1:123456789012:" + url.rpartition("/")[2],
                "messageAttributes": {
                    name: build_attribute(attribute) for name, attribute in each.get("MessageAttributes", {}).items()
                },
            }
            for each in received
        ]
    }  # fmt: skip


def receive(sqs: Any, url: str, visibility: int = 30, poll: int = 0) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = sqs.receive_message(
        QueueUrl=url, MaxNumberOfMessages=10, MessageAttributeNames=["All"], AttributeNames=["All"],
        VisibilityTimeout=visibility, WaitTimeSeconds=poll,
    ).get("Messages", [])  # fmt: skip
    return found


def invoke(
    sqs: Any, queue: Queue, function: Any, context: Any = None, visibility: int = 30, poll: int = 0
) -> list[str]:
    """Invoke a function as its trigger does, and return the bodies of what failed."""
    if not (received := receive(sqs, queue.url, visibility, poll)):
        return []
    answer = function(build_event(received, queue.url), context or Context())
    failed = [each["itemIdentifier"] for each in answer["batchItemFailures"]]
    for each in received:
        if each["MessageId"] not in failed:
            sqs.delete_message(QueueUrl=queue.url, ReceiptHandle=each["ReceiptHandle"])
    return [each["Body"] for each in received if each["MessageId"] in failed]


class LambdaTransport(SqsTransport):
    """A trigger that invokes the function in a thread, for one batch after the other."""

    is_concurrent = False
    visibility = None  # a queue with a trigger has a visibility of several timeouts of the function

    async def start(self, handler: Handler, *, acknowledges: bool = True) -> ContractConsumer:
        return LambdaConsumer(self, handler, acknowledges)


class LambdaConsumer:
    def __init__(self, transport: LambdaTransport, handler: Handler, acknowledges: bool) -> None:
        self.broker, self.redis = (Proxy(url, remember=False) for url in (transport.endpoint, transport.store))
        self.gate = Gate(self.redis.url, namespace=transport.gate.namespace, timeout="3s")
        self.queue, self.sqs = transport.queue, make_client(self.broker.url)
        if not acknowledges:
            self.broker.drop_request(b"AmazonSQS.DeleteMessage", times=1_000_000)

        def key(message: SqsMessage) -> str:
            message_id = read(message)[0]
            return message_id if self.is_killed else transport.count(message_id)  # its thread may have just received it

        options = {**OPTIONS, "key": key}
        self.function = lambda_batch(
            self.gate, adapt_handler(handler, read), client=self.sqs, dead_letters=self.queue.dead_url, **options
        )
        self.stopping = self.is_killed = False
        self.task = asyncio.create_task(asyncio.to_thread(self.consume))

    def consume(self) -> None:
        while not self.stopping:
            with suppress(Exception):  # the connection was cut
                invoke(self.sqs, self.queue, self.function, visibility=1, poll=1)

    async def stop(self) -> None:
        self.stopping = True
        await self.task
        self.broker.close()
        self.redis.close()
        self.gate.close()

    async def kill(self) -> None:
        self.is_killed = True
        self.broker.close()
        self.redis.close()
        self.stopping = True


class TestLambda(ConsumerContract):
    kinds = ("sync",)

    @pytest.fixture
    def transport(self, gate: Gate, store: str, endpoint: str, make_queue: Any) -> SqsTransport:
        return LambdaTransport(gate, store, endpoint, make_queue())


class Function:
    """A guarded function, plain or async, that notes the bodies, and fails for those in `fails`."""

    def __init__(self, gate: Gate, kind: str, *fails: str, **options: Any) -> None:
        self.runs, self.fails = list[str](), fails

        def handle(message: SqsMessage) -> None:
            self.runs.append(message.body)
            if message.body in self.fails:
                raise ValueError(message.body)

        async def handle_async(message: SqsMessage) -> None:
            handle(message)

        self.run: Any = lambda_batch(
            gate, handle if kind == "sync" else handle_async, **{"key": KEY, "scope": "orders", **options}
        )


@pytest.fixture
def make_function(gate: Gate) -> Iterator[Callable[..., Function]]:
    made: list[Function] = []

    def make(*args: Any, **options: Any) -> Function:
        made.append(Function(gate, *args, **options))
        return made[-1]

    yield make
    for each in made:
        if (runner := each.run.__self__._runner) is not None:  # its event loop has connections of the gate
            runner.run(gate.aio.close())
            runner.close()


@pytest.fixture(params=["sync", "async"])
def kind(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


def test_only_failed_messages_come_again(gate: Gate, make_function: Any, make_queue: Any, sqs: Any, kind: str) -> None:
    queue, function = make_queue(), make_function(kind, "two")
    for body in ("one", "two", "three"):
        queue.send(body, id=body)
    assert invoke(sqs, queue, function.run, visibility=1) == ["two"]
    function.fails = ()
    assert invoke(sqs, queue, function.run, poll=5) == []
    assert (sorted(function.runs), queue.count()) == (["one", "three", "two", "two"], (0, 0))


def test_a_fifo_batch_stops_at_its_first_failure(
    gate: Gate, make_function: Any, make_queue: Any, sqs: Any, kind: str
) -> None:
    queue, function = make_queue(fifo=True), make_function(kind, "two")
    for body in ("one", "two", "three"):
        queue.send(body, id=body)
    assert invoke(sqs, queue, function.run) == ["two", "three"]
    assert (function.runs, gate.counters["lambda.not_started"]) == (["one", "two"], 1)


def test_what_cannot_end_in_time_does_not_start(
    gate: Gate, make_function: Any, make_queue: Any, sqs: Any, kind: str
) -> None:
    queue, function = make_queue(), make_function(kind)
    for body in ("one", "two"):
        queue.send(body, id=body)
    assert invoke(sqs, queue, function.run, Context(5_000, 999)) == ["two"]
    assert (function.runs, gate.counters["lambda.not_started"]) == (["one"], 1)


def test_a_run_ends_with_its_invocation(gate: Gate, make_queue: Any, sqs: Any) -> None:
    # Given an invocation that has one second left, and a lease of one
    queue = make_queue()
    queue.send("one", id="a")

    def work(message: SqsMessage) -> None:
        deadline = time.monotonic() + 20
        while gate.inspect("a", scope="orders").state != "lapsed":
            assert time.monotonic() < deadline
            time.sleep(0.05)

    # Then its lease is not renewed after that, and another invocation could run the message
    assert invoke(sqs, queue, lambda_batch(gate, work, key=KEY, scope="orders", lease="1s"), Context(1_000)) == []


def test_a_client_hides_failed_messages_and_sends_dead_letters(gate: Gate, make_queue: Any, sqs: Any) -> None:
    queue = make_queue()
    for body in ("later", "never"):
        queue.send(body, id=body)

    def work(message: SqsMessage) -> None:
        if message.body == "later":
            raise Retry(delay="10m")
        raise InvalidArgument("body", message.body, "bad", "Mend it") from KeyError("total")

    function = lambda_batch(gate, work, key=KEY, scope="orders", client=sqs, dead_letters=queue.dead_url)
    assert invoke(sqs, queue, function) == ["later"]
    assert 590 < hidden_for(queue)[0] <= 600
    (letter,) = queue.take_dead_letters()
    assert letter["Body"] == "never"
    assert "InvalidArgument: body='never': bad. Mend it" in letter["MessageAttributes"]["idemgate-error"]["StringValue"]


async def test_a_function_is_collected_while_another_event_loop_runs(gate: Gate) -> None:
    # Given a function with an async handler, and the event loop that it runs in
    async def work(_: SqsMessage) -> None: ...

    function: Any = lambda_batch(gate, work, key=KEY, scope="orders")
    loop = function.__self__._runner.get_loop()
    # When nothing refers to the function any more
    del function
    gc.collect()
    # Then its loop is closed, beside the one that runs
    assert loop.is_closed()


def test_without_a_client_a_rejected_message_is_left_to_the_redrive_policy(
    gate: Gate, make_function: Any, make_queue: Any, sqs: Any
) -> None:
    queue, function = make_queue(), make_function("sync", "one", max_attempts=1)
    queue.send("one", id="a")
    assert invoke(sqs, queue, function.run) == ["one"]
    assert gate.counters["consumer.rejected"] == 1


def test_a_message_that_cannot_be_settled_comes_again(
    gate: Gate, make_queue: Any, sqs: Any, caplog: pytest.LogCaptureFixture
) -> None:
    queue = make_queue()
    message_id = queue.send("one")  # without a key, so it is rejected
    url = queue.dead_url + "-missing"
    function = lambda_batch(gate, print, key=KEY, scope="orders", client=sqs, dead_letters=url)
    assert invoke(sqs, queue, function) == ["one"]
    assert gate.counters["consumer.unsettled"] == 1
    assert f"consumer.unsettled scope='orders' id='{message_id}' outcome=rejected: QueueDoesNotExist: " in caplog.text


def test_a_binary_attribute_is_decoded(gate: Gate, make_queue: Any, sqs: Any) -> None:
    queue, found = make_queue(), list[SqsMessage]()
    attributes = {"id": {"DataType": "Number", "StringValue": "7"}, "b": {"DataType": "Binary", "BinaryValue": b"\xff"}}
    sqs.send_message(QueueUrl=queue.url, MessageBody="{}", MessageAttributes=attributes)
    assert invoke(sqs, queue, lambda_batch(gate, found.append, key=KEY, scope="orders")) == []
    assert (found[0].attributes, found[0].receives, found[0].json) == ({"id": "7", "b": b"\xff"}, 1, {})


@for_each("event", [{}, {"Records": [{"eventSource": "aws:kinesis"}]}, {"Records": [{"eventSource": "aws:sqs"}]}, None])
def test_the_event_of_another_trigger_is_refused(gate: Gate, make_function: Any, event: Any) -> None:
    with pytest.raises(InvalidArgument, match="not an event of SQS"):
        make_function("sync").run(event, Context())


@for_each(
    ("options", "name"),
    [
        ({"dead_letters": "http://x/dead"}, "client"),
        ({"client": object()}, "client"),
        ({"backoff": []}, "backoff"),
        ({"max_run": "soon"}, "max_run"),
        ({"lease": 0}, "lease"),
        ({"key": "{message.order}"}, "key"),
    ],
)
def test_a_wrong_option_is_named(gate: Gate, make_function: Any, options: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        make_function("sync", **options)
    assert raised.value.name == name
