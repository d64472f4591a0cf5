"""The script calls of a topic: one builder per script of `lua/topics`, and the meaning of its reply."""

from __future__ import annotations

from idemgate.topics.calls.admin import AdminCalls, DeadTaken, FlushReply
from idemgate.topics.calls.base import OpenReply, SlotsChanged, open_topic, stored_policy
from idemgate.topics.calls.oversize import defer_oversize, split_oversize
from idemgate.topics.calls.query import QueryCalls
from idemgate.topics.calls.settle import MAX_MIXED_SETTLEMENTS, SettleCalls, Settlement, nack_items
from idemgate.topics.calls.trigger import MAX_TRIGGERS, PackedTrigger, TriggerCalls

__all__ = [
    "MAX_MIXED_SETTLEMENTS",
    "MAX_TRIGGERS",
    "DeadTaken",
    "FlushReply",
    "OpenReply",
    "PackedTrigger",
    "Settlement",
    "SlotsChanged",
    "TopicCalls",
    "defer_oversize",
    "nack_items",
    "open_topic",
    "split_oversize",
    "stored_policy",
]


class TopicCalls(TriggerCalls, SettleCalls, QueryCalls, AdminCalls):
    """Builds the calls of one topic.

    A call about one key or one slot is a `Call`; a call about many slots is a `Batch` of them. If a slot has moved to
    another layout, the link sends the same request there with the same request id.
    """

    __slots__ = ()
