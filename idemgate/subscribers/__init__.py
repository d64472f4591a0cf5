"""Subscribers: callbacks for Redis Pub/Sub channels, consumer groups of streams and keys that expire.

Create them with `Gate.subscribe`, `Gate.stream` and `Gate.on_expired`. `gate.run()` runs them, or
`gate.aio.subscribers()` inside an application.
"""

from __future__ import annotations

from idemgate.subscribers.expiry.expiry import AioExpiry, Expiry
from idemgate.subscribers.expiry.rules import Expired
from idemgate.subscribers.pubsub import Channel, PubSubMessage
from idemgate.subscribers.stream import Stream
from idemgate.subscribers.stream_group import Entry
from idemgate.subscribers.subscribers import Subscriber, Subscribers

__all__ = ["AioExpiry", "Channel", "Entry", "Expired", "Expiry", "PubSubMessage", "Stream", "Subscriber", "Subscribers"]
