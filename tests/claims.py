"""The calls of the guard, for tests that send them one by one."""

from __future__ import annotations

from idemgate.guard.claim_calls import Claims
from idemgate.store.context import HasContext

__all__ = ["claims_of"]


def claims_of(gate: HasContext) -> Claims:
    """Return what builds the guard's calls for this gate."""
    return Claims(gate.context.namespace, gate.context.clock)
