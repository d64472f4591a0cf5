"""The topics of one test: what it produces to them, and what consumers left there."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any, Self

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

PARTITIONS = 4
SESSION = 2_000
"""The session timeout of consumers in ms. A join of Tansu takes half of it."""
LIBRARIES = ("aiokafka", "confluent")


class Topics:
    """A topic, its dead letters and its retries."""

    def __init__(self, servers: str, name: str) -> None:
        self.servers = servers
        self.name, self.dead, self.retry = name, f"{name}-dead", f"{name}-retry"
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            admin = AIOKafkaAdminClient(bootstrap_servers=self.servers)
            await admin.start()
            stack.push_async_callback(admin.close)
            counts = {self.name: PARTITIONS, self.dead: 1, self.retry: 1}
            await admin.create_topics([NewTopic(name, count, 1) for name, count in counts.items()])
        self.producer = await self._open(AIOKafkaProducer(bootstrap_servers=self.servers))
        self._committed = await self._open(AIOKafkaConsumer(bootstrap_servers=self.servers, group_id=self.name))
        self._reader = await self._open(AIOKafkaConsumer(bootstrap_servers=self.servers))
        return self

    async def _open(self, client: Any) -> Any:
        self._stack.push_async_callback(client.stop)
        await client.start()
        return client

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def settings(self, library: str) -> dict[str, Any]:
        """Return the settings of a consumer of the topic, with short times."""
        if library == "aiokafka":
            return {
                "bootstrap_servers": self.servers, "group_id": self.name, "session_timeout_ms": SESSION,
                "heartbeat_interval_ms": 200, "fetch_max_wait_ms": 50,
            }  # fmt: skip
        return {
            "bootstrap.servers": self.servers, "group.id": self.name, "session.timeout.ms": SESSION,
            "heartbeat.interval.ms": 200, "fetch.wait.max.ms": 50,
        }  # fmt: skip

    async def send(
        self, value: bytes | None, *, partition: int = 0, key: bytes | None = None, **headers: str
    ) -> tuple[int, int]:
        """Produce a record and return its partition and its offset."""
        given = [(name, text.encode()) for name, text in headers.items()]
        sent = await self.producer.send_and_wait(self.name, value, key, partition=partition, headers=given)
        return sent.partition, sent.offset

    async def lag(self) -> int:
        """Return how many records of the topic the group has not committed."""
        lag = 0
        for topic, count in ((self.name, PARTITIONS), (self.retry, 1)):
            partitions = [TopicPartition(topic, number) for number in range(count)]
            ends = await self._committed.end_offsets(partitions)
            for partition in partitions:
                lag += ends[partition] - (await self._committed.committed(partition) or 0)
        return lag

    async def list_dead_letters(self) -> list[Any]:
        """Return the records of the dead-letter topic."""
        return await self._list(self.dead)

    async def list_retries(self) -> list[Any]:
        """Return the records of the retry topic."""
        return await self._list(self.retry)

    async def _list(self, topic: str) -> list[Any]:
        partition = TopicPartition(topic, 0)
        end = (await self._reader.end_offsets([partition]))[partition]
        self._reader.assign([partition])
        self._reader.seek(partition, 0)
        found = list[Any]()
        while len(found) < end:
            for records in (await self._reader.getmany(timeout_ms=200)).values():
                found += records
        return found
