"""moto's server of this test process, and queues of its own for each test."""

from __future__ import annotations

import io
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from moto.core import DEFAULT_ACCOUNT_ID
from moto.server import DomainDispatcherApplication, create_backend_app
from moto.sqs.models import sqs_backends
from werkzeug.serving import WSGIRequestHandler, make_server

from integrations.aws.tests.clients import ACCOUNT, make_client, open_aio_client

POLL = 0.03
_numbers = itertools.count()


class Moto:
    """moto's server, one request after the other: its queues lose messages if two requests change them at once.

    It polls by itself, because moto's own long poll is a busy loop while a message group is blocked.
    """

    def __init__(self) -> None:
        self._app = DomainDispatcherApplication(create_backend_app)
        self._lock = threading.Lock()
        self._server = make_server("127.0.0.1", 0, self._serve, threaded=True, request_handler=_Quiet)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _serve(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        request = json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
        name = request.get("QueueUrl", "").rpartition("/")[2]
        end = time.monotonic() + request.pop("WaitTimeSeconds", 0)
        sent = json.dumps(request).encode()
        environ["CONTENT_LENGTH"] = str(len(sent))
        while True:
            is_over = time.monotonic() >= end
            if is_over or self._has_messages(name):  # a request takes 5 ms
                with self._lock:
                    environ["wsgi.input"] = io.BytesIO(sent)
                    head, answer = _call(self._app, dict(environ))
                if is_over or b'"Messages"' in answer:
                    start_response(*head)
                    return [answer]
            time.sleep(POLL)

    def _has_messages(self, name: str) -> bool:
        with self._lock:
            queue = sqs_backends[DEFAULT_ACCOUNT_ID][ACCOUNT["region_name"]].queues.get(name)
            return queue is None or bool(queue.messages)


def _call(app: Any, environ: dict[str, Any]) -> tuple[Any, bytes]:
    heads: list[Any] = []
    answer = b"".join(app(environ, lambda *head: heads.append(head)))
    return heads[0], answer


class _Quiet(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"

    def log(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="session")
def endpoint() -> Iterator[str]:
    server = Moto()
    yield server.url
    server.close()


@pytest.fixture(scope="session")
def sqs(endpoint: str) -> Any:
    """A client for the tests."""
    return make_client(endpoint)


class Queue:
    """A queue with a dead-letter queue."""

    def __init__(self, sqs: Any, *, fifo: bool = False, receives: int = 1_000, **attributes: str) -> None:
        self.sqs, self.fifo = sqs, fifo
        name, end = f"q{os.getpid()}-{next(_numbers)}", ".fifo" if fifo else ""
        kind = {"FifoQueue": "true"} if fifo else {}
        self.dead_url = sqs.create_queue(QueueName=f"{name}-dead{end}", Attributes=kind)["QueueUrl"]
        found = sqs.get_queue_attributes(QueueUrl=self.dead_url, AttributeNames=["QueueArn"])
        policy = {"deadLetterTargetArn": found["Attributes"]["QueueArn"], "maxReceiveCount": receives}
        attributes = {"RedrivePolicy": json.dumps(policy), **kind, **attributes}
        self.url = sqs.create_queue(QueueName=name + end, Attributes=attributes)["QueueUrl"]

    def send(self, body: str, group: str = "g", **attributes: str) -> str:
        """Send a message and return its id."""
        order = {"MessageGroupId": group, "MessageDeduplicationId": str(next(_numbers))} if self.fifo else {}
        named = {name: {"DataType": "String", "StringValue": each} for name, each in attributes.items()}
        sent = self.sqs.send_message(QueueUrl=self.url, MessageBody=body, MessageAttributes=named, **order)
        message_id: str = sent["MessageId"]
        return message_id

    def send_many(self, bodies: list[str]) -> None:
        """Send up to ten messages in one request."""
        entries = [{"Id": str(n), "MessageBody": body} for n, body in enumerate(bodies)]
        self.sqs.send_message_batch(QueueUrl=self.url, Entries=entries)

    def count(self) -> tuple[int, int]:
        """Return how many messages are visible, and how many are hidden."""
        names = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
        found = self.sqs.get_queue_attributes(QueueUrl=self.url, AttributeNames=names)["Attributes"]
        visible, hidden = (int(found[name]) for name in names)
        return visible, hidden

    def take(self, url: str = "") -> list[dict[str, Any]]:
        """Receive and delete what is visible, or the dead letters."""
        found = list[dict[str, Any]]()
        while received := self.sqs.receive_message(
            QueueUrl=url or self.url, MaxNumberOfMessages=10, MessageAttributeNames=["All"], AttributeNames=["All"]
        ).get("Messages"):
            for each in received:
                self.sqs.delete_message(QueueUrl=url or self.url, ReceiptHandle=each["ReceiptHandle"])
            found += received
        return found

    def take_dead_letters(self) -> list[dict[str, Any]]:
        return self.take(self.dead_url)


@pytest.fixture
def make_queue(sqs: Any) -> Callable[..., Queue]:
    return lambda **options: Queue(sqs, **options)


@pytest.fixture(params=["boto3", "aiobotocore"])
async def client(request: pytest.FixtureRequest, endpoint: str) -> AsyncIterator[Any]:
    """Each behaviour with both clients."""
    async with AsyncExitStack() as stack:
        if request.param == "boto3":
            yield make_client(endpoint)
        else:
            yield await stack.enter_async_context(open_aio_client(endpoint))


@pytest.fixture
def python() -> Callable[..., subprocess.Popen[str]]:
    """Start a script of this folder in a process."""

    def start_script(name: str, *args: str, **options: Any) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
        script = Path(__file__).with_name(name)
        return subprocess.Popen([sys.executable, str(script), *args], text=True, env=environment, **options)

    return start_script
