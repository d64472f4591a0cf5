"""A delivery that an integration sends on to a broker: what the copy says of it, and its payload as JSON."""

from __future__ import annotations

import json
from typing import Any

from idemgate.errors import InvalidArgument

__all__ = ["describe_delivery", "dump_payload"]


def describe_delivery(delivery: Any) -> dict[str, str | int]:
    """Return the facts of a `Delivery` by the names of the headers or attributes of its copy."""
    return {
        "idemgate-topic": delivery.topic, "idemgate-key": delivery.key, "idemgate-count": delivery.count,
        "idemgate-first-at": delivery.first_at.isoformat(timespec="milliseconds"),
        "idemgate-last-at": delivery.last_at.isoformat(timespec="milliseconds"),
        "idemgate-reason": delivery.reason, "idemgate-attempt": delivery.attempt,
    }  # fmt: skip


def dump_payload(payload: object) -> str:
    """Return a payload as JSON in ASCII. Raises InvalidArgument, which makes the delivery a dead letter."""
    try:
        return json.dumps(payload, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        fix = "Trigger with None, bool, int, float, str, list or dict"
        raise InvalidArgument("payload", type(payload), f"not JSON: {error}", fix) from None
