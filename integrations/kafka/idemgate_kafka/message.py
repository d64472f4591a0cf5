"""A record of Kafka, as handlers get it, and the headers of the copies that the consumer produces."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from idemgate.core.text import last_line
from idemgate.core.verdict import error_of_run

__all__ = ["Headers", "KafkaMessage", "Partition", "build_headers", "due_ms", "restore_origin", "value_of"]

Headers = tuple[tuple[str, bytes], ...]
_PLACE = re.compile(r"([\w.-]+):(\d{1,9}):(\d{1,18})", re.ASCII)
_NUMBER = re.compile(r"\d{1,15}", re.ASCII)
ERROR, ORIGIN, ATTEMPT, DUE = "idemgate-error", "idemgate-origin", "idemgate-attempt", "idemgate-due"


class Partition(NamedTuple):
    """A partition of a topic."""

    topic: str
    number: int

    def __str__(self) -> str:
        return f"{self.topic}:{self.number}"


@dataclass(frozen=True, slots=True)
class KafkaMessage:
    """A record of Kafka.

    One that was read from the retry topic has the topic, partition and offset with which it came first.

    Attributes:
        topic: its topic.
        partition: the number of its partition.
        offset: its offset in the partition.
        key: the key of the record, by which its producer chose the partition, or None.
        value: its value. None: a tombstone of a compacted topic.
        raw_headers: its headers as they came. A name may occur twice. A header without a value has b"".
        timestamp_ms: when it was made, in ms since 1970, by the clock of its producer or of the broker; None: unknown.
    """

    topic: str
    partition: int
    offset: int
    key: bytes | None = None
    value: bytes | None = None
    raw_headers: Headers = ()
    timestamp_ms: int | None = None

    @property
    def id(self) -> str:
        """Return its place, such as "orders:3:17". A producer that sends again makes another one."""
        return f"{self.topic}:{self.partition}:{self.offset}"

    @property
    def headers(self) -> dict[str, str]:
        """Return its headers as text, by name. Of a name that occurs twice the last one counts.

        Bytes that are not UTF-8 are escaped, such as \\xff.
        """
        return {name: value.decode(errors="backslashreplace") for name, value in self.raw_headers}

    @property
    def json(self) -> Any:
        """Decode its value, each time. Raises ValueError."""
        return json.loads(self.value or b"")


def value_of(message: KafkaMessage) -> bytes:
    """Return the value as the fingerprint of a record."""
    return message.value or b""


def build_headers(
    message: KafkaMessage, error: BaseException | None, *, attempt: int | None = None, due: int | None = None
) -> Headers:
    """Return the headers of a copy for a dead-letter topic or a retry topic.

    Args:
        message: the record.
        error: the error of its last attempt. None: the copy has no room for it.
        attempt: the number of attempts, for a retry topic.
        due: the time of the next one, in ms since 1970, for a retry topic.
    """
    own = {ORIGIN: message.id}
    if error is not None:
        own[ERROR] = last_line(error_of_run(error))
    if attempt is not None:
        own[ATTEMPT] = str(attempt)
    if due is not None:
        own[DUE] = str(due)
    kept = [each for each in message.raw_headers if each[0] not in (ERROR, ORIGIN, ATTEMPT, DUE)]
    return (*kept, *((name, text.encode()) for name, text in own.items()))


def restore_origin(message: KafkaMessage) -> KafkaMessage:
    """Return a record of a retry topic with the place where it came first."""
    found = _PLACE.fullmatch(message.headers.get(ORIGIN, ""))
    if found is None:
        return message
    return replace(message, topic=found[1], partition=int(found[2]), offset=int(found[3]))


def due_ms(message: KafkaMessage) -> int:
    """Return when a record of a retry topic may run, in ms since 1970. 0: at once."""
    found = _NUMBER.fullmatch(message.headers.get(DUE, ""))
    return 0 if found is None else int(found[0])
