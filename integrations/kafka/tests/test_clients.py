"""The clients behind one face, in-process: what a broker that answers as it should never shows."""

from __future__ import annotations

from typing import Any

import pytest
from aiokafka import errors
from confluent_kafka import KafkaError, KafkaException
from idemgate_kafka import aio_client
from idemgate_kafka.aio_client import AioConsumer, AioLibrary
from idemgate_kafka.clients import Library
from idemgate_kafka.confluent_client import ConfluentConsumer, ConfluentLibrary, _Thread
from idemgate_kafka.message import Partition

from tests.for_each import for_each


class Record:
    """A message of confluent-kafka."""

    def __init__(self, offset: int, error: KafkaError | None = None) -> None:
        self.offset, self.error = lambda: offset, lambda: error
        self.topic, self.partition, self.key, self.value = lambda: "orders", lambda: 3, lambda: None, lambda: b"one"
        self.headers, self.timestamp = lambda: [("id", b"a"), ("empty", None)], lambda: (0, -1)


class Client:
    """A consumer of confluent-kafka that delivers one record, and then what it is given."""

    def __init__(self, others: Any) -> None:
        self._first: Any = Record(7)
        self._others = others

    def poll(self, _: float) -> Any:
        first, self._first = self._first, None
        return first

    def consume(self, *_: Any) -> Any:
        if isinstance(self._others, Exception):
            raise self._others
        return self._others


@for_each(
    "others",
    [
        [Record(-1, KafkaError(KafkaError._PARTITION_EOF)), Record(-1, KafkaError(KafkaError._TRANSPORT))],
        KafkaException(KafkaError(KafkaError._TRANSPORT)),
    ],
)
async def test_an_error_beside_a_record_is_raised_by_the_next_poll(others: Any) -> None:
    consumer = ConfluentConsumer({})
    consumer._thread, consumer._client = _Thread(), Client(others)
    try:
        ((partition, (message,)),) = await consumer.poll(0.2, 10)
        with pytest.raises(KafkaException, match="_TRANSPORT"):
            await consumer.poll(0.2, 10)
        assert await consumer.poll(0.05, 10) == []
    finally:
        consumer._thread.stop()
    assert (partition, message.id) == (Partition("orders", 3), "orders:3:7")
    assert (message.raw_headers, message.timestamp_ms) == ((("id", b"a"), ("empty", b"")), None)


async def test_a_broker_that_answers_aiokafka_no_more_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    now, answered, paused = [0.0], {"p0": 100, "p1": None}, set[str]()

    class Silent:
        async def getmany(self, **_: object) -> dict[object, list[object]]:
            return {}

    fake: Any = Silent()
    fake.assignment, fake.paused = lambda: frozenset(answered), lambda: paused
    fake.last_poll_timestamp = answered.get
    monkeypatch.setattr(aio_client, "monotonic", lambda: now[0])
    consumer = AioConsumer({"request_timeout_ms": 10_000})
    consumer._client = fake

    async def poll(at: float) -> None:
        now[0] = at
        assert await consumer.poll(0.01, 9) == []

    # Given fetches that are answered, Then time does not matter
    for at, answer in ((0, None), (40, 200), (80, 300)):
        answered["p1"] = answer
        await poll(at)
        answered["p0"] = 100 + at * 1000
    # Given a partition that is answered no more, while the other one is
    await poll(81)
    answered["p0"] = 900_000
    await poll(110)
    for at in (111, 112):
        with pytest.raises(TimeoutError, match="no broker answers"):
            await poll(at)
    # Then it matters no more once it is paused, or answered again
    paused.add("p1")
    await poll(114)
    paused.clear()
    answered["p0"] = answered["p1"] = 901_000
    await poll(130)
    await poll(159)


def of_confluent(code: int) -> KafkaException:
    return KafkaException(KafkaError(code))


@for_each(
    ("library", "error", "unanswered", "permanent", "too_large"),
    [
        (AioLibrary(), errors.KafkaConnectionError(), True, False, False),
        (AioLibrary(), errors.RequestTimedOutError(), True, False, False),
        (AioLibrary(), TimeoutError(), True, False, False),
        (AioLibrary(), errors.KafkaError("Unable to get cluster metadata over all known brokers"), True, True, False),
        (AioLibrary(), errors.UnknownTopicOrPartitionError(), False, False, False),
        (AioLibrary(), errors.TopicAuthorizationFailedError(), False, True, False),
        (AioLibrary(), errors.MessageSizeTooLargeError(), False, True, True),
        (ConfluentLibrary(), of_confluent(KafkaError._TRANSPORT), True, False, False),
        (ConfluentLibrary(), of_confluent(KafkaError._MSG_TIMED_OUT), True, False, False),
        (ConfluentLibrary(), BufferError(), True, True, False),
        (ConfluentLibrary(), of_confluent(KafkaError.UNKNOWN_TOPIC_OR_PART), False, False, False),
        (ConfluentLibrary(), of_confluent(KafkaError._MAX_POLL_EXCEEDED), False, False, False),
        (ConfluentLibrary(), of_confluent(KafkaError.TOPIC_AUTHORIZATION_FAILED), False, True, False),
        (ConfluentLibrary(), of_confluent(KafkaError.MSG_SIZE_TOO_LARGE), False, False, True),
    ],
)
def test_each_library_tells_outages_from_mistakes(
    library: Library, error: Exception, unanswered: bool, permanent: bool, too_large: bool
) -> None:
    found = library.is_unanswered(error), library.is_permanent(error), library.is_too_large(error)
    assert found == (unanswered, permanent, too_large)
