"""Priorities: of what is due, the highest first, the oldest first within one; boosted ones age."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from idemgate import Gate, InvalidArgument, Trigger
from idemgate.testing import Clock


async def keys_taken(topic: Any, n: int = 100) -> list[str]:
    return [delivery.key for delivery in await topic.take(n)]


async def test_the_highest_is_first_and_the_oldest_within_one(face: Any, clock: Clock) -> None:
    # Given messages of several priorities, some far out of the usual
    topic = face.topic("jobs", priority=True)
    for key, priority in [("a", 0), ("b", 5), ("c", -3), ("d", 5), ("e", 10**12), ("f", None), ("g", -(10**12))]:
        await topic.trigger(key, priority=priority)
        clock.advance("1ms")
    # Then they come in the order of their ranks, also one by one
    assert await keys_taken(topic, 2) == ["e", "b"]
    assert await keys_taken(topic, 1) == ["d"]
    assert await keys_taken(topic) == ["a", "f", "c", "g"]


@pytest.mark.parametrize("policy", [{}, {"priority": True}])
async def test_messages_of_one_due_time_run_in_the_byte_order_of_their_keys(
    face: Any, clock: Clock, policy: dict[str, Any]
) -> None:
    # Given messages of one time, the one with the last key first
    topic = face.topic("jobs", **policy)
    keys = [f"job-{n}" for n in reversed(range(1, 13))]
    for key in keys:
        await topic.trigger(key, at=clock.now() + timedelta(minutes=1))
    clock.advance("2m")
    # Then they come as the page says; a group would keep the order of their acceptance
    assert await keys_taken(topic) == sorted(keys)


async def test_priority_counts_only_among_what_is_due(face: Any, clock: Clock) -> None:
    # Given a high priority that is due later
    topic = face.topic("jobs", priority=True)
    await topic.trigger("later", priority=9, delay="10s")
    await topic.trigger("now", priority=1)
    # Then it is not taken before its time, and is first when it is due
    assert await keys_taken(topic) == ["now"]
    await topic.trigger("other", priority=1)
    clock.advance("10s")
    assert await keys_taken(topic) == ["later", "other"]


@pytest.mark.parametrize("policy", [{"priority": True}, {"priority_boost": "1h"}])
async def test_the_highest_is_first_in_a_backlog_that_no_call_sorts_at_once(
    face: Any, clock: Clock, policy: dict[str, Any]
) -> None:
    # Given a backlog whose newest message is the most urgent one, and the oldest the least
    topic = face.topic("jobs", **policy)
    for start in range(0, 400, 100):
        await topic.trigger_many([Trigger(f"k{n:03}", priority=n) for n in range(start, start + 100)])
        clock.advance("1s")
    # Then messages come in the order of their priorities, however many are taken
    urgent_first = [f"k{n:03}" for n in reversed(range(400))]
    assert await keys_taken(topic, 1) == urgent_first[:1]
    assert await keys_taken(topic, 400) == urgent_first[1:]


async def test_a_duplicate_in_the_backlog_takes_the_newest_priority(face: Any, clock: Clock) -> None:
    # Given a backlog that was ranked already, because some of it was taken
    topic = face.topic("jobs", priority=True, merge="sum")
    for key in ("a", "b", "c", "d"):
        await topic.trigger(key, 1, priority=1)
        clock.advance("1ms")
    assert await keys_taken(topic, 1) == ["a"]
    # When one is triggered again with a higher priority, one with a lower, and one without
    assert (await topic.trigger("d", 1, priority=7)).status == "merged"
    await topic.trigger("b", 1, priority=-7)
    await topic.trigger("c", 1)
    # Then each merged, and stands where it now belongs
    taken = await topic.take(10)
    assert [(one.key, one.payload, one.priority) for one in taken] == [("d", 2, 7), ("c", 2, 1), ("b", 2, -7)]
    stats = await topic.stats()
    assert (stats.ready, stats.scheduled, stats.waiting, stats.in_flight) == (0, 0, 0, 4)


async def test_boosted_priorities_age_and_the_wait_of_the_lowest_is_bounded(face: Any, clock: Clock) -> None:
    # Given ten seconds a priority, a message of priority 0, and a flood of priority 3
    topic = face.topic("jobs", priority_boost="10s")
    await topic.trigger("low", priority=0)
    for number in range(40):
        clock.advance("1s")
        await topic.trigger(f"high{number:02}", priority=3)
    # When they are taken one after the other
    order = await keys_taken(topic)
    # Then only what came due within 3 x 10 s after the low one went before it
    assert order.index("low") == 29
    assert order[:29] == [f"high{number:02}" for number in range(29)]


async def test_ranked_messages_can_be_cancelled_moved_and_retried(face: Any, clock: Clock) -> None:
    # Given a ranked backlog
    topic = face.topic("jobs", priority=True, backoff=[5])
    for key in ("a", "b", "c"):
        await topic.trigger(key, priority=1)
    first = (await topic.take(1))[0]
    # When one is cancelled, one moved, and one fails
    assert await topic.cancel("b") == "cancelled"
    assert await topic.reschedule("c", delay="2s") == "rescheduled"
    assert await topic.nack(first) == "ok"
    # Then they are where they belong
    assert await keys_taken(topic) == []
    clock.advance("2s")
    assert await keys_taken(topic) == ["c"]
    clock.advance("3s")
    assert await keys_taken(topic) == [first.key]
    assert (await topic.stats()).pending == 0


async def test_what_comes_back_keeps_its_priority_unless_a_newer_trigger_names_one(face: Any) -> None:
    # Given a delivery of priority 9, and behind it a trigger that names none
    topic = face.topic("jobs", priority=True)
    for named, expected in [(None, 9), (0, 0)]:
        await topic.trigger("k", priority=9)
        (running,) = await topic.take(1)
        await topic.trigger("k", priority=named)
        # When it is tried again
        await topic.nack(running, delay=0)
        # Then it is as important as the newest trigger said that said it
        (again,) = await topic.take(1)
        assert again.priority == expected
        await topic.ack(again)


async def test_a_priority_that_cannot_rank_is_refused(face: Any) -> None:
    with pytest.raises(InvalidArgument, match="priority=True"):
        await face.topic("plain").trigger("a", priority=1)
    for wrong in (1.5, True, "1", 2**60):
        with pytest.raises(InvalidArgument, match="priority"):
            await face.topic("ranked", priority=True).trigger("a", priority=wrong)


async def test_what_was_ranked_comes_out_when_the_topic_has_priorities_no_more(
    face: Any, url: str, namespace: str, clock: Clock
) -> None:
    # Given ranked messages, of which one was taken
    topic = face.topic("jobs", priority=True)
    await topic.trigger_many([Trigger(f"j{n}", priority=n) for n in range(4)])
    assert [one.key for one in await topic.take(1)] == ["j3"]
    # When the topic is redefined to have no priorities
    with Gate(url, namespace=namespace, clock=clock) as other:
        plain = other.topic("jobs", revision=1)
        plain.trigger("new")
        # Then nothing stays behind, and there is nothing left to do
        assert sorted(one.key for one in plain.take(10)) == ["j0", "j1", "j2", "new"]
        assert plain.stats().pending == 0


async def test_a_batch_that_puts_off_what_was_ranked_leaves_it_in_one_place(
    face: Any, url: str, namespace: str, clock: Clock
) -> None:
    # Given ranked messages, of which one was taken
    topic = face.topic("jobs", priority=True)
    await topic.trigger_many([Trigger(f"j{n}") for n in range(3)])
    assert await keys_taken(topic, 1) == ["j0"]
    # When the topic is redefined to have a quiet time and no priorities, and a batch joins both
    with Gate(url, namespace=namespace, clock=clock) as other:
        quiet = other.topic("jobs", revision=1, quiet="10s", max_delay="60s")
        receipts = quiet.trigger_many([Trigger("j1"), Trigger("j2")])
        # Then both wait until it is quiet
        assert [one.due_at for one in receipts] == [clock.now() + timedelta(seconds=10)] * 2
        stats = quiet.stats()
        assert (stats.ready, stats.scheduled) == (0, 2)
        assert quiet.take(10) == []
        clock.advance("10s")
        assert sorted((one.key, one.count) for one in quiet.take(10)) == [("j1", 2), ("j2", 2)]


async def test_what_is_ranked_is_due_now(face: Any, clock: Clock) -> None:
    topic = face.topic("jobs", priority=True)
    await topic.trigger_many([Trigger(f"j{n}", priority=n) for n in range(4)])
    (first,) = await topic.take(1)
    assert (first.key, first.reason) == ("j3", "now")
    assert await topic.next_due() == clock.now()
    stats = await topic.stats()
    assert (stats.ready, stats.scheduled, stats.waiting, stats.in_flight) == (3, 0, 0, 1)


async def test_what_was_flushed_and_ranked_can_be_cancelled(face: Any) -> None:
    # Given two messages of a topic with priorities that were flushed, one of which was taken: the other is ranked
    topic = face.topic("jobs", priority=True, window="1h")
    await topic.trigger_many([Trigger("a", priority=2), Trigger("b", priority=1)])
    assert await topic.flush() == 2
    assert await keys_taken(topic, 1) == ["a"]
    # When that is cancelled, then nothing of it is left
    assert await topic.cancel("b") == "cancelled"
    assert await keys_taken(topic) == []


async def test_a_released_message_that_merges_with_a_redriven_one_keeps_its_place_in_its_group(
    face: Any, clock: Clock
) -> None:
    topic = face.topic("jobs", priority=True, merge="sum")
    # Given a dead letter of a key, from another group
    await topic.trigger("b", 1, group="g")
    assert await topic.bury(await topic.take(1)) == ["dead"]
    clock.advance("1ms")
    # And a delivery of the key whose time its caller set, with a message of its group behind it
    await topic.trigger("b", 2, group="h", priority=1, at=clock.now())
    (delivery,) = await topic.take(1)
    await topic.trigger("d", 3, group="h", priority=9)
    # When the dead letter is redriven, and the delivery is released
    assert await topic.dead.redrive() == 1
    assert await topic.release(delivery) == "ok"
    # Then the key is still the one of its group that may run
    assert [(one.key, one.payload) for one in await topic.take(2)] == [("b", 3)]


async def test_a_ranked_message_of_a_group_stands_where_its_newest_trigger_puts_it(face: Any) -> None:
    # Given two ranked messages of a group, and one that was accepted later
    topic = face.topic("jobs", priority=True, merge="sum")
    await topic.trigger("front", 1, priority=9)
    await topic.trigger("a", 1, group="g", priority=1)
    await topic.trigger("b", 1, group="g", priority=1)
    assert await keys_taken(topic, 1) == ["front"]
    await topic.trigger("c", 1, group="g", priority=2)
    # When the first of them merges with a trigger that ranks it with the later one
    assert (await topic.trigger("a", 1, group="g", priority=2)).status == "merged"
    # Then its newest trigger is the last of those with its priority
    order = list[str]()
    while taken := await topic.take(10):
        order += [one.key for one in taken]
        await topic.ack(taken)
    assert order == ["c", "a", "b"]


# -- retries ----------------------------------------------------------------------------------------------------------


async def test_a_failed_message_loses_priority_so_that_it_does_not_stay_in_front(face: Any, clock: Clock) -> None:
    topic = face.topic("jobs", priority=True, retry_penalty=2, backoff="1s", lease="10s")
    for key, priority in (("failing", 5), ("other", 2), ("plain", None)):
        await topic.trigger(key, priority=priority)
    # Given a message in front whose first attempt vanishes with its worker, and whose second one fails
    (first,) = await topic.take(1)
    clock.advance("11s")
    (second,) = await topic.take(1)
    assert (first.key, second.key, second.priority) == ("failing", "failing", 3)
    assert await topic.nack(second, delay="1s") == "ok"
    clock.advance("1s")
    # Then the message that has the higher priority now comes first
    taken = await topic.take(10)
    assert [(one.key, one.priority) for one in taken] == [("other", 2), ("failing", 1), ("plain", 0)]
    # And a delivery that did not fail keeps its priority
    assert await topic.release(taken) == ["ok"] * 3
    assert [one.priority for one in await topic.take(10)] == [2, 1, 0]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"retry_penalty": 1}, "Add priority=True"),
        ({"priority": True, "retry_penalty": -1}, "retry_penalty"),
        ({"priority": True, "retry_penalty": 10**9}, "too many points"),
    ],
)
def test_a_penalty_that_cannot_work_is_refused(gate: Gate, options: Any, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        gate.topic("jobs", **options)
