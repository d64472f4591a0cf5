"""A real server and a plain model, step by step: replies, messages, counters and dead letters stay the same.

`IDEMGATE_STEPS=100000 pytest -s tests/topics/test_model.py` runs about that many steps, over all policies together,
instead of those of ten seconds, and prints how many there were.
"""

from __future__ import annotations

import itertools
import os
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from idemgate import Delivery, Gate, Trigger, append
from idemgate.core.calls import Batch, Call, stamp
from idemgate.testing import Clock
from idemgate.topics.dead_letters import DeadFilter
from idemgate.topics.deliveries import Settlement
from idemgate.topics.messages import Message as Packed
from idemgate.topics.messages import Taken, moment
from idemgate.topics.topic_calls import TopicCalls
from tests.topics.model import NEVER, Letter, Model, Rules

pytestmark = pytest.mark.one_in(5)

WEIGHTS = {
    "trigger": 10, "take": 3, "wait_and_take": 6, "settle": 9, "turn": 3, "extend": 1, "cancel": 1, "bury": 1,
    "reschedule": 1, "flush": 1, "flush_all": 1, "exhume": 3, "load": 1, "time": 5, "again": 4, "pause": 1,
}  # fmt: skip
HAPPENED = (
    "acked", "nacked", "buried", "returned", "deferred", "lapsed", "lost", "cancelled", "redriven", "deleted", "folded",
    "replaced", "duplicate", "dropped",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A policy as a program says it, and as each slot has it; what its triggers may name; what it is redefined to."""

    options: dict[str, Any]
    rules: tuple[Rules, ...]
    groups: tuple[str, ...] = ("",)
    others: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = ()

    @property
    def steps(self) -> list[str]:
        weights = WEIGHTS | ({"redefine": 2} if self.others else {})
        return [verb for verb, weight in weights.items() for _ in range(weight)]


def firsts(number: int) -> dict[str, Any]:
    """A list with room for so many."""
    return {"merge": lambda payloads: payloads[:number], "kept": number}


GROUPS = ("g", "h", "g", "h", "")
CASES = {
    "quiet, bounded": Case(
        {"quiet": 10, "max_delay": 25, "max_size": 3, "merge": append(3)},
        (Rules(quiet=10_000, max_delay=25_000, max_size=3, **firsts(3)),),
    ),
    "leading window": Case(
        {"window": 10, "edge": "leading", "merge": "last"}, (Rules(window=10_000, leading=True, replaces=True),)
    ),
    "leading window, one attempt": Case(
        {"window": 20, "edge": "leading", "merge": "last", "max_attempts": 1},
        (Rules(window=20_000, leading=True, replaces=True, max_attempts=1),),
    ),
    "groups, the last of a quiet time": Case(
        {"quiet": 5, "max_delay": 8, "max_size": 4, "merge": "last"},
        (Rules(quiet=5_000, max_delay=8_000, max_size=4, replaces=True),),
        GROUPS,
    ),
    "leading quiet": Case(
        {"quiet": 10, "max_delay": None, "edge": "leading", "merge": "first"},
        (Rules(quiet=10_000, leading=True, merge=lambda payloads: payloads[0]),),
    ),
    "window": Case({"window": 10, "max_size": 5, "merge": "sum"}, (Rules(window=10_000, max_size=5, merge=sum),)),
    "at once": Case({"merge": append(3)}, (Rules(**firsts(3)),)),
    "priorities": Case({"priority": True, "merge": append(9)}, (Rules(ranked=True, **firsts(9)),)),
    "boosted, window": Case(
        {"priority_boost": 5, "window": 10, "merge": "sum"},
        (Rules(ranked=True, boost=5_000, window=10_000, merge=sum),),
    ),
    "groups": Case({"merge": append(9)}, (Rules(**firsts(9)),), GROUPS),
    "groups of two, quiet": Case(
        {"group_concurrency": 2, "quiet": 5, "max_delay": None, "merge": append(9)},
        (Rules(together=2, quiet=5_000, **firsts(9)),),
        ("g", "g", "g", "h", ""),
    ),
    "groups with priorities": Case({"priority": True, "merge": "sum"}, (Rules(ranked=True, merge=sum),), GROUPS),
    "limits": Case(
        {"concurrency": 2, "rate": "12/1m", "burst": 3, "merge": "sum"},
        (Rules(most=2, interval=5_000_000, burst=3, merge=sum),),
    ),
    "limits of two slots, boosted groups": Case(
        {"slots": 2, "concurrency": 5, "rate": "24/1m", "burst": 5, "priority_boost": 3, "merge": append(9)},
        (
            Rules(most=3, interval=5_000_000, burst=3, ranked=True, boost=3_000, **firsts(9)),
            Rules(most=2, interval=5_000_000, burst=2, ranked=True, boost=3_000, **firsts(9)),
        ),
        GROUPS,
    ),
    "redefined": Case(
        {"merge": "sum"},
        (Rules(merge=sum),),
        ("g", "h", ""),
        (
            ({}, {}),
            ({"priority": True}, {"ranked": True}),
            ({"priority_boost": 5}, {"ranked": True, "boost": 5_000}),
            ({"window": 10, "concurrency": 3}, {"window": 10_000, "most": 3}),
        ),
    ),
}
LIMITS: dict[str, Any] = {
    "lease": 20,
    "max_attempts": 3,
    "dead_retention": 60,
    "max_dead_letters": 2,
    "dedup_retention": 30,
}
KEYS = ("a", "b", "c", "d", "e")
LENGTH = 60
EXAMPLES = 1 + int(os.environ.get("IDEMGATE_STEPS", "6500")) // (LENGTH - 1) // len(CASES)

SPANS = (0, 1, 500, 5_000, 10_000, 25_000)
MOVES = (1, 1, 999, 1_000, 3_000, 3_000, 5_000, 5_000, 9_999, 10_000, 20_000, 61_000)
NAMED = [("delay", ms) for ms in (0, 1, 5_000, 25_000)] + [("at", ms) for ms in (-9_000, 7_000, 40_000)]
WHENS = [None] * 9 + NAMED
VERBS = ("ack", "ack", "nack", "nack", "bury", "bury", "return", "defer")
PRIORITIES = (None, None, 0, 1, 2, 9, -3)
VERSIONS = [None] * 9 + [1, 2, 3, 4, 5, 6]
EVENTS = [None] * 9 + ["e1", "e2", "e3"]
_numbers = itertools.count()


def _ms(time: Any) -> int | None:
    return None if time is None else round(time.timestamp() * 1000)


def _taken(taken: Taken) -> Any:
    return [(one.key, one.token) for one in taken.deliveries], taken.lapsed


def _settled(model: Model, settlements: list[Settlement]) -> list[str]:
    outcomes = [model.settle(verb, one.key, one.token, delay, failure) for verb, one, delay, failure, *_ in settlements]
    model.discard()
    return outcomes


def _receipts(receipts: Any) -> Any:
    return [(receipt.status, _ms(receipt.due_at)) for receipt in receipts]


def _shown(message: Packed | None) -> Any:
    if message is None:
        return None
    return (
        message.count, message.payload, message.first_ms, message.last_ms, message.attempts, message.reason,
        message.version, message.failure, message.priority, message.group, message.dropped,
    )  # fmt: skip


@dataclass
class Sent:
    """A call that was made, its answer, and how to ask the model again."""

    slot: int
    call: Call[Any]
    when: int
    reply: Any
    expected: Callable[[Any], Any]


class Machine(RuleBasedStateMachine):
    """Each rule does one thing to the server and to the model, and compares what they answer."""

    gate: Gate
    clock: Clock
    case: Case
    seen: Counter[str]
    ends: list[float]  # the time at which each example ended, seconds

    @initialize(seed=st.integers(0, 2**64 - 1))
    def begin(self, seed: int) -> None:
        # All choices from one seed: drawn one by one they would take thrice the time, and come out less even.
        self.any_of = Random(seed)
        self.clock.set(1_700_000_000 + self.any_of.randrange(60))
        self.name = f"t{next(_numbers)}"
        self.rules = self.case.rules
        self.models = [Model(rules, self.now) for rules in self.rules]
        self.calls: TopicCalls = self.gate.topic(self.name, **LIMITS | self.case.options).open()
        self.deliveries: list[Delivery[Any]] = []
        self.sent: list[Sent] = []
        self.kept: dict[tuple[int, int, str], tuple[bytes, Letter]] = {}  # what was a letter: stored, and in the model
        # A name that lives in each slot: what the group is else for, does not matter to those who look.
        homes = {self._slot(str(number)): str(number) for number in range(32)}
        self.homes = [homes[slot] for slot in range(len(self.models))]

    @property
    def now(self) -> int:
        return self.clock.microseconds() // 1000

    def _slot(self, name: str) -> int:
        return zlib.crc32(name.encode()) % len(self.models)

    def _run(
        self,
        slot: int,
        call: Call[Any],
        expected: Callable[[Any], Any],
        read: Callable[[Any], Any] = lambda answer: answer,
    ) -> Any:
        """Sends a call and compares; keeps it, to be sent again."""
        answer = self.gate.context.link.run(call)
        reply = read(answer)
        note(f"  slot {slot}: {call.script.name} {call.args[2:]} -> {reply}")
        assert reply == expected(reply)
        self.sent.append(Sent(slot, call, self.now, reply, expected))
        return answer

    def _any_slot(self, any_of: Random) -> int:
        return 0 if len(self.models) == 1 else any_of.randrange(len(self.models))  # type: ignore[no-any-return]

    def _move_to(self, ms: int) -> None:
        self.clock.set(ms / 1000)
        for model in self.models:
            model.now = self.now

    # -- steps --------------------------------------------------------------------------------------------------------

    @rule()
    def step(self) -> None:
        """One rule that chooses by weight: with a rule for each verb, most examples would leave most verbs out, and
        cancel more than they trigger."""
        any_of = self.any_of
        verb = any_of.choice(self.case.steps)
        type(self).seen[verb] += 1
        note(f"{self.clock}: {verb}")
        getattr(self, f"_{verb}")(any_of)

    def _trigger(self, any_of: Random) -> None:
        some = [self._one_trigger(any_of) for _ in range(any_of.randint(1, 4))]
        calls = self.calls.trigger_many([trigger for trigger, _ in some]).calls
        by_slot: dict[int, list[Any]] = defaultdict(list)
        for trigger, said in some:
            by_slot[self._slot(str(trigger.group or trigger.key))].append(said)
        for call, (slot, said) in zip(calls, by_slot.items(), strict=True):
            self._put(slot, call, said)

    def _put(self, slot: int, call: Call[Any], said: list[Any]) -> None:
        self._run(slot, call, lambda _: [self.models[slot].trigger(*one) for one in said], _receipts)

    def _one_trigger(self, any_of: Random) -> tuple[Trigger, Any]:
        """Send a call to the server, and the same to the model."""
        key, payload = any_of.choice(KEYS), any_of.randint(-5, 5)
        when, version, event = any_of.choice(WHENS), any_of.choice(VERSIONS), any_of.choice(EVENTS)
        group = any_of.choice(self.case.groups) if len(self.case.groups) > 1 else ""
        priority = any_of.choice(PRIORITIES) if self.rules[0].ranked else None
        kind, ms = when or ("", 0)
        times: Any = {"delay": {"delay": ms / 1000}, "at": {"at": moment(self.now + ms)}}.get(kind, {})
        trigger = Trigger(
            key, payload, priority=priority, group=group or None, version=version, event_id=event, **times
        )
        return trigger, (key, payload, self.now + ms if when else None, priority, group, version, event)

    def _take(self, any_of: Random) -> None:
        self._take_from(self._any_slot(any_of), any_of.choice([0, 1, 1, 2, 10]))

    def _take_from(self, slot: int, n: int) -> None:
        model = self.models[slot]
        taken: Taken = self._run(
            slot,
            self.calls.take(slot, n),
            lambda reply: model.take(n, [key for key, _ in reply[0]]),
            _taken,
        )
        self._compare_taken(model, n, taken)

    def _compare_taken(self, model: Model, n: int, taken: Taken) -> None:
        # An empty reply says when the next message is due. After a reply with messages, a worker takes again.
        if n > 0 and not taken.deliveries:
            assert not 0 < taken.next_due_ms <= self.now
        # But for what the rate holds back: whether that stands behind its group is found out later.
        self._compare_next(model, taken.next_due_ms, exact=n > 0 and not taken.deliveries and model.opens() <= self.now)
        for one in taken.deliveries:
            message = model.flights[one.key].message
            assert (one.due_ms, one.due_ms <= self.now) == (message.due, True)
            assert _shown(one._message) == model.shown(message)
        self.deliveries += taken.deliveries

    def _compare_next(self, model: Model, told: int, *, exact: bool) -> None:
        """Nobody may be told to sleep for longer than until there is work; nor to look again at once, for nothing."""
        told, due = max(told or NEVER, self.now), max(model.next_work(), self.now)
        assert told == due if exact else told <= due

    def _wait_and_take(self, any_of: Random) -> None:
        """As a worker does: sleeps until there is work, and takes it."""
        slot = self._any_slot(any_of)
        due = self.models[slot].next_work()
        if due < NEVER:
            self._move_to(max(self.now, due))
        self._take_from(slot, any_of.choice([1, 2, 10]))

    def _settle(self, any_of: Random) -> None:
        """Mostly what is in flight, also stale ones; perhaps the same one twice."""
        if not (ending := self._ending(any_of)):
            return
        slot = ending[0].delivery.slot
        model = self.models[slot]
        settled = self._run(
            slot, self.calls.settle(slot, ending), lambda _: _settled(model, ending), lambda answer: answer.outcomes
        )
        plain = not model.paused and self.case.groups == ("",) and model.rules.most is model.rules.interval is None
        self._compare_next(model, settled.next_due_ms, exact=plain)

    def _turn(self, any_of: Random) -> None:
        """Settles, then takes, in one step."""
        if not (ending := self._ending(any_of)):
            return
        slot, n = ending[0].delivery.slot, any_of.choice([0, 1, 1, 2, 10])
        model = self.models[slot]
        turned = self._run(
            slot,
            self.calls.settle_and_take(slot, ending, n),
            lambda reply: (_settled(model, ending), model.take(n, [key for key, _ in reply[1][0]])),
            lambda answer: (answer.settled.outcomes, _taken(answer.taken)),
        )
        self._compare_taken(model, n, turned.taken)

    def _ending(self, any_of: Random) -> list[Settlement]:
        if not self.deliveries or not (any(model.flights for model in self.models) or any_of.random() < 0.3):
            return []
        first = self._delivery(any_of)
        second = self._delivery(any_of)
        found = [first, second] if second.slot == first.slot and any_of.random() < 0.5 else [first]
        verb, delay = any_of.choice(VERBS), any_of.choice(SPANS)
        verbs = [verb, any_of.choice([verb, "ack"])]
        return [Settlement(verb, one, delay, "because") for verb, one in zip(verbs, found, strict=False)]

    def _extend(self, any_of: Random) -> None:
        if self.deliveries:
            one, lease = self._delivery(any_of), any_of.choice([1_000, 20_000, 50_000])
            model = self.models[one.slot]
            self._run(
                one.slot,
                self.calls.extend(one.slot, [one], lease),
                lambda _: [model.extend(one.key, one.token, lease)],
            )

    def _delivery(self, any_of: Random) -> Delivery[Any]:
        """One that is in flight, or a zombie: one that was lost or is settled already."""
        live = [one for one in self.deliveries if self.models[one.slot].holds(one.key, one.token)]
        return any_of.choice(live if live and any_of.random() < 0.8 else self.deliveries[-9:])

    def _cancel(self, any_of: Random) -> None:
        slot, key = self._any_slot(any_of), any_of.choice(KEYS)
        self._run(slot, self.calls.cancel(key, self.homes[slot]), lambda _: self.models[slot].cancel(key))

    def _bury(self, any_of: Random) -> None:
        slot, key = self._any_slot(any_of), any_of.choice(KEYS)
        call = self.calls.bury(key, self.homes[slot], "because")
        self._run(slot, call, lambda _: self.models[slot].bury(key, "because"))

    def _reschedule(self, any_of: Random) -> None:
        slot, key, delay = self._any_slot(any_of), any_of.choice(KEYS), any_of.choice(SPANS)
        at = self.now + delay
        call = self.calls.reschedule(Trigger(key, delay=delay / 1000, group=self.homes[slot]))
        self._run(slot, call, lambda _: self.models[slot].reschedule(key, at))

    def _flush(self, any_of: Random) -> None:
        slot, key = self._any_slot(any_of), any_of.choice(KEYS)
        self._run(slot, self.calls.flush(key, self.homes[slot]), lambda _: self.models[slot].flush(key))

    def _flush_all(self, any_of: Random) -> None:
        slot = self._any_slot(any_of)
        self._run(slot, self.calls.flush_slot(slot), lambda _: self.models[slot].flush_all())

    def _pause(self, any_of: Random) -> None:
        """Mostly resumed: little happens in a topic that is paused."""
        pause = any_of.choice([True, False, False]) if not self.models[0].paused else False
        for slot, call in enumerate((self.calls.pause() if pause else self.calls.resume()).calls):
            self._run(slot, call, lambda _, slot=slot: self.models[slot].pause(pause))  # type: ignore[misc]

    def _exhume(self, any_of: Random) -> None:
        """All dead letters, or some: of those that there are, and of those that there were."""
        slot = self._any_slot(any_of)
        model = self.models[slot]
        verb = any_of.choice(["redrive", "delete"])
        known = [letter.token for letter in model.dead] + [one.token for one in self.deliveries[-1:]]
        tokens = any_of.sample(known, min(len(known), any_of.randrange(3)))
        call = self.calls.take_dead(slot, verb, [str(token) for token in tokens])
        self._run(slot, call, lambda _: model.exhume(verb, tokens))

    def _load(self, any_of: Random) -> None:
        """A dead letter, mostly one that has been redriven or deleted."""
        if not self.kept:
            return
        (slot, *_), (stored, letter) = any_of.choice([*self.kept.items()])
        [call] = self.calls.load_dead([(self.homes[slot].encode(), stored)]).calls
        self._run(slot, call, lambda _: [self.models[slot].load(letter)])

    def _redefine(self, any_of: Random) -> None:
        options, facts = any_of.choice(self.case.others)
        self.rules = tuple(replace(rules, **facts) for rules in self.case.rules)
        revision = self.gate.topic(self.name).policy.revision + 1
        self.calls = self.gate.topic(self.name, revision=revision, **LIMITS | self.case.options | options).open()
        for model, rules in zip(self.models, self.rules, strict=True):
            model.redefine(rules)

    def _time(self, any_of: Random) -> None:
        self._move_to(self.now + any_of.choice(MOVES))

    def _again(self, any_of: Random) -> None:
        """A copy of an earlier call, while its answer is remembered: no second effect."""
        if not self.sent:
            return
        sent = any_of.choice(self.sent[-20:])
        verb = sent.call.script.name.partition("/")[2]
        copy = Call(sent.call.script, sent.call.keys, (stamp(self.clock), *sent.call.args[1:]), sent.call.read)
        if verb == "extend":
            assert self.gate.context.link.run(copy) == sent.expected(None)
        elif self.now // 30_000 - sent.when // 30_000 <= 1:
            self._answered_again(verb, copy, sent)

    def _answered_again(self, verb: str, copy: Call[Any], sent: Sent) -> None:
        if verb == "take" and sent.reply == ([], 0):
            return  # it had no effect, and its answer was not kept: a copy is another take
        answer = self.gate.context.link.run(copy)
        if verb == "settle_and_take":
            (outcomes, (taken, lapsed)), own = sent.reply, self._own(sent)
            assert (answer.settled.outcomes, _taken(answer.taken)) == (
                outcomes,
                ([one for one in taken if one in own], lapsed),
            )
        elif verb == "take":
            own = self._own(sent)
            assert _taken(answer) == ([one for one in sent.reply[0] if one in own], sent.reply[1])
        elif verb == "trigger":
            assert _receipts(answer) == sent.reply
        elif verb == "settle":
            assert answer.outcomes == sent.reply
        else:
            assert answer == sent.reply

    def _own(self, sent: Sent) -> set[tuple[str, int]]:
        return {(key, flight.token) for key, flight in self.models[sent.slot].flights.items()}

    def teardown(self) -> None:
        self.ends.append(self.now / 1000)
        for model in getattr(self, "models", []):
            type(self).seen.update(model.counters)

    # -- after each step ----------------------------------------------------------------------------------------------

    @invariant()
    def server_and_model_agree(self) -> None:
        if not hasattr(self, "models"):
            return
        looks: list[Call[Any]] = []
        for slot, stats in enumerate(self.calls.stats().calls):
            looks += [stats, self.calls.dead(slot, DeadFilter(), 100)]
            looks += [self.calls.peek(key, self.homes[slot]) for key in KEYS]
        answers = iter(self.gate.context.link.run_all(Batch(looks, list)))
        for slot, model in enumerate(self.models):
            stats, letters = next(answers), next(answers).letters
            self._compare_stats(model, stats)
            self._compare_letters(model, self.calls.stats().join([stats]).dead, letters)
            for one, letter in zip(letters, reversed(model.dead), strict=True):
                copy = replace(letter, message=replace(letter.message))
                self.kept.setdefault((slot, letter.token, letter.key), (one.stored, copy))
            for key in KEYS:
                self._compare_key(model, key, next(answers))
            assert model.unaccounted() == 0

    def _compare_stats(self, model: Model, reply: list[Any]) -> None:
        stats = self.calls.stats().join([reply])
        places = (stats.scheduled, stats.ready + stats.blocked, stats.waiting, stats.in_flight, stats.dead)
        assert places == model.places()
        # Whether a due message stands behind its group is found out when it is to be handed out.
        assert 0 <= stats.blocked <= model.behind()
        assert (bool(stats.paused), dict(stats.counters)) == (model.paused, model.counted())
        due = [message.due for message in model.pending.values() if message.due <= self.now]
        assert (_ms(stats.oldest_due), stats.sampled) == (min(due, default=None), False)
        assert stats.lateness == timedelta(milliseconds=self.now - min(due, default=self.now))
        blocked = [one.oldest_due for one in stats.blocked_groups]
        assert sum(one.count for one in stats.blocked_groups) == stats.blocked
        assert stats.oldest_blocked is None or stats.oldest_blocked.oldest_due == min(blocked)
        told = max(_ms(stats.next_due) or NEVER, self.now)
        standing = min((message.due for message in model._standing().values()), default=NEVER)
        unblocked = min((message.due for message in model.unblocked()), default=NEVER)
        assert max(standing, self.now) <= told <= max(unblocked, self.now)

    def _compare_letters(self, model: Model, dead: int, letters: list[Any]) -> None:
        assert dead == len(letters)
        seen = [
            (int(one.id.partition("-")[2]), one.key, one.reason, _ms(one.died_at), _shown(one.message))
            for one in letters
        ]
        assert seen == model.letters()

    def _compare_key(self, model: Model, key: str, peek: Any) -> None:
        flight = (_shown(peek.in_flight), peek.token, _ms(peek.lease_until)) if peek.in_flight else None
        assert (_shown(peek.pending), _ms(peek.due_at), flight) == model.peek(key)


@pytest.mark.timeout(0 if "IDEMGATE_STEPS" in os.environ else 120)
@pytest.mark.parametrize("name", CASES)
def test_a_topic_is_its_model(gate: Gate, clock: Clock, name: str, record_fault: Any) -> None:
    seen: Counter[str] = Counter()
    case = CASES[name]
    ends: list[float] = []
    facts = {"gate": gate, "clock": clock, "case": case, "seen": seen, "ends": ends}
    machine = type("TopicMachine", (Machine,), facts)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=LENGTH,
            deadline=None,
            derandomize="IDEMGATE_STEPS" not in os.environ,
            database=None,
            # Without shrinking, which takes minutes here; what is printed of a failure is short enough to be read.
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )
    # The audit compares the lifetime of keys with their entries. It holds at any time but an earlier one.
    clock.set(max(ends))
    verbs = set(case.steps)
    record_fault(
        "topic against its model: any order of calls, copies, late copies, moves of the clock (N: calls)",
        sum(seen[verb] for verb in verbs),
        promises="P5 P6 P7 P8 P9 P10 P11 P13 P15",
        divergences=0,
        policies=1,
    )
    print(f"{name}: {sum(seen[verb] for verb in verbs)} steps, in which {dict(sorted(seen.items()))}")
    # A walk that never gets anywhere would agree, too. (A short one that is left to chance may miss what is rare.)
    short = "IDEMGATE_STEPS" in os.environ and sum(seen[verb] for verb in verbs) < 5_000
    assert [verb for verb in (*verbs, *(() if short else HAPPENED)) if not seen[verb]] == []
