"""Every call of the guard and of topics, each on a stage of its own where it has something to do.

A play is a call and the stage it is made for. The same play on two stages, at the same time of the test clock, gives
the same answers and the same fencing tokens, so that one of them may be disturbed and compared with the other.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol

from idemgate import Gate
from idemgate.core.calls import Call, new_id
from idemgate.core.keys import scope_history
from idemgate.errors import OutcomeUnknown
from idemgate.guard.claim_calls import ClaimReply, Record, register_retention
from idemgate.guard.heartbeat import note_history
from idemgate.operate.keys import scopes_call
from idemgate.testing import Clock
from idemgate.topics.dead_letters import DeadFilter
from idemgate.topics.messages import Peek, Ticket
from idemgate.topics.slots import open_topic, stored_policy
from tests.claims import claims_of
from tests.dedup.dedup_calls import calls_of
from tests.topics.test_replays import MUTATING, Stage, facts

__all__ = ["PLAYS", "READS", "Play", "answer_of"]


class Play(Protocol):
    """`call` is to be disturbed; `meanwhile`: what others do afterwards; `facts`: all that may be seen of the stage."""

    call: Call[Any]

    def meanwhile(self) -> None: ...
    def facts(self) -> Any: ...


def answer_of(answer: Any) -> Any:
    """What a caller may see of an answer, to be compared."""
    if isinstance(answer, Record):
        return replace(answer, owner="")
    if isinstance(answer, ClaimReply):
        return [getattr(answer, name) for name in ClaimReply.__slots__]
    if isinstance(answer, list) and any(isinstance(one, ClaimReply) for one in answer):
        return [answer_of(one) for one in answer]
    if isinstance(answer, Peek):
        pending, in_flight = _message(answer.pending), _message(answer.in_flight)
        return replace(answer, pending=None, in_flight=None), pending, in_flight
    if isinstance(answer, tuple) and answer and isinstance(answer[-1], list):
        return [(letter.id, letter.reason, letter.payload) for letter in answer[-1]]
    return facts(answer)


class Guard:
    """Keys of one scope: "free" was never claimed, "mine" is held by us, "theirs" by another, "silent" by one whose
    lease has lapsed, "done" is done, "unknown" waits for a decision."""

    def __init__(self, gate: Gate, clock: Clock, build: Callable[[Guard], Call[Any]]) -> None:
        self.gate, self.clock, self.claims = gate, clock, claims_of(gate)
        self.owner = new_id()
        for key, lease, hold in [("silent", 1_000, False), ("unknown", 1_000, True)]:
            gate.context.link.run(self.claims.claim(self.key(key), new_id(), lease, 60_000, hold=hold))
        clock.advance("2s")
        self.fence = gate.context.link.run(self.claims.claim(self.key("mine"), self.owner, 30_000, 60_000)).token
        gate.claim("theirs", scope="s")
        gate.claim("done", scope="s").complete("result")
        self.call = build(self)

    def key(self, key: str) -> tuple[bytes, ...]:
        return self.claims.key("s", key)

    def seen(self, key: str) -> Record:
        return self.gate.inspect(key, scope="s")

    def claim(self, key: str, **options: Any) -> Call[Any]:
        return self.claims.claim(self.key(key), new_id(), 30_000, 60_000, **options)

    def meanwhile(self) -> None:
        """Let the caller go on: it ends what it holds, and other callers come."""
        owners = self._owners()
        for key in ("free", "mine", "silent", "unknown"):
            record = self.key(key)
            self.gate.context.link.run(self.claims.release(record, owners.get(record[0], self.owner), 60_000))
        self.clock.advance("1s")
        for key in ("free", "mine", "silent", "unknown", "theirs", "done"):
            with suppress(OutcomeUnknown):
                claim = self.gate.claim(key, scope="s", lease="10s", on_lease_loss="hold")
                if claim.started and key in ("silent", "done"):
                    claim.complete("by others")
        self.clock.advance("20s")

    def _owners(self) -> dict[bytes, Any]:
        """Who took each record, of equal ones the first."""
        first = {"guard/mark": 1, "guard/claim": 4}.get(self.call.script.name)
        taken = [] if first is None else list(zip(self.call.keys, self.call.args[first:], strict=False))
        return dict(reversed(taken))

    def facts(self) -> Any:
        inspected = [
            self.gate.inspect(key, scope="s") for key in ("free", "mine", "theirs", "silent", "done", "unknown")
        ]
        return [replace(record, owner="") for record in inspected]


class _Face:
    def __init__(self, gate: Gate) -> None:
        self.gate, self.awaiting = gate, False


class Topic(Stage):
    """The stage of `tests/topics/test_replays.py`."""

    def __init__(self, gate: Gate, clock: Clock, build: Callable[[Any], Call[Any]]) -> None:
        super().__init__(_Face(gate), clock)
        self.call = build(self)

    def meanwhile(self) -> None:
        self.others_act()

    def facts(self) -> Any:
        keys = ("dead", "flying", "other", "late", "ripe", "new")
        stats, peeks = self.topic.stats(), [self.topic.peek(key) for key in keys]
        shown = [(*map(_message, (seen.pending, seen.in_flight)), seen.due_at) for seen in peeks]
        letters = [(letter.key, letter.payload, letter.attempts) for letter in self.topic.dead.list()]
        return stats.counters, stats.pending, stats.in_flight, stats.next_due, shown, letters


def _message(message: Any) -> Any:
    return message and (message.payload, message.count, message.attempts)


GUARD: dict[str, Callable[[Guard], Call[Any]]] = {
    "claim": lambda on: on.claim("free"),
    "claim, in progress": lambda on: on.claim("theirs"),
    "claim, lapsed": lambda on: on.claim("silent"),
    "claim, done": lambda on: on.claim("done"),
    "claim, held": lambda on: on.claim("unknown", hold=True),
    "claim_many": lambda on: on.claims.claim_each(
        [(on.key(key)[0], new_id()) for key in ("free", "theirs", "done", "free", "silent", "unknown")],
        30_000,
        60_000,
        0,
        True,
        False,
        100,
    )[0],
    "mark": lambda on: on.claims.mark(on.key("free"), new_id(), 60_000),
    "marks": lambda on: on.claims.mark_many((*on.key("free"), *on.key("done")), 60_000, 100)[0],
    "dedup add": lambda on: calls_of(on.gate, "s", 60_000).add("free"),
    "dedup get_or_set": lambda on: calls_of(on.gate, "s", 60_000).get_or_set("free", 7),
    "dedup get": lambda on: calls_of(on.gate, "s", 60_000).get("free"),
    "complete": lambda on: on.claims.complete(on.key("mine"), on.owner, on.fence, 60_000, b"v", b"\xa1x"),
    "complete, lost": lambda on: on.claims.complete(on.key("theirs"), on.owner, on.fence, 60_000, b"v", b"\xa1x"),
    "complete_many": lambda on: on.claims.complete_each(
        [(on.key(key)[0], on.owner, on.fence, 60_000, b"\xa1x") for key in ("theirs", "mine", "done", "free")], 100
    )[0],
    "renew": lambda on: on.claims.renew(on.key("mine"), on.owner, 40_000, 60_000),
    "renew, lost": lambda on: on.claims.renew(on.key("theirs"), on.owner, 40_000, 60_000),
    "release": lambda on: on.claims.release(on.key("mine"), on.owner, 60_000),
    "release, undone": lambda on: on.claims.release(on.key("mine"), on.owner, 60_000, undo=True),
    "release_many": lambda on: on.claims.release_each(
        [(on.key(key)[0], on.owner, 60_000, b"") for key in ("done", "theirs", "mine", "silent")], 100, undo=False
    )[0],
    "checkpoint": lambda on: on.claims.checkpoint(on.key("mine"), on.owner, b"\xa1n"),
    "resolve": lambda on: on.claims.resolve(
        on.key("unknown"), new_id(), on.seen("unknown"), True, 60_000, b"v", b"\xa1x"
    ),
    "forget": lambda on: on.claims.forget(on.key("done"), new_id(), on.seen("done"), False),
    "cancel": lambda on: on.claims.cancel(on.key("mine"), on.fence),
    "cancel, absent": lambda on: on.claims.cancel(on.key("free"), on.fence),
    "inspect": lambda on: on.claims.inspect(on.key("mine")),
    "register": lambda on: register_retention(on.gate.context, "s", 60_000),
    "scopes": lambda on: scopes_call(on.gate),
    "note": lambda on: note_history(on.gate.context, scope_history(on.gate.namespace, "s", b"free"), [(0, b"note")]),
}
READS: dict[str, Callable[[Any], Call[Any]]] = {
    "peek": lambda on: on.calls.peek("flying"),
    "versions": lambda on: on.calls.versions("flying"),
    "stats": lambda on: on.calls.stats().calls[0],
    "open": lambda on: open_topic(on.gate.namespace, on.clock, "t", on.calls.policy),
    "policy": lambda on: stored_policy(on.gate.namespace, on.clock, "t"),
    "dead letters": lambda on: on.calls.dead(0, DeadFilter(), 10),
    "results": lambda on: (
        on.gate.topic("r", result_retention="1h").open().result(Ticket("r", b"flying", b"flying", 1, 1, 0))
    ),
}

PLAYS: dict[str, Callable[[Gate, Clock], Play]] = {
    **{f"once: {name}": lambda gate, clock, build=build: Guard(gate, clock, build) for name, build in GUARD.items()},
    **{
        f"topic: {name}": lambda gate, clock, build=build: Topic(gate, clock, build)
        for name, build in (MUTATING | READS).items()
    },
}
