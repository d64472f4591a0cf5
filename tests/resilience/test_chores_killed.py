"""kill -9 before and after each script call of a process that asks everything once: whatever the place, the next
process does it all, and what is then in the store is sound."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import pytest

from idemgate import Gate
from idemgate.lua import names
from idemgate.testing import Clock, audit
from tests.resilience.chores import ITEMS, LEASE, topic_of

START = 1_700_000_000.0
ELSEWHERE = {"audit", "registry", "policy", "list", "reopen", "scopes", "count_refused"}
"""Scripts that read, or that another test is about: `registry` and `policy` list topics, `scopes` lists scopes, `audit`
audits, `list` says who the members are; `reopen` undoes a change of slots that was given up; `count_refused` counts
what the client refused, best-effort."""


class Case:
    """Processes of one namespace, each of which begins when the leases of those before it are over."""

    def __init__(self, zygote: Any, url: str, namespace: str) -> None:
        self.zygote, self.url, self.namespace = zygote, url, namespace
        self.clock = Clock(START)

    def run(self, die: str = "") -> dict[str, Any]:
        now = self.clock.microseconds() / 1_000_000
        ended: dict[str, Any] = self.zygote(scene="chores", url=self.url, namespace=self.namespace, now=now, die=die)
        self.clock.advance("60s")
        return ended

    def check(self) -> None:
        """Every item was accepted once, and each is where it may be."""
        with Gate(self.url, namespace=self.namespace, clock=self.clock) as gate:
            topic = topic_of(gate)
            for _ in range(3):
                topic.ack(topic.take(100))
                self.clock.advance(LEASE)
            stats, letters = topic.stats(), topic.dead.list()
            dead = sum(letter.count for letter in letters)
            assert stats["accepted"] == len(ITEMS)
            assert stats["acked_triggers"] + stats["cancelled_triggers"] + dead == len(ITEMS)
            assert (stats.pending, stats.in_flight) == (0, 0)
            assert {gate.inspect("k", scope=scope).state for scope in ("chores", "first")} == {"done"}
            report = audit(gate)
            assert report.sound, str(report)


@pytest.mark.timeout(0)
def test_killed_at_every_boundary_of_everything(
    zygote: Any,
    url: str,
    raw: Any,
    namespace: str,
    many: Any,
    drawn: random.Random,
    seed: int,
    record_fault: Callable[..., None],
) -> None:
    # Given all the places that such a process passes, of which a small suite takes a part
    reached = Case(zygote, url, f"{namespace}-dry").run()["said"]
    scripts = {place.split()[1] for place in reached}
    there = {name for name in names() if re.fullmatch("(guard|dedup|topics|membership)/[a-z_]+", name)}
    assert {name.partition("/")[2] for name in there - scripts} <= ELSEWHERE
    places = sorted({f"{place} {n}" for place, times in reached.items() for n in {1, times}})
    chosen, died = drawn.sample(places, min(len(places), many(12))), 0
    for number, place in enumerate(chosen):
        # When one dies there, and another one comes
        case = Case(zygote, url, f"{namespace}-{number}")
        died += case.run(die=place)["signal"] == 9
        assert case.run()["signal"] is None, place
        # Then all is done, once
        case.check()
        for key in raw.scan_iter(f"*{case.namespace}*", count=1000):
            raw.delete(key)
    assert died > len(chosen) // 2  # a worker may reach its last place less often than the first time
    record_fault(
        "SIGKILL before and after each script call of a process that asks everything",
        died,
        promises="P2 P5 P6 P7 P12 P15",
        exhaustive=len(chosen) == len(places),
        seed=seed,
        lost=0,
    )
