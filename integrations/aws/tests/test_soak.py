"""Soak: guarded consumers of a queue of SQS, while consumers, their connections and those of the store fail at random.

    IDEMGATE_SOAK=10m pytest integrations/aws/tests/test_soak.py -s

runs for ten minutes; without it, for a few seconds. The seed is printed, and `IDEMGATE_SEED` repeats the plan of
faults. From two minutes on, the memory, descriptors and threads of consumers that were not killed must not grow.
moto keeps its queues in memory, so it is not killed: its connections are cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from idemgate.testing import Proxy
from integrations.aws.tests.conftest import Queue
from tests.resilience.consumers import MAX_ATTEMPTS, SCOPE, SECONDS, ConsumerSoak

OPTIONS = {
    "key": "{message.body}", "scope": SCOPE, "lease": "2s", "max_attempts": MAX_ATTEMPTS, "poll": 1, "backoff": [0, 1],
}  # fmt: skip
SQS: dict[str, Callable[[Proxy], object]] = {
    "lose a deletion": lambda proxy: proxy.drop_request(b"AmazonSQS.DeleteMessageBatch"),
    "lose the answer to a deletion": lambda proxy: proxy.cut_reply(b"AmazonSQS.DeleteMessageBatch"),
    "lose a delivery": lambda proxy: proxy.cut_reply(b"AmazonSQS.ReceiveMessage"),
    "lose a visibility": lambda proxy: proxy.drop_request(b"AmazonSQS.ChangeMessageVisibilityBatch"),
    "lose the answer to a dead letter": lambda proxy: proxy.cut_reply(b"AmazonSQS.SendMessage"),
    "cut all of SQS": lambda proxy: proxy.cut_all(),
}


class Soak(ConsumerSoak):
    """A request to moto takes 20 to 100 ms, and a consumer starts within 3 to 10 s."""

    program = "integrations.aws.tests.consumer"
    kinds = (("boto3", True), ("aiobotocore", True), ("boto3", False), ("aiobotocore", False))
    broker_faults = SQS

    def __init__(self, store: str, namespace: str, broker: Proxy, queue: Queue, seed: int) -> None:
        super().__init__(store, namespace, broker, seed)
        self.queue = queue

    def order(self, kind: str) -> Mapping[str, Any]:
        return {"endpoint": self.broker.url, "queue": self.queue.url, "client": kind, "options": OPTIONS}

    def send(self, bodies: Sequence[str]) -> Iterable[str]:
        self.queue.send_many([*bodies])
        return bodies

    def count_waiting(self) -> int:
        return self.queue.count()[0]

    def count_unsettled(self) -> int:
        return sum(self.queue.count())

    def list_dead_letters(self) -> Iterable[str]:
        return [letter["Body"] for letter in self.queue.take_dead_letters()]


@pytest.fixture
def soak(store: str, namespace: str, endpoint: str, make_queue: Any, seed: int) -> Iterator[Soak]:
    with Proxy(endpoint, remember=False) as broker:
        made = Soak(store, namespace, broker, make_queue(), seed)
        yield made
        made.close()


@pytest.mark.timeout(0)
@pytest.mark.slow
def test_no_message_is_lost_and_each_second_effect_has_a_documented_reason(soak: Soak) -> None:
    soak.run(SECONDS)
    soak.check()
