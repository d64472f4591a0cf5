"""Deliveries with a value larger than the `max_bytes` of this gate: they are left to workers with a larger limit."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from idemgate.store.context import Context
from idemgate.topics.calls.settle import Settlement
from idemgate.topics.messages import Delivery

__all__ = ["defer_oversize", "split_oversize"]

log = logging.getLogger("idemgate.topic")
_DELAY = 30_000
"""Ms until the message is due again. It limits the takes if no worker has a larger limit."""


def defer_oversize(context: Context, delivery: Delivery[Any]) -> Settlement | None:
    """Return the settlement that defers a delivery with a value that is too large for this gate, else None.

    It counts no attempt. It is counted and logged.
    """
    size = delivery.oversize
    if not size:
        return None
    context.counters.add("topic.too_large")
    facts = {"topic": delivery.topic, "key": delivery.key, "size": size, "max_bytes": context.codec.max_bytes}
    log.error("topic.too_large topic=%r key=%r size=%d max_bytes=%d", *facts.values(), extra=facts)
    return Settlement("defer", delivery, _DELAY)


def split_oversize(
    context: Context, deliveries: Sequence[Delivery[Any]]
) -> tuple[list[Delivery[Any]], list[Settlement]]:
    """Return the deliveries that this gate may decode, and the settlements of the others."""
    if max([delivery.size for delivery in deliveries], default=0) <= context.codec.max_bytes:
        return [*deliveries], []  # no value is larger than its message
    fitting: list[Delivery[Any]] = []
    deferred: list[Settlement] = []
    for delivery in deliveries:
        settlement = defer_oversize(context, delivery)
        if settlement is None:
            fitting.append(delivery)
        else:
            deferred.append(settlement)
    return fitting, deferred
