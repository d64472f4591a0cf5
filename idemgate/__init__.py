"""Between triggers and work: of all duplicates run the first (`once`), of all triggers of a window run one delivery
(`merge`)."""

from __future__ import annotations

from idemgate.core.aimd import Adaptive
from idemgate.core.backoff import BackoffPolicy
from idemgate.core.claims import Record
from idemgate.core.compact import Kept
from idemgate.core.durations import Duration, milliseconds
from idemgate.core.holdings import Announcement, Roll
from idemgate.core.merging import Merge, append, union
from idemgate.core.messages import DeadLetter, Delivery, Message, Peek, Receipt, Stats, Trigger
from idemgate.core.registry import StoredTopic
from idemgate.core.resizing import Forgotten, Progress, Resized
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
from idemgate.once.batch import AioClaimBatch, ClaimBatch
from idemgate.once.claim import AioClaim, Claim
from idemgate.once.current import Execution, current
from idemgate.topic.faces import AioTopic, Topic
from idemgate.topic.merged import Merged
from idemgate.work.members import Member, Membership, RedisMembership

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
