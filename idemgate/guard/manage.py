"""Mark a key, inspect it, forget it, or resolve one whose owner lost its lease."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import cast

from idemgate.core.calls import Call, Plan, new_id, run_call, run_calls
from idemgate.core.durations import Duration, milliseconds
from idemgate.core.keys import Key, text_of
from idemgate.core.validation import check_iterable
from idemgate.errors import AlreadyInProgress, InvalidArgument, StoreError
from idemgate.guard.claim_calls import LOOK_SECONDS, Claims, MarkMany, Record, register_retention
from idemgate.guard.heartbeat import note
from idemgate.store.context import Context

__all__ = ["cancel", "forget", "inspect", "join_marks", "mark_call", "mark_calls", "resolve"]

DecisionReply = tuple[str, int]
"""A status word, and the ms that are left of a live owner's lease."""


_COUNTED = 86_400_000
"""How long the attempts of a key that may run again are counted, in ms."""


class Decision:
    """A decision about one key.

    Send `inspect`, then the call built from its reply. Repeat both while the answer is "changed".
    """

    def __init__(self, context: Context, key: Key, scope: str, word: str) -> None:
        self.claims: Claims = Claims(context.namespace, context.clock)
        self.record: tuple[bytes, ...] = self.claims.key(scope, key)
        self.key = key
        self.scope = scope
        self.word = word
        self.noted = word
        self.request_id: bytes = new_id()
        self.context = context
        self.evict()

    def evict(self) -> None:
        """Remove the record from the caches. A duplicate may have cached it while the decision was under way."""
        for cache in tuple(self.context.caches):
            cache.evict(self.record[0])

    def inspect(self) -> Call[Record]:
        """Build the call that reads the record."""
        return self.claims.inspect(self.record)

    def result(self, seen: Record, answer: DecisionReply) -> bool:
        """Return True if the record was changed, and note it. Raise AlreadyInProgress if a live owner holds the key."""
        word, left_ms = answer
        if word == "busy":
            raise AlreadyInProgress(text_of(self.key), left_ms / 1000, self.scope)
        if word == self.word:
            note(self.context, self.scope, self.key, self.noted, token=seen.token, attempt=seen.attempts)
        return word == self.word


class Resolution(Decision):
    """The decision about a key whose owner lost its lease.

    `retention` is in ms, and None until it is known.
    """

    def __init__(
        self, context: Context, key: Key, scope: str, done: bool, result: object, retention: Duration | None
    ) -> None:
        super().__init__(context, key, scope, "ok")
        self.noted = "resolved_done" if done else "resolved_again"
        self.retention = None if done else _COUNTED
        if retention is not None:
            self.retention = milliseconds(retention, "retention")
        self._done = done
        self._result = context.codec.encode(result, "result")

    def ask_retention(self) -> Call[int]:
        """Build the call that returns the longest retention of the scope. It stores that of this gate."""
        return register_retention(self.context, self.scope, self.context.scopes.get(self.scope, 0))

    def set_retention(self, longest: int) -> None:
        """Set the retention to the longest of the scope. Raise InvalidArgument if that is unknown (0)."""
        if longest == 0:
            fix = 'Pass retention="7d", as long as the programs of this scope keep their keys'
            raise InvalidArgument("retention", None, f"the store does not know the scope {self.scope!r}", fix)
        self.retention = longest

    def build(self, record: Record) -> Call[DecisionReply]:
        """Build the call that decides, given the record."""
        assert self.retention is not None
        return self.claims.resolve(self.record, self.request_id, record, self._done, self.retention, b"v", self._result)


def mark_call(context: Context, key: Key, retention: Duration, scope: str) -> Call[bool]:
    """Build the call that marks a key. Its reply is True for the first caller."""
    claims = Claims(context.namespace, context.clock)
    return claims.first(claims.key(scope, key), milliseconds(retention, "retention"))


def mark_calls(
    context: Context, keys: Iterable[Key], retention: Duration, scope: str
) -> tuple[list[bytes], Sequence[MarkMany]]:
    """Return the records of keys, and the calls that mark them: 100 in a call, or one each on a cluster."""
    claims = Claims(context.namespace, context.clock)
    span = milliseconds(retention, "retention")
    records = [claims.key(scope, key)[0] for key in check_iterable(keys, "keys", "Pass a list of keys")]
    return records, claims.mark_many(tuple(dict.fromkeys(records)), span, context.batch_size)


def join_marks(records: list[bytes], outcomes: Sequence[bool | StoreError]) -> list[bool]:
    """Return which marks were the first ones: of equal records only the first can be. Raise the first StoreError."""
    if {*map(type, outcomes)} - {bool}:
        raise next(outcome for outcome in outcomes if isinstance(outcome, StoreError))
    firsts = cast("Sequence[bool]", outcomes)
    if len(firsts) == len(records):
        return [*firsts]
    found = dict(zip(dict.fromkeys(records), firsts, strict=True))
    return [found.pop(record, False) for record in records]


def inspect(context: Context, key: Key, scope: str) -> Plan[Record]:
    """Return the record of a key. If there is none, look in the other scopes of this gate."""
    claims = Claims(context.namespace, context.clock)
    record = yield from run_call(claims.inspect(claims.key(scope, key)))
    if record.state != "absent" or not (scopes := sorted(context.scopes.keys() - {scope})):
        return record
    found = yield from run_calls(claims.inspect(claims.key(one, key)) for one in scopes)
    known = [one for one, other in zip(scopes, found, strict=True) if other.state != "absent"]
    return dataclasses.replace(record, other_scopes=tuple(known))


def cancel(context: Context, key: Key, scope: str) -> Plan[bool]:
    """Ask the owner of a key to stop. Return False if no owner has a live lease."""
    claims = Claims(context.namespace, context.clock)
    record = claims.key(scope, key)
    seen = yield from run_call(claims.inspect(record))
    asked = yield from run_call(claims.cancel(record, seen.token))
    if asked:
        note(context, scope, key, "cancel_asked", token=seen.token, attempt=seen.attempts)
    return asked


def forget(context: Context, key: Key, scope: str, force: bool) -> Plan[bool]:
    """Delete the record of a key. Return False if there was none."""
    decision = Decision(context, key, scope, "forgotten")
    name, request_id, build = decision.record, decision.request_id, decision.claims.forget

    def ask(seen: Record) -> Plan[DecisionReply]:
        answer = yield from run_call(build(name, request_id, seen, force))
        if answer[0] == "early":
            yield LOOK_SECONDS
            answer = yield from run_call(build(name, request_id, seen, force, early=True))
        return answer

    return (yield from _decide(decision, ask))


def resolve(
    context: Context, key: Key, scope: str, done: bool, result: object, retention: Duration | None
) -> Plan[bool]:
    """Decide the state of a key whose owner lost its lease. Return False if there is nothing to decide."""
    resolution = Resolution(context, key, scope, done, result, retention)
    if resolution.retention is None:
        resolution.set_retention((yield from run_call(resolution.ask_retention())))
    return (yield from _decide(resolution, lambda record: run_call(resolution.build(record))))


def _decide(decision: Decision, ask: Callable[[Record], Plan[DecisionReply]]) -> Plan[bool]:
    try:
        while True:
            record = yield from run_call(decision.inspect())
            answer = yield from ask(record)
            if answer[0] != "changed":
                return decision.result(record, answer)
    finally:
        decision.evict()
