"""Helpers that run a (guarded) callback on what others publish: Redis Pub/Sub channels, and consumer groups of streams.

Made by `Gate.on` and `Gate.stream`; run by `gate.run()`, or inside of an application by `gate.aio.subscribers()`.
"""

from __future__ import annotations

from idemgate.work.subscribers.channel import Channel, Heard
from idemgate.work.subscribers.group import Entry
from idemgate.work.subscribers.stream import Stream
from idemgate.work.subscribers.together import Subscriber, Subscribers

__all__ = ["Channel", "Entry", "Heard", "Stream", "Subscriber", "Subscribers"]
