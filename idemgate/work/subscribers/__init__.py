"""Helpers that run a (guarded) callback on what others publish: Redis Pub/Sub channels, and consumer groups of streams,
keys that expire.

Made by `Gate.on`, `Gate.stream` and `Gate.expiry`; run by `gate.run()`, or inside of an application by
`gate.aio.subscribers()`.
"""

from __future__ import annotations

from idemgate.core.expiry import Expired
from idemgate.work.subscribers.channel import Channel, Heard
from idemgate.work.subscribers.expiry import AioExpiry, Expiry
from idemgate.work.subscribers.group import Entry
from idemgate.work.subscribers.stream import Stream
from idemgate.work.subscribers.together import Subscriber, Subscribers

__all__ = ["AioExpiry", "Channel", "Entry", "Expired", "Expiry", "Heard", "Stream", "Subscriber", "Subscribers"]
