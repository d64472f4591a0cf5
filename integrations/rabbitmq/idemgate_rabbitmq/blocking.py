"""The blocking publisher, on pika."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from threading import Lock, Thread
from typing import Any, Self

import pika
from pika.adapters.select_connection import SelectConnection
from pika.channel import Channel
from pika.exceptions import AMQPChannelError
from pika.spec import Basic, BasicProperties

from idemgate import Delivery, Duration, InvalidArgument
from idemgate.core.text import event_log
from idemgate_rabbitmq.outgoing import (
    Address,
    BrokerUnavailable,
    Encoding,
    NotPublished,
    Outgoing,
    RoutingKey,
    Unroutable,
)

__all__ = ["Publisher"]

log: logging.Logger = event_log("idemgate.rabbitmq")
Sent = Future[None]


class Publisher:
    """As `AioPublisher`, blocking, on pika: `topic.handler(Publisher("amqp://..."))`.

    May be called from any number of threads: pika's connection has a thread of its own, which serves its heartbeats,
    and callers wait for their confirms together. `options` are attributes of `pika.URLParameters`, such as
    `ssl_options`. `publisher.close()` in the end.
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
        self._parameters = _parameters(url, self._address.seconds, options)
        self._lock = Lock()
        self._wire: _Wire | None = None

    def __repr__(self) -> str:
        return f"<Publisher to exchange {self._address.exchange!r}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __call__(self, delivery: Delivery[Any]) -> None:
        """Publishes a delivery and returns when the broker has it. Raises InvalidArgument, NotPublished, Unroutable."""
        message, wire = self._address.outgoing(delivery), self._current()
        try:
            wire.publish(message).result(self._address.seconds)
        except TimeoutError:
            self._drop(wire)
            raise BrokerUnavailable(f"not confirmed within {self._address.seconds:g} s") from None

    def close(self) -> None:
        """Ends the connection; what waits for a confirm fails, and is tried again. The next delivery would connect
        anew."""
        wire = self._wire
        if wire is not None:
            self._drop(wire)
            wire.join(self._address.seconds)

    def _current(self) -> _Wire:
        with self._lock:
            if self._wire is None or self._wire.ended:
                self._wire = _Wire(self._parameters, self._address.exchange)
            return self._wire

    def _drop(self, wire: _Wire) -> None:
        with self._lock:
            if self._wire is wire:
                self._wire = None
        wire.close()


class _Wire:
    """One connection and one channel with confirms, in a thread of their own. Everything but `publish`, `close` and
    `join` runs there; the lock holds what both sides touch."""

    def __init__(self, parameters: pika.URLParameters, exchange: str) -> None:
        self._exchange = exchange
        self._lock = Lock()
        self.ended = False
        self._early: list[tuple[Outgoing, Sent]] | None = []  # until the channel is open
        self._unconfirmed: dict[int, tuple[Outgoing, Sent]] = {}
        self._returned: dict[str, str] = {}
        self._tag = 0
        self._why: BaseException | None = None
        self._channel: Channel | None = None
        self._doomed = False
        self._connection = SelectConnection(
            parameters,
            on_open_callback=self._opened,
            on_open_error_callback=self._closed,
            on_close_callback=self._closed,
        )
        self._thread = Thread(target=self._run, name="idemgate-rabbitmq", daemon=True)
        self._thread.start()

    # -- from any thread ----------------------------------------------------------------------------------------------

    def publish(self, message: Outgoing) -> Sent:
        """Done when the broker has it; NotPublished when it is known that it does not, or that nobody will say."""
        sent: Sent = Future()
        with self._lock:
            if self.ended:
                sent.set_exception(self._failure())
            else:
                self._connection.ioloop.add_callback_threadsafe(lambda: self._publish(message, sent))
        return sent

    def close(self) -> None:
        with self._lock:
            if not self.ended:
                self._connection.ioloop.add_callback_threadsafe(self._close)

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)

    # -- in its own thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        loop = self._connection.ioloop
        try:
            loop.start()
        except Exception as error:  # a fault of pika's or ours must not leave anybody waiting
            log.exception("rabbitmq.connection_failed")
            self._why = self._why or error
        finally:
            with self._lock:
                self.ended = True
            loop.process_timeouts()  # what was handed over in the last moment
            for _, sent in (*(self._early or ()), *self._unconfirmed.values()):
                _fail(sent, self._failure())
            loop.close()

    def _opened(self, _: Any) -> None:
        if self._doomed:
            self._connection.close()
        else:
            self._connection.channel(on_open_callback=self._ready)

    def _ready(self, channel: Channel) -> None:
        channel.add_on_close_callback(self._channel_closed)
        channel.add_on_return_callback(self._came_back)
        channel.confirm_delivery(self._confirmed)
        if self._exchange:  # if there is none, the broker closes the channel and says so
            channel.exchange_declare(self._exchange, passive=True, callback=lambda _: self._begin(channel))
        else:
            self._begin(channel)

    def _begin(self, channel: Channel) -> None:
        self._channel = channel
        early, self._early = self._early or [], None
        for message, sent in early:
            self._publish(message, sent)

    def _publish(self, message: Outgoing, sent: Sent) -> None:
        if self.ended:
            _fail(sent, self._failure())
        elif self._early is not None:
            self._early.append((message, sent))
        elif self._channel is None or not self._channel.is_open:
            _fail(sent, self._failure())
        else:
            self._send(self._channel, message, sent)

    def _send(self, channel: Channel, message: Outgoing, sent: Sent) -> None:
        properties = BasicProperties(
            content_type=message.content_type,
            delivery_mode=2,
            message_id=message.message_id,
            headers=message.headers,
        )
        self._tag += 1
        self._unconfirmed[self._tag] = message, sent
        channel.basic_publish(self._exchange, message.routing_key, message.body, properties, mandatory=True)

    def _came_back(self, _: Channel, method: Basic.Return, properties: BasicProperties, __: bytes) -> None:
        """Comes before its confirm."""
        self._returned[properties.message_id or ""] = f"{method.reply_code} {method.reply_text}"

    def _confirmed(self, frame: Any) -> None:
        tag, many = frame.method.delivery_tag, frame.method.multiple
        # Tags rise, and a dict keeps their order.
        for one in [known for known in self._unconfirmed if known <= tag] if many else [tag]:
            message, sent = self._unconfirmed.pop(one)
            if isinstance(frame.method, Basic.Nack):
                _fail(sent, NotPublished("the broker refused it (nack): its queue is full, or failed"))
            elif (reply := self._returned.pop(message.message_id, None)) is not None:
                _fail(sent, Unroutable(self._exchange, message.routing_key, reply))
            elif sent.set_running_or_notify_cancel():
                sent.set_result(None)

    def _channel_closed(self, _: Channel, reason: BaseException) -> None:
        self._why = self._why or reason
        self._close()

    def _closed(self, _: Any, reason: BaseException) -> None:
        self._why = self._why or reason
        self._connection.ioloop.stop()

    def _failure(self) -> NotPublished:
        why = self._why
        # The broker closes a channel because of a message, or because the exchange is missing.
        kind = NotPublished if isinstance(why, AMQPChannelError) else BrokerUnavailable
        return kind(f"{type(why).__name__}: {why}"[:300] if why else "the connection is closed")

    def _close(self) -> None:
        """Close the connection. One that still opens is closed later: pika supports nothing else."""
        self._doomed = True
        if self._connection.is_open:
            self._connection.close()


def _fail(sent: Sent, error: NotPublished) -> None:
    if sent.set_running_or_notify_cancel():
        sent.set_exception(error)


def _parameters(url: str, seconds: float, options: dict[str, Any]) -> pika.URLParameters:
    made = pika.URLParameters(url)
    made.socket_timeout = made.stack_timeout = seconds
    for name, value in options.items():
        if not hasattr(made, name):
            raise InvalidArgument("options", name, "not an attribute of pika.URLParameters", "Leave it out")
        setattr(made, name, value)
    return made
