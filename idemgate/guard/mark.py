"""Mark keys as seen, without a lease or a result."""

from __future__ import annotations

from collections.abc import Iterable

from idemgate.core.calls import Batch, Call
from idemgate.core.durations import Duration, milliseconds
from idemgate.core.keys import Key
from idemgate.core.validation import check_iterable
from idemgate.guard.calls import Claims
from idemgate.store.context import Context

__all__ = ["mark_call", "mark_calls"]


def mark_call(context: Context, key: Key, retention: Duration, scope: str) -> Call[bool]:
    """Build the call that marks a key. Its reply is True for the first caller."""
    claims = Claims(context.namespace, context.clock)
    return claims.first(claims.key(scope, key), milliseconds(retention, "retention"))


def mark_calls(context: Context, keys: Iterable[Key], retention: Duration, scope: str) -> Batch[list[bool]]:
    """Build the calls that mark many keys: 100 in one script call, or one each on a cluster."""
    claims = Claims(context.namespace, context.clock)
    span = milliseconds(retention, "retention")
    records = [claims.key(scope, key) for key in check_iterable(keys, "keys", "Pass a list of keys")]
    if context.batch_size == 1:
        return Batch([claims.first(record, span) for record in records], list)
    return claims.mark_many(records, span)
