"""idemgate and FastStream: a middleware that runs each message once, for NATS, Kafka, RabbitMQ and Redis."""

from __future__ import annotations

from idemgate_faststream.middleware import Once

__all__ = ["Once"]

__version__ = "0.1.0"
