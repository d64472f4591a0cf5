"""Between triggers and work: of all duplicates run the first (`once`), of all triggers of a window run one delivery
(`merge`)."""

from __future__ import annotations

from idemgate.core.backoff import BackoffPolicy
from idemgate.core.durations import Duration, milliseconds
from idemgate.dedup.calls import Kept
from idemgate.errors import (
    AlreadyDone,
    AlreadyInProgress,
    AttemptsExhausted,
    BadInput,
    Bury,
    Failed,
    ForeignData,
    IdemgateError,
    KeyReused,
    LeaseLost,
    NotConfigured,
    NotDecodable,
    NotDurable,
    NotInside,
    OutcomeUnknown,
    Overloaded,
    PolicyChanged,
    Refused,
    ReplayedFailure,
    ResultUnavailable,
    Retry,
    StoreError,
    StoreRefused,
    StoreUnavailable,
    TopicInUse,
)
from idemgate.gate import AioGate, Gate, default_gate
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
from idemgate.topics.reshard import Forgotten, Progress, Resized
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
    "BadInput",
    "Bury",
    "Claim",
    "ClaimBatch",
    "DeadLetter",
    "Delivery",
    "Duration",
    "Execution",
    "Failed",
    "ForeignData",
    "Forgotten",
    "Gate",
    "IdemgateError",
    "Kept",
    "KeyReused",
    "LeaseLost",
    "Member",
    "Membership",
    "Merge",
    "Merged",
    "Message",
    "NotConfigured",
    "NotDecodable",
    "NotDurable",
    "NotInside",
    "OutcomeUnknown",
    "Overloaded",
    "Peek",
    "PolicyChanged",
    "Progress",
    "Receipt",
    "Record",
    "RedisMembership",
    "Refused",
    "ReplayedFailure",
    "Resized",
    "ResultUnavailable",
    "Retry",
    "Roll",
    "Stats",
    "StoreError",
    "StoreRefused",
    "StoreUnavailable",
    "StoredTopic",
    "Topic",
    "TopicInUse",
    "Trigger",
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
