"""Groups: deliveries of one group never overlap, and come in order; others go on."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from idemgate import Gate, InvalidArgument, Trigger
from idemgate.errors import UnexpectedData
from idemgate.testing import Clock
from tests.waiting import subscribed

pytestmark = pytest.mark.one_in(5)


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


def _scattered_keys(n: int) -> list[str]:
    """Return keys whose order by bytes has nothing to do with their number."""
    return [f"{n * 7919 % 10_007:05}-{n}" for n in range(n)]


async def _deliver_all(topic: Any, n: int) -> dict[str, list[str]]:
    """Take and end all messages, at most `n` at a time. Return the keys of each group in the order of delivery."""
    delivered: dict[str, list[str]] = {}
    while taken := await topic.take(n):
        for one in taken:
            delivered.setdefault(one.group, []).append(one.key)
        await topic.ack(taken)
    return delivered


@pytest.mark.parametrize("n", [1, 10, 100])
@pytest.mark.parametrize("send", ["together", "one by one"])
@pytest.mark.parametrize("policy", [{}, {"window": "5s"}, {"priority": True}], ids=["now", "window", "priority"])
async def test_messages_of_one_millisecond_are_delivered_in_the_order_of_their_acceptance(
    face: Any, clock: Clock, policy: dict[str, Any], send: str, n: int
) -> None:
    # Given many groups, whose messages are accepted in turn within a millisecond
    topic, groups = face.topic("orders", **policy), [f"g{number}" for number in range(30)]
    triggers = [_trigger(key, groups[at % 30]) for at, key in enumerate(_scattered_keys(120))]
    if send == "together":
        await topic.trigger_many(triggers)
    else:
        for one in triggers:
            await topic.trigger(one.key, group=one.group)
    clock.advance("5s")
    # Then each group gets them in this order
    expected = {group: [one.key for one in triggers if one.group == group] for group in groups}
    assert await _deliver_all(topic, n) == expected


@pytest.mark.parametrize("n", [7, 100])
@pytest.mark.parametrize("send", ["together", "one by one, at one time"])
@pytest.mark.parametrize("policy", [{}, {"priority": True}], ids=["plain", "priority"])
async def test_a_group_of_many_places_is_first_in_first_out(
    face: Any, clock: Clock, policy: dict[str, Any], send: str, n: int
) -> None:
    # Given one group with room for several deliveries, whose messages are due in one millisecond
    topic = face.topic("queue", group_concurrency=8, **policy)
    keys, at = [f"job-{number}" for number in range(1, 200)], clock.now() + timedelta(seconds=5)
    if send == "together":
        await topic.trigger_many([Trigger(key, group="all", at=at) for key in keys])
    else:
        for key in keys:
            await topic.trigger(key, group="all", at=at)
            clock.advance("1ms")
    clock.advance("6s")
    # When they are delivered, at most eight at a time
    begun = list[str]()
    while taken := await topic.take(n):
        assert len(taken) <= 8
        begun += [one.key for one in taken]
        await topic.ack(taken)
    # Then they began in the order of their acceptance
    assert begun == keys


@pytest.mark.parametrize("n", [7, 100])
@pytest.mark.parametrize("policy", [{}, {"window": "5s"}, {"priority": True}], ids=["now", "window", "priority"])
async def test_any_number_of_messages_of_one_millisecond_are_delivered_in_the_order_of_their_acceptance(
    face: Any, clock: Clock, policy: dict[str, Any], n: int
) -> None:
    # Given more messages of a millisecond than one script call reads, some with a large payload and some of no group
    topic, groups = face.topic("orders", **policy), [f"g{number}" for number in range(200)]
    triggers = [_trigger(key, groups[at % 200]) for at, key in enumerate(_scattered_keys(1000))]
    triggers[500] = triggers[500].__class__(triggers[500].key, b"x" * 60_000, group=triggers[500].group)
    await topic.trigger_many([*triggers[:500], *[(f"alone-{at}", None) for at in range(50)], *triggers[500:]])
    clock.advance("5s")
    # Then each group gets them in this order, and nothing is lost
    delivered = await _deliver_all(topic, n)
    assert len(delivered.pop("")) == 50
    assert delivered == {group: [one.key for one in triggers if one.group == group] for group in groups}


@pytest.mark.parametrize("change", ["nack", "release", "reshard", "cancel", "trigger", "reschedule"])
async def test_messages_that_were_ordered_keep_their_order(face: Any, clock: Clock, change: str) -> None:
    # Given a crowded millisecond, some of whose messages run, wait for their groups, or are ready
    topic, groups = face.topic("orders", backoff=0, slots=1), [f"g{number}" for number in range(100)]
    triggers = [_trigger(key, groups[at % 100]) for at, key in enumerate(_scattered_keys(500))]
    await topic.trigger_many(triggers)
    first = await topic.take(20)
    expected = {group: [one.key for one in triggers if one.group == group] for group in groups}
    # When deliveries come back, the slots change, or the last message of each group is changed
    if change in ("nack", "release"):
        await getattr(topic, change)(first)
    else:
        for one in first:
            expected[one.group].remove(one.key)
        await topic.ack(first)
    last = {group: expected[group].pop() for group in groups}
    if change == "reshard":
        await topic.reshard(4)
        for group, key in last.items():
            expected[group].append(key)
    elif change == "cancel":
        assert [await topic.cancel(key, group=group) for group, key in last.items()] == ["cancelled"] * 100
    elif change in ("trigger", "reschedule"):
        for group, key in last.items():
            await getattr(topic, change)(key, delay="1m", group=group)
    else:
        for group, key in last.items():
            expected[group].append(key)
    # Then the others come in the order of their acceptance
    assert await _deliver_all(topic, 30) == expected
    # And those that were put off come later
    clock.advance("1m")
    put_off = {group: [key] for group, key in last.items()} if change in ("trigger", "reschedule") else {}
    assert await _deliver_all(topic, 30) == put_off


@pytest.mark.parametrize("end", ["nack", "release"])
async def test_any_number_of_deliveries_that_come_back_at_once_begin_again_in_their_order(face: Any, end: str) -> None:
    # Given more deliveries of a group in flight than one script call sorts
    topic = face.topic("queue", group_concurrency=300, backoff=0)
    keys = [f"job-{number}" for number in range(300)]
    await topic.trigger_many([Trigger(key, group="all") for key in keys])
    taken = await topic.take(300)
    assert [one.key for one in taken] == keys
    # When all come back in one millisecond
    await getattr(topic, end)(taken)
    # Then they begin again in the order in which they were accepted
    assert [one.key for n in (7, 93, 200) for one in await topic.take(n)] == keys


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


@pytest.mark.parametrize("how", ["cancel", "bury", "reschedule", "trigger"])
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
    elif how == "bury":
        assert await topic.bury("first", group="ann") == "buried"
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


async def test_a_redriven_letter_does_not_let_its_running_key_out_of_the_group(face: Any, clock: Clock) -> None:
    # Given a dead letter of a key that is in flight again, with another message behind it whose time was named
    topic = face.topic("orders")
    await topic.trigger("k", group="ann")
    await topic.bury(await topic.take(1))
    await topic.trigger("k", group="ann")
    (running,) = await topic.take(1)
    await topic.trigger("k", group="ann", delay="1h")
    await topic.trigger("next", group="ann")
    # When the letter is redriven
    assert await topic.dead.redrive() == 1
    # Then the group is still taken, until the delivery ends
    assert await keys_taken(topic) == []
    await topic.ack(running)
    assert await keys_taken(topic) == ["next"]


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("end", ["nack", "part"])
async def test_a_group_waits_for_a_retry_that_was_joined_unless_its_caller_named_a_time(
    face: Any, clock: Clock, end: str, named: bool
) -> None:
    # Given a delivery, one more trigger of its key behind it, maybe with a time of its own, and another of its group
    topic = face.topic("orders", merge="append", lease="1h")
    await topic.trigger("k", 1, group="ann")
    (running,) = await topic.take(1)
    await topic.trigger("k", 2, group="ann", delay="2m" if named else None)
    await topic.trigger("next", 3, group="ann")
    assert await keys_taken(topic) == []
    # When it failed, and is to be tried again in a minute, with what came since
    await topic.nack(running, delay="1m", items=[1] if end == "part" else None)
    # Then the other waits for that, and not for a time that was named
    assert await keys_taken(topic) == (["next"] if named else [])
    clock.advance("1m")
    assert await keys_taken(topic) == ([] if named else ["k"])


@pytest.mark.parametrize("end", ["nack", "release", "lapse"])
async def test_a_group_lets_a_key_go_that_moved_to_another(face: Any, clock: Clock, end: str) -> None:
    # Given a delivery of one group, and behind it a trigger of its key for another group
    topic = face.topic("orders", backoff=0, lease="30s")
    await topic.trigger("k", group="ann")
    (running,) = await topic.take(1)
    clock.advance("1ms")
    await topic.trigger("k", group="bob")
    await topic.trigger("next", group="ann")
    assert await keys_taken(topic) == []
    # When the delivery is not done, so that both become one
    if end == "lapse":
        clock.advance("30s")
    else:
        await getattr(topic, end)(running)
    # Then the one is of the newer group, and the former group goes on
    taken = {one.key: one.group for one in await topic.take(10)}
    assert taken == {"k": "bob", "next": "ann"}


async def test_a_redriven_letter_joins_the_group_of_what_is_newer(face: Any, clock: Clock) -> None:
    # Given a dead letter of one group, and a retry of its key that holds another
    topic = face.topic("orders", backoff=[3600])
    await topic.trigger("k", group="ann")
    await topic.bury(await topic.take(1))
    clock.advance("1ms")
    await topic.trigger("k", group="bob")
    await topic.nack(await topic.take(1))
    await topic.trigger("next", group="bob")
    assert await keys_taken(topic) == []
    # When the letter is redriven and done
    await topic.dead.redrive()
    (both,) = await topic.take(10)
    assert (both.key, both.count, both.group) == ("k", 2, "bob")
    await topic.ack(both)
    # Then no group is held any more
    await topic.trigger("last", group="ann")
    assert sorted(await keys_taken(topic)) == ["last", "next"]


@pytest.mark.parametrize("how", ["cancel", "bury", "reschedule", "trigger"])
async def test_workers_are_told_that_a_group_goes_on(
    face: Any, clock: Clock, raw: Any, namespace: str, how: str
) -> None:
    # Given a group that waits for a retry in an hour, until when workers sleep
    topic = face.topic("orders", backoff=[3600])
    await topic.trigger("first", group="ann")
    clock.advance("1ms")
    await topic.trigger("second", group="ann")
    await topic.nack(await topic.take(1))
    assert await keys_taken(topic) == []
    with subscribed(raw, f"ig2:{{{namespace}:topic:orders:0/1}}:scheduled") as heard:
        # When the retry makes room for the next
        if how == "cancel":
            await topic.cancel("first", group="ann")
        elif how == "bury":
            await topic.bury("first", group="ann")
        elif how == "reschedule":
            await topic.reschedule("first", delay="48h", group="ann")
        else:
            await topic.trigger("first", group="ann", delay="48h")
        # Then they hear of a time that has come
        told = heard.get_message(timeout=30)
    assert told is not None
    assert int(told["data"]) <= clock.now().timestamp() * 1000


async def test_the_highest_of_a_group_goes_first_also_from_its_line(face: Any, clock: Clock) -> None:
    # Given a group of which one runs, and others that were found to stand behind it
    topic = face.topic("orders", priority=True)
    await topic.trigger("first", group="ann")
    running = await topic.take(10)
    for key, priority in [("low", 1), ("high", 9), ("middle", 5), ("fallen", 7)]:
        await topic.trigger(key, group="ann", priority=priority)
        clock.advance("1ms")
    assert await keys_taken(topic) == []
    # When the one in front ends, and then what goes next is the highest no more
    await topic.ack(running)
    high = await topic.take(10)
    await topic.ack(high)
    await topic.trigger("fallen", group="ann", priority=0)
    order = [one.key for one in high]
    while taken := await topic.take(10):
        order += [one.key for one in taken]
        await topic.ack(taken)
    # Then they come in the order of their priorities
    assert order == ["high", "middle", "low", "fallen"]


async def test_the_older_one_of_a_group_is_not_overtaken_by_a_redriven_letter(face: Any, clock: Clock) -> None:
    # Given a dead letter, and a new message of its key that is the next of its group
    topic = face.topic("orders")
    await topic.trigger("k", group="ann")
    await topic.bury(await topic.take(1))
    await topic.trigger("first", group="ann")
    running = await topic.take(1)
    for key in ("k", "next"):
        clock.advance("1ms")
        await topic.trigger(key, group="ann")
    assert await keys_taken(topic) == []
    await topic.ack(running)
    # When the letter is redriven, so that both are due from now on
    clock.advance("1ms")
    await topic.dead.redrive()
    # Then the other one goes before it
    assert await keys_taken(topic) == ["next"]


async def test_what_is_rescheduled_behind_its_delivery_frees_no_group(face: Any, clock: Clock) -> None:
    # Given a key in flight, another message of it behind, and the next of its group
    topic = face.topic("orders")
    await topic.trigger("k", group="ann")
    running = await topic.take(1)
    await topic.trigger("k", group="ann")
    await topic.trigger("next", group="ann")
    assert await keys_taken(topic) == []
    # When what is behind is given another time
    assert await topic.reschedule("k", delay="10s", group="ann") == "rescheduled"
    # Then the next still waits until the delivery ends
    assert await keys_taken(topic) == []
    await topic.ack(running)
    assert await keys_taken(topic) == ["next"]


def test_nothing_of_a_group_is_scheduled_while_more_deliveries_than_its_limit_run(
    gate: Gate, url: str, clock: Clock
) -> None:
    # Given a group with three deliveries at a time, and two messages that wait for it
    topic = gate.topic("t", group_concurrency=3)
    topic.trigger_many([Trigger(f"k{number}", group="g") for number in range(5)])
    running = topic.take(10)
    assert len(running) == 3
    with Gate(url, namespace=gate.namespace, clock=clock) as other:
        # When its limit is lowered to one
        lowered = other.topic("t", group_concurrency=1, revision=1)
        # Then nothing that waits is scheduled until the last of the three has ended
        for delivery in running:
            assert lowered.next_due() is None
            lowered.ack(delivery)
        assert lowered.next_due() is not None
        assert len(lowered.take(10)) == 1


async def test_a_group_with_a_nul_is_refused(face: Any) -> None:
    with pytest.raises(InvalidArgument, match="NUL"):
        await face.topic("orders").trigger("a", group="a\0b")


def _trigger(key: str, group: str) -> Any:
    from idemgate import Trigger

    return Trigger(key, group=group)


async def test_a_retry_that_is_triggered_again_keeps_its_group(face: Any) -> None:
    # Given a retry that holds its group, and one behind it
    topic = face.topic("t", backoff=60, merge="append")
    await topic.trigger("a", group="g")
    await topic.nack(await topic.take(1))
    await topic.trigger("b", group="g")
    # When the first is triggered again, which does not change its time
    assert (await topic.trigger("a", group="g")).status == "merged"
    # Then the other waits as before
    assert await topic.take(10) == []


@pytest.mark.parametrize("ranked", [False, True])
async def test_a_line_is_ordered_by_name_alone(face: Any, raw: Any, namespace: str, ranked: bool) -> None:
    topic = face.topic("orders", priority=ranked)
    await topic.trigger_many([_trigger(f"o{n}", "ann") for n in range(4)])
    assert len(await topic.take(10)) == 1
    line = raw.zrange(f"ig2:{{{namespace}:topic:orders:0/1}}:group:waiting", 0, -1, withscores=True)
    assert [score for _, score in line] == [0.0] * 3


def test_one_call_sets_a_bounded_number_of_blocked_messages_aside(gate: Gate) -> None:
    # Given a busy group with more due messages than one script call reads
    topic = gate.topic("orders")
    topic.trigger("first", group="hot")
    assert len(topic.take(1)) == 1
    topic.trigger_many([_trigger(f"hot{n:04}", "hot") for n in range(600)])
    calls, blocked = topic.open(), []
    # When takes find nothing that may run
    for _ in range(6):
        assert gate.context.link.run(calls.take(0, 1)).deliveries == []
        blocked.append(topic.stats().blocked)
    # Then each reads at most 128 of them, and none twice
    assert blocked == [128, 256, 384, 512, 600, 600]


async def test_a_group_is_not_freed_by_putting_off_what_waits_behind_its_delivery(face: Any) -> None:
    # Given a delivery of a group, and a message of its key behind it
    topic = face.topic("orders")
    await topic.trigger("k", group="ann")
    running = await topic.take(1)
    await topic.trigger("k", group="ann")
    # When that is put off, and others of the group come
    await topic.trigger("k", group="ann", delay="60s")
    await topic.trigger("other", group="ann")
    # Then they wait until the delivery has ended
    assert await keys_taken(topic) == []
    await topic.ack(running)
    assert await keys_taken(topic) == ["other"]


async def test_a_retry_that_becomes_more_important_keeps_its_group(face: Any, clock: Clock) -> None:
    # Given a message between two attempts
    topic = face.topic("orders", priority=True, merge="append")
    await topic.trigger("k", group="ann")
    await topic.nack(await topic.take(1), delay="60s")
    await topic.trigger("other", group="ann")
    # When it gets another priority, and no other time
    await topic.trigger("k", group="ann", priority=5)
    # Then its group still waits for it
    assert await keys_taken(topic) == []
    clock.advance("60s")
    assert await keys_taken(topic) == ["k"]


@pytest.mark.damages("undecodable")
async def test_a_group_that_is_none_of_ours_is_named_before_anything_is_taken(
    face: Any, raw: Any, everything: Any, namespace: str
) -> None:
    # Given a group whose members another program has written
    topic, busy = face.topic("orders"), f"ig2:{{{namespace}:topic:orders:0/1}}:group:active"
    await topic.trigger("k", group="ann")
    raw.hset(busy, "ann", "spoilt")
    before = everything()
    # When the next of it would go, then that is said, and nothing is written
    with pytest.raises(UnexpectedData, match=":group:active: holds corrupt data under ann"):
        await topic.take(1)
    assert everything() == before


@pytest.mark.damages("undecodable")
async def test_what_lapses_between_two_groups_is_not_touched_where_either_is_none_of_ours(
    face: Any, raw: Any, clock: Clock, everything: Any, namespace: str
) -> None:
    # Given a delivery of one group, one more message of its key in another behind it, and a lease that has ended
    topic, busy = face.topic("orders", lease="30s"), f"ig2:{{{namespace}:topic:orders:0/1}}:group:active"
    await topic.trigger("k", group="ann")
    assert len(await topic.take(1)) == 1
    await topic.trigger("k", group="bob")
    clock.advance("30s")
    # When another program has written the members of the first
    raw.hset(busy, "ann", "spoilt")
    before = everything()
    # Then that is said, and nothing is written
    with pytest.raises(UnexpectedData, match=":group:active: holds corrupt data under ann"):
        await topic.take(1)
    assert everything() == before
