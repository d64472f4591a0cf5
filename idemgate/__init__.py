"""Run duplicate calls once (`once`) and merge the triggers of a time window into one delivery (`merge`).

The other errors are in `idemgate.errors`, the types of arguments and results in `idemgate.types`.
"""

from __future__ import annotations

from typing import Final

from idemgate.core.durations import Duration
from idemgate.core.verdict import Verdict, verdict_of
from idemgate.core.version import VERSION
from idemgate.default_gate import configure, default_gate
from idemgate.errors import (
    AlreadyDone,
    AlreadyInProgress,
    Bury,
    IdemgateError,
    InvalidArgument,
    KeyReused,
    LeaseLost,
    MissingKey,
    OutcomeUnknown,
    PartialFailure,
    Retry,
    StoreError,
    StoreUnavailable,
)
from idemgate.gate import Gate
from idemgate.gate_aio import AioGate
from idemgate.guard.claim import AioClaim, Claim
from idemgate.guard.current import current
from idemgate.guard.guard import AioGuard, Guard
from idemgate.membership.member import RedisMembership
from idemgate.topics.limits import Adaptive
from idemgate.topics.merge import append, union
from idemgate.topics.messages import Delivery, Receipt, Trigger
from idemgate.topics.topic import Topic

__version__ = VERSION

__all__ = [
    "Adaptive",
    "AioClaim",
    "AioGate",
    "AioGuard",
    "AlreadyDone",
    "AlreadyInProgress",
    "Bury",
    "Claim",
    "Delivery",
    "Duration",
    "Gate",
    "Guard",
    "IdemgateError",
    "InvalidArgument",
    "KeyReused",
    "LeaseLost",
    "MissingKey",
    "OutcomeUnknown",
    "PartialFailure",
    "Receipt",
    "RedisMembership",
    "Retry",
    "StoreError",
    "StoreUnavailable",
    "Topic",
    "Trigger",
    "Verdict",
    "append",
    "configure",
    "current",
    "default_gate",
    "merge",
    "once",
    "union",
    "verdict_of",
]

once: Final = default_gate.once
"""`Gate.once` of the default gate. `configure` or the variable IDEMGATE_URL names its store."""
merge: Final = default_gate.merge
"""`Gate.merge` of the default gate. `configure` or the variable IDEMGATE_URL names its store."""
