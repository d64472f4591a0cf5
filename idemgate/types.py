"""The types that the library returns or accepts and that most programs never import."""

from __future__ import annotations

from idemgate.core.backoff import BackoffPolicy
from idemgate.core.durations import Duration, milliseconds
from idemgate.core.key_template import KeyCallable
from idemgate.core.keys import row_name
from idemgate.core.scopes import scope_of
from idemgate.core.validation import check_function
from idemgate.core.verdict import Action, Outcome, Verdict
from idemgate.dedup.dedup import DedupValue
from idemgate.gate import check_gate
from idemgate.guard.batch import AioClaimBatch, ClaimBatch
from idemgate.guard.claim_calls import Record
from idemgate.guard.current import Execution
from idemgate.guard.decorator import OnceFunction, once_function
from idemgate.guard.guard import Keep
from idemgate.guard.options import ClaimOptions, GuardOptions, NoSkipOptions
from idemgate.guard.sink.protocol import AioSink, Sink, SinkEntry, StoredResult
from idemgate.history.trace import EventTrace, EventTraces, TracedDelivery
from idemgate.membership.member import Member, Membership
from idemgate.membership.ownership import HeartbeatReply, HeartbeatRequest
from idemgate.store.context import Step, Tracer
from idemgate.subscribers import Entry, Expired, ListEntry, PubSubMessage, Subscriber
from idemgate.topics.dead_letters import DeadLetter, LoadedLetters
from idemgate.topics.decorator import MergedFunction
from idemgate.topics.merge import Merge
from idemgate.topics.messages import BlockedGroup, Message, Pause, Peek, Stats, StoredVersion
from idemgate.topics.policy import TopicOptions
from idemgate.topics.registry import StoredTopic
from idemgate.topics.reshard import DeletedTopic, ReshardProgress, ReshardResult
from idemgate.topics.topic import AioTopic

__all__ = [
    "Action",
    "AioClaimBatch",
    "AioSink",
    "AioTopic",
    "BackoffPolicy",
    "BlockedGroup",
    "ClaimBatch",
    "ClaimOptions",
    "DeadLetter",
    "DedupValue",
    "DeletedTopic",
    "Duration",
    "Entry",
    "EventTrace",
    "EventTraces",
    "Execution",
    "Expired",
    "GuardOptions",
    "HeartbeatReply",
    "HeartbeatRequest",
    "Keep",
    "KeyCallable",
    "ListEntry",
    "LoadedLetters",
    "Member",
    "Membership",
    "Merge",
    "MergedFunction",
    "Message",
    "NoSkipOptions",
    "OnceFunction",
    "Outcome",
    "Pause",
    "Peek",
    "PubSubMessage",
    "Record",
    "ReshardProgress",
    "ReshardResult",
    "Sink",
    "SinkEntry",
    "Stats",
    "Step",
    "StoredResult",
    "StoredTopic",
    "StoredVersion",
    "Subscriber",
    "TopicOptions",
    "TracedDelivery",
    "Tracer",
    "Verdict",
    "check_function",
    "check_gate",
    "milliseconds",
    "once_function",
    "row_name",
    "scope_of",
]
