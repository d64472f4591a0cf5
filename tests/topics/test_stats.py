"""The numbers of a topic: since when messages are due, and which groups hold them back."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from idemgate import Gate, Trigger
from idemgate.testing import Clock
from idemgate.topics.messages import BlockedGroup


async def _trigger(topic: Any, *keys: str, **options: Any) -> None:
    await topic.trigger_many([Trigger(key, **options) for key in keys])


async def test_what_is_due_is_late_wherever_it_waits(face: Any, clock: Clock, at: Any) -> None:
    # Given a message that is due in a minute
    topic = face.topic("t", group_concurrency=1, lease="1h", concurrency=2)
    await _trigger(topic, "later", delay="60s")
    stats = await topic.stats()
    assert (stats.next_due, stats.oldest_due, stats.lateness) == (at(60), None, timedelta())
    # When deliveries hold back a message of their group, of their key, and by their number
    await _trigger(topic, "a", "b", group="g")
    assert [one.key for one in await topic.take(10)] == ["a"]
    for step, (key, group) in enumerate([("b", "g"), ("a", "g"), ("c", None)], 1):
        clock.advance("1s")
        if key != "b":  # it is due since the first second
            await topic.trigger(key, group=group)
        stats = await topic.stats()
        # Then the oldest of them is late
        assert (stats.oldest_due, stats.lateness) == (at(0), timedelta(seconds=step))
    assert (stats.blocked, stats.waiting, stats.ready, stats.next_due) == (1, 1, 1, at(3))
    assert stats.oldest_blocked == BlockedGroup("g", 1, at(0))
    # And each of them, when it is the only one
    await topic.cancel("b", group="g")
    assert ((await topic.stats()).oldest_due, (await topic.stats()).oldest_blocked) == (at(2), None)
    await topic.take(10)  # "c"
    stats = await topic.stats()
    assert (stats.oldest_due, stats.next_due, stats.ready, stats.waiting) == (at(2), at(60), 0, 1)


@pytest.mark.parametrize("boost", [None, "10s"])
async def test_the_oldest_message_of_any_priority_is_found(face: Any, clock: Clock, at: Any, boost: str | None) -> None:
    # Given ranked messages, of which one with a low priority is the oldest
    topic = face.topic("jobs", priority=True, priority_boost=boost, group_concurrency=1, lease="1h")
    for n, priority in enumerate([5, 0, 9, 5, 9]):
        await topic.trigger(f"j{n}", priority=priority, group="g" if n > 2 else None)
        clock.advance("1s")
    taken = await topic.take(3)
    assert [one.key for one in taken] == ["j2", "j4", "j0"]
    # Then it is the next and the oldest
    stats = await topic.stats()
    assert (stats.ready, stats.blocked, stats.next_due, stats.oldest_due) == (2, 0, at(1), at(1))
    assert (stats.lateness, stats.sampled) == (timedelta(seconds=4), False)
    # And the oldest of a full group, behind others with a higher priority
    await _trigger(topic, "j5", "j6", priority=20, group="g")
    assert [one.key for one in await topic.take(1)] == ["j1"]
    stats = await topic.stats()
    assert (stats.blocked_groups, stats.next_due) == ((BlockedGroup("g", 3, at(3)),), None)
    # And a single one that is ready
    await _trigger(topic, "j7", "j8")
    assert len(await topic.take(1)) == 1
    assert ((await topic.stats()).ready, await topic.next_due()) == (1, at(5))


@pytest.mark.parametrize(("slots", "groups"), [(1, 5), (1, 7), (4, 7)])
async def test_the_five_groups_with_the_most_messages_are_named(
    face: Any, clock: Clock, at: Any, slots: int, groups: int
) -> None:
    # Given blocked groups: the larger, the later
    topic = face.topic("t", slots=slots, lease="1h")
    for n in range(1, groups + 1):
        await _trigger(topic, *(f"{n}-{i}" for i in range(n + 1)), group=f"g{n}\n")
        clock.advance("1s")
    assert len(await topic.take(100)) == groups
    stats = await topic.stats()
    # Then the largest come first, and the smallest has the oldest message
    assert [(one.group, one.count, one.oldest_due) for one in stats.blocked_groups] == [
        (f"g{n}\n", n, at(n - 1)) for n in range(groups, groups - 5, -1)
    ]
    assert stats.oldest_blocked == BlockedGroup("g1\n", 1, at(0))
    assert (stats.oldest_due, stats.sampled) == (at(0), False)


def test_each_group_with_its_share_of_the_messages_is_found_among_many(gate: Gate, clock: Clock) -> None:
    # Given 64 groups in front with three blocked messages each, and others with 256, of which five have a 64th each
    topic, hot = gate.topic("t", lease="1h"), {f"h{n:03}" for n in (0, 50, 101, 150, 240)}
    sizes = {f"a{n:03}": 3 for n in range(64)} | {f"h{n:03}": 1 for n in range(241)} | dict.fromkeys(hot, 4)
    topic.trigger_many([Trigger(f"{name}-{i}", group=name) for name, n in sizes.items() for i in range(n + 1)])
    while topic.take(100):
        pass
    # Then these five are named with the number of all their messages, and the stats say that they did not look at all
    stats = topic.stats()
    assert (stats.blocked, stats.sampled) == (sum(sizes.values()), True)
    assert {one.group for one in stats.blocked_groups} == hot
    assert stats.blocked_groups[0] == BlockedGroup("h000", 4, clock.now())
    assert (stats.oldest_due, stats.lateness) == (clock.now(), timedelta())


@pytest.mark.parametrize(("n", "sampled"), [(250, False), (251, True)])
def test_a_call_looks_at_a_bounded_number_of_priorities(gate: Gate, n: int, sampled: bool) -> None:
    # Given ready messages, each with a priority of its own
    topic = gate.topic("t", priority=True)
    topic.trigger_many([Trigger(f"{i}", priority=i) for i in range(n)])
    calls, link = topic.open(), gate.context.link
    for _ in range(2):  # a call ranks 160 messages
        topic.release(link.run(calls.take(0, 1)).deliveries)
    stats = topic.stats()
    assert (stats.ready, stats.sampled) == (n, sampled)


@pytest.mark.parametrize(("n", "sampled", "oldest"), [(249, False, 1), (251, True, 1), (252, True, 2)])
def test_a_call_looks_at_a_bounded_number_of_priorities_in_groups(
    gate: Gate, clock: Clock, at: Any, n: int, sampled: bool, oldest: int
) -> None:
    # Given blocked messages, each with a priority of its own, of which the last one is the oldest; and another group
    topic = gate.topic("t", priority=True, lease="1h")
    clock.advance("1s")
    topic.trigger("0", priority=0, group="g")
    clock.advance("1s")
    topic.trigger_many([Trigger(f"{i}", priority=i, group="g") for i in range(1, n + 1)])
    topic.trigger_many([Trigger(key, group="h") for key in ("first", "second")])
    while topic.stats().blocked < n + 1:
        topic.take(1)
    # Then a call reads a part of them, and one message of each other group
    stats = topic.stats()
    assert (stats.sampled, stats.oldest_due) == (sampled, at(oldest))
    assert stats.blocked_groups == (BlockedGroup("g", n, at(oldest)), BlockedGroup("h", 1, at(2)))


@pytest.mark.parametrize("n", [500, 501])
def test_a_call_looks_at_a_bounded_number_of_deliveries(gate: Gate, clock: Clock, n: int) -> None:
    # Given deliveries, and one message behind the last of them
    topic = gate.topic("t", lease="1h")
    for key in range(n):
        topic.trigger(key)
    taken = [delivery.key for _ in range(n // 100 + 1) for delivery in topic.take(100)]
    clock.advance("1s")
    topic.trigger(taken[-1])
    clock.advance("1s")
    stats = topic.stats()
    assert (stats.waiting, stats.sampled, stats.lateness) == (1, n > 500, timedelta(seconds=n <= 500))


@pytest.mark.parametrize(("size", "sampled"), [(1, False), (2000, True)])
def test_a_call_reads_a_bounded_number_of_bytes(gate: Gate, clock: Clock, size: int, sampled: bool) -> None:
    # Given 100 messages that wait behind deliveries of their keys
    topic, keys = gate.topic("t", lease="1h"), range(100)
    topic.trigger_many([Trigger(key) for key in keys])
    topic.take(100)
    topic.trigger_many([Trigger(key, "x" * size) for key in keys])
    clock.advance("5s")
    stats = topic.stats()
    assert (stats.waiting, stats.lateness, stats.sampled) == (100, timedelta(seconds=5), sampled)


async def test_a_paused_topic_is_late_too(face: Any, clock: Clock, at: Any) -> None:
    topic = face.topic("t")
    await topic.trigger("k")
    await topic.pause()
    clock.advance("1h")
    stats = await topic.stats()
    assert (stats.ready, stats.oldest_due, stats.lateness) == (1, at(0), timedelta(hours=1))
