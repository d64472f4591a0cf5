"""60,000 real file changes through a topic with a moved clock: its deliveries are those of a plain oracle, exactly.

With a policy per field each of three timings gets a third of them; `IDEMGATE_EVENTS=60000` gives each all.
"""

from __future__ import annotations

import gzip
import heapq
import json
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest

from idemgate import Gate, append
from idemgate.testing import Clock
from idemgate.topics.merge import NAMES
from tests.topics.oracle import APPEND_CAP, Delivered, deliveries

pytestmark = pytest.mark.one_in(5)

FILE = Path(__file__).parents[1] / "data" / "repo-changes.ndjson.gz"
TIMINGS: dict[str, dict[str, float]] = {
    "window 60 s": {"window": 60},
    "window 1 h": {"window": 3600},
    "quiet 30 s, at most 10 min": {"quiet": 30, "max_delay": 600},
}
APART = 60_000 // (len(TIMINGS) * len(NAMES))
SLICE = 1_500
EVENTS = int(os.environ.get("IDEMGATE_EVENTS", "20000"))
"""Of the file, for each timing with a policy per field."""

Event = dict[str, Any]
Trigger = tuple[float, str, Any]


@pytest.fixture(scope="module")
def events() -> list[Event]:
    with gzip.open(FILE) as lines:
        found = [json.loads(line) for line in lines]
    assert len(found) == 60_000
    return found


def _payloads(event: Event) -> dict[str, Any]:
    """One for each policy, of the real facts of the event: number of its commit, depth and suffix of its path."""
    path = event["path"]
    return {
        "last": {"id": event["id"], "change": event["change"]},
        "first": event["id"],
        "append": [event["change"], event["ts"], path],
        "union": [event["change"], path.rpartition(".")[2]],
        "count": None,
        "sum": int(event["id"].partition("-")[0][:8], 16),
        "min": int(event["id"][:6], 16) / 8,
        "max": path.count("/"),
    }


def _folder(event: Event) -> str:
    return event["path"].rpartition("/")[0] or "."


def _policy(merge: str) -> Any:
    if merge == "fields":
        return {name: _policy(name) for name in NAMES}
    return append(APPEND_CAP) if merge == "append" else merge


class Inline:
    """A blocking topic whose methods are awaited, without the thread that the fixture `face` takes for each call."""

    def __init__(self, topic: Any) -> None:
        self._topic = topic

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any) -> Any:
            return getattr(self._topic, name)(*args)

        return call


class Replay:
    """Feeds triggers at their times, and takes and acks at each time that a receipt named."""

    def __init__(self, topic: Any, clock: Clock) -> None:
        self.topic = topic
        self.clock = clock
        self.found: list[Delivered] = []
        self._due: list[float] = []

    async def run(self, triggers: list[Trigger]) -> list[Delivered]:
        for time, group in groupby(triggers, key=itemgetter(0)):
            await self._deliver(time)
            self.clock.set(time)
            receipts = await self.topic.trigger_many([(key, payload) for _, key, payload in group])
            for due in {receipt.due_at.timestamp() for receipt in receipts if receipt.accepted}:
                heapq.heappush(self._due, due)
        await self._deliver(float("inf"))
        return self.found

    async def _deliver(self, until: float) -> None:
        while self._due and self._due[0] <= until:
            due = heapq.heappop(self._due)
            if not self._due or self._due[0] != due:
                self.clock.set(due)
                async for one in self._taken():
                    # Neither early nor late: it comes at the very time that it was due.
                    assert one.due == due, (one, due)
                    self.found.append(one)

    async def _taken(self) -> Any:
        taken = [None] * 1000
        while len(taken) == 1000:
            taken = await self.topic.take(1000)
            if taken:
                assert set(await self.topic.ack(taken)) == {"ok"}
            for one in taken:
                times = one.due_at.timestamp(), one.first_at.timestamp(), one.last_at.timestamp()
                yield Delivered(times[0], one.key, one.count, times[1], times[2], one.payload, one.reason)


def _compare(found: list[Delivered], expected: list[Delivered]) -> None:
    for one, other in zip(found, expected, strict=False):
        assert one == other
    assert len(found) == len(expected)


async def _conserved(topic: Any, triggers: int, messages: int, **dropped: int) -> None:
    stats = await topic.stats()
    assert (stats.pending, stats.in_flight, stats.dead) == (0, 0, 0)
    assert stats.counters == {
        "accepted": triggers,
        "merged": triggers - messages,
        "taken": messages,
        "acked": messages,
        "acked_triggers": triggers,
        **{name: number for name, number in dropped.items() if number},
    }


@pytest.mark.slow
@pytest.mark.parametrize("timing", TIMINGS)
async def test_many_events_with_a_policy_per_field(gate: Gate, clock: Clock, events: list[Event], timing: str) -> None:
    # Given a topic whose payloads have one field for each merge policy
    policy = TIMINGS[timing]
    topic = Inline(gate.topic("changes", merge=_policy("fields"), **policy))
    start = min(list(TIMINGS).index(timing) * 20_000, len(events) - EVENTS)
    triggers = [(event["ts"], _folder(event), _payloads(event)) for event in events[start : start + EVENTS]]
    # When these events are triggered at their times, and whatever is due is taken and acked at its time
    found = await Replay(topic, clock).run(triggers)
    # Then each delivery is the oracle's, in the same order, and every trigger is in exactly one
    expected = deliveries(triggers, "fields", **policy)
    _compare(found, expected)
    assert sum(one.count for one in found) == EVENTS
    assert sum(one.count > APPEND_CAP for one in found) > 10
    # A full list leaves its items out, and the other fields of these triggers are merged
    items = sum(max(0, one.count - APPEND_CAP) for one in found)
    await _conserved(topic, EVENTS, len(expected), items_dropped=items)


def _slices() -> Iterator[Any]:
    for number, (timing, merge) in enumerate((timing, merge) for timing in TIMINGS for merge in NAMES):
        flavour = ("blocking", "awaiting")[(number % len(NAMES) + number // len(NAMES)) % 2]
        yield pytest.param(flavour, timing, merge, number * APART, id=f"{merge}, {timing}, {flavour}")


@pytest.mark.parametrize(("face", "timing", "merge", "start"), list(_slices()), indirect=["face"])
async def test_every_policy_by_itself(
    face: Any, clock: Clock, events: list[Event], timing: str, merge: str, start: int
) -> None:
    # Given a topic with one policy for whole payloads, and this combination's own part of the file
    policy = TIMINGS[timing]
    topic = face.topic("changes", merge=_policy(merge), **policy)
    triggers = [(event["ts"], _folder(event), _payloads(event)[merge]) for event in events[start : start + SLICE]]
    # When it is replayed
    found = await Replay(topic, clock).run(triggers)
    # Then its deliveries are the oracle's, and there was something to merge
    expected = deliveries(triggers, merge, **policy)
    _compare(found, expected)
    accepted = sum(one.count for one in found)
    assert max(one.count for one in found) >= APPEND_CAP
    assert (accepted < SLICE) == (merge == "append")
    dropped = SLICE - accepted
    await _conserved(topic, accepted, len(expected), dropped=dropped, dropped_full=dropped, items_dropped=dropped)


def test_the_oracle_by_hand() -> None:
    # Given triggers of one key at 0, 20, 45 and 200 s
    at = datetime(2024, 1, 1, tzinfo=UTC).timestamp()
    triggers = [(at + after, "k", after) for after in (0, 20, 45, 200)]
    # Then a quiet time of 30 s, bounded by 60 s, makes two deliveries, the first cut short
    assert deliveries(triggers, "append", quiet=30, max_delay=60) == [
        Delivered(at + 60, "k", 3, at, at + 45, [0, 20, 45], "max_delay"),
        Delivered(at + 230, "k", 1, at + 200, at + 200, [200], "quiet"),
    ]
    # And a window of 20 s makes four: what comes at its end is not in it
    assert [(one.due - at, one.payload) for one in deliveries(triggers, "last", window=20)] == [
        (20, 0),
        (40, 20),
        (65, 45),
        (220, 200),
    ]
