"""kill -9 of a worker's process, at every script boundary, inside its handlers, and at random moments.

What must hold, whatever the place: every accepted trigger ends in a delivery that was completed, or in the dead
letters. A message runs at most once more than its leases were lost, its attempts are counted, and its fencing tokens
rise.

`IDEMGATE_KILLS` (see conftest.py) says how many more are to be killed than the few a place and flavour of the suite.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter, defaultdict
from typing import Any, NamedTuple

import pytest

from tests.resilience.judging import KillCase, history_of

SIGKILL = "SIGKILL of a worker, at every script boundary, in its handlers and at random moments"
LEASE = 0.06
"""Seconds. Heartbeats come every 10 ms; it lapses only when the test's clock says so."""


class Place(NamedTuple):
    """Where processes die, and what their handlers do beside noting that they run."""

    die: str
    does: tuple[str, ...] = ()


PLACES = [
    Place("before topics/take"),
    Place("after topics/take"),
    Place("after topics/take 3"),
    Place("before topics/settle"),
    Place("after topics/settle"),
    Place("before topics/settle 3"),
    Place("after topics/settle 3"),
    Place("before topics/settle_and_take"),
    Place("after topics/settle_and_take"),
    Place("after topics/settle_and_take", ("fails",)),
    Place("before topics/settle", ("fails",)),
    Place("after topics/settle", ("fails",)),
    Place("before topics/extend", ("linger",)),
    Place("after topics/extend", ("linger",)),
    Place("before topics/trigger", ("trigger",)),
    Place("after topics/trigger", ("trigger",)),
    Place("in handler"),
    Place("in handler 4"),
]


class Case(KillCase):
    """A topic with some work, and the processes that do it, of which some die."""

    def __init__(self, zygote: Any, url: str, raw: Any, namespace: str) -> None:
        super().__init__(zygote, url, raw, namespace, scene="work", lease=LEASE, linger=0.03)
        self.topic = self.gate.topic("t", merge="append", slots=2, lease=LEASE, max_attempts=17, backoff=0)
        self.follow = self.gate.topic("follow")
        self.sent: dict[str, list[int]] = defaultdict(list)

    def trigger(self, *keys: str) -> None:
        """One trigger a key, each with a payload of its own."""
        for key in keys:
            self.sent[key].append(sum(map(len, self.sent.values())))
            assert self.topic.trigger(key, self.sent[key][-1]).accepted

    def run(self, flavour: str, does: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
        """A process on the clock as it is now; afterwards a lease (of `LEASE`) that it still had is over."""
        ended = self.run_process(flavour, does, **{"concurrency": 3, "prefetch": 2, "max_attempts": 17, **more})
        self.clock.advance(LEASE)
        return ended

    def finish(self, flavour: str, does: tuple[str, ...] = ()) -> None:
        """Processes that live, until nothing is left."""
        for _ in range(100):
            assert self.run(flavour, does) == {"signal": None, "said": None}
            stats = self.topic.stats()
            if stats.pending == stats.in_flight == 0:  # a delivery whose lease is lost before its handler begins stays
                return
        pytest.fail(f"something is left: {self.topic.stats()}")

    def runs(self) -> dict[str, list[tuple[int, int, list[int]]]]:
        """(attempt, token, payload) of every start of a handler, by key, in their order."""
        found: dict[str, list[tuple[int, int, list[int]]]] = defaultdict(list)
        for event in history_of(self.raw, self.namespace).events:
            if event.what == "start":
                found[event.key].append((event.attempt, event.token, event.note))
        return found

    def check(self, does: tuple[str, ...] = ()) -> None:
        """All that must hold once nothing is left to do."""
        stats, runs, letters = self.topic.stats(), self.runs(), self.topic.dead.list()
        assert (stats.pending, stats.in_flight) == (0, 0)
        # Conservation: what was accepted was acknowledged, or lies in the dead letters.
        assert stats["accepted"] == sum(map(len, self.sent.values()))
        assert stats["accepted"] == stats["acked_triggers"] + sum(letter.count for letter in letters)
        for key, payloads in self.sent.items():
            seen = {payload for run in runs[key] for payload in run[2]}
            assert seen | {payload for letter in letters if letter.key == key for payload in letter.payload} == {
                *payloads
            }
        # Every delivery ended in one way; handlers started at most once more than leases were lost or attempts failed.
        ended = stats["acked"] + stats["nacked"] + stats["lapsed"]
        assert stats["taken"] == ended + stats["returned"]
        assert sum(map(len, runs.values())) <= ended
        for key, starts in runs.items():
            tokens = [token for _, token, _ in starts]
            assert tokens == sorted(set(tokens)), (key, tokens)
            for (before, _, had), (after, _, has) in itertools.pairwise(starts):
                # Counted on, or another message, or one that a trigger joined, whose attempts start anew.
                assert after > before or not set(had) & set(has) or set(has) - set(had), (key, starts)
        if "trigger" in does:  # however often a handler ran, what it triggered counts once
            assert self.follow.stats()["accepted"] == len(self.sent)


@pytest.mark.parametrize("flavour", ["sync", "async"])
@pytest.mark.parametrize("place", PLACES, ids=lambda place: " ".join((place.die, *place.does)))
def test_killed_at(case: Any, flavour: str, place: Place, record_fault: Any) -> None:
    one = case()
    # Given ten keys, some triggered twice, and a worker that dies at this place, and another
    one.trigger(*"abcdefghij", *"aceg")
    for more in range(10):
        if one.run(flavour, place.does, die=place.die)["signal"] == 9:
            break
        one.trigger(*(f"{key}{more}{n}" for key in "abcdefghij" for n in range(3)))  # it was done before it got there
    else:
        pytest.fail(f"no process got {place.die}")
    one.run(flavour, place.does, die=place.die)  # what is left may be too little to get there again
    # When others do the work
    one.finish(flavour, place.does)
    # Then all is done, and the last run of each key had all its payloads
    one.check(place.does)
    assert one.topic.dead.list() == []
    assert {key: starts[-1][2] for key, starts in one.runs().items()} == one.sent
    record_fault(SIGKILL, 1, promises="P3 P7 P11 P12", triggers=one.topic.stats()["accepted"], lost=0)


@pytest.mark.parametrize("flavour", ["sync", "async"])
def test_killed_at_random_moments(
    case: Any, zygote: Any, flavour: str, drawn: random.Random, seed: int, record_fault: Any
) -> None:
    for _ in range(4):
        one = case()
        one.trigger(*"abcdefghij", *"aceg")
        for _ in range(3):
            one.run(flavour, kill_after=drawn.uniform(0, 0.04))
        one.finish(flavour)
        one.check()
    assert zygote.kills > 0
    record_fault(SIGKILL, zygote.kills, promises="P3 P7 P11 P12", seed=seed, triggers=4 * 14, lost=0)


@pytest.mark.parametrize("flavour", ["sync", "async"])
def test_what_is_triggered_while_its_key_is_in_flight_in_a_dead_process_is_not_lost(case: Any, flavour: str) -> None:
    # Given a process that died with a delivery in flight
    one = case()
    one.trigger("a")
    assert one.run(flavour, die="in handler")["signal"] == 9
    # When its key is triggered again, before and after anybody noticed
    one.trigger("a")
    assert one.run(flavour, die="after topics/take")["signal"] == 9
    one.trigger("a")
    one.finish(flavour)
    # Then the last run has it all
    one.check()
    assert [payload for _, _, payload in one.runs()["a"]] == [[0], [0, 1, 2]]


@pytest.mark.parametrize(("concurrency", "prefetch"), [(1, 0), (3, 2), (32, 8)])
def test_a_message_that_kills_its_worker_ends_in_the_dead_letters(
    case: Any, concurrency: int, prefetch: int, record_fault: Any
) -> None:
    # Given a message whose handler kills the process, among others that are taken together with it
    one, deaths = case(), 0
    one.order["lease"] = 10
    one.trigger(*"abcdefghij")
    shape = {"poison": "e", "max_attempts": 6, "concurrency": concurrency, "prefetch": prefetch}
    # When a worker is started whenever something is due or lapsed, until nothing is left
    lapses: set[int] = set()
    while (stats := one.topic.stats()).pending + stats.in_flight:
        due = {round(stats.next_due.timestamp() * 1000)} if stats.next_due else set()
        now = max(min(lapses | due), one.clock.microseconds() // 1000)
        one.clock.set(now / 1000)
        lapses = {moment for moment in lapses if moment > now}
        if one.run("async", **shape)["signal"] == 9:
            deaths += 1
            lapses.add(now + 10_000)
    # Then it was tried as often as it may be, and lies in the dead letters with what happened
    assert deaths == 6
    one.check()
    (letter,) = one.topic.dead.list()
    assert (letter.key, letter.attempts) == ("e", 6)
    assert letter.reason == "lease lapsed: its worker vanished or stalled"
    # And the others are done: what was in flight with it twice was set apart from it
    runs = one.runs()
    assert [attempt for attempt, _, _ in runs["e"]] == [1, 2, 3, 4, 5, 6]
    assert all(runs[key][-1][0] <= 4 for key in "abcdfghij")
    record_fault("a message that kills every worker that takes it", deaths, promises="P7 P11", others_lost=0)


@pytest.mark.timeout(0)
def test_many_kills(case: Any, zygote: Any, kills: int, drawn: random.Random, seed: int, record_fault: Any) -> None:
    """Only with IDEMGATE_KILLS."""
    if not kills:
        pytest.skip("IDEMGATE_KILLS says how many")
    found: Counter[str] = Counter()
    triggers = runs = lapses = 0
    before = zygote.kills
    while zygote.kills - before < kills:
        one = case()
        one.trigger(*"abcdefghij", *drawn.choices("abcdefghij", k=6))
        does = tuple(word for word in ("trigger", "linger") if drawn.random() < 0.5)
        fitting = [place for place in PLACES if {*place.does} <= {*does, "fails"}]
        for _ in range(drawn.randint(1, 6)):
            flavour = drawn.choice(["sync", "async"])
            if drawn.random() < 0.4:
                place_, ended = "at a random moment", one.run(flavour, does, kill_after=drawn.uniform(0, 0.04))
            else:
                place = drawn.choice(fitting)
                place_, ended = place.die, one.run(flavour, (*does, *place.does), die=place.die)
            found[place_] += ended["signal"] == 9
            if drawn.random() < 0.3:
                one.trigger(drawn.choice("abcdefghij"))
        one.finish(drawn.choice(["sync", "async"]), does)
        stats = one.topic.stats()
        one.check(does)
        triggers += stats["accepted"]
        lapses += stats["lapsed"]
        runs += sum(map(len, one.runs().values()))
    n = zygote.kills - before
    record_fault(SIGKILL, n, promises="P3 P7 P11 P12", seed=seed, triggers=triggers, lost=0, lapses=lapses)
    print(f"\n{n} kills, {triggers} triggers, {runs} runs, {lapses} lapses: lost 0; 95 % bound 3/N = {3 / n:.4f}")
    for place_, count in sorted(found.items()):
        print(f"  {place_:30} {count}")
