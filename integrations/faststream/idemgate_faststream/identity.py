"""The facts about a message: who made its ids, and whether and how its broker delivers it again."""

from __future__ import annotations

import copy
import functools
from typing import Any, Literal, TypeVar

from faststream import AckPolicy, StreamMessage

from idemgate import InvalidArgument

__all__ = ["Redelivery", "check_redelivery", "expose_given_ids", "redelivery_of"]

Message = StreamMessage[Any]
M = TypeVar("M", bound=Message)
Redelivery = Literal["delayed", "idle", "at once"]
"""How a broker redelivers what is given back: after a delay, after the idle time of its consumer group, or at once."""

_NO_NACK: object = StreamMessage[Any].nack
"""The method of a message that its broker does not redeliver."""
_IDS = ("message_id", "correlation_id")
_POLICY_FIX = (
    "Pass ack_policy=AckPolicy.NACK_ON_ERROR to the subscriber; a stream of Redis needs a group without no_ack"
)
_ONCE_FIX = (
    "Use JetStream, or a stream with a consumer group. Or guard the function itself with gate.once, and put Once on a "
    "router without this subscriber"
)


def redelivery_of(message: Message) -> Redelivery:
    """Return how the broker redelivers the message after a nack."""
    if hasattr(message, "in_progress"):  # NATS
        return "delayed"
    return "idle" if hasattr(message, "get_delivery_count") else "at once"  # Redis; Kafka and RabbitMQ


def check_redelivery(subscriber: Any, message: Message) -> None:
    """Raise InvalidArgument for a message whose settlement FastStream does not leave to the guard.

    Its broker keeps it, if it has not been acknowledged before.
    """
    policy: object = subscriber.ack_policy
    if message.batch_headers:
        problem = "one verdict cannot settle many messages"
        refused = InvalidArgument("batch", True, problem, "Leave batch out, or call guard.aio.run_many in the handler")
    elif policy is AckPolicy.ACK_FIRST:
        problem = "the message is acknowledged before the handler has run, so a crash loses it"
        refused = InvalidArgument("ack_policy", policy, problem, _POLICY_FIX)
    elif getattr(message.raw_message, "_ackd", False) or type(message).nack is _NO_NACK:
        problem = "this source delivers a message once at most, so a failed one is lost"
        refused = InvalidArgument("subscriber", type(message).__name__, problem, _ONCE_FIX)
    elif policy is AckPolicy.MANUAL:
        problem = "FastStream would not acknowledge a duplicate, for which the handler does not run"
        refused = InvalidArgument("ack_policy", policy, problem, _POLICY_FIX)
    else:
        return
    for name in ("ack", "nack", "reject"):  # otherwise the policy might reject the message, which loses it
        setattr(message, name, _leave_unsettled)
    raise refused


async def _leave_unsettled(**_: object) -> None:
    """Settle nothing, so that the broker keeps the message."""


# -- ids --------------------------------------------------------------------------------------------------------------


def expose_given_ids(message: M) -> M:
    """Return the message, or a copy whose ids raise InvalidArgument where FastStream made them up.

    FastStream fills in an id that the publisher did not set, another one for each delivery. Its `message_id` of Kafka
    is the offset and the time, which two partitions share. A key of such an id would guard nothing, or drop messages.
    """
    raw, headers = message.raw_message, message.headers
    made_up = frozenset(
        name for name in _IDS if getattr(message, name) not in (headers.get(name), getattr(raw, name, None))
    )
    if not made_up:
        return message
    view = copy.copy(message)
    kind: Any = type(message)
    view.__class__ = _class_without(kind, made_up)
    return view


@functools.cache
def _class_without(kind: Any, made_up: frozenset[str]) -> Any:
    return type(kind.__name__, (kind,), {name: property(functools.partial(_refuse_id, name=name)) for name in made_up})


def _refuse_id(message: Message, *, name: str) -> str:
    problem = "FastStream made it up, because the publisher set none; it differs for each delivery or copy"
    fix = 'Publish an id of the operation in a header, and pass key="{message.headers[event-id]}"'
    raise InvalidArgument(f"message.{name}", message.__dict__[name], problem, fix)
