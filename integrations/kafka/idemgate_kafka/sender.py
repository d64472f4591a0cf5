"""Topics that are sent on to Kafka."""

from __future__ import annotations

import asyncio
from typing import Any, Self

from idemgate import Delivery, InvalidArgument
from idemgate.core.text import message_of, one_line
from idemgate.errors import DownstreamUnavailable
from idemgate.topics.sending import describe_delivery, dump_payload
from idemgate_kafka.clients import ProducerClient, Settings, choose_library

__all__ = ["KafkaSender"]


class KafkaSender:
    """A handler of a topic of idemgate that produces each delivery: `topic.handler(KafkaSender(settings, "images"))`.

    With `@gate.merge(..., deliver=KafkaSender(settings, "images"))` Kafka gets the merged arguments.

    The value is the payload as JSON. The record key is the key of the delivery, so that its records stay in order. The
    header `idemgate-id` is `delivery.id`, which stays the same at each attempt: a consumer with
    `key="{message.headers[idemgate-id]}"` drops the copy of a send whose answer was lost. Other headers are
    `idemgate-topic`, `-key`, `-count`, `-first-at`, `-last-at`, `-reason` and `-attempt`.

    If no broker answers, `DownstreamUnavailable` pauses the topic and counts no attempt. An error that the broker
    answers is a failed attempt. A payload that is not JSON is a dead letter of the topic at once (InvalidArgument).

    It connects with the first delivery of an event loop. `await sender.close()` in the end, or use it as
    `async with KafkaSender(...) as sender`.

    Args:
        settings: those of `AIOKafkaProducer` or of confluent-kafka; see `KafkaConsumer`. Those of consumers are left
            out. Unless they say otherwise, all in-sync replicas must have the record (`acks`).
        topic: the topic of Kafka.

    Raises:
        InvalidArgument: an argument is invalid.
        ImportError: the library of the settings is not installed.
    """

    def __init__(self, settings: Settings, topic: str) -> None:
        if not isinstance(topic, str) or not topic:
            raise InvalidArgument("topic", topic, "not the name of a topic", "Pass text")
        self._library = choose_library(settings)
        self._library.make_producer(settings)  # checks them
        self._settings, self._topic = settings, topic
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opening: asyncio.Task[ProducerClient] | None = None

    def __repr__(self) -> str:
        return f"KafkaSender({self._topic!r})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def __call__(self, delivery: Delivery[Any]) -> None:
        """Produce a delivery."""
        value = dump_payload(delivery.payload).encode()
        facts = {"idemgate-id": delivery.id, **describe_delivery(delivery)}
        headers = tuple((name, str(fact).encode(errors="surrogatepass")) for name, fact in facts.items())
        try:
            producer = await asyncio.shield(self._open())
            await producer.send(self._topic, delivery.key.encode(errors="surrogatepass"), value, headers)
        except Exception as error:
            if self._library.is_unanswered(error):
                raise DownstreamUnavailable(f"{type(error).__name__}: {one_line(message_of(error))}"[:300]) from error
            raise

    async def close(self) -> None:
        """Disconnect. A later delivery would connect again."""
        opening, self._opening = self._opening, None
        if opening is not None and self._loop is asyncio.get_running_loop():
            await asyncio.wait({opening})
            if not opening.cancelled() and opening.exception() is None:
                await opening.result().close()

    def _open(self) -> asyncio.Task[ProducerClient]:
        """Return the producer of this event loop, which those who come meanwhile share."""
        loop = asyncio.get_running_loop()
        opening = self._opening
        if opening is None or self._loop is not loop or _has_failed(opening):
            self._loop = loop
            opening = self._opening = loop.create_task(self._connect())
        return opening

    async def _connect(self) -> ProducerClient:
        producer = self._library.make_producer(self._settings)
        try:
            await producer.open()
        except BaseException:
            await producer.close()
            raise
        return producer


def _has_failed(opening: asyncio.Task[ProducerClient]) -> bool:
    return opening.done() and (opening.cancelled() or opening.exception() is not None)
