"""Subscribers: callbacks for Redis Pub/Sub channels, consumer groups of streams, lists and keys that expire.

Create them with `Gate.subscribe`, `Gate.stream`, `Gate.consume_list` and `Gate.on_expired`. `gate.run()` runs them, or
`gate.aio.subscribers()` inside an application.
"""

from __future__ import annotations

from idemgate.subscribers.expiry.expiry import AioExpiry, Expiry
from idemgate.subscribers.expiry.rules import Expired
from idemgate.subscribers.list_entries import ListEntry
from idemgate.subscribers.list_queue import ListQueue
from idemgate.subscribers.pubsub import Channel, PubSubMessage
from idemgate.subscribers.stream import Stream
from idemgate.subscribers.stream_group import Entry
from idemgate.subscribers.subscribers import Subscriber, Subscribers

__all__ = [
    "AioExpiry", "Channel", "Entry", "Expired", "Expiry", "ListEntry", "ListQueue", "PubSubMessage", "Stream",
    "Subscriber", "Subscribers",
]  # fmt: skip
