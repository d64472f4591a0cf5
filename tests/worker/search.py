"""Every interleaving of two workers whose handler is guarded by `once(key="{delivery.id}")`, up to a depth, run by the
scripts themselves.

A worker takes a delivery and claims its work; its handler runs, and what it did is recorded; then it acknowledges. It
may fail, or vanish before any of these. A second trigger comes whenever it likes. The lease of the guard ends after
that of the delivery, so that a worker meets one that still runs. Each request may come once more.

What is judged beside the promises of the topic: no work runs while it runs, or after it was recorded; nothing is
acknowledged that did not run; and an item that was done runs again only as a part of other work, which newer triggers
have joined, or by a worker that has lost its delivery, whose token is a former one (P3).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import redis

from idemgate import Gate
from idemgate.core.calls import Call
from tests.claims import claims_of
from tests.topics import search
from tests.topics.search import Held, Scope, Step, Violation

__all__ = ["Search", "Violation"]

GUARD, KEEP = 15_000, 600_000
"""Ms: the lease of a claim, which outlives that of its delivery; and how long what was done or given back is known."""
WORKS = ((1,), (2,), (1, 2))
"""All that a delivery of two triggers may consist of: each has a record."""
SCOPE = Scope(("k", "k"), ("ack",), ("forget",), attempts=3)
SLOT = 15
"""Keys of a slot; behind them stand the records."""
SNAPSHOT = search.SNAPSHOT.replace("zset(11) }", f'zset(11), redis.call("MGET", unpack(KEYS, {SLOT + 1})) }}')


@dataclass(frozen=True)
class Run:
    """How far a worker has come with its delivery: "running", "done", "failed", or "busy", where another runs it for
    `left` ms more."""

    stage: str
    owner: bytes = b""
    fence: int = 0
    left: int = 0


@dataclass(frozen=True)
class Work:
    """The truth about a work: its last owner that has not ended, and until when its lease holds (ms)."""

    owner: bytes = b""
    until: int = 0
    fence: int = 0
    done: bool = False


@dataclass(frozen=True)
class State(search.State):
    """`ran`: the triggers whose handler came to its end. `ids`: of each work, as a handler sees it."""

    dumps: tuple[bytes, ...] = (b"",) * (SLOT + len(WORKS))
    records: tuple[bytes | None, ...] = (None,) * len(WORKS)
    works: tuple[Work, ...] = (Work(),) * len(WORKS)
    runs: tuple[Run | None, ...] = (None, None)
    ran: frozenset[int] = frozenset()
    ids: tuple[str, ...] = ("",) * len(WORKS)

    def same(self) -> Any:
        return super().same(), self.records, self.works, self.runs, self.ran, self.ids


class Search(search.Search):
    def __init__(self, raw: redis.Redis, gate: Gate, scripts: Mapping[str, str]) -> None:
        super().__init__(raw, gate, SCOPE, scripts)
        self.claims = claims_of(gate)
        self.slot = self.keys
        self.records = [claims_of(gate).key("search", str(items)) for items in WORKS]
        self.keys = (*self.slot, *(key for (key,) in self.records))
        self.snapshot = raw.script_load(SNAPSHOT)

    def start(self) -> State:
        return State()

    def asks(self, step: Step) -> tuple[bytes, ...]:
        return step.keys or tuple(self.slot)

    # -- what may happen ----------------------------------------------------------------------------------------------

    def may_lapse(self, state: search.State) -> bool:
        return state.accepted > 0

    def works(self, state: search.State) -> Iterator[Step]:
        assert isinstance(state, State)
        for worker, (held, run) in enumerate(zip(state.workers, state.runs, strict=True)):
            if held is not None:
                yield Step(f"forget {worker}", worker=worker)
                yield from self._goes_on(state, worker, held, run)
        yield from self.takes(state)

    def _goes_on(self, state: State, worker: int, held: Held, run: Run | None) -> Iterator[Step]:
        """What the worker of a guarded handler does next."""
        record = self.records[_work(held)]
        if run is None:
            owner = f"{worker}.{sum(one.name.startswith('claim') for one in state.sent)}".encode()
            yield self._guards(f"claim {owner.decode()}", self.claims.claim(record, owner, GUARD, KEEP), worker)
        elif run.stage == "running":
            done = self.claims.complete(record, run.owner, run.fence, KEEP, b"v", b"result")
            yield self._guards(f"complete {run.owner.decode()}", done, worker)
            yield self._guards(f"release {run.owner.decode()}", self.claims.release(record, run.owner, KEEP), worker)
        else:
            verb = {"done": "ack", "failed": "nack", "busy": "defer"}[run.stage]
            yield self.end(verb, worker, held, run.left)

    def _guards(self, name: str, call: Call[Any], worker: int) -> Step:
        return Step(name, call.script.name, tuple(call.args[1:]), worker, keys=call.keys)

    def alone(self, state: search.State, step: Step) -> State:
        return _rested(super().alone(state, step))

    # -- what came of it ----------------------------------------------------------------------------------------------

    def answered(
        self, before: search.State, step: Step, reply: tuple[Any, ...], found: tuple[Any, ...]
    ) -> search.State:
        assert isinstance(before, State)
        after = super().answered(before, step, reply, found[:-1])
        assert isinstance(after, State)
        after = replace(after, records=found[-1])
        if step.keys:
            return self._guarded(before, after, step, reply)
        self.check(after, after.records == before.records, "what is guarded is changed by the topic")
        if step.verb == "ack" and step.told is None and reply[-1] == b"ok":
            assert step.held is not None
            self.check(after, after.ran.issuperset(step.held.items), "P7: what never ran is acknowledged")
        if step.verb == "take" and step.told is None:
            after = self._named(after, step, reply)
        return _rested(after)

    def _judge_copy(
        self, before: search.State, after: search.State, first: search.Request, reply: tuple[Any, ...]
    ) -> None:
        if not first.keys:
            super()._judge_copy(before, after, first, reply)

    def _named(self, after: State, step: Step, reply: tuple[Any, ...]) -> State:
        """The name of the work that was taken: always the same, and of no other."""
        deliveries = self.calls.take(0, 1).answer(list(reply)).deliveries
        held = after.workers[step.worker]
        if held is None:
            return after
        (delivery,), at = deliveries, _work(held)
        known = after.ids[at]
        self.check(after, known in ("", delivery.id), "P12: what is tried again is called otherwise")
        others = (*after.ids[:at], *after.ids[at + 1 :])
        self.check(after, delivery.id not in others, "P12: two works have one name")
        return replace(after, ids=(*after.ids[:at], delivery.id, *after.ids[at + 1 :]))

    def _guarded(self, before: State, after: State, step: Step, reply: tuple[Any, ...]) -> State:
        """What came of a request to the guard."""
        self.check(after, after.content == before.content, "what is pending is changed by the guard")
        at = next(at for at, keys in enumerate(self.records) if keys == step.keys)
        judge = {"claim": self._claimed, "complete": self._completed, "release": self._released}[
            step.script.partition("/")[2]
        ]
        work, run = judge(before, after, step, at, _words(reply))
        after = replace(after, works=(*after.works[:at], work, *after.works[at + 1 :]))
        if step.told is not None:
            return after
        if step.script == "guard/complete":
            after = replace(after, ran=after.ran | set(WORKS[at]))
        return replace(after, runs=_put(after.runs, step.worker, run))

    def _claimed(
        self, before: State, after: State, step: Step, at: int, words: tuple[Any, ...]
    ) -> tuple[Work, Run | None]:
        work, owner, (word, *rest) = before.works[at], cast("bytes", step.args[3]), words
        live = bool(work.owner) and work.until > before.now
        if word == "done":
            self.check(after, work.done, "P12: what did not run is done")
            return work, Run("done")
        if word == "busy":
            self.check(after, live, "a free work is refused")
            self.check(after, rest[0] == work.until - before.now, "wrong remaining lease")
            return work, Run("busy", left=rest[0])
        if word == "stale":
            self.check(after, step.told is not None, "a new claim is taken for an old one")
            return work, None
        self.check(after, word == "started", f"a claim is answered {word}")
        fence = rest[0]
        if owner == work.owner:
            self.check(after, fence == work.fence, "P6: a copy of a claim gets another token")
            return work, None
        self.check(after, not live, "P1: it runs twice at a time")
        self.check(after, not work.done, "P12: what is done runs again")
        self.check(after, fence > work.fence, "P4: a fencing token does not rise")
        done = [set(items) for items, one in zip(WORKS, before.works, strict=True) if one.done]
        again = [items for items in done if items & set(WORKS[at]) and not items < set(WORKS[at])]
        self.check(after, not again or _lost(before, step), "P12: an item that is done runs again")
        return Work(owner, before.now + GUARD, fence), Run("running", owner, fence)

    def _completed(
        self, before: State, after: State, step: Step, at: int, words: tuple[Any, ...]
    ) -> tuple[Work, Run | None]:
        """Acknowledge after each run to the end, whether that was recorded or not."""
        work, owner = before.works[at], step.args[1]
        mine = (work.owner, work.fence) == (owner, step.args[2]) and not work.done
        if mine:
            self.check(after, words[0] == "ok", "P5: the owner is refused")
            return Work(fence=work.fence, done=True), Run("done")
        self.check(after, after.records == before.records, "P5: who does not own the work changes it")
        return work, Run("done")

    def _released(
        self, before: State, after: State, step: Step, at: int, words: tuple[Any, ...]
    ) -> tuple[Work, Run | None]:
        work, owner = before.works[at], step.args[1]
        if work.owner == owner:
            self.check(after, words[0] == "ok", "P5: the owner is refused")
            return Work(fence=work.fence), Run("failed")
        self.check(after, after.records == before.records, "P5: who does not own the work changes it")
        return work, Run("failed")


def _lost(before: State, step: Step) -> bool:
    """Return whether the caller has lost its delivery: a fence that has seen its successor refuses its token."""
    held, flight = before.workers[step.worker], search.in_flight(before.content).get(b"k")
    return held is not None and (flight is None or flight[0] != held.fence)


def _work(held: Held) -> int:
    return WORKS.index(tuple(sorted(held.items)))


def _words(reply: Any) -> tuple[Any, ...]:
    """What a claim or an ending is answered, without the time."""
    packed = bytes(reply) if isinstance(reply[0], int) else b""
    if packed[:1] == b"s":
        return "started", *struct.unpack_from(">xQ", packed)
    if packed:
        return ("ok",) if packed == b"k" else ("done",)
    return reply[0].decode(), *reply[2:]


def _rested(state: search.State) -> State:
    """Who holds nothing has come nowhere."""
    assert isinstance(state, State)
    runs = tuple(run if held else None for run, held in zip(state.runs, state.workers, strict=True))
    return replace(state, runs=runs)


def _put(runs: tuple[Run | None, ...], at: int, one: Run | None) -> tuple[Run | None, ...]:
    return (*runs[:at], one, *runs[at + 1 :])
