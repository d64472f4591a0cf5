"""When a message is due: windows and their edges, and times that callers name."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from idemgate import Gate, InvalidArgument
from idemgate.testing import Clock
from idemgate.topics.deliveries import Settlement

pytestmark = pytest.mark.one_in(3)

At = Callable[[float], datetime]


async def _due_in(topic: Any, clock: Clock, key: str = "k") -> tuple[float, str]:
    """How many seconds from now the key is delivered, and why; checks that a millisecond earlier it is not."""
    peek = await topic.peek(key)
    assert peek.due_at is not None
    left = (peek.due_at - clock.now()).total_seconds()
    if left > 0:
        clock.advance(left - 0.001)
        assert await topic.take(10) == []
        clock.advance(0.001)
    (delivery,) = await topic.take(10)
    assert delivery.key == key
    assert delivery.due_at == peek.due_at
    assert await topic.ack(delivery) == "ok"
    return left, delivery.reason


async def test_without_a_window_a_trigger_is_due_at_once(face: Any, clock: Clock) -> None:
    topic = face.topic("t")
    # Given a trigger, and another while it waits to be taken
    assert (await topic.trigger("k", 1)).due_at == clock.now()
    clock.advance("5s")
    assert (await topic.trigger("k", 2)).status == "merged"
    # When it is taken
    (delivery,) = await topic.take(10)
    # Then both are in it
    assert (delivery.count, delivery.payload, delivery.reason) == (2, 2, "now")
    assert (clock.now() - delivery.due_at, delivery.last_at) == (timedelta(seconds=5), clock.now())


async def test_a_window_runs_from_the_first_trigger(face: Any, clock: Clock, at: At) -> None:
    topic = face.topic("t", window="60s")
    # Given three triggers in one minute
    for status, payload in (("scheduled", 1), ("merged", 2), ("merged", 3)):
        receipt = await topic.trigger("k", payload)
        assert (receipt.status, receipt.due_at) == (status, at(60))
        clock.advance("25s")
    # When the window has not ended, nothing is due
    clock.set(at(59.999).timestamp())
    assert await topic.take(10) == []
    # Then, when it ends, one delivery carries the three
    clock.set(at(60).timestamp())
    (delivery,) = await topic.take(10)
    assert (delivery.count, delivery.payload, delivery.reason) == (3, 3, "window")
    assert (delivery.first_at, delivery.last_at, delivery.due_at) == (at(0), at(50), at(60))
    # And the next trigger begins a window of its own
    assert await topic.ack(delivery) == "ok"
    assert (await topic.trigger("k", 4)).due_at == at(120)


async def test_what_comes_late_still_joins_what_was_not_taken(face: Any, clock: Clock, at: At) -> None:
    topic = face.topic("t", window="60s")
    await topic.trigger("k", 1)
    clock.advance("90s")
    # When a trigger comes after the window, but before anybody took it
    receipt = await topic.trigger("k", 2)
    # Then it is in the same delivery, whose time does not move
    assert (receipt.status, receipt.due_at) == ("merged", at(60))
    assert [one.count for one in await topic.take(10)] == [2]


async def test_max_size_cuts_a_window_short(face: Any, clock: Clock, at: At) -> None:
    topic = face.topic("t", window="60s", max_size=3)
    await topic.trigger("k")
    clock.advance("10s")
    assert (await topic.trigger("k")).due_at == at(60)
    # When the third trigger comes, it is due at once
    assert (await topic.trigger("k")).due_at == at(10)
    assert await _due_in(topic, clock) == (0, "max_size")
    # And what follows begins anew
    assert (await topic.trigger("k")).due_at == at(70)


async def test_a_quiet_time_runs_from_the_last_trigger(face: Any, clock: Clock, at: At) -> None:
    topic = face.topic("t", quiet="30s", max_delay=None)
    # Given triggers every 20 s
    for n in range(5):
        assert (await topic.trigger("k")).due_at == at(20 * n + 30)
        clock.advance("20s")
    # Then it is due 30 s after the last
    assert await _due_in(topic, clock) == (10, "quiet")


async def test_max_delay_bounds_a_quiet_time(face: Any, clock: Clock, at: At) -> None:
    topic = face.topic("t", quiet="30s", max_delay="70s")
    assert [await _trigger_then(topic, clock, "20s") for _ in range(4)] == [at(30), at(50), at(70), at(70)]
    # When it is due because of the bound, the reason says so
    clock.set(at(60).timestamp())
    assert await _due_in(topic, clock) == (10, "max_delay")


async def _trigger_then(topic: Any, clock: Clock, pause: str) -> datetime | None:
    due = (await topic.trigger("k")).due_at
    clock.advance(pause)
    return due


async def test_max_size_cuts_a_quiet_time_short(face: Any, clock: Clock, at: At) -> None:
    topic = face.topic("t", quiet="30s", max_delay="10m", max_size=2)
    await topic.trigger("k")
    clock.advance("5s")
    assert (await topic.trigger("k")).due_at == at(5)
    assert await _due_in(topic, clock) == (0, "max_size")


async def test_max_size_of_one_never_waits(face: Any, clock: Clock) -> None:
    topic = face.topic("t", window="60s", max_size=1)
    assert (await topic.trigger("k")).due_at == clock.now()
    assert await _due_in(topic, clock) == (0, "max_size")


async def test_a_leading_edge_delivers_the_first_and_drops_the_rest_of_the_window(face: Any, clock: Clock) -> None:
    topic = face.topic("t", window="60s", edge="leading")
    # Given the first trigger: due at once
    assert (await topic.trigger("k", 1)).due_at == clock.now()
    # When more come inside of the window, before and after the delivery
    dropped = await topic.trigger("k", 2)
    assert (dropped.status, dropped.due_at, dropped.accepted) == ("dropped", None, False)
    assert await _due_in(topic, clock) == (0, "leading")
    clock.advance("59.999s")
    assert (await topic.trigger("k", 3)).status == "dropped"
    # Then they are dropped and counted, and the first one after the window runs again
    clock.advance("1ms")
    assert (await topic.trigger("k", 4)).status == "scheduled"
    (delivery,) = await topic.take(10)
    assert (delivery.count, delivery.payload) == (1, 4)
    stats = await topic.stats()
    assert (stats["accepted"], stats["dropped"]) == (2, 2)


async def _end_undone(topic: Any, clock: Clock, how: str) -> None:
    """End the message of the key so that its work is not done."""
    if how == "cancelled":
        assert await topic.cancel("k") == "cancelled"
        return
    if how == "buried unstarted":
        assert await topic.bury("k") == "buried"
        return
    (delivery,) = await topic.take(1)
    if how == "buried":
        assert await topic.bury(delivery) == "dead"
    elif how == "out of attempts":
        assert await topic.nack(delivery) == "dead"
    elif how == "lapsed":
        clock.advance("10s")
        assert await topic.take(1) == []
    else:
        assert await topic.cancel("k") == "in_flight"
        assert (await topic.trigger("k")).status == "dropped"  # it may still be done
        assert await topic.nack(delivery) == "cancelled"


@pytest.mark.parametrize("quiet", [False, True])
@pytest.mark.parametrize(
    "how", ["cancelled", "cancelled in flight", "buried", "buried unstarted", "out of attempts", "lapsed"]
)
async def test_a_leading_edge_accepts_the_next_trigger_if_nothing_was_done(
    face: Any, clock: Clock, how: str, quiet: bool
) -> None:
    window: dict[str, Any] = {"quiet": "1h", "max_delay": None} if quiet else {"window": "1h"}
    topic = face.topic("t", **window, edge="leading", max_attempts=1, lease="10s")
    # Given a message that was cancelled or died
    await topic.trigger("k", 1)
    await _end_undone(topic, clock, how)
    # When its key is triggered within the window, then nothing has run for it, so the trigger is accepted
    assert (await topic.trigger("k", 2)).status == "scheduled"
    assert (await topic.trigger("k", 3)).status == "dropped"
    (delivery,) = await topic.take(1)
    await topic.ack(delivery)
    # And once it is done, the window lasts
    assert (delivery.payload, (await topic.trigger("k", 4)).status) == (2, "dropped")


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_leading_edge_accepts_a_trigger_behind_a_lapsed_delivery_that_no_take_has_found(
    face: Any, clock: Clock, cancelled: bool
) -> None:
    topic = face.topic("t", window="1h", edge="leading", max_attempts=2 if cancelled else 1, lease="10s")
    # Given a delivery whose worker vanished, and that is not tried again
    await topic.trigger("k", 1)
    await topic.take(1)
    if cancelled:
        assert await topic.cancel("k") == "in_flight"
    assert (await topic.trigger("k", 2)).status == "dropped"  # it may still be done
    clock.advance("10s")
    # When its key is triggered before any take, then the first trigger is accepted and opens a window of its own
    assert (await topic.trigger("k", 3)).status == "scheduled"
    assert (await topic.trigger("k", 4)).status == "dropped"
    (delivery,) = await topic.take(1)
    await topic.ack(delivery)
    assert (delivery.payload, (await topic.trigger("k", 5)).status) == (3, "dropped")


async def test_a_leading_edge_drops_triggers_behind_a_lapsed_delivery_that_is_retried(face: Any, clock: Clock) -> None:
    topic = face.topic("t", window="1h", edge="leading", max_attempts=2, lease="10s")
    await topic.trigger("k", 1)
    await topic.take(1)
    clock.advance("10s")
    assert (await topic.trigger("k", 2)).status == "dropped"
    assert [delivery.payload for delivery in await topic.take(1)] == [1]


async def test_a_message_that_dies_does_not_open_the_window_of_the_one_behind_it(face: Any, clock: Clock) -> None:
    topic = face.topic("t", window="1m", edge="leading")
    # Given a delivery that takes longer than its window, and the message of the next window behind it
    await topic.trigger("k", 1)
    (delivery,) = await topic.take(1)
    clock.advance("1m")
    assert (await topic.trigger("k", 2)).status == "scheduled"
    # When the delivery dies, then the window of the other one lasts
    assert await topic.bury(delivery) == "dead"
    assert (await topic.trigger("k", 3)).status == "dropped"
    assert [one.payload for one in await topic.take(1)] == [2]


async def test_a_leading_edge_of_a_quiet_time_lasts_until_it_is_quiet(face: Any, clock: Clock) -> None:
    topic = face.topic("t", quiet="30s", max_delay=None, edge="leading")
    await topic.trigger("k")
    # When triggers keep coming every 20 s, each is dropped and keeps the door shut
    for _ in range(3):
        clock.advance("20s")
        assert (await topic.trigger("k")).status == "dropped"
    # Then only 30 s of quiet open it
    clock.advance("30s")
    assert (await topic.trigger("k")).accepted


async def test_keys_have_windows_of_their_own(face: Any, clock: Clock, at: At) -> None:
    topic = face.topic("t", window="60s")
    for key in ("a", "b", "c"):
        await topic.trigger(key)
        clock.advance("10s")
    # When they are taken, the oldest due is first
    clock.set(at(75).timestamp())
    assert [one.key for one in await topic.take(10)] == ["a", "b"]


# -- times that callers name ------------------------------------------------------------------------------------------


async def test_a_delay_counts_from_now(face: Any, clock: Clock, at: At) -> None:
    topic = face.topic("t")
    assert (await topic.trigger("k", delay="90s")).due_at == at(90)
    assert await _due_in(topic, clock) == (90, "time")


@pytest.mark.parametrize("zone", [UTC, timezone(timedelta(hours=-7))])
async def test_a_time_is_kept_exactly(face: Any, clock: Clock, at: At, zone: Any) -> None:
    topic = face.topic("t", window="60s")
    # Given a time 80 years ahead, in whatever zone
    then = at(80 * 365 * 86_400 + 0.123).astimezone(zone)
    receipt = await topic.trigger("k", at=then)
    # Then it is due then, to the millisecond
    assert (receipt.status, receipt.due_at) == ("scheduled", then)
    assert (await topic.next_due()) == then


@pytest.mark.parametrize("then", [-0.001, -86_400, -1_700_000_000])
async def test_a_time_in_the_past_means_now(face: Any, clock: Clock, at: At, then: float) -> None:
    topic = face.topic("t", window="60s")
    # When a trigger names a time that has passed, as far back as 1970
    receipt = await topic.trigger("k", at=at(then))
    # Then it is accepted, and due now
    assert (receipt.accepted, receipt.due_at) == (True, clock.now())
    assert await _due_in(topic, clock) == (0, "time")


async def test_a_named_time_moves_what_is_pending(face: Any, clock: Clock, at: At) -> None:
    topic = face.topic("t", window="60s")
    await topic.trigger("k", 1)
    # When a later trigger names a time, the message moves there, further or nearer
    moved = await topic.trigger("k", 2, delay="10m")
    assert (moved.status, moved.due_at) == ("replaced", at(600))
    assert (await topic.trigger("k", 3, at=at(30))).due_at == at(30)
    # Then further triggers of the policy do not move it
    clock.advance("20s")
    plain = await topic.trigger("k", 4)
    assert (plain.status, plain.due_at) == ("merged", at(30))
    assert await _due_in(topic, clock) == (10, "time")
    assert (await topic.stats())["replaced"] == 2


@pytest.mark.parametrize("named", ["first", "second"])
async def test_a_named_time_stands_in_a_quiet_topic(face: Any, clock: Clock, at: At, named: str) -> None:
    topic = face.topic("t", quiet="30s", max_size=4)
    if named == "second":
        await topic.trigger("k")
    await topic.trigger("k", delay="5s")
    # When more come, neither the quiet time nor the size moves it
    for _ in range(3):
        assert (await topic.trigger("k")).due_at == at(5)


async def test_naive_datetimes_are_refused(face: Any, everything: Any) -> None:
    topic = face.topic("t")
    with pytest.raises(InvalidArgument, match=r"at=.*naive datetime.*tzinfo=UTC"):
        await topic.trigger("k", at=datetime(2030, 1, 1))  # noqa: DTZ001
    with pytest.raises(InvalidArgument, match=r"at=.*naive datetime"):
        await topic.reschedule("k", at=datetime(2030, 1, 1))  # noqa: DTZ001
    assert everything() == {}


async def test_a_clock_set_back_does_not_turn_first_and_last_round(face: Any, clock: Clock, at: At) -> None:
    topic = face.topic("t", window="60s")
    # Given a server whose clock is set back between two triggers
    clock.advance("10s")
    await topic.trigger("k")
    clock.set(at(4).timestamp())
    await topic.trigger("k")
    # Then first and last are the earliest and the latest time, and the due time stands
    clock.set(at(70).timestamp())
    (delivery,) = await topic.take(1)
    assert (delivery.first_at, delivery.last_at, delivery.due_at) == (at(4), at(10), at(70))


def test_a_deferred_delivery_is_not_moved_by_the_policy(gate: Gate, clock: Clock, at: At) -> None:
    # Given a first delivery that was not possible, and is to be tried again in a minute
    topic = gate.topic("t", quiet="5s", max_delay=None)
    topic.trigger("k")
    clock.advance("5s")
    (early,) = topic.take(1)
    gate.context.link.run(topic.open().settle(0, [Settlement("defer", early, 60_000)]))
    # When another trigger of its key comes
    receipt = topic.trigger("k")
    # Then its time stands, as that of any retry
    assert (receipt.status, receipt.due_at) == ("merged", at(65))
    # And what was not possible yet was no attempt
    clock.advance("60s")
    assert [one.attempt for one in topic.take(1)] == [1]
