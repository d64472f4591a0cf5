"""Helpers that run a (guarded) callback on what others publish: Redis Pub/Sub channels, and consumer groups of streams,
keys that expire.

Made by `Gate.on`, `Gate.stream` and `Gate.expiry`; run by `gate.run()`, or inside of an application by
`gate.aio.subscribers()`.
"""

from __future__ import annotations

from idemgate.subscribers.expiry.expiry import AioExpiry, Expiry
from idemgate.subscribers.expiry.rules import Expired
from idemgate.subscribers.pubsub import Channel, Heard
from idemgate.subscribers.stream import Stream
from idemgate.subscribers.stream_group import Entry
from idemgate.subscribers.subscribers import Subscriber, Subscribers

__all__ = ["AioExpiry", "Channel", "Entry", "Expired", "Expiry", "Heard", "Stream", "Subscriber", "Subscribers"]
