"""Triggers as bytes, for programs that store them before they send them."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

from idemgate.core.codec import Codec
from idemgate.core.codec.decoding import wrap_decode_errors
from idemgate.core.durations import milliseconds
from idemgate.store.context import Context
from idemgate.topics.messages import Trigger

__all__ = ["decode_trigger", "encode_trigger"]

_FIELDS = ("key", "payload", "priority", "group", "at", "version", "event_id")


def encode_trigger(trigger: Trigger, context: Context) -> bytes:
    """Encode a trigger. A delay becomes a time, by the test clock of the context or by that of the machine."""
    at = trigger.at
    if trigger.delay is not None:
        now = time.time() if context.clock is None else context.clock.microseconds() / 1_000_000
        delay = timedelta(milliseconds=milliseconds(trigger.delay, "delay", zero=True))
        at = datetime.fromtimestamp(now, UTC) + delay
    fields = (trigger.key, trigger.payload, trigger.priority, trigger.group, at, trigger.version, trigger.event_id)
    return context.codec.encode(dict(zip(_FIELDS, fields, strict=True)), "trigger")


def decode_trigger(packed: bytes, codec: Codec) -> Trigger:
    """Decode a trigger. Raises DecodeError."""
    fields = codec.decode(packed)
    with wrap_decode_errors("a packed trigger"):
        return Trigger(**{name: fields[name] for name in _FIELDS})
