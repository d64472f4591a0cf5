"""Limits over all workers: what is in flight, how fast, and not at all."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest

from idemgate import Gate, InvalidArgument
from idemgate.errors import DecodeError
from idemgate.testing import Clock
from tests.for_each import for_each


async def test_no_more_in_flight_than_allowed(face: Any, clock: Clock) -> None:
    # Given at most five in flight
    topic = face.topic("calls", concurrency=5)
    await topic.trigger_many([(f"k{n}", n) for n in range(12)])
    taken = await topic.take(100)
    assert len(taken) == 5
    assert await topic.take(100) == []
    # When two end, two more go out
    await topic.ack(taken[:2])
    assert len(await topic.take(100)) == 2


async def test_the_shares_of_the_slots_add_up_to_the_limit(face: Any) -> None:
    topic = face.topic("calls", concurrency=10, slots=4)
    await topic.trigger_many([(f"k{n}", n) for n in range(400)])
    assert sum([len(await topic.take(100)) for _ in range(3)]) == 10


async def test_no_faster_than_the_rate_and_no_slower(face: Any, clock: Clock) -> None:
    # Given ten a second, at most two at once
    topic = face.topic("calls", rate="10/s", burst=2)
    await topic.trigger_many([(f"k{n}", n) for n in range(100)])
    # When it is asked every 10 ms for two seconds
    out = []
    for tick in range(200):
        out += [tick * 10] * len(await topic.take(100))
        clock.advance("10ms")
    # Then two went at once, and one each 100 ms from then on
    assert out[:4] == [0, 0, 100, 200]
    assert len(out) == 2 + 19


def test_a_take_says_when_the_rate_permits_the_next(gate: Gate, clock: Clock) -> None:
    # Given more than the rate permits
    topic = gate.topic("calls", rate="1/60s", lease="1h")
    topic.trigger_many([(n, n) for n in range(3)])
    first, second = (gate.context.link.run(topic.open().take(0, 10)) for _ in range(2))
    # Then who comes too early sleeps until the next may go, and who took looks again before that at the latest
    later = round(clock.now().timestamp() * 1000) + 60_000
    assert (len(first.deliveries), len(second.deliveries)) == (1, 0)
    assert second.next_due_ms == later
    assert first.next_due_ms <= later


async def test_a_rate_over_slots_is_the_rate(face: Any, clock: Clock) -> None:
    topic = face.topic("calls", rate="100/s", burst=4, slots=4)
    await topic.trigger_many([(f"k{n}", n) for n in range(1000)])
    out = 0
    for _ in range(200):
        out += len(await topic.take(1000))
        clock.advance("10ms")
    assert 190 <= out <= 204


async def test_pause_and_resume(face: Any, clock: Clock) -> None:
    # Given a topic with a delivery out
    topic = face.topic("calls")
    await topic.trigger_many([("a", 1), ("b", 2)])
    out = await topic.take(1)
    # When it is paused
    assert await topic.pause("a bad release") is True
    assert await topic.pause("another reason") is False
    # Then nothing more goes out, what is out can end, and triggers are accepted
    assert await topic.take(10) == []
    assert await topic.ack(out) == ["ok"]
    await topic.trigger("c", 3)
    paused = (await topic.stats()).paused
    assert (paused.since, paused.reason) == (clock.now(), "a bad release")
    assert re.fullmatch(rf".+, pid {os.getpid()} on .+", paused.by)
    # And it goes on when resumed
    assert await topic.resume() is True
    assert await topic.resume() is False
    assert (await topic.stats()).paused is None
    assert [one.key for one in await topic.take(10)] == ["b", "c"]


async def test_a_reason_that_is_no_short_text_is_refused_before_anything_is_written(face: Any, everything: Any) -> None:
    topic = face.topic("calls")
    await topic.trigger("k")
    before = everything()
    for reason in ("", "x" * 501, b"bytes", 7):
        with pytest.raises(InvalidArgument, match=r"^reason=.*Pass a text of 1 to 500 characters, or None"):
            await topic.pause(reason)
    assert everything() == before
    # And any other text is stored
    assert await topic.pause("\ud800\x1b" + "\N{SNOWMAN}" * 498)
    assert (await topic.stats()).paused.reason == "\\ud800\x1b" + "\N{SNOWMAN}" * 498


async def test_a_pause_that_another_program_wrote_still_pauses(face: Any, raw: Any) -> None:
    # Given a record of a pause that cannot be read
    topic = face.topic("calls")
    await topic.trigger("k")
    await topic.pause()
    raw.hset((await topic.open()).keys(0)[7], "paused", b"123 \xc1")
    # Then the topic is paused, its numbers name what is wrong, and it can be resumed
    assert await topic.take(1) == []
    with pytest.raises(DecodeError, match="a pause"):
        await topic.stats()
    assert await topic.resume() is True
    assert (await topic.stats()).paused is None


def test_nobody_waits_for_a_rate_that_has_room(gate: Gate) -> None:
    # Given a burst of three, and one message that is due
    topic = gate.topic("calls", rate="12/1m", burst=3)
    topic.trigger("a")
    topic.trigger("b", delay="1s")
    # When it is taken
    taken = gate.context.link.run(topic.open().take(0, 10))
    assert [one.key for one in taken.deliveries] == ["a"]
    # Then the worker that took it takes again when the next is due
    assert taken.next_due_ms == taken.now_ms + 1000


def test_who_takes_nothing_hears_of_what_is_due_in_spite_of_a_limit(gate: Gate) -> None:
    topic = gate.topic("calls", concurrency=2)
    topic.trigger("a")
    # As a forwarding worker does, to put back what lapsed
    swept = gate.context.link.run(topic.open().take(0, 0))
    assert (swept.deliveries, swept.next_due_ms) == ([], swept.now_ms)


@pytest.mark.parametrize("limit", ["pause", "concurrency", "rate"])
def test_who_may_take_nothing_of_a_long_ranked_backlog_is_not_told_that_it_is_due(
    gate: Gate, clock: Clock, limit: str
) -> None:
    # Given a topic with priorities that permits no delivery, and more due messages than one call sorts
    options = {"concurrency": {"concurrency": 1}, "rate": {"rate": "1/60s"}}.get(limit, {})
    topic = gate.topic("calls", priority=True, lease="1h", **options)
    if limit == "pause":
        topic.pause()
    else:
        topic.trigger("first")
        assert len(topic.take(1)) == 1
    topic.trigger_many([(n, n) for n in range(200)])
    # When somebody takes
    taken = gate.context.link.run(topic.open().take(0, 10))
    # Then it does not come back at once, but when the limit permits the next
    now = round(clock.now().timestamp() * 1000)
    opens = {"pause": 0, "concurrency": now + 3_600_000, "rate": now + 60_000}[limit]
    assert (taken.deliveries, taken.next_due_ms) == ([], opens)


@for_each(
    ("options", "word"),
    [
        ({"concurrency": 0}, "concurrency"),
        ({"concurrency": 3, "slots": 4}, "slots"),
        ({"rate": "fast"}, "rate"),
        ({"rate": 0}, "rate"),
        ({"rate": float("nan")}, "rate"),
        ({"rate": "10/0s"}, "rate"),
        ({"burst": 3}, "burst"),
        ({"group_concurrency": 0}, "group_concurrency"),
        ({"priority_boost": -1}, "priority_boost"),
    ],
)
async def test_limits_that_make_no_sense_are_refused(face: Any, options: dict[str, Any], word: str) -> None:
    with pytest.raises(InvalidArgument, match=word):
        face.topic("calls", **options)
