"""The clients of aiokafka."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import aiokafka as untyped  # pyright: ignore[reportMissingTypeStubs]

from idemgate import InvalidArgument
from idemgate.core.clock import monotonic
from idemgate_kafka.clients import Listener, Records, Settings
from idemgate_kafka.message import Headers, KafkaMessage, Partition

__all__ = ["AioLibrary"]

aiokafka: Any = untyped
errors: Any = untyped.errors
REQUEST_MS = 10_000
"""The patience of requests, unless the settings have another one."""
UNANSWERED = 3
"""A poll raises once a partition was not answered for so many times the patience."""


class AioLibrary:
    servers = "bootstrap_servers"
    group = "group_id"
    auto_commit = "enable_auto_commit"

    def make_consumer(self, settings: Settings) -> AioConsumer:
        for name in ("key_deserializer", "value_deserializer"):
            if settings.get(name) is not None:
                fix = "Leave it out, and use message.json: a record that cannot be decoded is then a dead letter"
                raise InvalidArgument("settings", name, "would stop the partition at a record that it cannot read", fix)
        reset = settings.get("auto_offset_reset", "earliest")
        if str(reset).lower() not in ("earliest", "latest", "none"):
            problem = "aiokafka takes it for 'none', which ends a consumer whose group has no offset"
            raise InvalidArgument("settings['auto_offset_reset']", reset, problem, "Use 'earliest' or 'latest'")
        return AioConsumer(_select(settings, aiokafka.AIOKafkaConsumer))

    def make_producer(self, settings: Settings) -> AioProducer:
        return AioProducer(_select(settings, aiokafka.AIOKafkaProducer))

    def is_unanswered(self, error: Exception) -> bool:
        if isinstance(error, errors.UnknownTopicOrPartitionError):
            return False
        # It raises the base class, too, if no broker of those that it knows answers.
        return isinstance(error, TimeoutError) or type(error) is errors.KafkaError or getattr(error, "retriable", False)

    def is_permanent(self, error: Exception) -> bool:
        return not isinstance(error, OSError) and not getattr(error, "retriable", False)

    def is_too_large(self, error: Exception) -> bool:
        return isinstance(error, errors.MessageSizeTooLargeError | errors.RecordListTooLargeError)


def _select(settings: Settings, made: Any) -> dict[str, Any]:
    """Return the settings that a class has. Raise InvalidArgument for a name that no class has."""
    known = [inspect.signature(each).parameters for each in (aiokafka.AIOKafkaConsumer, aiokafka.AIOKafkaProducer)]
    for name, value in settings.items():
        if not any(name in each for each in known):
            fix = "Pass parameters of AIOKafkaConsumer and AIOKafkaProducer"
            raise InvalidArgument("settings", name, "not a setting of aiokafka", fix)
        if name.endswith("_ms") and not isinstance(value, int | None):
            raise InvalidArgument(f"settings[{name!r}]", value, "not a whole number of milliseconds", "Pass an int")
    selected = {name: settings[name] for name in inspect.signature(made).parameters if name in settings}
    return {"request_timeout_ms": REQUEST_MS, **selected}


class AioConsumer:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._client: Any = None
        self._fetched: int | None = None
        self._fetched_at = monotonic()

    async def open(self, topics: Sequence[str], listener: Listener) -> set[str]:
        self._client = aiokafka.AIOKafkaConsumer(
            **{"auto_offset_reset": "earliest", **self._settings, "enable_auto_commit": False}
        )
        await self._client.start()
        found: set[str] = await self._client.topics()
        self._client.subscribe([*topics], listener=_Listener(listener))
        return found

    async def poll(self, seconds: float, most: int) -> Records:
        try:
            async with asyncio.timeout(seconds + 1):  # during a rebalance it waits for the end of that
                found = await self._client.getmany(timeout_ms=int(seconds * 1000), max_records=most)
        except TimeoutError:
            return []
        if not found:
            self._check_answered()
        return [
            (Partition(*partition), [_to_message(each) for each in records]) for partition, records in found.items()
        ]

    def _check_answered(self) -> None:
        """Raise TimeoutError if the leader of a partition answers no fetch. aiokafka itself raises nothing then."""
        reading = self._client.assignment() - self._client.paused()
        fetched = min((self._client.last_poll_timestamp(each) or 0 for each in reading), default=None)
        if fetched is None or fetched != self._fetched:
            self._fetched, self._fetched_at = fetched, monotonic()
        elif monotonic() > self._fetched_at + UNANSWERED * self._settings["request_timeout_ms"] / 1000:
            raise TimeoutError("no broker answers for a partition of this consumer")

    async def pause(self, partitions: Sequence[Partition]) -> None:
        for each in partitions:
            self._set_paused(each, self._client.pause)

    async def resume(self, partition: Partition) -> None:
        self._set_paused(partition, self._client.resume)

    def _set_paused(self, partition: Partition, method: Any) -> None:
        if (raw := aiokafka.TopicPartition(*partition)) in self._client.assignment():
            method(raw)

    async def commit(self, offsets: Mapping[Partition, int]) -> None:
        async with asyncio.timeout(REQUEST_MS / 1000):  # it would try again without end
            await self._client.commit({aiokafka.TopicPartition(*each): offset for each, offset in offsets.items()})

    async def close(self) -> None:
        if self._client is not None:
            await self._client.stop()


class _Listener:
    """The `ConsumerRebalanceListener` of a consumer. Errors of its methods are those of the consumer's bookkeeping."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener

    async def on_partitions_assigned(self, assigned: set[Any]) -> None:
        await self._listener.assigned([Partition(*each) for each in assigned])

    async def on_partitions_revoked(self, revoked: set[Any]) -> None:
        await self._listener.revoked([Partition(*each) for each in revoked], False)


aiokafka.abc.ConsumerRebalanceListener.register(_Listener)


def _to_message(record: Any) -> KafkaMessage:
    headers = tuple((name, value or b"") for name, value in record.headers)
    timestamp: int = record.timestamp
    return KafkaMessage(
        record.topic, record.partition, record.offset, record.key, record.value, headers,
        timestamp if timestamp >= 0 else None,
    )  # fmt: skip


class AioProducer:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._client: Any = None

    async def open(self) -> None:
        self._client = aiokafka.AIOKafkaProducer(**{"acks": "all", **self._settings})
        await self._client.start()

    async def send(self, topic: str, key: bytes | None, value: bytes | None, headers: Headers) -> None:
        await self._client.send_and_wait(topic, value, key, headers=[*headers])

    async def close(self) -> None:
        if self._client is not None:
            await self._client.stop()
