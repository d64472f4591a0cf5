"""A real server and a plain model, step by step: replies, messages, counters and dead letters stay the same.

`IDEMGATE_STEPS=20000 pytest -s tests/topic/test_model.py` runs about that many steps for each policy instead of a few
seconds, and prints how many there were.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from idemgate import Delivery, Gate, Trigger, append
from idemgate.core.calls import Batch, Call
from idemgate.core.clock import stamp
from idemgate.core.messages import Message as Packed
from idemgate.core.messages import Taken, moment
from idemgate.core.topics import Settlement
from idemgate.testing import Clock
from tests.topic.model import Model, Rules

KEYS = ("a", "b", "c")
LENGTH = 60
EXAMPLES = max(1, int(os.environ.get("IDEMGATE_STEPS", "1500")) // LENGTH)
WEIGHTS = {
    "trigger": 9, "take": 3, "wait_and_take": 6, "settle": 9, "extend": 1, "cancel": 1, "reschedule": 1, "flush": 1,
    "flush_all": 1, "exhume": 2, "time": 5, "again": 3,
}  # fmt: skip
STEPS = [verb for verb, weight in WEIGHTS.items() for _ in range(weight)]

POLICIES: dict[str, tuple[dict[str, Any], Rules]] = {
    "quiet, bounded": (
        {"quiet": 10, "max_delay": 25, "max_size": 4, "merge": append(3)},
        Rules(quiet=10_000, max_delay=25_000, max_size=4, merge=lambda payloads: payloads[:3], kept=3),
    ),
    "leading window": (
        {"window": 10, "edge": "leading", "merge": "last"},
        Rules(window=10_000, leading=True),
    ),
    "leading quiet": (
        {"quiet": 10, "edge": "leading", "merge": "first"},
        Rules(quiet=10_000, leading=True, merge=lambda payloads: payloads[0]),
    ),
    "window": (
        {"window": 10, "max_size": 5, "merge": "sum"},
        Rules(window=10_000, max_size=5, merge=sum),
    ),
    "at once": (
        {"merge": append(2)},
        Rules(merge=lambda payloads: payloads[:2], kept=2),
    ),
}  # fmt: skip
LIMITS: dict[str, Any] = {"lease": 20, "max_attempts": 3, "retention": 60, "max_dead": 3, "remember": 30}

keys = st.sampled_from(KEYS)
spans = st.sampled_from([0, 1, 500, 5_000, 10_000, 25_000])
moves = st.sampled_from([1, 999, 1_000, 3_000, 5_000, 9_999, 10_000, 20_000, 30_000, 61_000])
triggers = st.tuples(
    keys,
    st.integers(-5, 5),
    st.one_of(
        st.none(),
        st.none(),
        st.none(),
        spans.map(lambda ms: ("delay", ms)),
        st.integers(-9, 40).map(lambda s: ("at", s * 1000)),
    ),
    st.one_of(st.none(), st.none(), st.integers(1, 6)),
    st.one_of(st.none(), st.none(), st.sampled_from(["e1", "e2", "e3"])),
)
HAPPENED = ("acked", "nacked", "buried", "returned", "lapsed", "lost", "cancelled", "redriven", "deleted", "folded")
_numbers = itertools.count()


def _ms(time: Any) -> int | None:
    return None if time is None else round(time.timestamp() * 1000)


def _taken(taken: Taken) -> Any:
    return [(one.key, one.token) for one in taken.deliveries], taken.lapsed


def _shown(message: Packed | None) -> Any:
    if message is None:
        return None
    return (
        message.count, message.payload, message.first_ms, message.last_ms, message.attempts,
        message.reason, message.version, message.failure, message.dropped,
    )  # fmt: skip


class Machine(RuleBasedStateMachine):
    """Each rule does one thing to the server and to the model, and compares what they answer."""

    gate: Gate
    clock: Clock
    policy: str
    seen: Counter[str]

    @initialize(second=st.integers(0, 59))
    def begin(self, second: int) -> None:
        options, rules = POLICIES[self.policy]
        self.clock.set(1_700_000_000 + second)
        self.calls = self.gate.topic(f"t{next(_numbers)}", **options, **LIMITS).open()
        self.model = Model(rules, self.now)
        self.deliveries: list[Delivery[Any]] = []
        self.sent: list[tuple[Call[Any], int, Any, Callable[[], Any]]] = []

    @property
    def now(self) -> int:
        return self.clock.microseconds() // 1000

    def _run(
        self, call: Call[Any], expected: Callable[[], Any], read: Callable[[Any], Any] = lambda answer: answer
    ) -> Any:
        """Sends a call and compares; keeps it, to be sent again."""
        answer = self.gate.link.run(call)
        reply = read(answer)
        assert reply == expected()
        self.sent.append((call, self.now, reply, expected))
        return answer

    # -- steps --------------------------------------------------------------------------------------------------------

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """One rule that chooses by weight: with a rule for each verb, most examples would leave most verbs out, and
        cancel more than they trigger."""
        verb = data.draw(st.sampled_from(STEPS), "verb")
        type(self).seen[verb] += 1
        getattr(self, f"_{verb}")(data.draw)

    def _trigger(self, draw: Any) -> None:
        some = draw(st.lists(triggers, min_size=1, max_size=4))
        (call,) = self.calls.trigger_many([self._one_trigger(*one) for one in some]).calls
        times = [None if when is None else self.now + when[1] for _, _, when, _, _ in some]

        def expected() -> Any:
            return [
                self.model.trigger(key, payload, at, version, event)
                for (key, payload, _, version, event), at in zip(some, times, strict=True)
            ]

        self._run(call, expected, lambda receipts: [(receipt.status, _ms(receipt.due_at)) for receipt in receipts])

    def _one_trigger(self, key: str, payload: int, when: Any, version: int | None, event: str | None) -> Trigger:
        kind, ms = when or ("", 0)
        times = {"delay": {"delay": ms / 1000}, "at": {"at": moment(self.now + ms)}}
        return Trigger(key, payload, version=version, event_id=event, **times.get(kind, {}))

    def _take(self, draw: Any) -> None:
        n = draw(st.sampled_from([1, 2, 10]))
        taken: Taken = self._run(self.calls.take(0, n), lambda: self.model.take(n), _taken)
        assert taken.next_due_ms == self.model.next_work()
        for one in taken.deliveries:
            flight = self.model.flights[one.key]
            assert (one.due_ms, one.due_ms <= self.now) == (flight.due, True)
            assert _shown(one._message) == self.model.shown(flight.message)
        self.deliveries += taken.deliveries

    def _wait_and_take(self, draw: Any) -> None:
        """As a worker does: sleeps until there is work, and takes it."""
        self.clock.set(max(self.now, self.model.next_work()) / 1000)
        self.model.now = self.now
        self._take(draw)

    def _settle(self, draw: Any) -> None:
        """Mostly what is in flight, also stale ones; perhaps the same one twice."""
        if not self.deliveries:
            return
        verb = draw(st.sampled_from(["ack", "nack", "nack", "bury", "return"]))
        delay = draw(spans)
        found = [self._delivery(draw) for _ in range(draw(st.integers(1, 2)))]
        settled = self._run(
            self.calls.settle(0, [Settlement(verb, one, delay, "because") for one in found]),
            lambda: [self.model.settle(verb, one.key, one.token, delay, "because") for one in found],
            lambda answer: answer.outcomes,
        )
        assert settled.next_due_ms == self.model.next_work()

    def _extend(self, draw: Any) -> None:
        if self.deliveries:
            one, lease = self._delivery(draw), draw(st.sampled_from([1_000, 20_000, 50_000]))
            self._run(self.calls.extend(0, [one], lease), lambda: [self.model.extend(one.key, one.token, lease)])

    def _delivery(self, draw: Any) -> Delivery[Any]:
        live = [one for one in self.deliveries if self.model.holds(one.key, one.token)]
        return draw(st.sampled_from(live * 3 + self.deliveries[-2:]))  # type: ignore[no-any-return]

    def _cancel(self, draw: Any) -> None:
        key = draw(keys)
        self._run(self.calls.cancel(key), lambda: self.model.cancel(key))

    def _reschedule(self, draw: Any) -> None:
        key, delay = draw(keys), draw(spans)
        at = self.now + delay
        self._run(self.calls.reschedule(Trigger(key, delay=delay / 1000)), lambda: self.model.reschedule(key, at))

    def _flush(self, draw: Any) -> None:
        key = draw(keys)
        self._run(self.calls.flush(key), lambda: self.model.flush(key))

    def _flush_all(self, draw: Any) -> None:
        self._run(self.calls.flush_slot(0), self.model.flush_all)

    def _exhume(self, draw: Any) -> None:
        """All dead letters, or some: of those that there are, and of those that there were."""
        verb = draw(st.sampled_from(["redrive", "redrive", "delete"]))
        known = [letter.token for letter in self.model.dead] + [one.token for one in self.deliveries[-1:]]
        tokens = draw(st.lists(st.sampled_from(known), max_size=2)) if known else []
        call = self.calls.exhume(0, verb, [str(token) for token in tokens])
        self._run(call, lambda: self.model.exhume(verb, tokens))

    def _time(self, draw: Any) -> None:
        self.clock.advance(draw(moves) / 1000)
        self.model.now = self.now

    def _again(self, draw: Any) -> None:
        """A copy of an earlier call, while its answer is remembered: no second effect."""
        if not self.sent:
            return
        call, when, reply, expected = draw(st.sampled_from(self.sent[-8:]))
        verb = call.script.name.partition("/")[2]
        copy = Call(call.script, call.keys, (stamp(self.clock), *call.args[1:]), call.read)
        if verb == "extend":
            assert self.gate.link.run(copy) == expected()
        elif self.now // 30_000 - when // 30_000 <= 1:
            self._answered_again(verb, copy, reply)

    def _answered_again(self, verb: str, copy: Call[Any], reply: Any) -> None:
        if verb == "take" and reply == ([], 0):
            return  # it had no effect, and its answer was not kept: a copy is another take
        answer = self.gate.link.run(copy)
        if verb == "take":
            own = {(key, flight.token) for key, flight in self.model.flights.items()}
            assert _taken(answer) == ([one for one in reply[0] if one in own], reply[1])
        elif verb == "trigger":
            assert [(receipt.status, _ms(receipt.due_at)) for receipt in answer] == reply
        elif verb == "settle":
            assert answer.outcomes == reply
        else:
            assert answer == reply

    def teardown(self) -> None:
        if hasattr(self, "model"):
            type(self).seen.update(self.model.counters)

    # -- after each step ----------------------------------------------------------------------------------------------

    @invariant()
    def server_and_model_agree(self) -> None:
        if not hasattr(self, "model"):
            return
        looks = [*self.calls.stats().calls, self.calls.dead(0, 0, 100), *(self.calls.peek(key) for key in KEYS)]
        reply, (dead, letters), *peeks = self.gate.link.run_all(Batch(looks, list))
        stats = self.calls.stats().join([reply])
        places = (stats.scheduled, stats.ready, stats.waiting, stats.in_flight, stats.dead)
        assert (places, _ms(stats.next_due), dict(stats.counters)) == self.model.stats()
        for key, peek in zip(KEYS, peeks, strict=True):
            flight = (_shown(peek.in_flight), peek.token, _ms(peek.lease_until)) if peek.in_flight else None
            assert (_shown(peek.pending), _ms(peek.due_at), flight) == self.model.peek(key)
        assert dead == len(letters)
        seen = [
            (int(one.id.partition("-")[2]), one.key, one.reason, _ms(one.died_at), _shown(one.message))
            for one in letters
        ]
        assert seen == self.model.letters()
        assert self.model.unaccounted() == 0


@pytest.mark.timeout(0 if "IDEMGATE_STEPS" in os.environ else 120)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_topic_is_its_model(gate: Gate, clock: Clock, policy: str) -> None:
    seen: Counter[str] = Counter()
    machine = type("TopicMachine", (Machine,), {"gate": gate, "clock": clock, "policy": policy, "seen": seen})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=LENGTH,
            deadline=None,
            derandomize="IDEMGATE_STEPS" not in os.environ,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    steps = sum(seen[verb] for verb in WEIGHTS)
    print(f"{policy}: {steps} steps, in which {dict(sorted(seen.items()))}")
    # A walk that never gets anywhere would agree, too.
    assert [verb for verb in (*WEIGHTS, *HAPPENED) if not seen[verb]] == []
