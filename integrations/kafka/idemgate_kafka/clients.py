"""The clients of both libraries behind one face, so that the consumer and the sender have one story.

The names of the settings tell the library: those of confluent-kafka have dots, those of aiokafka underscores.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast

from idemgate import InvalidArgument
from idemgate_kafka.message import Headers, KafkaMessage, Partition

__all__ = ["ConsumerClient", "Library", "Listener", "ProducerClient", "Settings", "choose_library"]

Settings = Mapping[str, Any]
Records = list[tuple[Partition, list[KafkaMessage]]]
_FIX = (
    'Pass those of aiokafka, {"bootstrap_servers": ...}, or those of confluent-kafka, {"bootstrap.servers": ...}, '
    "with names of one kind"
)


class Listener(NamedTuple):
    """What a client calls during a rebalance.

    `revoked` gets the partitions that the consumer loses, and whether another one may have them already.
    """

    assigned: Callable[[Sequence[Partition]], Awaitable[None]]
    revoked: Callable[[Sequence[Partition], bool], Awaitable[None]]


class ConsumerClient(Protocol):
    """A member of a consumer group."""

    async def open(self, topics: Sequence[str], listener: Listener) -> set[str]:
        """Connect and join the group. Return the topics of the cluster."""
        ...

    async def poll(self, seconds: float, most: int) -> Records:
        """Wait some seconds for records, and return at most so many. This also keeps the membership."""
        ...

    async def pause(self, partitions: Sequence[Partition]) -> None:
        """Get no more records of these partitions. One that was lost meanwhile is ignored."""
        ...

    async def resume(self, partition: Partition) -> None:
        """Undo `pause`."""
        ...

    async def commit(self, offsets: Mapping[Partition, int]) -> None:
        """Store the offset of the next record of each partition. Return when the broker has it."""
        ...

    async def close(self) -> None:
        """Leave the group, without a commit."""
        ...


class ProducerClient(Protocol):
    """A producer."""

    async def open(self) -> None:
        """Connect."""
        ...

    async def send(self, topic: str, key: bytes | None, value: bytes | None, headers: Headers) -> None:
        """Produce a record. Return when the in-sync replicas have it."""
        ...

    async def close(self) -> None:
        """Disconnect."""
        ...


class Library(Protocol):
    """One of the two libraries."""

    servers: str
    """The names of some settings."""
    group: str
    auto_commit: str

    def make_consumer(self, settings: Settings) -> ConsumerClient:
        """Return a consumer that is not open. Raise InvalidArgument."""
        ...

    def make_producer(self, settings: Settings) -> ProducerClient:
        """Return a producer that is not open, without the settings of consumers. Raise InvalidArgument."""
        ...

    def is_unanswered(self, error: Exception) -> bool:
        """Return True if the broker did not answer, or could not work: another record would fail, too."""
        ...

    def is_permanent(self, error: Exception) -> bool:
        """Return True if each further poll would fail, too."""
        ...

    def is_too_large(self, error: Exception) -> bool:
        """Return True if the record is larger than its topic allows."""
        ...


def choose_library(settings: object) -> Library:
    """Return the library that the settings belong to. Raise InvalidArgument, without a value: it may be a password."""
    if not isinstance(settings, Mapping):
        raise InvalidArgument("settings", type(settings), "not a mapping", _FIX)
    names: list[Any] = sorted(cast("Settings", settings), key=str)
    is_confluent, is_aio = "bootstrap.servers" in names, "bootstrap_servers" in names
    if is_confluent == is_aio:
        raise InvalidArgument("settings", names, "names no broker, or two", _FIX)
    if wrong := [name for name in names if ("_" in str(name) if is_confluent else "." in str(name))]:
        raise InvalidArgument("settings", wrong[0], "is a setting of the other library", _FIX)
    name = "bootstrap.servers" if is_confluent else "bootstrap_servers"
    given: Any = cast("Settings", settings)[name]
    servers: list[Any] = [*given] if isinstance(given, list | tuple) and is_aio else [given]
    if not servers or not all(isinstance(each, str) for each in servers):
        raise InvalidArgument(f"settings[{name!r}]", given, "no address of a broker", 'Pass text such as "kafka:9092"')
    if is_confluent:
        from idemgate_kafka.confluent_client import ConfluentLibrary

        return ConfluentLibrary()
    from idemgate_kafka.aio_client import AioLibrary

    return AioLibrary()
