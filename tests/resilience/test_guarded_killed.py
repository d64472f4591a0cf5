"""kill -9 of a process that runs a guarded function, at every script boundary, around the effect, and at random
moments.

What must hold, whatever the place: after the next process has come by, the key is done and its result is replayed.
The effect happened once; twice in one place only, after the effect and before its completion was recorded, which is
the window that the promises name; never more. Fencing tokens rise in the order of effects. A row that each effect
overwrites, and that refuses lower tokens, holds the last of them; it does not prevent the second effect
(`test_effects_killed.py`).

`IDEMGATE_KILLS` (see conftest.py) says how many more are to be killed than the one a place and flavour of the suite.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any, NamedTuple

import pytest

from tests.resilience.judging import KillCase

SIGKILL = "SIGKILL of a guarded function, at every script boundary and at random moments"
LEASE = 1.2
"""Seconds. Heartbeats come every 0.2 s; it lapses only when the test's clock says so. A process that stood still for
half of it would not start."""


class Place(NamedTuple):
    """Where the first process dies, what its function does beside the effect, and how often the effect then happens."""

    die: str
    effects: int
    does: tuple[str, ...] = ()


PLACES = [
    Place("before guard/claim", 1),
    Place("after guard/claim", 1),
    Place("before effect", 1),
    Place("after effect", 2),  # the window
    Place("before guard/complete", 2),  # still the window: nothing was recorded
    Place("after guard/complete", 1),
    Place("before guard/release", 1, ("fails",)),
    Place("after guard/release", 1, ("fails",)),
    Place("before guard/renew", 1, ("linger",)),
    Place("after guard/renew", 1, ("linger",)),
    Place("before guard/renew 2", 1, ("linger",)),
    Place("before guard/checkpoint", 2, ("checkpoint",)),  # the window
    Place("after guard/checkpoint", 1, ("checkpoint",)),  # the next one knows
    Place("before guard/complete", 1, ("checkpoint",)),
    Place("before topics/trigger", 1, ("trigger",)),
    Place("after topics/trigger", 1, ("trigger",)),
    Place("before topics/open", 1, ("trigger",)),
    Place("after topics/policy", 1, ("trigger",)),
]


class Case(KillCase):
    """One key, the process that dies over it, and the one that recovers."""

    def __init__(self, zygote: Any, url: str, raw: Any, namespace: str) -> None:
        super().__init__(zygote, url, raw, namespace, scene="guarded", key="k", lease=LEASE, linger=10)

    def run(self, flavour: str, does: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
        return self.run_process(flavour, does, **more)

    @property
    def tokens(self) -> list[int]:
        return [int(token) for token in self.raw.lrange(f"{self.namespace}:effects", 0, -1)]

    def recover(self, flavour: str, does: tuple[str, ...] = ()) -> None:
        """The next process comes by when the lease has lapsed; then one more, a duplicate. Checks what must always
        hold."""
        record = self.gate.inspect("k", scope="charge")
        before = len(self.tokens)
        self.clock.advance(LEASE)
        rest = tuple(word for word in does if word != "linger")
        ended = self.run(flavour, rest)
        if str(ended["said"]).startswith("failed"):  # the first attempt had to fail, and this was it
            ended = self.run(flavour, rest)
        assert ended == {"signal": None, "said": "receipt for k"}
        # Never again after success; else once more, unless a note says that the effect had happened.
        again = record.state != "done" and not record.checkpoint
        assert len(self.tokens) == before + again
        tokens = self.tokens
        assert self.run(flavour, rest)["said"] == "receipt for k"
        assert self.tokens == tokens
        assert tokens == sorted(set(tokens)), "fencing tokens rise in the order of effects"
        assert self.raw.hgetall(f"{self.namespace}:fenced") == {b"k": b"%d" % tokens[-1]}
        assert self.gate.inspect("k", scope="charge").state == "done"
        if "trigger" in does:
            stats = self.gate.topic("mails").stats()
            assert (stats["accepted"], stats.pending) == (1, 1)


@pytest.mark.parametrize("flavour", ["sync", "async"])
@pytest.mark.parametrize("place", PLACES, ids=lambda place: " ".join((place.die, *place.does)))
def test_killed_at(case: Any, flavour: str, place: Place, record_fault: Any) -> None:
    one = case()
    # Given a process that dies there
    assert one.run(flavour, place.does, die=place.die)["signal"] == 9
    # When another comes by
    one.recover(flavour, place.does)
    # Then the effect happened once, or twice in the window
    assert len(one.tokens) == place.effects
    record_fault(SIGKILL, 1, promises="P2 P3 P4 P12", effects=len(one.tokens), in_the_window=place.effects - 1)


@pytest.mark.parametrize("flavour", ["sync", "async"])
def test_killed_at_random_moments(
    case: Any, zygote: Any, flavour: str, drawn: random.Random, seed: int, record_fault: Any
) -> None:
    found: Counter[int] = Counter()
    for _ in range(12):
        one = case()
        one.run(flavour, kill_after=drawn.uniform(0, 0.008))
        one.recover(flavour)
        found[len(one.tokens)] += 1
    assert set(found) <= {1, 2}
    assert zygote.kills > 0
    effects = sum(times * count for times, count in found.items())
    record_fault(SIGKILL, found.total(), promises="P2 P3 P4 P12", seed=seed, effects=effects, in_the_window=found[2])


@pytest.mark.parametrize("flavour", ["sync", "async"])
def test_killed_again_and_again(case: Any, flavour: str, record_fault: Any) -> None:
    # Given a key whose owners die one after the other, all of them after the effect
    one = case()
    for _ in range(5):
        assert one.run(flavour, die="after effect")["signal"] == 9
        one.clock.advance(LEASE)
    # When one of them lives
    one.recover(flavour)
    # Then there were as many effects as leases were lost, and one, and all of that is known
    assert len(one.tokens) == 6
    record = one.gate.inspect("k", scope="charge")
    assert (record.attempts, record.taken_over) == (6, 5)
    record_fault(SIGKILL, 5, promises="P2 P3 P4 P12", effects=6, in_the_window=5)


def test_a_former_owner_that_was_only_stopped_cannot_write(case: Any) -> None:
    # Given an owner that is silent until its lease has lapsed, and another that then ran
    one = case()
    late = one.gate.claim("k", scope="charge", lease=LEASE)
    one.clock.advance(LEASE)
    assert one.run("sync")["said"] == "receipt for k"
    # When the first one wakes up
    # Then nothing that it says changes anything
    assert (late.extend(), late.checkpoint("x"), late.complete("other"), late.release()) == (False,) * 4
    assert one.run("sync")["said"] == "receipt for k"
    assert late.token < one.tokens[0]


@pytest.mark.timeout(0)
def test_many_kills(case: Any, zygote: Any, kills: int, drawn: random.Random, seed: int, record_fault: Any) -> None:
    """Only with IDEMGATE_KILLS."""
    if not kills:
        pytest.skip("IDEMGATE_KILLS says how many")
    found: Counter[tuple[str, int]] = Counter()
    before = zygote.kills
    plans = [(place, flavour) for place in PLACES for flavour in ("sync", "async")]
    while zygote.kills - before < kills:
        place, flavour = drawn.choice([*plans, (None, "sync"), (None, "async"), (None, "sync"), (None, "async")])
        one = case()
        if place is None:
            one.run(flavour, kill_after=drawn.uniform(0, 0.008))
            one.recover(flavour)
            found["at a random moment", len(one.tokens)] += 1
        else:
            assert one.run(flavour, place.does, die=place.die)["signal"] == 9
            one.recover(flavour, place.does)
            assert len(one.tokens) == place.effects
            found[" ".join((place.die, *place.does)), len(one.tokens)] += 1
    n = sum(found.values())
    effects = sum(times * count for (_, times), count in found.items())
    record_fault(SIGKILL, n, promises="P2 P3 P4 P12", seed=seed, effects=effects, in_the_window=effects - n)
    print(f"\n{zygote.kills - before} kills over {n} keys: lost 0, beyond the window 0; 95 % bound 3/N = {3 / n:.4f}")
    for (place_, effects), count in sorted(found.items()):
        print(f"  {place_:40} effects={effects}: {count}")
