"""Between triggers and work: of all duplicates run the first (`once`), of all triggers of a window run one delivery
(`merge`)."""

from __future__ import annotations

from idemgate.core.backoff import BackoffPolicy
from idemgate.core.durations import Duration, milliseconds
from idemgate.dedup.calls import DedupValue
from idemgate.errors import (
    AlreadyDone,
    AlreadyInProgress,
    AttemptsExhausted,
    Bury,
    ClaimRejected,
    DecodeError,
    IdemgateError,
    InvalidArgument,
    KeyReused,
    LeaseLost,
    NoCurrentExecution,
    NotConfigured,
    NotDurable,
    OutcomeUnknown,
    Overloaded,
    PartialFailure,
    PolicyChanged,
    ReplayedFailure,
    ResultUnavailable,
    Retry,
    ServerRejected,
    StoreError,
    StoreUnavailable,
    TopicInUse,
    UnexpectedData,
)
from idemgate.gate import Gate, default_gate
from idemgate.gate_aio import AioGate
from idemgate.guard.batch import AioClaimBatch, ClaimBatch
from idemgate.guard.calls import Record
from idemgate.guard.claim import AioClaim, Claim
from idemgate.guard.current import Execution, current
from idemgate.membership.member import Member, Membership, RedisMembership
from idemgate.membership.ownership import Announcement, Roll
from idemgate.topics.adaptive import Adaptive
from idemgate.topics.decorator import Merged
from idemgate.topics.merge import Merge, append, union
from idemgate.topics.messages import DeadLetter, Delivery, Message, Peek, Receipt, Stats, Trigger
from idemgate.topics.registry import StoredTopic
from idemgate.topics.reshard import DeletedTopic, ReshardProgress, ReshardResult
from idemgate.topics.topic import AioTopic, Topic

__version__ = "0.1.0"

__all__ = [
    "Adaptive",
    "AioClaim",
    "AioClaimBatch",
    "AioGate",
    "AioTopic",
    "AlreadyDone",
    "AlreadyInProgress",
    "Announcement",
    "AttemptsExhausted",
    "BackoffPolicy",
    "Bury",
    "Claim",
    "ClaimBatch",
    "ClaimRejected",
    "DeadLetter",
    "DecodeError",
    "DedupValue",
    "DeletedTopic",
    "Delivery",
    "Duration",
    "Execution",
    "Gate",
    "IdemgateError",
    "InvalidArgument",
    "KeyReused",
    "LeaseLost",
    "Member",
    "Membership",
    "Merge",
    "Merged",
    "Message",
    "NoCurrentExecution",
    "NotConfigured",
    "NotDurable",
    "OutcomeUnknown",
    "Overloaded",
    "PartialFailure",
    "Peek",
    "PolicyChanged",
    "Receipt",
    "Record",
    "RedisMembership",
    "ReplayedFailure",
    "ReshardProgress",
    "ReshardResult",
    "ResultUnavailable",
    "Retry",
    "Roll",
    "ServerRejected",
    "Stats",
    "StoreError",
    "StoreUnavailable",
    "StoredTopic",
    "Topic",
    "TopicInUse",
    "Trigger",
    "UnexpectedData",
    "append",
    "current",
    "default_gate",
    "merge",
    "milliseconds",
    "once",
    "union",
]

once = default_gate.once
"""`Gate.once` of the default gate, whose store is named by IDEMGATE_URL."""
merge = default_gate.merge
"""`Gate.merge` of the default gate, whose store is named by IDEMGATE_URL."""
