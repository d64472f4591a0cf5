"""Take, lease, settle: one live attempt of a key, each attempt counted and fenced."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest
import tenacity

from idemgate import Delivery, Gate, InvalidArgument, Trigger
from idemgate.errors import UnexpectedData
from idemgate.testing import Clock
from idemgate.topics.deliveries import Settlement
from idemgate.topics.messages import Forward
from idemgate.topics.topic_calls import TopicCalls

pytestmark = pytest.mark.one_in(3)

At = Callable[[float], datetime]


async def _taken(topic: Any, n: int = 1) -> Delivery[Any]:
    (delivery,) = await topic.take(n)
    assert isinstance(delivery, Delivery)
    return delivery


# -- take -------------------------------------------------------------------------------------------------------------


async def test_the_longest_due_are_taken_first(face: Any, clock: Clock) -> None:
    topic = face.topic("t")
    # Given messages due at various times, triggered in another order
    for key, delay in (("c", 3), ("a", 1), ("e", 5), ("b", 2), ("d", 4)):
        await topic.trigger(key, delay=delay)
    # When four are due and are taken two by two
    clock.advance("4s")
    first, second, third = [await topic.take(2) for _ in range(3)]
    # Then they come in the order of their times
    assert [[one.key for one in taken] for taken in (first, second, third)] == [["a", "b"], ["c", "d"], []]


async def test_nothing_is_taken_where_nothing_is_due(face: Any, everything: Any) -> None:
    topic = face.topic("t", window="60s")
    assert await topic.take(10) == []
    await topic.trigger("k")
    before = everything()
    assert await topic.take(10) == []
    assert await topic.take(0) == []
    assert everything() == before


async def test_all_slots_are_served(face: Any) -> None:
    # Given 16 slots with work in each
    topic = face.topic("t", slots=16)
    await topic.trigger_many([(n, n) for n in range(400)])
    # When a few are taken at a time, all are found, each once, and no slot is starved by those before it
    slots_in_first_rounds = set()
    seen = []
    for turn in range(400):
        taken = await topic.take(3)
        if not taken:
            break
        if turn < 16:
            slots_in_first_rounds |= {one.slot for one in taken}
        seen += [one.payload for one in taken]
        await topic.ack(taken)
    assert sorted(seen) == list(range(400))
    assert slots_in_first_rounds == set(range(16))


async def test_a_key_has_one_live_attempt(face: Any) -> None:
    topic = face.topic("t")
    await topic.trigger("k")
    await _taken(topic)
    await topic.trigger("k")
    assert await topic.take(10) == []


async def test_tokens_rise_for_each_key(face: Any, clock: Clock) -> None:
    topic = face.topic("t", backoff=0, max_attempts=1000)
    tokens = []
    # When a key is delivered again and again, also with a clock that stands still or goes back
    for turn in range(30):
        await topic.trigger("k")
        delivery = await _taken(topic, 10)
        tokens.append(delivery.token)
        end = (topic.ack, topic.nack, topic.release)[turn % 3]
        assert await end(delivery) == "ok"
        if turn == 10:
            clock.advance("1h")
        if turn == 20:
            clock.set(clock.now().timestamp() - 1800)
            await topic.flush("k")
    # Then each token is above all before it
    assert tokens == sorted(set(tokens))
    # And those of one batch are equal: a token rises for each key, not for each delivery
    await topic.trigger_many([("a", 1), ("b", 2), ("c", 3)])
    batch = [one.token for one in await topic.take(10)]
    assert len(set(batch)) == 1
    assert batch[0] > tokens[-1]


# -- leases -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("extended", [False, True])
async def test_a_lease_ends_though_the_clock_was_set_back(
    face: Any, clock: Clock, extended: bool, conserved: Any
) -> None:
    topic = face.topic("t", lease="30s")
    await topic.trigger("k", 1)
    first = await _taken(topic)
    if extended:  # long after it was taken
        clock.advance("2h")
        assert await topic.extend([first]) == ["ok"]
    # Given an owner that fell silent, and a clock that is set back by an hour
    clock.set(clock.now().timestamp() - 3600)
    # When a worker has looked for work, and a lease has gone by since
    assert await topic.take(10) == []
    clock.advance("29.999s")
    assert await topic.take(10) == []
    clock.advance("1ms")
    # Then it is delivered again
    second = await _taken(topic, 10)
    assert (second.attempt, second.token > first.token) == (2, True)
    await conserved(topic, ["k"])


def _stored(raw: Any, gate: Gate) -> tuple[int, int]:
    """The number of deliveries of slot 0, and of those of them that have an entry."""
    slot = f"ig2:{{{gate.namespace}:topic:t:0/1}}"
    return raw.zcard(f"{slot}:leases"), raw.hlen(f"{slot}:inflight")


def test_a_slot_stores_entries_for_other_leases_than_that_of_its_deliveries(
    gate: Gate, url: str, clock: Clock, raw: Any, sound: Any
) -> None:
    with Gate(url, namespace=gate.namespace, clock=clock) as newer:
        # Given deliveries for 30 s, then others for 10 s by a program that declares the topic otherwise
        short, long = newer.topic("t", lease="10s"), gate.topic("t", lease="30s")
        long.trigger_many([(n, n) for n in range(40)])
        taken = long.take(20)
        clock.advance("1s")
        others = short.take(20)
        assert _stored(raw, gate) == (40, 20)
        assert {one.token for one in taken}.isdisjoint({one.token for one in others})
        leases = [long.peek(one.key).lease_until for one in (taken[0], others[0])]
        assert [(ends - clock.now()).total_seconds() for ends in leases] == [29, 10]
        sound(gate)
        # When the shorter leases end, then these deliveries are taken again, and the others are held
        clock.advance("10s")
        again = long.take(40)
        assert {one.key for one in again} == {one.key for one in others}
        assert short.ack(others) == ["lost"] * 20
        assert long.ack(taken + again) == ["ok"] * 40
        # And with nothing in flight, the next take decides which lease needs no entries
        short.trigger_many([(n, n) for n in range(40)])
        assert len(short.take(20)) == 20
        assert _stored(raw, gate) == (20, 0)
        assert len(long.take(20)) == 20
        assert _stored(raw, gate) == (40, 20)
        sound(gate)


@pytest.mark.parametrize("many", [1, 40])
def test_a_delivery_that_is_not_plain_has_an_entry(gate: Gate, clock: Clock, raw: Any, sound: Any, many: int) -> None:
    topic = gate.topic("t", window="1m")
    # Given deliveries of one trigger, and others that are merged, flushed or of a group
    topic.trigger_many([Trigger(f"plain{n}", n) for n in range(many)])
    clock.advance("1m")
    taken = topic.take(100)
    assert _stored(raw, gate) == (many, 0)
    for kind in ("merged", "merged", "flushed"):
        topic.trigger_many([Trigger(f"{kind}{n}", n) for n in range(many)])
    topic.trigger_many([Trigger(f"grouped{n}", n, group=f"g{n}") for n in range(many)])
    topic.flush()
    taken += topic.take(100) + topic.take(100)
    assert _stored(raw, gate) == (4 * many, 3 * many)
    # When the plain ones are extended or cancelled, then they have one, too
    assert {*topic.extend(taken[: many // 2], "2m")} <= {"ok"}
    assert {topic.cancel(one.key) for one in taken[many // 2 : many]} == {"in_flight"}
    assert _stored(raw, gate) == (4 * many, 4 * many)
    sound(gate)
    # And with the deliveries, the entries go
    assert {*topic.ack(taken)} == {"ok"}
    assert _stored(raw, gate) == (0, 0)


async def test_a_longer_lease_is_as_long_as_it_was_asked_for(face: Any, clock: Clock) -> None:
    topic = face.topic("t", lease="30s")
    await topic.trigger_many([(n, n) for n in range(100)])
    # Given deliveries whose leases were extended by more than a lease
    held = await topic.take(50)
    assert set(await topic.extend(held, "10m")) == {"ok"}
    # When others are taken meanwhile, by a clock that was not set back
    assert len(await topic.take(50)) == 50
    clock.advance("9m")
    await topic.take(100)
    # Then they are held to the end
    assert {await topic.ack(one) for one in held} == {"ok"}


@pytest.mark.parametrize("burst", [1, 3])
async def test_a_rate_goes_on_though_the_clock_was_set_back(face: Any, clock: Clock, burst: int) -> None:
    topic = face.topic("t", rate="1/1s", burst=burst)
    await topic.trigger_many([(n, n) for n in range(burst + 2)])
    assert len(await topic.take(10)) == burst
    clock.set(clock.now().timestamp() - 3600)
    await topic.flush()
    # The burst is used up, as it was before
    assert await topic.take(10) == []
    clock.advance("1s")
    assert len(await topic.take(10)) == 1
    assert await topic.take(10) == []


async def test_a_burst_that_was_not_used_up_remains_though_the_clock_was_set_back(face: Any, clock: Clock) -> None:
    # Given a topic that delivered one message of a burst of ten
    topic = face.topic("t", rate="1/1s", burst=10)
    await topic.trigger("first")
    assert len(await topic.take(20)) == 1
    # When the clock is set back by two seconds, and a take finds nothing
    clock.set(clock.now().timestamp() - 2)
    assert await topic.take(20) == []
    # Then the burst lacks that one and these two seconds
    await topic.trigger_many([(n, n) for n in range(20)])
    assert len(await topic.take(20)) == 7


async def test_a_lapsed_lease_is_taken_over_by_the_next_take(face: Any, clock: Clock, conserved: Any) -> None:
    topic = face.topic("t", lease="30s")
    await topic.trigger("k", 1)
    first = await _taken(topic)
    # Given an owner that fell silent; a millisecond before its lease ends nothing happens
    clock.advance("29.999s")
    assert await topic.take(10) == []
    clock.advance("1ms")
    # When a worker takes
    second = await _taken(topic, 10)
    # Then it is delivered again at once, as a second attempt, with a higher token
    assert (second.attempt, second.reason, second.payload) == (2, "retry", 1)
    assert second.token > first.token
    assert second.failure == "lease lapsed: its worker vanished or stalled"
    assert (await topic.stats())["lapsed"] == 1
    await conserved(topic, ["k"])


async def test_extend_keeps_a_lease(face: Any, clock: Clock, at: At) -> None:
    topic = face.topic("t", lease="30s")
    await topic.trigger_many([("a", 1), ("b", 2)])
    taken = await topic.take(10)
    # When one of the two is extended, by the topic's lease and then by another
    clock.advance("20s")
    assert await topic.extend(taken[0]) == "ok"
    assert (await topic.peek("a")).lease_until == at(50)
    assert await topic.extend([taken[0]], "2m") == ["ok"]
    assert (await topic.peek("a")).lease_until == at(140)
    # Then only the other lapses
    clock.advance("60s")
    assert [(one.key, one.attempt) for one in await topic.take(10)] == [("b", 2)]
    assert await topic.ack(taken[0]) == "ok"


async def test_a_late_owner_that_nobody_followed_may_still_finish(face: Any, clock: Clock) -> None:
    topic = face.topic("t", lease="30s")
    await topic.trigger("k")
    delivery = await _taken(topic)
    clock.advance("1h")
    # When its lease has lapsed, but nobody took it over
    assert await topic.extend(delivery) == "ok"
    assert await topic.ack(delivery) == "ok"
    assert (await topic.stats())["lapsed"] == 0


@pytest.mark.parametrize("verb", ["ack", "nack", "bury", "release", "extend"])
async def test_a_former_owner_changes_nothing(face: Any, clock: Clock, everything: Any, verb: str) -> None:
    topic = face.topic("t", lease="30s")
    await topic.trigger("k")
    former = await _taken(topic)
    clock.advance("30s")
    current = await _taken(topic)
    before = await topic.peek("k")
    # When the former owner comes back
    assert await getattr(topic, verb)(former) == "lost"
    # Then the call returns "lost", and the current delivery is as it was
    after = await topic.peek("k")
    assert (after.pending, after.token, after.lease_until) == (None, current.token, before.lease_until)
    assert (await topic.stats())["lost"] == (0 if verb == "extend" else 1)
    # And when that has ended, the former owner is lost as well
    assert await topic.ack(current) == "ok"
    assert await getattr(topic, verb)(former) == "lost"
    stats = await topic.stats()
    assert (stats.pending, stats.in_flight, stats.dead) == (0, 0, 0)


async def test_a_lost_one_does_not_hinder_the_others_of_its_batch(face: Any, clock: Clock) -> None:
    topic = face.topic("t", lease="30s", slots=4)
    await topic.trigger_many([(n, n) for n in range(40)])
    taken = sorted(await topic.take(100), key=lambda one: one.payload)
    # Given three that were settled before
    assert await topic.ack([taken[n] for n in (3, 17, 21)]) == ["ok"] * 3
    # When all are acked, over four slots
    outcomes = await topic.ack(taken)
    # Then the outcomes are in the order of the deliveries
    assert [n for n, outcome in enumerate(outcomes) if outcome == "lost"] == [3, 17, 21]
    assert (await topic.stats()).in_flight == 0
    assert await topic.ack([]) == []


# -- settle -----------------------------------------------------------------------------------------------------------


async def test_an_ack_ends_it(face: Any, clock: Clock, conserved: Any) -> None:
    topic = face.topic("t", lease="30s")
    await topic.trigger("k")
    delivery = await _taken(topic)
    assert await topic.ack(delivery) == "ok"
    # Then it never comes again, and a second ack returns "lost"
    clock.advance("1h")
    assert await topic.take(10) == []
    assert await topic.ack(delivery) == "lost"
    await conserved(topic, ["k"])


async def test_giving_back_undoes_the_attempt(face: Any, clock: Clock, at: At, conserved: Any) -> None:
    topic = face.topic("t", window="60s", max_attempts=2)
    await topic.trigger("k", 1)
    clock.advance("70s")
    # When it is taken and given back, more often than there are attempts
    for _ in range(5):
        delivery = await _taken(topic)
        assert (delivery.attempt, delivery.due_at, delivery.reason) == (1, at(60), "window")
        assert await topic.release(delivery) == "ok"
    # Then it is as it was; what is triggered now joins it
    assert (await topic.trigger("k", 2)).status == "merged"
    assert [(one.count, one.attempt) for one in await topic.take(10)] == [(2, 1)]
    assert (await topic.stats())["returned"] == 5
    await conserved(topic, ["k"])


async def test_giving_back_a_retry_leaves_its_earlier_attempts(face: Any) -> None:
    topic = face.topic("t", backoff=0)
    await topic.trigger("k")
    await topic.nack(await _taken(topic), reason="no")
    await topic.release(await _taken(topic))
    again = await _taken(topic)
    assert (again.attempt, again.failure) == (2, "no")


@pytest.mark.parametrize(
    ("backoff", "expected"),
    [
        (["1s", "10s", "1m"], [1, 10, 60, 60, 60]),
        ("2.5s", [2.5] * 5),
        (0, [0] * 5),
        (tenacity.wait_fixed(3), [3] * 5),
        (tenacity.wait_exponential(multiplier=1), [1, 2, 4, 8, 16]),
        (tenacity.wait_fixed(1) + tenacity.wait_incrementing(start=0, increment=2), [1, 3, 5, 7, 9]),
    ],
)
async def test_a_nack_waits_by_the_backoff(face: Any, clock: Clock, backoff: Any, expected: list[float]) -> None:
    topic = face.topic("t", backoff=backoff)
    await topic.trigger("k", "x")
    # When each attempt fails
    waited = []
    for attempt in range(1, 6):
        delivery = await _taken(topic)
        assert (delivery.attempt, delivery.payload) == (attempt, "x")
        assert await topic.nack(delivery, reason=f"failure {attempt}") == "ok"
        due = await topic.next_due()
        waited.append((due - clock.now()).total_seconds())
        clock.set(due.timestamp())
    # Then the pauses are those of the policy, and the next attempt knows why
    assert waited == expected
    last = await _taken(topic)
    assert (last.attempt, last.reason, last.failure) == (6, "retry", "failure 5")
    assert (await topic.stats())["nacked"] == 5


async def test_the_default_backoff_is_a_jitter_that_grows_to_ten_minutes(face: Any, clock: Clock) -> None:
    topic = face.topic("t")
    await topic.trigger_many([(n, None) for n in range(50)])
    longest = []
    for _ in range(16):
        await topic.nack(await topic.take(100))
        ends = [(await topic.peek(n)).due_at for n in range(50)] if len(longest) in (0, 15) else [clock.now()]
        longest.append(max((end - clock.now()).total_seconds() for end in ends))
        clock.advance("10m")
    # Then pauses after the first attempt are below a second, those after the last spread up to ten minutes
    assert 0.5 < longest[0] <= 1
    assert 300 < longest[15] <= 600


async def test_a_nack_may_name_its_delay(face: Any, clock: Clock, at: At) -> None:
    topic = face.topic("t", merge="append")
    await topic.trigger("k")
    assert await topic.nack(await _taken(topic), delay="42s") == "ok"
    assert await topic.next_due() == at(42)
    # And what is triggered meanwhile joins it, at its time
    assert (await topic.trigger("k")).due_at == at(42)
    clock.advance("42s")
    assert (await _taken(topic)).count == 2
    # Then it has joined nothing without a trigger
    assert (await topic.stats())["folded"] == 0


@pytest.mark.parametrize("while_in_flight", [False, True])
async def test_a_new_payload_replaces_one_that_failed_with_its_own_attempts_and_time(
    face: Any, clock: Clock, conserved: Any, while_in_flight: bool
) -> None:
    topic = face.topic("t", window="5s", backoff="10m", max_attempts=3)
    # Given a payload that failed twice of three times
    await topic.trigger("k", "bad")
    clock.advance("5s")
    assert await topic.nack(await _taken(topic), reason="cannot parse") == "ok"
    clock.advance("10m")
    failing = await _taken(topic)
    # When a newer one comes, while the other runs or waits for its retry
    if while_in_flight:
        await topic.trigger("k", "good")
    assert await topic.nack(failing, reason="cannot parse") == "ok"
    if not while_in_flight:
        receipt = await topic.trigger("k", "good")
        assert (receipt.status, receipt.due_at) == ("merged", clock.now() + timedelta(seconds=5))
    # Then it is due by its own window, with all of its attempts
    clock.advance("5s")
    for attempt in (1, 2, 3):
        delivery = await _taken(topic)
        assert (delivery.payload, delivery.attempt, delivery.count) == ("good", attempt, 2)
        assert delivery.failure == ("" if attempt == 1 else "busy")
        assert await topic.nack(delivery, reason="busy", delay=0) == ("dead" if attempt == 3 else "ok")
    await conserved(topic, ["k"])


@pytest.mark.parametrize("end", ["nack", "lapse"])
async def test_a_poison_item_dies_though_triggers_join_it_again_and_again(
    face: Any, clock: Clock, conserved: Any, end: str
) -> None:
    topic = face.topic("t", merge="append", backoff=0, max_attempts=3, lease="1s")
    # Given an item that fails in each delivery, and others that join it before each retry
    await topic.trigger("k", 0)
    tried: list[int] = []
    for n in range(1, 20):
        for delivery in await topic.take(1):
            if 0 in delivery.payload:
                tried.append(delivery.attempt)
                if end == "nack":
                    await topic.nack(delivery, reason="poison")
            else:
                await topic.ack(delivery)
        await topic.trigger("k", n)
        clock.advance("1s")
    # Then each starts the attempts anew, and the message is dead after twice as many as one may have
    assert tried == [1] * 6
    (letter,) = await topic.dead.list()
    assert (letter.payload[0], letter.count) == (0, len(letter.payload))
    # And what came later is not in it
    await topic.ack(await topic.take(1))
    await conserved(topic, ["k"])


async def test_a_trigger_that_joins_a_failed_message_starts_its_attempts_anew(face: Any, clock: Clock) -> None:
    topic = face.topic("t", merge="append", backoff="10s", max_attempts=3)
    # Given an item that failed twice of three times
    await topic.trigger("k", "old")
    for _ in range(2):
        await topic.nack(await _taken(topic), reason="busy")
        clock.advance("10s")
    # When another joins it, then it is delivered at the time of the retry, and may fail three times
    await topic.trigger("k", "new")
    for attempt, outcome in ((1, "ok"), (2, "ok"), (3, "dead")):
        delivery = await _taken(topic)
        assert (delivery.payload, delivery.attempt, delivery.failure) == (["old", "new"], attempt, "busy")
        assert await topic.nack(delivery, reason="busy") == outcome
        clock.advance("10s")


async def test_sixteen_retries_and_then_dead(face: Any, clock: Clock, conserved: Any) -> None:
    topic = face.topic("t", backoff=0)
    await topic.trigger("k", "x")
    # When all attempts of the default policy fail
    outcomes = [await topic.nack(await _taken(topic), reason=f"ValueError: {n}") for n in range(17)]
    # Then the first delivery and 16 retries were tried; the letter says how the last one failed
    assert outcomes == ["ok"] * 16 + ["dead"]
    (letter,) = await topic.dead.list()
    assert (letter.key, letter.payload, letter.reason, letter.attempts) == ("k", "x", "ValueError: 16", 17)
    assert (letter.count, letter.died_at) == (1, clock.now())
    assert await topic.take(10) == []
    await conserved(topic, ["k"])


async def test_attempts_are_counted_however_many_they_are(face: Any) -> None:
    # Given a message that fails more often than a byte can count
    topic = face.topic("t", backoff=0, max_attempts=1000)
    await topic.trigger("k", "x")
    for attempt in range(1, 260):
        delivery = await _taken(topic)
        assert (delivery.attempt, delivery.payload) == (attempt, "x")
        await topic.nack(delivery)


async def test_lapses_count_as_attempts(face: Any, clock: Clock, conserved: Any) -> None:
    topic = face.topic("t", max_attempts=3, lease="30s")
    await topic.trigger("k")
    # When its worker vanishes each time
    for attempt in (1, 2, 3):
        assert (await _taken(topic)).attempt == attempt
        clock.advance("30s")
        if attempt == 2:
            # From the second time on it is put off by less than a lease, apart from what was in flight with it
            assert await topic.take(10) == []
            clock.advance("30s")
    # Then the next take buries it instead of trying for ever
    assert await topic.take(10) == []
    assert [letter.reason for letter in await topic.dead.list()] == ["lease lapsed: its worker vanished or stalled"]
    await conserved(topic, ["k"])


async def test_what_lapses_again_is_tried_apart_from_its_neighbours(face: Any, clock: Clock) -> None:
    # Given 40 messages that were in flight together when their worker vanished, twice
    topic = face.topic("t", lease="30s")
    await topic.trigger_many([(n, n) for n in range(40)])
    for _ in range(2):
        assert len(await topic.take(100)) == 40
        clock.advance("30s")
    # When a worker takes again and again
    together = []
    for _ in range(31):
        taken = await topic.take(100)
        together.append(len(taken))
        assert await topic.ack(taken) == ["ok"] * len(taken)
        clock.advance("1s")
    # Then they come within one lease, but not together
    assert sum(together) == 40
    assert max(together) <= 10


async def test_bury_gives_up_at_once(face: Any) -> None:
    topic = face.topic("t")
    await topic.trigger("k")
    assert await topic.bury(await _taken(topic), reason="KeyError: 'id'") == "dead"
    assert [(letter.attempts, letter.reason) for letter in await topic.dead.list()] == [(1, "KeyError: 'id'")]


async def test_a_batch_is_settled_in_its_order(face: Any) -> None:
    topic = face.topic("t", slots=4, max_attempts=1)
    await topic.trigger_many([(n, n) for n in range(20)])
    taken = await topic.take(100)
    assert await topic.nack(taken[:10], reason="no") == ["dead"] * 10
    assert await topic.release(taken[10:15]) == ["ok"] * 5
    assert await topic.extend(taken) == ["lost"] * 15 + ["ok"] * 5
    assert await topic.bury(taken[15:], reason="no") == ["dead"] * 5
    stats = await topic.stats()
    assert (stats.ready, stats.in_flight, stats.dead) == (5, 0, 15)


@pytest.mark.parametrize("delay", [-1, "soon", float("nan"), True])
async def test_a_nack_refuses_what_is_no_delay(face: Any, delay: Any, everything: Any) -> None:
    topic = face.topic("t")
    await topic.trigger("k")
    delivery = await _taken(topic)
    before = everything()
    with pytest.raises(InvalidArgument, match=r"^delay="):
        await topic.nack(delivery, delay=delay)
    assert everything() == before


async def test_many_lapsed_at_once_are_put_back_a_few_a_call(gate: Gate, clock: Clock) -> None:
    # Given 90 deliveries whose worker vanished, and 50 messages that are due
    topic = gate.topic("t", lease="30s")
    topic.trigger_many([(n, n) for n in range(90)])
    assert len(topic.take(1000)) == 90
    topic.trigger_many([(n, n) for n in range(90, 140)])
    clock.advance("1h")
    # When a worker takes, each call puts back 32, and hands out as many at most, or fewer where fewer were asked for
    calls: TopicCalls = topic.open()
    rounds = [gate.context.link.run(calls.take(0, most)) for most in (1000, 5, 1000, 1000, 1000)]
    assert [(taken.lapsed, len(taken.deliveries)) for taken in rounds] == [
        (32, 32),
        (32, 5),
        (26, 32),
        (0, 71),
        (0, 0),
    ]
    # Then all are in flight again, once
    assert (await topic.aio.stats()).in_flight == 140


async def test_an_id_names_the_same_triggers_and_no_others(face: Any, clock: Clock) -> None:
    # Given a delivery that is tried again
    topic = face.topic("t", backoff=[1])
    await topic.trigger("k", 1)
    first = (await topic.take())[0]
    await topic.nack(first)
    clock.advance("1s")
    again = (await topic.take())[0]
    # Then it has the same id, and another one when a trigger has joined it
    assert (again.attempt, again.id) == (2, first.id)
    await topic.trigger("k", 2)
    await topic.nack(again)
    clock.advance("1s")
    joined = (await topic.take())[0]
    assert joined.count == 2
    assert joined.id != first.id


async def test_every_message_has_an_id_of_its_own_that_stays_when_it_is_tried_again(face: Any, clock: Clock) -> None:
    # Given three messages of one key within a millisecond: one delivered, one that came meanwhile, one after both
    topic = face.topic("t", merge="append")
    await topic.trigger("a", 1)
    (first,) = await topic.take()
    await topic.trigger("a", 2)
    await topic.ack(first)
    (second,) = await topic.take()
    await topic.ack(second)
    await topic.trigger("a", 3)
    (third,) = await topic.take()
    # Then each has its id
    assert len({first.id, second.id, third.id}) == 3
    # And keeps it when it is tried again, whether its owner vanished or said so
    clock.advance("1h")
    (lapsed,) = await topic.take()
    await topic.nack(lapsed, delay=0)
    (again,) = await topic.take()
    assert third.id == lapsed.id == again.id
    # But when another trigger joins it, it is another message
    await topic.trigger("a", 4)
    await topic.nack(again, delay=0)
    (joined,) = await topic.take()
    assert joined.payload == [3, 4]
    assert joined.id not in (first.id, second.id, third.id)


async def test_no_two_messages_of_a_namespace_have_one_id(face: Any) -> None:
    # Given triggers at one moment, of the same keys, in two topics and in groups of several slots
    topics, seen = [face.topic("t", slots=8), face.topic("u", slots=8)], dict[str, int]()
    spots = [(key, group) for key in ("k", b"\xff", r"\xff", "a|b") for group in (None, "a", "b", "a|", "c/k")]
    for topic in topics:
        for key, group in spots:
            await topic.trigger(key, 1, group=group)
    # When all are delivered
    for topic in topics:
        while taken := await topic.take(50):
            for one in taken:
                # Then each has an id of its own, and none says that some of its items are retried
                assert one.id not in seen
                assert one.id.endswith(f"+{one.count}")
                seen[one.id] = one.count
                await topic.ack(one)
    assert sum(seen.values()) == 2 * len(spots)
    assert len(seen) > len(spots)


async def test_a_take_from_a_topic_that_stands_still_writes_nothing(
    face: Any, everything: Callable[[], dict[bytes, bytes]]
) -> None:
    topic = face.topic("t", priority=True)
    await topic.trigger("k", priority=3)
    await topic.pause()
    before = everything()
    assert await topic.take(10) == []
    assert everything() == before


async def test_where_nothing_is_due_ever_there_is_no_next_time(face: Any, clock: Clock) -> None:
    topic = face.topic("t", slots=4)
    assert await topic.next_due() is None
    await topic.trigger("k", delay="60s")
    assert await topic.next_due() == clock.now() + timedelta(seconds=60)


@pytest.mark.parametrize("how", ["take", "turn", "forward"])
def test_a_take_returns_when_to_take_again(gate: Gate, clock: Clock, how: str) -> None:
    # Given one that is in flight, one that is due, and one that is due in a minute
    topic = gate.topic("t", lease="1h")
    topic.trigger("first")
    taken = topic.take(1)
    topic.trigger_many([Trigger("now"), Trigger("late", delay="60s")])
    calls = topic.open()
    call: Any = {
        "take": calls.take(0, 10),
        "turn": calls.settle_and_take(0, [Settlement("ack", taken[0])], 10),
        "forward": calls.forward(0, Forward("list", None, 0), 10),
    }[how]
    now = round(clock.now().timestamp() * 1000)
    found = gate.context.link.run(call)
    assert (found.now_ms, found.next_due_ms) == (now, now + 60_000)


@pytest.mark.damages("orphan")
async def test_a_lease_of_nothing_is_named(face: Any, raw: Any, namespace: str, clock: Clock) -> None:
    # Given a lease that lapsed, and no delivery that it could belong to
    topic = face.topic("t", lease="30s")
    await topic.trigger("k")
    lease = f"ig2:{{{namespace}:topic:t:0/1}}:leases"
    raw.zadd(lease, {"nobody": clock.now().timestamp() * 1000 - 1})
    with pytest.raises(UnexpectedData, match="nobody") as caught:
        await topic.take(10)
    assert caught.value.redis_key == lease


async def test_a_take_that_finds_nothing_writes_nothing(
    face: Any, clock: Clock, everything: Callable[[], dict[bytes, bytes]]
) -> None:
    # Given one that is in flight, and one that is not due
    topic = face.topic("t", lease="30s")
    await topic.trigger("late", delay="60s")
    await topic.trigger("now")
    assert len(await topic.take(10)) == 1
    before = everything()
    # When more is asked for
    assert await topic.take(10) == []
    # Then what is stored is the same
    assert everything() == before


def test_a_turn_knows_how_each_of_its_deliveries_ended(gate: Gate, clock: Clock) -> None:
    # Given four deliveries
    topic = gate.topic("t", lease="1h")
    topic.trigger_many([(n, n) for n in range(4)])
    one, two, three, four = topic.take(4)
    # When a turn ends them in several ways
    ends = [
        Settlement("nack", one, 1_000, "first"),
        Settlement("ack", two),
        Settlement("bury", three, 0, "third"),
        Settlement("nack", four, 2_000, "fourth"),
    ]
    turned = gate.context.link.run(topic.open().settle_and_take(0, ends, 10))
    assert turned.settled.outcomes == ["ok", "ok", "dead", "ok"]
    # Then each is known with its reason, and comes at its time
    assert [(one.key, one.reason) for one in topic.dead.list()] == [("2", "third")]
    for key, failure in (("0", "first"), ("3", "fourth")):
        clock.advance("1s")
        assert [(one.key, one.failure) for one in topic.take(10)] == [(key, failure)]


def test_to_end_nothing_ends_nothing(gate: Gate) -> None:
    topic, run = gate.topic("t"), gate.context.link.run
    topic.trigger("k")
    assert run(topic.open().settle(0, [])).outcomes == []
    assert run(topic.open().extend(0, [])) == []
    turned = run(topic.open().settle_and_take(0, [], 1))
    assert (turned.settled.outcomes, [one.key for one in turned.taken.deliveries]) == ([], ["k"])
