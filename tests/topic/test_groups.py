"""Groups: deliveries of one group never overlap, and come in order; others go on."""

from __future__ import annotations

from typing import Any

import pytest

from idemgate import BadInput
from idemgate.testing import Clock


async def keys_taken(topic: Any, n: int = 100) -> list[str]:
    return [delivery.key for delivery in await topic.take(n)]


async def test_deliveries_of_a_group_do_not_overlap_and_come_in_order(face: Any, clock: Clock) -> None:
    # Given five messages of one group
    topic = face.topic("orders")
    for number in range(5):
        await topic.trigger(f"o{number}", group="ann")
        clock.advance("1ms")
    # Then only one is out at a time, the oldest
    for number in range(5):
        taken = await topic.take(10)
        assert [one.key for one in taken] == [f"o{number}"]
        assert await topic.take(10) == []
        await topic.ack(taken)
    stats = await topic.stats()
    assert (stats.pending, stats.blocked, stats.in_flight) == (0, 0, 0)


async def test_a_hot_group_does_not_hold_up_others(face: Any, clock: Clock) -> None:
    # Given two thousand messages of one group before three of others
    topic = face.topic("orders")
    await topic.trigger_many([_trigger(f"hot{n:04}", "hot") for n in range(2000)])
    clock.advance("1ms")
    for name in ("x", "y", "z"):
        await topic.trigger(name, group=name)
    # When a few takes are made
    taken: list[str] = []
    for _ in range(4):
        taken += await keys_taken(topic, 10)
    # Then one of the hot ones and all the others are out, and what is blocked is not walked over again
    assert taken == ["hot0000", "x", "y", "z"]
    stats = await topic.stats()
    assert (stats.blocked, stats.ready, stats.in_flight) == (1999, 0, 4)


async def test_a_failed_one_is_tried_again_before_the_next_of_its_group(face: Any, clock: Clock) -> None:
    # Given a group whose first message fails
    topic = face.topic("orders", backoff=[60])
    await topic.trigger("first", group="ann")
    clock.advance("1ms")
    await topic.trigger("second", group="ann")
    await topic.nack(await topic.take(10))
    # Then the second waits for it
    assert await keys_taken(topic) == []
    clock.advance("60s")
    taken = await topic.take(10)
    assert [one.key for one in taken] == ["first"]
    # And goes on when it is dead
    assert await topic.bury(taken[0]) == "dead"
    assert await keys_taken(topic) == ["second"]


async def test_a_lapsed_delivery_keeps_its_place_in_the_group(face: Any, clock: Clock) -> None:
    # Given a delivery whose worker vanished
    topic = face.topic("orders", lease="30s")
    await topic.trigger("first", group="ann")
    clock.advance("1ms")
    await topic.trigger("second", group="ann")
    await topic.take(1)
    clock.advance("31s")
    # Then it is delivered again, before the next
    again = await topic.take(10)
    assert [(one.key, one.attempt) for one in again] == [("first", 2)]
    await topic.ack(again)
    assert await keys_taken(topic) == ["second"]


@pytest.mark.parametrize("how", ["cancel", "reschedule", "trigger"])
async def test_a_group_does_not_wait_for_what_was_called_off(face: Any, clock: Clock, how: str) -> None:
    # Given a group that waits for a retry in an hour, with one more in its line
    topic = face.topic("orders", backoff=[3600])
    await topic.trigger("first", group="ann")
    clock.advance("1ms")
    await topic.trigger("second", group="ann")
    await topic.nack(await topic.take(1))
    assert await keys_taken(topic) == []
    # When the retry is called off, or put off by name
    if how == "cancel":
        assert await topic.cancel("first", group="ann") == "cancelled"
    elif how == "reschedule":
        assert await topic.reschedule("first", delay="48h", group="ann") == "rescheduled"
    else:
        assert (await topic.trigger("first", group="ann", delay="48h")).status == "replaced"
    # Then the next of the group goes on
    assert await keys_taken(topic) == ["second"]


async def test_more_than_one_of_a_group_where_allowed(face: Any, clock: Clock) -> None:
    # Given a limit of three a group
    topic = face.topic("orders", group_concurrency=3)
    for number in range(7):
        await topic.trigger(f"o{number}", group="ann")
        clock.advance("1ms")
    taken = await topic.take(10)
    assert [one.key for one in taken] == ["o0", "o1", "o2"]
    # When one ends, one more goes out
    await topic.ack(taken[1])
    assert await keys_taken(topic) == ["o3"]


async def test_groups_and_slots_go_together(face: Any) -> None:
    # Given many slots, and messages of one group with different keys
    topic = face.topic("orders", slots=8)
    await topic.trigger_many([_trigger(f"k{number}", f"g{number % 4}") for number in range(40)])
    # Then of each group exactly one is out
    taken = await topic.take(100)
    assert sorted(one.group for one in taken) == ["g0", "g1", "g2", "g3"]


async def test_a_group_with_a_nul_is_refused(face: Any) -> None:
    with pytest.raises(BadInput, match="NUL"):
        await face.topic("orders").trigger("a", group="a\0b")


def _trigger(key: str, group: str) -> Any:
    from idemgate import Trigger

    return Trigger(key, group=group)
