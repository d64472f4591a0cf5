"""A delivery as a message of RabbitMQ: what both publishers send, and how they say that they could not."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

import msgpack

from idemgate import Delivery, Duration, InvalidArgument, Retry
from idemgate.errors import DownstreamUnavailable
from idemgate.topics.sending import describe_delivery
from idemgate.types import milliseconds

__all__ = [
    "Address",
    "BrokerUnavailable",
    "Encoding",
    "NotPublished",
    "Outgoing",
    "RoutingKey",
    "Unroutable",
    "decoded",
]

Encoding = Literal["json", "msgpack"]
RoutingKey = str | Callable[[Delivery[Any]], str] | None
SHORT = 255
"""Bytes of a short string of AMQP: names, routing keys, message ids."""
LONG = 8192
"""Characters of a key. All headers of a message travel in one frame, which the broker bounds."""
JSON, MSGPACK, BYTES = "application/json", "application/msgpack", "application/octet-stream"


class NotPublished(Retry):
    """The broker did not say that it has the message: no connection, no confirm in time, or it refused. It may have it
    all the same. The topic's backoff says when it is tried again."""

    __module__ = "idemgate_rabbitmq"  # as it stands in a dead letter


class BrokerUnavailable(NotPublished, DownstreamUnavailable):
    """There is no connection to the broker, or no confirm in time. That is no attempt of the message: the worker defers
    it, and pauses the topic."""

    __module__ = "idemgate_rabbitmq"


class Unroutable(NotPublished):
    """The broker returned the message: no queue is bound for it. `exchange` and `routing_key` say where to,
    `reply` why."""

    __module__ = "idemgate_rabbitmq"

    def __init__(self, exchange: str, routing_key: str, reply: str) -> None:
        super().__init__()
        self.args: tuple[Any, ...] = exchange, routing_key, reply
        self.exchange = exchange
        self.routing_key = routing_key
        self.reply = reply

    def __str__(self) -> str:
        return (
            f"returned as unroutable ({self.reply}): no queue is bound to exchange {self.exchange!r} for routing key "
            f"{self.routing_key!r}"
        )


@dataclass(frozen=True, slots=True)
class Outgoing:
    """What is sent: persistent, mandatory, the same id and body at each attempt."""

    routing_key: str
    body: bytes
    content_type: str
    message_id: str
    headers: dict[str, str | int]


class Address:
    """Where to and how, checked; InvalidArgument names what is wrong."""

    def __init__(self, url: str, exchange: str, routing_key: RoutingKey, encoding: Encoding, timeout: Duration) -> None:
        self.url: str = _checked_url(url)
        self.exchange: str = _short("exchange", exchange)
        self._routing_key = routing_key if routing_key is None or callable(routing_key) else _key(routing_key)
        if encoding not in get_args(Encoding):
            raise InvalidArgument("encoding", encoding, "no such choice", "Use 'json' or 'msgpack'")
        self._encoding: Encoding = encoding
        self.seconds: float = milliseconds(timeout, "timeout") / 1000

    def outgoing(self, delivery: Delivery[Any]) -> Outgoing:
        """Build the message of a delivery.

        Raises InvalidArgument for a payload that the encoding cannot hold and for a bad routing key: the worker buries
        these at once."""
        asked = self._routing_key
        routing_key = delivery.topic if asked is None else _key(asked(delivery)) if callable(asked) else asked
        body, content_type = _encoded(delivery.payload, self._encoding)
        return Outgoing(routing_key, body, content_type, message_id(delivery), _headers(delivery))


def message_id(delivery: Delivery[Any]) -> str:
    """The id of the delivery, hashed where that is too long for AMQP."""
    found = delivery.id
    if len(found) <= SHORT:
        return found
    return f"{delivery.topic}/#{blake2b(found.encode(), digest_size=16).hexdigest()}"


def decoded(body: bytes, content_type: str | None) -> Any:
    """Decode the payload of a message that a publisher of this package sent.

    Raises InvalidArgument for another content type or another body."""
    try:
        if content_type == JSON:
            return json.loads(body)
        if content_type == MSGPACK:
            return msgpack.unpackb(body, strict_map_key=False)
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise InvalidArgument("body", body, f"not {content_type}: {error}", "Look at who published it") from None
    if content_type == BYTES:
        return body
    raise InvalidArgument("content_type", content_type, "not one of ours", f"Publish {JSON}, {MSGPACK} or {BYTES}")


def _encoded(payload: object, encoding: Encoding) -> tuple[bytes, str]:
    try:
        if isinstance(payload, bytes):
            return payload, BYTES
        if encoding == "msgpack":
            return msgpack.packb(payload), MSGPACK
        return json.dumps(payload, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode(), JSON
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        fix = "Trigger with what every consumer can read: None, bool, int, float, str, list, dict; or with bytes"
        raise InvalidArgument("payload", type(payload), f"not {encoding}: {error}", fix) from None


def _headers(delivery: Delivery[Any]) -> dict[str, str | int]:
    if len(delivery.key) > LONG:
        raise InvalidArgument(
            "key", delivery.key, f"{len(delivery.key)} characters long", f"Use at most {LONG}, or a hash"
        )
    return describe_delivery(delivery)


def _checked_url(url: str) -> str:
    fix = 'Pass one such as "amqp://user:password@host:5672/vhost"; amqps:// for TLS'
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("amqp", "amqps") and bool(parts.hostname) and (parts.port or 1) > 0
    except (TypeError, ValueError, AttributeError):
        good = False
    if not good:  # not shown: it may hold a password
        raise InvalidArgument("url", type(url), "not the URL of a broker", fix)
    return url


def _key(routing_key: object) -> str:
    return _short("routing_key", routing_key)


def _short(name: str, value: object) -> str:
    if not isinstance(value, str) or len(value.encode(errors="surrogatepass")) > SHORT or not value.isprintable():
        raise InvalidArgument(name, value, "not a name of AMQP", f"Use printable text of at most {SHORT} bytes")
    return value
