"""Soak: guarded consumers of Kafka, while consumers, their connections and those of the store fail at random.

    IDEMGATE_SOAK=10m pytest integrations/kafka/tests/test_soak.py -s

runs for ten minutes; without it, for a few seconds. The seed is printed, and `IDEMGATE_SEED` repeats the plan of
faults. From two minutes on, the memory, descriptors and threads of consumers that were not killed must not grow.
Tansu keeps its topics in memory, so it is not killed: its connections are cut. The group rebalances with each kill and
start, and with each stop that is longer than a session.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from idemgate.testing import Proxy
from tests.ports import free_ports
from tests.resilience.consumers import MAX_ATTEMPTS, SCOPE, SECONDS, ConsumerSoak
from tests.tansu import running_tansu

PARTITIONS = 6
PATIENCE = 20.0
"""Seconds for a request of the test, whose connections are cut, too."""
ONE_BY_ONE = {"batch.num.messages": 1}
"""For producers: the end offset that Tansu tells is too low behind a batch of several records."""
BROKER: dict[str, Callable[[Proxy], object]] = {
    "cut all of Kafka": lambda proxy: proxy.cut_all(),
    "lose answers of Kafka": lambda proxy: proxy.cut_reply(b"", times=3),
    "slow Kafka": lambda proxy: setattr(proxy, "delay", 0.05),
    "quick Kafka": lambda proxy: setattr(proxy, "delay", 0.0),
}


class Soak(ConsumerSoak):
    program = "integrations.kafka.tests.killed_consumer"
    kinds = (("aiokafka async", True), ("confluent sync", True), ("aiokafka sync", False), ("confluent async", False))
    broker_faults = BROKER

    def __init__(self, store: str, namespace: str, broker: Proxy, seed: int) -> None:
        super().__init__(store, namespace, broker, seed)
        self.servers = f"127.0.0.1:{broker.port}"
        self.topic, self.retry, self.dead_topic = namespace, f"{namespace}-retry", f"{namespace}-dead"
        quiet = {"bootstrap.servers": self.servers, "log_level": 0, "reconnect.backoff.max.ms": 500}
        counts = {self.topic: PARTITIONS, self.retry: 2, self.dead_topic: 1}
        admin, topics = AdminClient(quiet), [NewTopic(name, count, 1) for name, count in counts.items()]
        for made in admin.create_topics(topics).values():
            made.result(PATIENCE)
        self.producer = Producer({**quiet, "message.timeout.ms": 10_000, **ONE_BY_ONE})
        self.reader = Consumer({**quiet, "group.id": namespace, "enable.auto.commit": False})
        self.watched = [TopicPartition(name, n) for name in (self.topic, self.retry) for n in range(counts[name])]

    def order(self, kind: str) -> Mapping[str, Any]:
        library, handler = kind.split()
        settings: dict[str, Any] = {"group.id": self.topic, "bootstrap.servers": self.servers}
        settings |= {"session.timeout.ms": 3_000, "heartbeat.interval.ms": 300}
        if library == "aiokafka":
            settings = {name.replace(".", "_"): value for name, value in settings.items()} | {"max_batch_size": 1}
        else:  # the strategy of aiokafka
            settings |= {"partition.assignment.strategy": "roundrobin", **ONE_BY_ONE}
        options = {
            "key": "{message.value}", "scope": SCOPE, "lease": "2s", "max_attempts": MAX_ATTEMPTS, "backoff": [0, 1],
            "dead_topic": self.dead_topic, "retry_topic": self.retry,
        }  # fmt: skip
        return {"settings": settings, "topics": self.topic, "options": options, "kind": handler}

    def send(self, bodies: Sequence[str]) -> Iterable[str]:
        found, left, end = list[str](), list(bodies), monotonic() + 3 * PATIENCE

        def note(body: str, error: KafkaError | None) -> None:
            (left if error else found).append(body)  # one without an answer may be there: its next copy is a duplicate

        while left:
            assert monotonic() < end, "the broker takes no messages"
            sent, left[:] = [*left], []
            for body in sent:
                self.producer.produce(
                    self.topic, body.encode(), body.encode(), on_delivery=lambda error, _, body=body: note(body, error)
                )
            self.producer.flush(PATIENCE)
        return found

    def count_waiting(self) -> int:
        return self.count_unsettled()

    def count_unsettled(self) -> int:
        end = monotonic() + 3 * PATIENCE
        while monotonic() < end:
            with suppress(KafkaException):
                lag = 0
                for each in self.reader.committed(self.watched, timeout=PATIENCE):
                    _, high = self.reader.get_watermark_offsets(each, timeout=PATIENCE)
                    assert high >= each.offset
                    lag += high - max(each.offset, 0)
                return lag
        raise AssertionError("the broker tells no offsets")

    def list_dead_letters(self) -> Iterable[str]:
        partition = TopicPartition(self.dead_topic, 0, 0)
        _, high = self.reader.get_watermark_offsets(partition, timeout=PATIENCE)
        self.reader.assign([partition])
        found = list[str]()
        while len(found) < high:
            message = self.reader.poll(PATIENCE)
            assert message is not None
            found.append((message.value() or b"").decode())
        return found

    def close(self) -> None:
        self.reader.close()
        super().close()


@pytest.fixture
def soak(store: str, namespace: str, tmp_path: Path, seed: int) -> Iterator[Soak]:
    (port,) = free_ports()
    with (
        Proxy(f"tcp://127.0.0.1:{port}", remember=False) as broker,
        running_tansu(tmp_path, port, advertised_port=broker.port),
    ):
        made = Soak(store, namespace, broker, seed)
        yield made
        made.close()


@pytest.mark.timeout(0)
@pytest.mark.slow
def test_no_record_is_lost_and_each_second_effect_has_a_documented_reason(soak: Soak) -> None:
    soak.run(SECONDS)
    soak.check()
