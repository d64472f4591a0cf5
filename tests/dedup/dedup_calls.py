"""The calls of a dedup set, for tests that send them one by one."""

from __future__ import annotations

from idemgate.dedup.dedup import DedupCalls
from idemgate.store.context import HasContext

__all__ = ["calls_of"]


def calls_of(gate: HasContext, scope: str, retention_ms: int) -> DedupCalls:
    """Return the builder of the calls of a scope of this gate."""
    return DedupCalls(gate.context.namespace, gate.context.clock, scope, retention_ms)
