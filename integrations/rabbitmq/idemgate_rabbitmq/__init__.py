"""idemgate and RabbitMQ: topics that are sent on with publisher confirms, and consumers that drop what comes twice."""

from __future__ import annotations

from idemgate_rabbitmq.aio import AioPublisher
from idemgate_rabbitmq.blocking import Publisher
from idemgate_rabbitmq.guard import guarded
from idemgate_rabbitmq.outgoing import BrokerUnavailable, NotPublished, Unroutable, decoded

__all__ = [
    "AioPublisher",
    "BrokerUnavailable",
    "NotPublished",
    "Publisher",
    "Unroutable",
    "decoded",
    "guarded",
]

__version__ = "0.1.0"
