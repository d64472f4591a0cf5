"""Cancel, reschedule, flush, peek, stats."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import pytest

from idemgate import Gate, InvalidArgument, Trigger
from idemgate.testing import Clock
from idemgate.topics.messages import Peek

pytestmark = pytest.mark.one_in(3)

At = Callable[[float], datetime]
NOTHING = Peek(pending=None, due_at=None, in_flight=None, token=None, lease_until=None)


# -- cancel -----------------------------------------------------------------------------------------------------------


async def test_what_is_cancelled_is_never_delivered(face: Any, clock: Clock, conserved: Any) -> None:
    topic = face.topic("t", window="60s")
    await topic.trigger_many([("a", 1), ("a", 2), ("b", 3)])
    # When one of two keys is cancelled
    assert await topic.cancel("a") == "cancelled"
    assert await topic.peek("a") == NOTHING
    # Then only the other comes, and the triggers are accounted for
    clock.advance("60s")
    assert [one.key for one in await topic.take(10)] == ["b"]
    stats = await topic.stats()
    assert (stats["cancelled"], stats["cancelled_triggers"]) == (1, 2)
    await conserved(topic, ["a", "b"])
    # And a new trigger of the key begins anew
    assert (await topic.trigger("a")).status == "scheduled"


async def test_cancelling_nothing_changes_nothing(face: Any) -> None:
    topic = face.topic("t")
    assert await topic.cancel("k") == "absent"
    stats = await topic.stats()
    assert (stats.counters, stats.pending) == ({}, 0)


@pytest.mark.parametrize("end", ["nack", "release", "lapse", "ack", "bury"])
async def test_one_in_flight_is_not_tried_again(face: Any, clock: Clock, conserved: Any, end: str) -> None:
    topic = face.topic("t", lease="30s", backoff=0)
    await topic.trigger("k")
    (running,) = await topic.take(1)
    # Given a cancelled delivery: its owner still holds it, and hears of it with its next heartbeat
    assert await topic.cancel("k") == "in_flight"
    assert await topic.extend(running) == "cancelled"
    # When it ends, however
    if end == "lapse":
        clock.advance("1h")
    else:
        expected = {"nack": "cancelled", "release": "cancelled", "ack": "ok", "bury": "dead"}[end]
        assert await getattr(topic, end)(running) == expected
    # Then it does not come back
    assert await topic.take(10) == []
    assert await topic.peek("k") == NOTHING
    stats = await topic.stats()
    ended = {"ack": "acked_triggers", "bury": "buried_triggers"}.get(end, "cancelled_triggers")
    assert (stats[ended], stats.in_flight, stats.dead) == (1, 0, int(end == "bury"))
    assert stats["cancelled"] == (1 if ended == "cancelled_triggers" else 0)
    await conserved(topic, ["k"])


async def test_cancel_takes_both_what_runs_and_what_waits(face: Any, conserved: Any) -> None:
    topic = face.topic("t", backoff=0)
    await topic.trigger("k", 1)
    (running,) = await topic.take(1)
    await topic.trigger_many([("k", 2), ("k", 3)])
    # When both are cancelled
    assert await topic.cancel("k") == "in_flight"
    assert (await topic.peek("k")).pending is None
    # Then a trigger after that is new, and is delivered when the cancelled one has ended
    assert (await topic.trigger("k", 4)).status == "scheduled"
    assert await topic.nack(running) == "cancelled"
    assert [(one.payload, one.count, one.attempt) for one in await topic.take(10)] == [(4, 1, 1)]
    assert (await topic.stats())["cancelled_triggers"] == 3
    await conserved(topic, ["k"])


# -- bury a key -------------------------------------------------------------------------------------------------------


async def test_what_is_buried_by_its_key_is_a_dead_letter(face: Any, clock: Clock, conserved: Any) -> None:
    topic = face.topic("t", window="60s", merge="append")
    await topic.trigger_many([("a", 1), ("a", 2), ("b", 3)])
    # When one of two keys is buried
    assert await topic.bury("a", reason="poison") == "buried"
    assert await topic.bury("a") == "absent"
    assert await topic.peek("a") == NOTHING
    # Then it is a dead letter that was never tried, and only the other is delivered
    [letter] = await topic.dead.list()
    assert (letter.key, letter.payload, letter.reason, letter.attempts, letter.died_at) == (
        "a", [1, 2], "poison", 0, clock.now(),
    )  # fmt: skip
    clock.advance("60s")
    assert [one.key for one in await topic.take(10)] == ["b"]
    stats = await topic.stats()
    assert (stats["buried"], stats["buried_triggers"], stats["cancelled"]) == (1, 2, 0)
    await conserved(topic, ["a", "b"])
    # And it comes back with its payload
    assert await topic.dead.redrive([letter.id]) == 1
    assert [(one.key, one.payload, one.attempt) for one in await topic.take(10)] == [("a", [1, 2], 1)]
    await conserved(topic, ["a", "b"])


async def test_a_burial_does_not_touch_what_runs(face: Any, conserved: Any) -> None:
    topic = face.topic("t", backoff=0)
    await topic.trigger("k", 1)
    (running,) = await topic.take(1)
    # While it runs and nothing waits behind it, there is nothing to bury
    assert await topic.bury("k") == "in_flight"
    # When what waits behind it is buried
    await topic.trigger("k", 2)
    assert await topic.bury("k") == "buried"
    # Then the delivery goes on: it is still held, and tried again
    assert await topic.extend(running) == "ok"
    assert await topic.nack(running) == "ok"
    assert [(one.payload, one.attempt) for one in await topic.take(10)] == [(1, 2)]
    assert [one.payload for one in await topic.dead.list()] == [2]
    await conserved(topic, ["k"])


async def test_a_burial_discards_the_oldest_letters_beyond_the_maximum(face: Any, clock: Clock) -> None:
    topic = face.topic("t", max_dead_letters=2)
    for key in "abc":
        await topic.trigger(key)
        assert await topic.bury(key) == "buried"
        clock.advance("1ms")
    assert [one.key for one in await topic.dead.list()] == ["c", "b"]
    assert (await topic.stats())["expired_triggers"] == 1


async def test_letters_of_one_time_have_different_ids(face: Any) -> None:
    topic = face.topic("t")
    for key in "abc":
        await topic.trigger(key)
    (taken,) = await topic.take(1)
    await topic.bury(taken)
    assert [await topic.bury(key) for key in {*"abc"} - {taken.key}] == ["buried", "buried"]
    assert {one.key for one in await topic.dead.list()} == {*"abc"}


async def test_a_group_is_for_a_key_only(face: Any) -> None:
    topic = face.topic("t")
    await topic.trigger("k", group="g")
    (taken,) = await topic.take(1)
    with pytest.raises(InvalidArgument, match="is for a key"):
        await topic.bury(taken, group="g")
    assert await topic.bury(taken) == "dead"


# -- reschedule -------------------------------------------------------------------------------------------------------


async def test_reschedule_moves_what_is_pending(face: Any, clock: Clock, at: At) -> None:
    topic = face.topic("t", quiet="30s", max_delay=None)
    await topic.trigger("k")
    # When it gets another time, absolute or from now
    assert await topic.reschedule("k", at=at(500)) == "rescheduled"
    assert await topic.next_due() == at(500)
    clock.advance("10s")
    assert await topic.reschedule("k", delay="5s") == "rescheduled"
    # Then the policy does not move it any more
    assert (await topic.trigger("k")).due_at == at(15)
    clock.advance("5s")
    assert [(one.count, one.reason, one.due_at) for one in await topic.take(10)] == [(2, "time", at(15))]


async def test_reschedule_moves_a_retry(face: Any, clock: Clock, at: At) -> None:
    topic = face.topic("t", backoff="10m")
    await topic.trigger("k")
    await topic.nack(await topic.take(1))
    assert await topic.reschedule("k", delay=0) == "rescheduled"
    assert [one.attempt for one in await topic.take(1)] == [2]


async def test_reschedule_of_what_is_not_pending(face: Any, clock: Clock, at: At) -> None:
    topic = face.topic("t")
    assert await topic.reschedule("k", delay="5s") == "absent"
    await topic.trigger("k")
    (running,) = await topic.take(1)
    # While it runs and nothing waits behind it, there is nothing to move
    assert await topic.reschedule("k", delay="5s") == "in_flight"
    # What waits behind it can be moved
    await topic.trigger("k")
    assert await topic.reschedule("k", delay="5s") == "rescheduled"
    await topic.ack(running)
    assert await topic.next_due() == at(5)


async def test_reschedule_to_the_past_means_now(face: Any, clock: Clock, at: At) -> None:
    topic = face.topic("t", window="60s")
    await topic.trigger("k")
    assert await topic.reschedule("k", at=at(-3600)) == "rescheduled"
    assert [one.due_at for one in await topic.take(1)] == [clock.now()]


@pytest.mark.parametrize(
    ("times", "problem"),
    [({}, "no time named"), ({"delay": 1, "at": datetime(2030, 1, 1, tzinfo=UTC)}, "at= was given too")],
)
async def test_reschedule_needs_one_time(face: Any, everything: Any, times: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidArgument, match=problem):
        await face.topic("t").reschedule("k", **times)
    assert everything() == {}


# -- flush ------------------------------------------------------------------------------------------------------------


async def test_flush_makes_a_key_due_now(face: Any, clock: Clock, at: At) -> None:
    topic = face.topic("t", window="60s")
    await topic.trigger_many([("a", 1), ("b", 2)])
    clock.advance("10s")
    # When one of two keys is flushed
    assert await topic.flush("a") == 1
    # Then only that one is due; flushing it again, or nothing, moves nothing
    assert await topic.flush("a") == 0
    assert await topic.flush("no such key") == 0
    assert [(one.key, one.reason, one.due_at) for one in await topic.take(10)] == [("a", "flush", at(10))]


@pytest.mark.parametrize("waits_for", ["a better priority", "its group"])
async def test_flush_moves_nothing_that_was_due_before_the_clock_stepped_back(
    face: Any, clock: Clock, at: At, waits_for: str
) -> None:
    # Given a message that was due, and that waits
    grouped = waits_for == "its group"
    topic = face.topic("t", slots=1, priority=not grouped)
    options = {"group": "g"} if grouped else {"priority": 1}
    await topic.trigger("first", 1, **(options if grouped else {"priority": 5}))
    await topic.trigger("second", 2, **options)
    first = await topic.take(1)
    if grouped:
        assert await topic.take(1) == []
    # When the clock steps back, and the message is flushed
    clock.set(at(-2).timestamp())
    assert await topic.flush("second") == 0
    # Then it is delivered once, after the other
    if not grouped:
        [delivery] = await topic.take(10)
        assert await topic.take(10) == []
    assert await topic.ack(first) == ["ok"]
    if grouped:
        clock.advance("3s")
        [delivery] = await topic.take(10)
    assert (delivery.key, await topic.ack([delivery])) == ("second", ["ok"])


async def test_flush_of_all_finds_more_than_a_thousand_in_many_slots(face: Any, clock: Clock) -> None:
    topic = face.topic("t", window="60s", slots=2)
    await topic.trigger_many([(n, n) for n in range(2600)])
    await topic.trigger("later", delay="30d")
    clock.advance("1s")
    # When the whole topic is flushed
    assert await topic.flush() == 2601
    # Then all is due now
    stats = await topic.stats()
    assert (stats.scheduled, stats.ready, stats.next_due) == (0, 2601, clock.now())
    taken = [await topic.take(1000) for _ in range(3)]
    assert sum(len(some) for some in taken) == 2601
    assert {one.reason for some in taken for one in some} == {"flush"}
    assert await topic.flush() == 0


async def test_what_was_flushed_with_all_others_is_not_flushed_again(face: Any) -> None:
    topic = face.topic("t", window="60s")
    await topic.trigger("k")
    assert (await topic.peek("k")).pending.reason == "window"
    assert [await topic.flush(), await topic.flush("k"), await topic.flush()] == [1, 0, 0]
    assert (await topic.peek("k")).pending.reason == "flush"


async def test_flush_of_all_reaches_all_that_waits_behind_deliveries(face: Any) -> None:
    topic = face.topic("t", window="60s", lease="1h")
    keys = ["a", "b", "c"]
    await topic.trigger_many([Trigger(key, delay=0) for key in keys])
    running = await topic.take(10)
    await topic.trigger_many([Trigger(key) for key in keys])
    # When all is flushed, then each of them is due when its delivery ends
    assert await topic.flush() == 3
    await topic.ack(running)
    assert sorted(one.key for one in await topic.take(10)) == keys


@pytest.mark.parametrize("key", ["k", None])
async def test_flush_reaches_what_waits_behind_a_delivery(face: Any, clock: Clock, key: str | None) -> None:
    topic = face.topic("t", window="60s", lease="10m")
    await topic.trigger("k")
    clock.advance("60s")
    (running,) = await topic.take(1)
    await topic.trigger("k")
    # When it is flushed, it is still not delivered beside the running one
    assert await topic.flush(key) == 1
    assert await topic.take(10) == []
    # But as soon as that has ended
    await topic.ack(running)
    assert [one.reason for one in await topic.take(10)] == ["flush"]


@pytest.mark.parametrize("key", ["k", None])
async def test_a_flushed_message_stays_due_in_a_window(face: Any, clock: Clock, key: str | None) -> None:
    topic = face.topic("t", window="60s")
    await topic.trigger("k")
    await topic.flush(key)
    # When more is triggered before it is taken, the receipt says the time that holds
    receipt = await topic.trigger("k")
    assert (receipt.status, receipt.due_at) == ("merged", clock.now())
    assert [(one.count, one.reason) for one in await topic.take(10)] == [(2, "flush")]


@pytest.mark.parametrize("key", ["k", None])
async def test_a_time_named_after_a_flush_holds(face: Any, clock: Clock, at: At, key: str | None) -> None:
    topic = face.topic("t")
    # Given a message for a time, and flushed
    await topic.trigger("k", at=at(600))
    await topic.flush(key)
    # When a caller names the same time again, it is not delivered before that
    assert (await topic.trigger("k", at=at(600))).due_at == at(600)
    assert await topic.take(10) == []
    assert await topic.next_due() == at(600)


@pytest.mark.parametrize("key", ["k", None])
async def test_a_trigger_after_a_flush_is_quiet_again(face: Any, clock: Clock, at: At, key: str | None) -> None:
    topic = face.topic("t", quiet="30s", max_delay=None)
    await topic.trigger("k")
    await topic.flush(key)
    assert (await topic.trigger("k")).due_at == at(30)
    assert await topic.take(10) == []


# -- peek and stats ---------------------------------------------------------------------------------------------------


async def test_peek_shows_both_messages_of_a_key(face: Any, clock: Clock, at: At, everything: Any) -> None:
    topic = face.topic("t", quiet="30s", max_delay=None, merge="append", lease="2m")
    assert await topic.peek("k") == NOTHING
    # Given one in flight and one behind it
    await topic.trigger("k", 1, version=7)
    clock.advance("30s")
    (running,) = await topic.take(1)
    clock.advance("5s")
    await topic.trigger_many([("k", 2), ("k", 3)])
    before = everything()
    # When it is looked at
    seen = await topic.peek("k")
    # Then both are told, and nothing changed
    assert (seen.pending.count, seen.pending.payload, seen.pending.attempts, seen.due_at) == (2, [2, 3], 0, at(65))
    assert (seen.in_flight.count, seen.in_flight.payload, seen.in_flight.version) == (1, [1], 7)
    assert (seen.token, seen.lease_until) == (running.token, at(150))
    assert everything() == before


async def test_peek_shows_a_flushed_one_as_due(face: Any, clock: Clock) -> None:
    topic = face.topic("t", window="60s")
    await topic.trigger("k")
    await topic.flush()
    assert (await topic.peek("k")).due_at == clock.now()


async def test_stats_say_where_messages_are(face: Any, clock: Clock, at: At, everything: Any) -> None:
    topic = face.topic("t", window="60s", slots=4)
    empty = await topic.stats()
    assert (empty.pending, empty.in_flight, empty.dead, empty.next_due, empty.counters) == (0, 0, 0, None, {})
    assert await topic.next_due() is None
    # Given two dead, one in flight with one behind it, three ready and four scheduled
    await topic.trigger_many([(n, n) for n in range(6)])
    clock.advance("60s")
    taken = await topic.take(3)
    await topic.bury(taken[:2])
    await topic.trigger(taken[2].key)
    await topic.trigger_many([(n, n) for n in range(10, 14)])
    before = everything()
    # When they are counted
    stats = await topic.stats()
    # Then each is where it is, over all slots
    assert (stats.dead, stats.in_flight, stats.waiting, stats.ready, stats.scheduled) == (2, 1, 1, 3, 4)
    assert (stats.pending, stats.next_due) == (8, at(60))
    assert dict(stats.counters) == {"accepted": 11, "taken": 3, "buried": 2, "buried_triggers": 2}
    assert stats["no such counter"] == 0
    assert everything() == before


async def test_every_trigger_is_accounted_for(face: Any, clock: Clock, conserved: Any) -> None:
    # Given a topic through all that can happen to a trigger
    topic = face.topic("t", window="10s", max_attempts=2, max_dead_letters=2, lease="30s", backoff=0, slots=2)
    keys = [f"k{n}" for n in range(12)]
    for turn in range(8):
        await topic.trigger_many([(key, turn) for key in keys] * 2)
        await conserved(topic, keys)
        clock.advance("10s")
        taken = await topic.take(9)
        ends = (topic.ack, topic.nack, topic.bury, topic.release, topic.nack, topic.ack)
        for end, delivery in zip(ends, taken, strict=False):
            await end(delivery)
            await conserved(topic, keys)
        await topic.cancel(keys[turn])
        await conserved(topic, keys)
        clock.advance("31s" if turn % 2 else 0)
        if turn == 5:
            assert await topic.dead.redrive() == 4
            await conserved(topic, keys)
        if turn == 6:
            await topic.dead.delete()
            await conserved(topic, keys)
    # Then all of it did happen
    stats = await topic.stats()
    names = ("acked", "nacked", "buried", "returned", "lapsed", "cancelled", "redriven", "deleted", "expired", "folded")
    assert {name: stats[name] for name in names if not stats[name]} == {}
    assert stats["accepted"] == 8 * 24
    assert stats["expired_triggers"] >= stats["expired"]


async def test_a_flush_of_all_is_seen_as_that_of_one(face: Any) -> None:
    topic = face.topic("t", window="60s")
    await topic.trigger("a")
    await topic.trigger("b")
    assert (await topic.flush("a"), await topic.flush()) == (1, 1)
    assert [(await topic.peek(key)).pending.reason for key in "ab"] == ["flush", "flush"]


def test_who_takes_and_who_cancels_or_moves_at_the_same_time_agree(gate: Gate) -> None:
    # Given messages that are due, and two who take while two cancel some of them, bury some, and move others far away
    topic = gate.topic("t", slots=4)
    topic.trigger_many([(f"k{n}", n) for n in range(600)])
    taken, answers = list[str](), dict[str, str]()

    def take() -> None:
        while found := topic.take(3):
            taken.extend(one.key for one in found)

    def change(keys: list[str]) -> None:
        for key in keys:
            change = (topic.cancel, topic.bury, lambda key: topic.reschedule(key, delay="1h"))[int(key[1:]) % 3]
            answers[key] = change(key)

    with ThreadPoolExecutor(4) as threads:
        work = [threads.submit(take) for _ in range(2)]
        work += [threads.submit(change, [f"k{n}" for n in range(first, 600, 2)][::-1]) for first in range(2)]
    for one in work:
        one.result()
    # Then each was either delivered once, and its change returned "in_flight", or it was changed and not delivered
    changed = {key for key, answer in answers.items() if answer in ("cancelled", "buried", "rescheduled")}
    assert {*answers.values()} <= {"cancelled", "buried", "rescheduled", "in_flight"}
    assert sorted(taken) == sorted(answers.keys() - changed)
    stats = topic.stats()
    for counter in ("cancelled", "buried"):
        assert stats[counter] == sum(answer == counter for answer in answers.values())
    assert (stats.scheduled, stats.in_flight) == (sum(one == "rescheduled" for one in answers.values()), len(taken))
