"""The guard's scripts against a model in plain Python: any order of calls, of any owner, at any time, late copies
included.

About 2,000 steps by default. `IDEMGATE_STEPS=50000 pytest tests/guard/test_model.py -s` makes more of them, and says
how many calls they were; from 50,000 on it also demands that every answer there is was given.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from idemgate import Gate
from idemgate.core.calls import Batch, Call
from idemgate.guard.claim_calls import ClaimReply, Claims, Record
from idemgate.testing import Clock

STEPS = int(os.environ.get("IDEMGATE_STEPS", "2000"))
A_RUN = 50
START = 1_700_000_000_000

Answer = tuple[Any, ...]


# -- the model --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Stored:
    """What is known of one key. Times in ms; None where there is nothing."""

    state: str = "none"  # then: running, done, failed, released
    owner: bytes | None = None
    fence: int = 0
    attempts: int = 0
    taken_over: int = 0
    lease_end: int = 0
    lease: int = 0
    ends: int = 0
    fingerprint: bytes = b""
    kind: bytes = b""
    result: bytes = b""
    note: bytes = b""
    hold: bool = False
    since: int = 0
    cancelled: bool = False
    waited: bool = False
    failure: bytes = b""
    """Of a released key: what those get who waited for its end."""
    plain: bool = False
    """A claim by plain commands, which no script has changed."""

    def left(self, now: int) -> int:
        """Of the lease; never more than a whole one."""
        return min(self.lease_end - now, self.lease)

    def seen(self, now: int) -> str:
        """The state as it counts: what has ended is nothing."""
        ended = self.state in ("done", "failed", "released") and self.ends <= now
        return "none" if ended else self.state


class Model:
    """The contract of `guard/scripts` for one key. `us` is the time of the call, in microseconds."""

    def __init__(self) -> None:
        self.key = Stored()

    def claim(
        self, us: int, owner: bytes, lease: int, keep: int, fingerprint: bytes, allowed: int, hold: bool, wait: int = 0
    ) -> Answer:
        key, now = self.key, us // 1000
        seen = key.seen(now)
        if seen == "running" and key.owner == owner:
            return ("started", key.fence, key.attempts, key.taken_over, key.note)
        if seen == "released" and key.owner == owner:
            return ("stale",)
        if (refused := self._refused(now, fingerprint)) is not None:
            if refused[0] == "in_progress" and wait > 0 and not self.key.waited:
                self.key = replace(self.key, waited=True, plain=False)
            return refused
        fresh = seen == "none"
        attempts = 0 if fresh else key.attempts
        if seen == "released" and key.failure and wait == 2 and key.fingerprint == fingerprint:
            return ("shared_failure", attempts, key.failure)
        taken_over = (0 if fresh else key.taken_over) + (seen == "running")
        if allowed and attempts >= allowed:
            return ("exhausted", attempts)
        self.key = Stored(
            "running", owner, max(key.fence + 1, us), attempts + 1, taken_over, now + lease, lease,
            fingerprint=fingerprint, note=b"" if fresh else key.note, hold=hold, since=now,
        )  # fmt: skip
        return ("started", self.key.fence, attempts + 1, taken_over, self.key.note)

    def plain_claim(self, us: int, owner: bytes, lease: int, keep: int, hold: bool) -> Answer:
        """Without a script: where that is not enough, nothing is changed."""
        key, now = self.key, us // 1000
        if key.state == "none" or (key.state != "running" and 0 < key.ends <= now):
            self.key = Stored(
                "running", owner, us, 1, lease_end=now + lease, lease=lease, hold=hold, since=now, plain=True
            )
            return ("started", us, 1, 0, b"")
        return ("done", key.kind, key.result, key.fence, 1, 0) if key.kind and key.attempts == 1 else ("undecided",)

    def plain_complete(self, us: int, owner: bytes, fence: int, retention: int, kind: bytes, result: bytes) -> Answer:
        """Without a script: where that is not enough, nothing is changed."""
        key, now = self.key, us // 1000
        if not key.plain or key.owner != owner:
            return ("undecided",)
        self._rest(state="done", owner=b"", fence=fence, ends=now + retention, kind=kind, result=result, since=now)
        return (True,)

    def plain_mark(self, us: int, owner: bytes, retention: int) -> Answer:
        """Without a script: where that is not enough, nothing is changed."""
        key, now = self.key, us // 1000
        if key.state == "none" or (key.state != "running" and 0 < key.ends <= now):
            self.key = Stored("done", owner, us, 1, ends=now + retention, kind=b"n", since=now)
            return (True,)
        return (False,) if key.kind else ("undecided",)

    def mark(self, us: int, owner: bytes, retention: int, fingerprint: bytes) -> Answer:
        key, now = self.key, us // 1000
        if key.seen(now) in ("done", "failed") and key.owner == owner:
            return ("started", key.fence, key.attempts, 0, b"")
        if (refused := self._refused(now, fingerprint)) is not None:
            return refused
        self.key = Stored(
            "done",
            owner,
            max(key.fence + 1, us),
            1,
            ends=now + retention,
            fingerprint=fingerprint,
            kind=b"n",
            since=now,
        )
        return ("started", self.key.fence, 1, 0, b"")

    def _refused(self, now: int, fingerprint: bytes) -> Answer | None:
        key, seen = self.key, self.key.seen(now)
        if seen in ("done", "failed", "running") and key.fingerprint != fingerprint:
            return ("reused",)
        if seen in ("done", "failed"):
            return ("done", key.kind, key.result, key.fence, key.attempts, key.ends - now)
        if seen == "running" and key.left(now) > 0:
            return ("in_progress", self._left(now), key.attempts)
        if seen == "running" and key.hold:
            return ("held", key.attempts)
        return None

    def _left(self, now: int) -> int:
        """Of the lease: where the clock was set back, it is a whole one from now on."""
        left = self.key.left(now)
        self.key = replace(self.key, lease_end=now + left, plain=self.key.plain and self.key.lease_end == now + left)
        return left

    def complete(self, us: int, owner: bytes, fence: int, retention: int, kind: bytes, result: bytes) -> Answer:
        key, now = self.key, us // 1000
        if key.state != "running":
            # Of what was completed only the fencing token tells by whom.
            return (key.kind != b"" and key.owner == b"" and key.fence == fence,)
        if key.owner != owner or key.fence != fence:
            return (False,)
        state = "failed" if kind == b"e" else "done"
        self._rest(state=state, owner=b"", ends=now + retention, kind=kind, result=result, note=b"", since=now)
        return (True,)

    def release(self, us: int, owner: bytes, keep: int, undo: bool, failure: bytes = b"") -> Answer:
        key, now = self.key, us // 1000
        if key.owner != owner or key.state not in ("running", "released"):
            return (False,)
        if key.state == "running":
            failure = failure if key.waited else b""
            shown = key.fingerprint if failure else b""
            attempts = key.attempts - undo
            self._rest(state="released", ends=now + keep, attempts=attempts, fingerprint=shown, since=now)
            self.key.failure = failure
        return (True,)

    def renew(self, us: int, owner: bytes, lease: int, keep: int) -> Answer:
        held = self.key.state == "running" and self.key.owner == owner
        if not held:
            return ("lost",)
        self.key = replace(self.key, lease_end=us // 1000 + lease, lease=lease, plain=False)
        return ("cancelled" if self.key.cancelled else "ok",)

    def cancel(self, us: int, fence: int) -> Answer:
        live = self.key.state == "running" and self.key.fence == fence and self.key.left(us // 1000) > 0
        if live:
            self.key = replace(self.key, cancelled=True, plain=False)
        return (live,)

    def checkpoint(self, us: int, owner: bytes, data: bytes) -> Answer:
        held = self.key.state == "running" and self.key.owner == owner
        if held:
            self.key = replace(self.key, note=data, plain=False)
        return (held,)

    def forget(self, us: int, request: bytes, about: Record, force: bool) -> Answer:
        key, now = self.key, us // 1000
        if key.owner == request:
            return ("forgotten", 0)
        if key.seen(now) == "none":
            return ("absent", 0)
        running = about.state in ("in_progress", "lapsed", "held")
        if key.fence != about.token or (key.state == "running") != running:
            return ("changed", 0)
        if key.state == "running" and key.left(now) > 0 and not force:
            return ("busy", self._left(now))
        self.key = Stored("released", request, key.fence, since=now)
        return ("forgotten", 0)

    def resolve(
        self, us: int, request: bytes, about: Record, done: bool, retention: int, kind: bytes, result: bytes
    ) -> Answer:
        key, now = self.key, us // 1000
        if key.owner == request:
            return ("ok", 0)
        if key.state != "running":
            return ("absent", 0)
        if key.fence != about.token:
            return ("changed", 0)
        if key.left(now) > 0:
            return ("busy", self._left(now))
        if done:
            self._rest(state="done", owner=request, ends=now + retention, kind=kind, result=result, note=b"", since=now)
        else:
            self._rest(state="released", owner=request, ends=now + retention, since=now)
        return ("ok", 0)

    def _rest(self, **changes: Any) -> None:
        rests = {"lease_end": 0, "lease": 0, "hold": False, "cancelled": False, "waited": False, "plain": False}
        self.key = replace(self.key, **(rests | changes))

    def looks(self, us: int) -> Answer:
        """As `facts_of` an inspection."""
        key, now = self.key, us // 1000
        seen = key.seen(now)
        if seen == "none":
            return ("absent", key.fence, 0, 0, None, None, None, "", False, b"", b"")
        live = key.left(now) > 0
        state = seen if seen != "running" else "in_progress" if live else "held" if key.hold else "lapsed"
        return (
            state, key.fence, key.attempts, key.taken_over,
            key.left(now) / 1000 if state == "in_progress" else None,
            (key.ends - now) / 1000 if seen != "running" else None,
            key.since / 1000, (key.owner or b"").hex(), key.fingerprint != b"", key.result, key.note,
        )  # fmt: skip


# -- what was really answered, in the model's words -------------------------------------------------------------------


def facts_of(record: Record) -> Answer:
    return (
        record.state, record.token, record.attempts, record.taken_over, record.lease_left, record.retention_left,
        record.since and record.since.timestamp(), record.owner, record.has_fingerprint, record.result,
        record.checkpoint,
    )  # fmt: skip


def answer_of(value: Any) -> Answer:
    if isinstance(value, ClaimReply):
        return _answer_of_entry(value)
    return value if isinstance(value, tuple) else (value,)


def _answer_of_entry(entry: ClaimReply) -> Answer:
    if entry.state == "started":
        return ("started", entry.token, entry.attempt, entry.taken_over, entry.checkpoint)
    if entry.state == "done":
        return ("done", entry.kind, entry.result, entry.token, entry.attempt, entry.left_ms)
    if entry.state == "in_progress":
        return ("in_progress", entry.left_ms, entry.attempt)
    if entry.state == "shared_failure":
        return (entry.state, entry.attempt, entry.result)
    return (entry.state, entry.attempt) if entry.state in ("held", "exhausted") else (entry.state,)


EVERY_ANSWER = {
    *(("claim", word) for word in ("started", "in_progress", "done", "reused", "held", "exhausted", "stale")),
    ("claim", "shared_failure"),
    *(("mark", word) for word in ("started", "in_progress", "done", "reused", "held")),
    *((verb, held) for verb in ("complete", "release", "checkpoint", "cancel") for held in (True, False)),
    *(("renew", word) for word in ("ok", "cancelled", "lost")),
    *(("forget", word) for word in ("forgotten", "absent", "busy", "changed")),
    *(("resolve", word) for word in ("ok", "absent", "busy", "changed")),
}
"""What a run that saw everything has seen."""


# -- the machine ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Made:
    """A call as it was made: which key, which verb with which arguments, and when."""

    key: int
    verb: str
    arguments: tuple[Any, ...]
    us: int


class Promises:
    """P1, P2 and P4 from the answers alone, without the model's idea of how they are kept. Times in ms."""

    def __init__(self) -> None:
        self.fence = 0
        self.holder: bytes | None = None
        self.until = 0
        self.done_until = 0

    def granted(self, now: int, owner: bytes, fence: int, until: int) -> None:
        if fence == self.fence:
            assert owner == self.holder, "one fencing token was given to two"
            return
        assert fence > self.fence, "fencing tokens rise"
        assert now >= self.until, "another owner's lease still holds"
        assert now >= self.done_until, "it is done, and its retention has not ended"
        self.fence, self.holder, self.until, self.done_until = fence, owner, until, 0

    def rested(self, done_until: int = 0) -> None:
        self.until, self.done_until = 0, done_until


keys = st.sampled_from([0, 0, 1])
# None: who holds the key, and the fingerprint it has, so that most calls find something to change.
owners = st.sampled_from([None, None, b"owner-a-16-bytes", b"owner-b-16-bytes", b"owner-c-16-bytes"])
prints = st.sampled_from([None, None, b"", b"print-1", b"print-of-16-byte"])
leases = st.sampled_from([1_000, 1_000, 30_000])
spans = st.sampled_from([100_000, 1_200_000])  # short and long forms of what is done
kinds = st.sampled_from([(b"v", b"value"), (b"n", b"why"), (b"e", b"failure")])


PRELUDES = ["vanish", "release", "complete", "share"]
owned = precondition(lambda self: any(model.key.owner for model in self.models))


class GuardMachine(RuleBasedStateMachine):
    """Real server and model side by side."""

    run: Callable[[Call[Any]], Any]
    run_all: Callable[[Batch[Any]], Any]
    namespace: str
    numbers = itertools.count()
    answers: ClassVar[Counter[tuple[str, Any]]] = Counter()

    @initialize(before=st.lists(st.tuples(st.sampled_from([0, 1]), st.sampled_from(PRELUDES)), max_size=3))
    def begin(self, before: list[tuple[int, str]]) -> None:
        self.clock = Clock(START / 1000)
        self.claims = Claims(self.namespace, self.clock)
        scope = f"e{next(self.numbers)}"
        self.records = [self.claims.key(scope, number) for number in range(2)]
        self.models = [Model(), Model()]
        self.promises = [Promises(), Promises()]
        self.past: list[Made] = []
        for key, prelude in before:
            self.prelude(key, prelude)

    def prelude(self, key: int, end: str) -> None:
        """A claim that came to some end: chance alone seldom leads there."""
        self.make(key, "claim", 30_000, 1_000_000, b"", 0, True, owner=b"owner-a-16-bytes")
        if end == "vanish":
            self.vanish(key)
        elif end == "share":
            self.make(key, "claim", 30_000, 1_000_000, b"", 0, True, 1, owner=b"owner-b-16-bytes")
            self.make(key, "release", 1_000_000, False, b"failure", owner=b"owner-a-16-bytes")
        elif end == "release":
            self.make(key, "release", 1_000_000, False, owner=b"owner-a-16-bytes")
        else:
            self.complete_by(key, b"owner-a-16-bytes", 0, 100_000, b"v", b"value")

    def do(self, made: Made) -> Answer:
        """Makes the call at the time it says; the answers are equal, and the promises are kept."""
        shown = self.clock.microseconds()
        self.clock.set(made.us / 1_000_000)
        call = getattr(self.claims, made.verb)(self.records[made.key], *made.arguments)
        self.clock.set(shown / 1_000_000)
        answer = answer_of(self.run(call))
        self.answers[made.verb, answer[0]] += 1
        assert answer == getattr(self.models[made.key], made.verb)(made.us, *made.arguments), made
        self.watch(made, answer)
        return answer

    def watch(self, made: Made, answer: Answer) -> None:
        promises, now = self.promises[made.key], made.us // 1000
        word = answer[0]
        if made.verb == "claim" and word == "started":
            promises.granted(now, made.arguments[0], answer[1], now + made.arguments[1])
        elif made.verb == "mark" and word == "started":
            promises.granted(now, made.arguments[0], answer[1], now)
            promises.rested(self.models[made.key].key.ends)
        elif made.verb == "renew" and word != "lost":
            promises.until = now + made.arguments[1]
        elif made.verb in ("complete", "release", "resolve") and word in (True, "ok"):
            promises.rested(
                self.models[made.key].key.ends if self.models[made.key].key.state in ("done", "failed") else 0
            )
        elif made.verb == "forget" and word == "forgotten":
            promises.rested()
        elif word in ("in_progress", "busy"):  # where the clock was set back, the lease is a whole one from now on
            promises.until = min(promises.until, now + self.models[made.key].key.lease)

    def make(self, key: int, verb: str, *arguments: Any, owner: bytes | None = b"") -> Answer:
        if owner != b"":
            held = self.models[key].key.owner or b"owner-a-16-bytes"
            # Who decided or forgot left its request id there, under which nobody claims.
            arguments = (owner or (b"owner-a-16-bytes" if held.startswith(b"request") else held), *arguments)
        made = Made(key, verb, arguments, self.clock.microseconds())
        self.past.append(made)
        return self.do(made)

    def print(self, key: int, fingerprint: bytes | None) -> bytes:
        return self.models[key].key.fingerprint if fingerprint is None else fingerprint

    @rule(
        key=keys,
        owner=owners,
        lease=leases,
        keep=spans,
        fingerprint=prints,
        allowed=st.sampled_from([0, 1, 2]),
        hold=st.booleans(),
        wait=st.sampled_from([0, 1, 2]),
    )
    def claim(self, key: int, owner: bytes | None, fingerprint: bytes | None, **terms: int) -> None:
        lease, keep, *others = (terms[name] for name in ("lease", "keep", "allowed", "hold", "wait"))
        self.make(key, "claim", lease, keep, self.print(key, fingerprint), *others, owner=owner)

    @rule(key=keys, owner=owners, retention=spans, fingerprint=prints)
    def mark(self, key: int, owner: bytes | None, retention: int, fingerprint: bytes | None) -> None:
        self.make(key, "mark", retention, self.print(key, fingerprint), owner=owner)

    @owned
    @rule(key=keys, owner=owners, before=st.sampled_from([0, 0, 1]), retention=spans, kind=kinds)
    def complete(self, key: int, owner: bytes | None, before: int, retention: int, kind: tuple[bytes, bytes]) -> None:
        self.complete_by(key, owner, before, retention, *kind)

    def complete_by(self, key: int, owner: bytes | None, before: int, *rest: Any) -> None:
        """`before`: by how much the fencing token is below the present one."""
        self.make(key, "complete", self.models[key].key.fence - before, *rest, owner=owner)

    @owned
    @rule(key=keys, owner=owners, lease=leases, keep=spans)
    def renew(self, key: int, owner: bytes | None, lease: int, keep: int) -> None:
        self.make(key, "renew", lease, keep, owner=owner)

    @rule(key=keys, before=st.sampled_from([0, 0, 1]))
    def cancel(self, key: int, before: int) -> None:
        self.make(key, "cancel", self.models[key].key.fence - before)

    @owned
    @rule(key=keys, owner=owners, keep=spans, undo=st.booleans(), failure=st.sampled_from([b"", b"failure"]))
    def release(self, key: int, owner: bytes | None, keep: int, undo: bool, failure: bytes) -> None:
        self.make(key, "release", keep, undo, failure, owner=owner)

    @owned
    @rule(key=keys, owner=owners, data=st.sampled_from([b"note", b"another note"]))
    def checkpoint(self, key: int, owner: bytes | None, data: bytes) -> None:
        self.make(key, "checkpoint", data, owner=owner)

    @rule(key=keys, force=st.booleans())
    def forget(self, key: int, force: bool) -> None:
        self.make(key, "forget", *self.deciding(key), force)

    def deciding(self, key: int) -> tuple[bytes, Record]:
        """A request of its own, about what is there now; its copies may find something else."""
        return b"request-%d" % next(self.numbers), self.run(self.claims.inspect(self.records[key]))

    @rule(key=keys, done=st.booleans(), retention=spans, kind=kinds.filter(lambda kind: kind[0] != b"e"))
    def resolve(self, key: int, done: bool, retention: int, kind: tuple[bytes, bytes]) -> None:
        self.make(key, "resolve", *self.deciding(key), done, retention, *kind)

    @rule(data=st.data(), late=st.booleans())
    def again(self, data: st.DataObject, late: bool) -> None:
        """A copy of an old call arrives, and counts as of now (the server's clock) or as of when it was made."""
        if self.past:
            made = data.draw(st.sampled_from(self.past))
            self.do(replace(made, us=self.clock.microseconds()) if late else made)

    @rule()
    def at_once_again(self) -> None:
        """The reply was lost and the call sent again: same answer, no second effect."""
        if self.past:
            made = replace(self.past[-1], us=self.clock.microseconds())
            first, before = self.do(made), replace(self.models[made.key].key)
            assert self.do(made) == first
            assert self.models[made.key].key == before

    @owned
    @rule(key=keys)
    def vanish(self, key: int) -> None:
        """Let the lease of the owner lapse."""
        self.clock.set(max(self.clock.microseconds() // 1000, self.models[key].key.lease_end) / 1000)

    @rule(ms=st.sampled_from([1, 999, 1_000, 29_999, 30_000, 99_999, 100_000, 1_000_000]))
    def forward(self, ms: int) -> None:
        self.clock.advance(ms / 1000)

    @rule(ms=st.sampled_from([1, 500, 5_000]))
    def back(self, ms: int) -> None:
        self.clock.set(self.clock.microseconds() / 1_000_000 - ms / 1000)

    @invariant()
    def every_key_looks_like_the_model(self) -> None:
        if self.models:
            us = self.clock.microseconds()
            found = self.run_all(Batch([self.claims.inspect(record) for record in self.records], list))
            assert [facts_of(record) for record in found] == [model.looks(us) for model in self.models]


@pytest.mark.timeout(0 if "IDEMGATE_STEPS" in os.environ else 120)
def test_any_order_of_calls_is_answered_as_the_model_answers(url: str, namespace: str, record_fault: Any) -> None:
    with Gate(url, namespace=namespace) as gate:

        class Bound(GuardMachine):
            run = staticmethod(gate.context.link.run)
            run_all = staticmethod(gate.context.link.run_all)

        Bound.namespace = namespace
        run_state_machine_as_test(  # type: ignore[no-untyped-call]
            Bound,
            settings=settings(
                max_examples=max(1, STEPS // A_RUN),
                stateful_step_count=A_RUN,
                database=None,
                derandomize=False,
                deadline=None,
                phases=(Phase.generate, Phase.shrink),
                suppress_health_check=list(HealthCheck),
            ),
        )
    record_fault(
        "guard against its model: any order of calls, copies, late copies, moves of the clock (N: calls)",
        GuardMachine.answers.total(),
        promises="P1 P2 P4 P5 P6",
        divergences=0,
    )
    print(f"{GuardMachine.answers.total()} calls without divergence: {dict(GuardMachine.answers)}")
    assert STEPS < 50_000 or GuardMachine.answers.keys() >= EVERY_ANSWER
