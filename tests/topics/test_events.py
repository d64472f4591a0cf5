"""What a slot remembers of event ids: a table that grows and shrinks with them, and forgets each to the millisecond."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from zlib import crc32

import msgpack
import pytest
import redis

from idemgate import Gate, Trigger
from idemgate.core import keys
from idemgate.errors import UnexpectedData
from idemgate.store.embedded.server import start
from idemgate.testing import Clock, audit

pytestmark = pytest.mark.one_in(3)


def _memo(raw: Any, gate: Gate, topic: str = "t", slots: int = 1) -> list[dict[bytes, bytes]]:
    return [raw.hgetall(keys.slot(gate.namespace, topic, slot, slots)[8]) for slot in range(slots)]


def _marks(memo: dict[bytes, bytes]) -> int:
    return sum(len(value) for name, value in memo.items() if name[:1] == b"e" and name != b"e") // 24


def test_thousands_with_times_of_their_own_are_each_known_as_long_as_they_should_be(gate: Gate, clock: Clock) -> None:
    # Given events whose messages are due at any time, of a rate that rises to hundreds a call and falls again
    topic = gate.topic("t", dedup_retention="60s", merge="count")
    dice, known = random.Random(1), dict[tuple[str, int], int]()
    for step in range(60):
        clock.advance(dice.randrange(8_000) / 1000)
        now = clock.microseconds() // 1000
        fresh = [(f"k{dice.randrange(9)}", dice.getrandbits(48)) for _ in range(300 if 15 < step < 40 else 9)]
        again = dice.sample(sorted(known), min(30, len(known)))
        asked = list(dict.fromkeys([*fresh, *again]))
        delays = [dice.choice([None, 0.001, 20, 100]) for _ in asked]
        triggers = [
            Trigger(key, event_id=event, delay=delay) for (key, event), delay in zip(asked, delays, strict=True)
        ]
        # Then each is a duplicate until its own time has come, and not a millisecond longer
        receipts = topic.trigger_many(triggers)
        for one, receipt in zip(asked, receipts, strict=True):
            assert (receipt.status == "duplicate") is (known.get(one, 0) > now), one
            if receipt.due_at is not None:
                known[one] = max(now, round(receipt.due_at.timestamp() * 1000)) + 60_000
        topic.ack(topic.take(100))
    assert audit(gate).sound


@pytest.mark.parametrize("options", [{}, {"group": "g"}, {"priority": 1}, {"version": 1}], ids=str)
async def test_an_event_is_known_whatever_slot_its_key_has(face: Any, options: dict[str, Any]) -> None:
    # Given a key, or a group, whose slot hash looks like two empty texts of MessagePack
    topic = face.topic("t", priority=True)
    await topic.trigger("the first one of a half minute takes another path")
    name = next(name for name in map(str, itertools.count()) if crc32(name.encode()) & 0xFFFF == 0xA0A0)
    key, group = ("k", name) if "group" in options else (name, None)
    options = options | {"group": group}
    # When an event is accepted and delivered, and comes again
    assert (await topic.trigger(key, event_id="e", **options)).status == "scheduled"
    await topic.ack(await topic.take(2))
    # Then it is known
    assert (await topic.trigger(key, event_id="e", **options)).status == "duplicate"


def test_a_table_shrinks_again(gate: Gate, raw: Any, clock: Clock) -> None:
    # Given thousands of events that are out of date
    topic = gate.topic("t", dedup_retention="60s")
    for start_ in range(0, 5_000, 500):
        topic.trigger_many([Trigger("k", event_id=number) for number in range(start_, start_ + 500)])
    [full] = _memo(raw, gate)
    assert _marks(full) == 5_000
    assert 5_000 / 14 <= len(full) <= 5_000 / 6
    clock.advance("1h")
    # When a tenth as many come, Then next to nothing but these is left
    for start_ in range(5_000, 5_500, 50):
        assert {one.status for one in topic.trigger_many([("k", 1)])} == {"merged"}
        topic.trigger_many([Trigger("k", event_id=number) for number in range(start_, start_ + 50)])
    [left] = _memo(raw, gate)
    assert 500 <= _marks(left) <= 1_000
    assert len(left) < len(full) / 2
    assert {topic.trigger("k", event_id=number).status for number in range(5_000, 5_500)} == {"duplicate"}


async def test_an_event_is_known_by_key_and_id_together(face: Any) -> None:
    # Given ids and keys that are the same when they are joined
    topic = face.topic("t")
    pairs = [("ab", "c"), ("a", "bc"), ("c", "ab"), ("abc", "abc")]
    assert [(await topic.trigger(key, event_id=event)).status for key, event in pairs] == ["scheduled"] * 4
    assert [(await topic.trigger(key, event_id=event)).status for key, event in pairs] == ["duplicate"] * 4


@pytest.mark.parametrize("longer", ["a", "d"])
async def test_an_event_of_two_slots_that_become_one_is_known_as_long_as_in_either(
    face: Any, clock: Clock, longer: str
) -> None:
    # Given the same event of a key in two groups, of which each has a slot, and for one it is remembered for longer
    topic = face.topic("t", slots=2, dedup_retention="60s")
    for group in "ad":
        delay = "100s" if group == longer else None
        receipt = await topic.trigger("k", event_id="e", group=group, delay=delay)
        assert receipt.status == "scheduled"
    # When both slots are one
    await topic.reshard(1)
    clock.advance("90s")
    # Then it is known for that time
    assert (await topic.trigger("k", event_id="e", group="a")).status == "duplicate"
    clock.advance("70s")
    assert (await topic.trigger("k", event_id="e", group="a")).status != "duplicate"


@pytest.mark.parametrize(("before", "after"), [(1, 8), (8, 2), (4, 1)])
async def test_thousands_move_with_their_slot_and_to_that_of_their_group(
    face: Any, raw: Any, clock: Clock, before: int, after: int
) -> None:
    # Given more than a batch of events, of keys and of groups, some of them out of date
    topic = face.topic("t", slots=before, window="1s")
    old = [Trigger(f"old{number}", event_id=number) for number in range(200)]
    await topic.trigger_many(old)
    clock.advance("2d")
    many = [
        Trigger(f"k{number % 50}", event_id=number, group=f"g{number % 50 % 5}" if number % 50 < 25 else None)
        for number in range(3_000)
    ]
    await topic.trigger_many(many)
    # When the topic is given other slots
    await topic.reshard(after)
    # Then each event is in the slot where it will be asked for, and the others are gone
    assert sum(_marks(memo) for memo in _memo(raw, face.gate, slots=after)) == 3_000
    assert all(_marks(memo) == 0 for memo in _memo(raw, face.gate, slots=before) if before != after)
    assert {one.status for one in await topic.trigger_many(many)} == {"duplicate"}
    assert "duplicate" not in {one.status for one in await topic.trigger_many(old)}
    assert audit(face.gate).sound


@pytest.mark.parametrize(
    ("field", "value"),
    [("e", b"x"), ("e", msgpack.packb([2, 1, 1])), ("e", msgpack.packb([1, 0, 0])), ("e0", b"x" * 25)],
)
@pytest.mark.damages("undecodable")
async def test_a_table_that_is_none_is_named_and_left_alone(
    face: Any, raw: Any, everything: Any, field: str, value: bytes
) -> None:
    topic = face.topic("t")
    await topic.trigger("k", event_id="e")
    memo = keys.slot(face.gate.namespace, "t", 0, 1)[8]
    raw.hset(memo, field, value)
    before = everything()
    # Then a trigger with an event id is refused, and nothing is written
    for ask in (topic.trigger("k", event_id="f"), topic.trigger_many([("n", 1), Trigger("k", event_id="f")])):
        with pytest.raises(UnexpectedData) as refused:
            await ask
        assert refused.value.redis_key == memo.decode()
    assert everything() == before
    # And who names none goes on
    assert (await topic.trigger("k")).status == "merged"


@pytest.mark.damages("undecodable")
def test_a_bucket_that_is_none_is_left_alone_when_it_is_to_be_split(gate: Gate, raw: Any) -> None:
    # Given a table of two buckets, of which another program wrote the one that is split next
    topic, memo = gate.topic("t"), keys.slot(gate.namespace, "t", 0, 1)[8]
    topic.trigger_many([Trigger("k", event_id=number) for number in range(20)])
    raw.hset(memo, "e0", b"x" * 25)
    # When the other gets so many that it is its turn
    told = 0
    for number in range(20, 80):
        with suppress(UnexpectedData):
            told += topic.trigger("k", event_id=number).status == "merged"
    assert told > 20
    # Then it is as it was, and none was made of it
    assert raw.hget(memo, "e0") == b"x" * 25
    assert sorted(raw.hkeys(memo)) == [b"e", b"e0", b"e1"]


@pytest.fixture(scope="module")
def alone() -> Iterator[str]:
    """A server whose memory nobody else uses."""
    with start() as server:
        yield server.url


def test_an_event_id_takes_at_most_36_bytes(alone: str) -> None:
    many = 50_000
    with Gate(alone) as gate, redis.Redis.from_url(alone) as raw:
        topic = gate.topic("t")
        for first in range(0, many, 500):
            topic.trigger_many([Trigger("k", event_id=f"event:{n:015}") for n in range(first, first + 500)])
        assert raw.memory_usage(keys.slot("default", "t", 0, 1)[8], samples=0) / many <= 36


def test_what_an_idle_topic_remembers_expires(gate: Gate, raw: Any, clock: Clock) -> None:
    # Given an event id, then a version of a longer retention
    topic = gate.topic("t", dedup_retention="1h")
    of_slot = keys.slot(gate.namespace, "t", 0, 1)
    facts, expiry = of_slot[8], of_slot[9]
    topic.trigger("k", event_id="a")
    # Then the server deletes the event ids after their retention, with a margin
    assert 3_600_000 <= raw.pttl(facts) <= 3_600_000 * 9 // 8 + 60_000
    topic.trigger("k", version=1)
    assert 3_600_000 <= raw.pttl(expiry) <= 3_600_000 * 9 // 8 + 61_000
    # And an event id counts from the time when its message is due
    topic.trigger("k", event_id="b", delay="10h")
    assert raw.pttl(facts) >= 11 * 3_600_000
    # And an earlier expiry does not replace a later one
    topic.trigger("k", event_id="c", version=2)
    assert raw.pttl(facts) >= 11 * 3_600_000
    # And the expiries live as long as the versions that they are for, because no call finds those without them
    assert raw.pttl(expiry) >= raw.pttl(facts)


def test_each_trigger_of_a_closed_window_lets_it_live_longer(gate: Gate, raw: Any, clock: Clock) -> None:
    topic = gate.topic("t", quiet="1h", edge="leading", max_delay=None)
    facts, expiry = keys.slot(gate.namespace, "t", 0, 1)[8:10]
    for receipt in ("scheduled", "dropped"):
        assert topic.trigger("k").status == receipt
        assert raw.pttl(facts) >= 3_600_000
        assert raw.pttl(expiry) >= 3_600_000
        for key in (facts, expiry):
            raw.persist(key)


def test_what_another_slot_remembered_expires_too(gate: Gate, raw: Any, clock: Clock) -> None:
    topic = gate.topic("t", dedup_retention="1h")
    for number in range(20):
        topic.trigger(f"k{number}", event_id=number, version=number)
    topic.reshard(2)
    for slot in range(2):
        for key in keys.slot(gate.namespace, "t", slot, 2)[8:10]:
            assert 3_500_000 <= raw.pttl(key) <= 3_600_000 * 9 // 8 + 61_000
    assert topic.trigger("k1", event_id=1).status == "duplicate"
