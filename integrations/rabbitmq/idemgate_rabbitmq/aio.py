"""The awaiting publisher, on aio-pika."""

from __future__ import annotations

import asyncio
from typing import Any, Self

import aio_pika
from aio_pika.abc import AbstractChannel, AbstractConnection, AbstractExchange
from aio_pika.exceptions import CONNECTION_EXCEPTIONS, AMQPChannelError, DeliveryError, PublishError

from idemgate import Delivery, Duration
from idemgate.core.waits import is_cancelled
from idemgate_rabbitmq.outgoing import (
    Address,
    BrokerUnavailable,
    Encoding,
    NotPublished,
    Outgoing,
    RoutingKey,
    Unroutable,
)

__all__ = ["AioPublisher"]

_LOST = (*CONNECTION_EXCEPTIONS, TimeoutError)


class AioPublisher:
    """The handler of a topic that is sent on to RabbitMQ: `topic.handler(AioPublisher("amqp://..."))`.

    A delivery is published persistent and mandatory, and acknowledged to the topic when the broker has confirmed it.
    Returned, refused, not confirmed within `timeout`, or the connection lost: NotPublished, and the topic's backoff
    says when it is tried again, under the same message id. Deliveries that run at once share one connection and wait
    for their confirms together, so the worker's `concurrency` is how many may be under way.

    - `url`: amqp://user:password@host:port/vhost, amqps:// for TLS; queries are aio-pika's, such as ?heartbeat=10.
    - `exchange`: has to exist; "": the default one, whose routing keys are names of queues.
    - `routing_key`: text, or a callable from the delivery; None: the topic's name.
    - `encoding`: of payloads, "json" or "msgpack" (plain); bytes are sent as they are.
    - `timeout`: of one attempt, connecting included. Keep it below the topic's `lease`, or renewals do the work.
    - `options`: for `aio_pika.connect`, such as `ssl_context`.

    Connects with the first delivery of an event loop, and again when the connection was lost. Several topics may share
    one. Raises InvalidArgument. `await publisher.close()` in the end.
    """

    def __init__(
        self,
        url: str,
        exchange: str = "",
        *,
        routing_key: RoutingKey = None,
        encoding: Encoding = "json",
        timeout: Duration = "10s",
        **options: Any,
    ) -> None:
        self._address = Address(url, exchange, routing_key, encoding, timeout)
        self._options = options
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wire: asyncio.Task[_Wire] | None = None
        self._closing: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<AioPublisher to exchange {self._address.exchange!r}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def __call__(self, delivery: Delivery[Any]) -> None:
        """Publishes a delivery and returns when the broker has it. Raises InvalidArgument, NotPublished, Unroutable."""
        message, wire = self._address.outgoing(delivery), self._current()
        try:
            async with asyncio.timeout(self._address.seconds):
                await (await asyncio.shield(wire)).publish(message)
        except PublishError as error:
            raise Unroutable(self._address.exchange, message.routing_key, _reply(error)) from None
        except DeliveryError:
            raise NotPublished("the broker refused it (nack): its queue is full, or failed") from None
        except TimeoutError:
            self._drop(wire)
            raise BrokerUnavailable(f"not confirmed within {self._address.seconds:g} s") from None
        except _LOST as error:
            self._drop(wire)
            # The broker closes a channel because of a message, or because the exchange is missing.
            kind = NotPublished if isinstance(error, AMQPChannelError) else BrokerUnavailable
            raise kind(f"{type(error).__name__}: {error}"[:300]) from None
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            raise BrokerUnavailable("the connection was closed") from None  # aio-pika's word for that, not ours

    async def close(self) -> None:
        """Ends the connection; what waits for a confirm fails, and is tried again. The next delivery would connect
        anew."""
        if self._wire is not None and self._loop is asyncio.get_running_loop():
            self._drop(self._wire)
        await asyncio.gather(*self._closing)

    def _current(self) -> asyncio.Task[_Wire]:
        """The wire of this event loop, made if there is none. Those that come meanwhile wait for the same one."""
        loop = asyncio.get_running_loop()
        if self._wire is not None and self._loop is loop:
            if not self._wire.done() or _usable(self._wire):
                return self._wire
            self._drop(self._wire)
        self._loop = loop
        self._wire = loop.create_task(_Wire.made(self._address, self._options))
        return self._wire

    def _drop(self, wire: asyncio.Task[_Wire]) -> None:
        """Nobody begins to use this one any more."""
        if wire is self._wire:
            self._wire = None
            ending = asyncio.create_task(_ended(wire))
            self._closing.add(ending)
            ending.add_done_callback(self._closing.discard)


GOODBYE = 2.0
"""Seconds that a broker has to answer it."""


class _Wire:
    """One connection and one channel with confirms."""

    def __init__(self, connection: AbstractConnection, channel: AbstractChannel, exchange: AbstractExchange) -> None:
        self.connection = connection
        self._channel = channel
        self._exchange = exchange

    @classmethod
    async def made(cls, address: Address, options: dict[str, Any]) -> _Wire:
        connection = await aio_pika.connect(address.url, timeout=address.seconds, **options)
        try:
            channel = await connection.channel(publisher_confirms=True, on_return_raises=True)
            exchange = await channel.get_exchange(address.exchange) if address.exchange else channel.default_exchange
        except BaseException:
            await _hung_up(connection)
            raise
        return cls(connection, channel, exchange)

    @property
    def usable(self) -> bool:
        return not self.connection.is_closed and not self._channel.is_closed

    async def publish(self, message: Outgoing) -> None:
        outgoing = aio_pika.Message(
            message.body,
            content_type=message.content_type,
            delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
            message_id=message.message_id,
            headers={**message.headers},
        )
        await self._exchange.publish(outgoing, message.routing_key, mandatory=True)


def _usable(task: asyncio.Task[_Wire]) -> bool:
    return not task.cancelled() and task.exception() is None and task.result().usable


async def _ended(task: asyncio.Task[_Wire]) -> None:
    task.cancel()
    (wire,) = await asyncio.gather(task, return_exceptions=True)
    if isinstance(wire, _Wire):
        await _hung_up(wire.connection)


async def _hung_up(connection: AbstractConnection) -> None:
    """Says goodbye, but does not wait for a broker that is silent."""
    await asyncio.wait({asyncio.create_task(connection.close())}, timeout=GOODBYE)


def _reply(error: PublishError) -> str:
    frame = error.frame
    return f"{getattr(frame, 'reply_code', '')} {getattr(frame, 'reply_text', '')}".strip()
