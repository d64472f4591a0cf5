"""A topic is given another number of slots while it is in use: nothing is lost, nothing is done twice."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import pytest

from idemgate import Gate, InvalidArgument, StoreUnavailable, Trigger
from idemgate.core.calls import Batch
from idemgate.core.keys import slot_of, topics
from idemgate.errors import PolicyChanged, ServerRejected, TopicInUse, UnexpectedData
from idemgate.testing import Clock, audit
from idemgate.topics.reshard import ReshardProgress, plan_reshard
from tests.conftest import Awaited, Face
from tests.for_each import for_each

pytestmark = pytest.mark.one_in(3)

KEYS = [f"k{i}" for i in range(40)]
CHANGES = [(1, 2), (2, 8), (8, 2), (4, 1), (16, 16)]


@pytest.fixture
async def other(gate: Gate, url: str, clock: Clock) -> AsyncIterator[Gate]:
    """Another program on the same store."""
    made = Gate(url, namespace=gate.namespace, clock=clock, timeout="30s")
    yield made
    await made.aio.close()
    made.close()


def _policy(slots: int) -> dict[str, Any]:
    return {"window": "60s", "merge": "append", "slots": slots, "max_attempts": 2, "backoff": "10s", "lease": "30s"}


async def _filled(topic: Any, clock: Clock) -> dict[str, Any]:
    """A topic with something everywhere: dead, in flight, waiting behind that, blocked by a group, retrying, scheduled,
    remembered. Returns the deliveries in flight by key."""
    await topic.trigger_many([Trigger(f"dead{i}", i) for i in range(8)])
    await topic.trigger_many([Trigger(f"back{i}", i) for i in range(8)])
    clock.advance("60s")
    taken = await topic.take(100)
    await topic.bury([one for one in taken if one.key.startswith("dead")], reason="no")
    await topic.nack([one for one in taken if one.key.startswith("back")], delay="300s", reason="later")
    await topic.trigger_many([Trigger(f"fly{i}", i) for i in range(16)])
    await topic.trigger_many([Trigger(f"{g}{i}", i, group=g) for i in range(3) for g in ("g", "h", "i", "j")])
    clock.advance("60s")
    flying = {one.key: one for one in await topic.take(100)}
    await topic.trigger_many([Trigger(f"fly{i}", "more") for i in range(4)])
    await topic.trigger_many([Trigger(key, 1, event_id=f"e{key}", version=5) for key in KEYS])
    return flying


async def _seen(topic: Any) -> Any:
    """What anybody can see of it, but for the ids of dead letters."""
    stats = await topic.stats()
    peeks = {}
    for key in [*KEYS, *(f"{name}{i}" for name in ("back", "fly") for i in range(16))]:
        peek = await topic.peek(key)
        pending = (peek.pending.payload, peek.pending.count, peek.pending.attempts) if peek.pending else None
        peeks[key] = (pending, peek.due_at, peek.in_flight.payload if peek.in_flight else None, peek.token)
    letters = sorted(
        (one.key, one.payload, one.reason, one.died_at, one.attempts) for one in await topic.dead.list(100)
    )
    counters = dict(stats.counters)
    places = (stats.scheduled, stats.ready, stats.waiting, stats.blocked, stats.in_flight, stats.dead, stats.paused)
    late = (stats.next_due, stats.oldest_due, stats.oldest_blocked, stats.blocked_groups, stats.sampled)
    return places, late, counters, peeks, letters


@pytest.mark.parametrize(("before", "after"), CHANGES)
async def test_everything_is_as_it_was(face: Face, clock: Clock, conserved: Any, before: int, after: int) -> None:
    # Given a topic with something everywhere
    topic = face.topic("t", **_policy(before))
    flying = await _filled(topic, clock)
    seen = await _seen(topic)
    # When it is given another number of slots
    done = await topic.reshard(after)
    # Then nobody sees a difference but in that number
    assert (done.before, done.after) == ((before, after) if before != after else (after, after))
    assert topic.policy.slots == after
    assert await _seen(topic) == seen
    # And what is in flight is settled, and lets go of its group and of what waits behind it
    assert set(await topic.ack(list(flying.values()))) == {"ok"}
    stats = await topic.stats()
    assert (stats.waiting, stats.in_flight) == (0, 0)
    order = []
    clock.advance("400s")
    while taken := await topic.take(100):
        order += [one.key for one in taken]
        assert len({one.group for one in taken if one.group}) == len([one for one in taken if one.group])
        await topic.ack(taken)
    assert sorted(order) == sorted(
        [*KEYS, *(f"back{i}" for i in range(8)), *(f"fly{i}" for i in range(4))]
        + [f"{g}{i}" for i in (1, 2) for g in "ghij"]
    )
    for group in "ghij":
        assert [key for key in order if key[0] == group and key[1:].isdigit()] == [f"{group}1", f"{group}2"]
    await conserved(topic, [])
    # And what it remembered it still remembers
    again = await topic.trigger_many([Trigger(key, 1, event_id=f"e{key}") for key in KEYS])
    assert {one.status for one in again} == {"duplicate"}
    assert (await topic.trigger(KEYS[0], 1, version=4)).status == "dropped"
    assert await topic.dead.redrive() == 8


async def test_nothing_stays_behind(face: Face, clock: Clock, everything: Callable[[], dict[bytes, bytes]]) -> None:
    topic = face.topic("t", **_policy(4))
    await _filled(topic, clock)
    await topic.reshard(1)
    left = [key.decode().partition("}:") for key in everything() if b"/4}" in key]
    assert sorted(part for _, _, part in left if part != "history") == ["meta"] * 4


@pytest.mark.parametrize(("before", "after"), [(2, 8), (8, 2)])
async def test_a_program_that_did_not_notice_goes_on(
    face: Face, other: Gate, clock: Clock, before: int, after: int
) -> None:
    # Given two programs that use a topic, one of which has deliveries
    topic = face.topic("t", **_policy(before))
    late = other.topic("t", **_policy(before))
    stale = late.aio if face.awaiting else Awaited(late)
    flying = await _filled(stale, clock)
    # When the other gives it another number of slots
    await topic.reshard(after)
    # Then whatever the first asks is answered in the new slots
    assert (await stale.trigger(KEYS[0], 2)).status == "merged"
    assert {one.status for one in await stale.trigger_many([(key, 3) for key in KEYS])} == {"merged"}
    assert await stale.cancel(KEYS[1]) == "cancelled"
    assert await stale.reschedule(KEYS[2], delay="500s") == "rescheduled"
    assert set(await stale.extend(list(flying.values()))) == {"ok"}
    assert set(await stale.ack(list(flying.values()))) == {"ok"}
    assert await stale.stats() == await topic.stats()
    assert late.policy.slots == after
    assert await stale.flush() > 0
    taken = await stale.take(1000)
    assert len({one.key for one in taken}) == len(taken) == 39 + 8 + 4 + 4
    assert {one.payload[0] for one in taken if one.key == KEYS[0]} == {1}
    assert (await topic.peek(KEYS[0])).in_flight.count == 3


VERBS: dict[str, Callable[[Any], Any]] = {
    "take": lambda topic: topic.take(1000),
    "trigger": lambda topic: topic.trigger(KEYS[0], 2),
    "trigger_many": lambda topic: topic.trigger_many([(key, 2) for key in KEYS]),
    "peek": lambda topic: topic.peek(KEYS[0]),
    "versions": lambda topic: topic.versions(KEYS[0]),
    "reset version": lambda topic: topic.reset_version(KEYS[0]),
    "cancel": lambda topic: topic.cancel(KEYS[0]),
    "bury a key": lambda topic: topic.bury(KEYS[0]),
    "flush one": lambda topic: topic.flush(KEYS[0]),
    "flush": lambda topic: topic.flush(),
    "pause": lambda topic: topic.pause(),
    "stats": lambda topic: topic.stats(),
    "dead": lambda topic: topic.dead.list(5),
    "redrive": lambda topic: topic.dead.redrive(),
    "delete": lambda topic: topic.dead.delete(),
    "forward": lambda topic: topic.forward_once(),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(("before", "after"), [(2, 4), pytest.param(4, 2, marks=pytest.mark.slow)])
async def test_the_first_call_after_it_is_the_same_as_without(
    face: Face, other: Gate, url: str, clock: Clock, verb: str, before: int, after: int
) -> None:
    # Given the same topic twice, and a program that opened both
    stale = []
    for name in ("t", "u"):
        late = other.topic(name, **_policy(before))
        late.forward("list")
        stale.append(late.aio if face.awaiting else Awaited(late))
        await _filled(stale[-1], clock)
        clock.set(clock.microseconds() / 1_000_000 - 120)
    clock.advance("200s")
    # When one of them is given other slots
    await face.topic("t", **_policy(before)).reshard(after)
    # Then the program is answered alike
    answers = [await VERBS[verb](topic) for topic in stale]
    shown = [_shown(answer) for answer in answers]
    assert shown[0] == shown[1]
    assert (await stale[0].stats()) == (await stale[1].stats())


def _shown(answer: Any) -> Any:
    if isinstance(answer, list):
        return [one if hasattr(one, "status") else None for one in answer]
    return getattr(answer, "due_at", answer)


async def _ended(topic: Any, flying: dict[str, Any], conserved: Any) -> None:
    """All that is left of it is done, and nothing was lost."""
    assert set(await topic.ack(list(flying.values()))) == {"ok"}
    await topic.flush()
    while taken := await topic.take(1000):
        await topic.ack(taken)
    await conserved(topic, [])


async def _steps(gate: Gate, name: str, slots: int, most: int) -> int:
    """Performs at most that many steps of a change; how many it did."""
    calls, link = gate.topic(name).open(), gate.context.link
    plan = plan_reshard(calls, slots, lambda _: None)
    batch: Batch[list[Any]] = next(plan)
    for step in range(most):
        try:
            batch = plan.send(link.run_all(batch))
        except StopIteration:
            return step + 1
    return most


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2), (1, 4)])
@pytest.mark.slow
async def test_killed_anywhere_it_goes_on(
    gate: Gate, other: Gate, clock: Clock, conserved: Any, before: int, after: int
) -> None:
    # Given how many steps it takes
    topic = gate.topic("t", **_policy(before)).aio
    await _filled(topic, clock)
    steps = await _steps(gate, "t", after, 10_000)
    assert steps > 20
    for killed in range(3, steps):  # the first two look, and change nothing
        # When it is killed after any of them
        name = f"t{killed}"
        topic = gate.topic(name, **_policy(before)).aio
        flying = await _filled(topic, clock)
        seen = await _seen(topic)
        await _steps(gate, name, after, killed)
        # Then meanwhile it can be seen how much is where
        (stored,) = [one for one in gate.stored_topics() if one.name == name]
        assert (stored.changing_to, stored.slots) == (after, before)
        assert sum((stored.stats.in_flight, stored.stats.dead)) >= seen[0][4] + seen[0][5]
        # And begun anew it ends, and nothing is lost or there twice
        with pytest.raises(
            TopicInUse, match=f"being resharded to {after} slots; .*: idemgate topic reshard \\S+ {after}$"
        ):
            await topic.reshard(64)
        await topic.reshard(after)
        assert await _seen(topic) == seen
        await _ended(topic, flying, conserved)


async def test_two_at_once_do_no_harm(gate: Gate, other: Gate, clock: Clock) -> None:
    # Given two programs that perform the same change, step by step in turns
    topic = gate.topic("t", **_policy(2)).aio
    await _filled(topic, clock)
    seen = await _seen(topic)
    plans = [plan_reshard(one.topic("t", **_policy(2)).open(), 8, lambda _: None) for one in (gate, other)]
    batches = [next(plan) for plan in plans]
    while plans:
        for at in reversed(range(len(plans))):
            try:
                batches[at] = plans[at].send(gate.context.link.run_all(batches[at]))
            except StopIteration:
                del plans[at], batches[at]
    assert await _seen(topic) == seen
    assert topic.policy.slots == 8


@pytest.mark.slow
async def test_one_that_slept_through_its_change_and_the_way_back_does_nothing(
    gate: Gate, other: Gate, clock: Clock, conserved: Any
) -> None:
    # Given how many steps it takes
    await _filled(gate.topic("t", **_policy(1)).aio, clock)
    steps = await _steps(gate, "t", 2, 10_000)
    for slept in range(steps):
        # When one falls asleep after any of them, and another ends the change and goes back
        name = f"t{slept}"
        topic = gate.topic(name, **_policy(1)).aio
        flying = await _filled(topic, clock)
        seen = await _seen(topic)
        plan = plan_reshard(await topic.open(), 2, lambda _: None)
        batch: Batch[list[Any]] = next(plan)
        for _ in range(slept):
            batch = plan.send(gate.context.link.run_all(batch))
        answers = gate.context.link.run_all(batch)
        await other.topic(name, **_policy(1)).aio.reshard(2)
        await other.topics[name].aio.reshard(1)
        # Then what it does when it wakes up changes nothing, but for a change that it only now begins
        with suppress(StopIteration):
            while True:
                answers = gate.context.link.run_all(plan.send(answers))
        (stored,) = [one for one in gate.stored_topics() if one.name == name]
        assert (stored.changing_to, stored.slots) == (None, 2 if slept < 2 else 1)
        assert await _seen(topic) == seen
        await _ended(topic, flying, conserved)


async def test_a_late_copy_of_any_step_changes_nothing(gate: Gate, clock: Clock) -> None:
    # Given every call of a change
    topic = gate.topic("t", **_policy(2)).aio
    await _filled(topic, clock)
    plan, sent = plan_reshard(await topic.open(), 8, lambda _: None), []
    try:
        batch = next(plan)
        while True:
            sent.append(batch)
            batch = plan.send(gate.context.link.run_all(batch))
    except StopIteration:
        gate.topic("t").definition.set_slots(8)
    seen = await _seen(topic)
    # When each arrives once more, after it
    for batch in sent:
        gate.context.link.run_all(batch)
    assert await _seen(topic) == seen
    assert (await topic.trigger("new")).status == "scheduled"


@pytest.mark.parametrize("half", [0, 30], ids=["even", "odd"])
async def test_who_lost_the_reply_hears_it_in_the_new_slot(gate: Gate, clock: Clock, half: int) -> None:
    # Given calls that were executed, their replies lost, in either half of a minute: they are remembered by turns
    clock.set(clock.now().timestamp() // 60 * 60 + 60 + half)
    topic = gate.topic("t", **_policy(2)).aio
    calls = await topic.open()
    flying = list((await _filled(topic, clock)).values())
    lost: list[Batch[Any]] = [
        calls.trigger_many([Trigger(key, 7) for key in KEYS]),
        calls.settle_many(topic._build_settlements("ack", flying)),
        Batch([calls.trigger(Trigger("once", 1))], list),
        Batch([calls.cancel(KEYS[3])], list),
    ]
    answers = [gate.context.link.run_all(batch) for batch in lost]
    seen = await _seen(topic)
    # When they are sent again after the topic was given other slots, once and again
    for slots in (8, 4):
        await topic.reshard(slots)
        assert [gate.context.link.run_all(batch) for batch in lost] == answers
        # Then nothing was done twice
        assert await _seen(topic) == seen


async def test_a_copy_that_moved_makes_no_message_of_a_key_that_ended(gate: Gate) -> None:
    # Given a request whose reply was lost, and whose messages were delivered before the topic was given other slots
    topic = gate.topic("t", slots=1).aio
    lost = (await topic.open()).trigger_many([Trigger(key, 7) for key in KEYS])
    answer = gate.context.link.run_all(lost)
    await topic.ack(await topic.take(100))
    await topic.reshard(64)
    # When it is sent again, as requests of one trigger or a few, then nothing is done twice
    assert gate.context.link.run_all(lost) == answer
    assert await topic.take(100) == []


async def test_one_window_makes_one_delivery_across_it(face: Face, clock: Clock) -> None:
    topic = face.topic("t", window="60s", merge="append", slots=1)
    await topic.trigger_many([(key, "before") for key in KEYS])
    await topic.reshard(4)
    clock.advance("30s")
    await topic.trigger_many([(key, "after") for key in KEYS])
    await topic.reshard(2)
    clock.advance("29s")
    assert await topic.take(100) == []
    clock.advance("1s")
    taken = await topic.take(100)
    assert sorted((one.key, one.payload) for one in taken) == sorted((key, ["before", "after"]) for key in KEYS)


async def test_ranks_pause_and_rate_hold(face: Face, clock: Clock) -> None:
    topic = face.topic("t", priority=True, slots=2, merge="last")
    await topic.trigger_many([Trigger(f"{p}-{i}", priority=p) for p in range(5) for i in range(4)])
    clock.advance("1s")
    first = await topic.take(1)  # ranks the rest
    await topic.release(first)
    await topic.pause("an outage")
    pause = (await topic.stats()).paused
    await topic.reshard(1)
    assert (await topic.stats()).paused == pause
    assert pause.reason == "an outage"
    assert await topic.take(5) == []
    await topic.resume()
    taken = await topic.take(100)
    assert [one.priority for one in taken] == sorted((one.priority for one in taken), reverse=True)
    assert len(taken) == 20


async def test_one_key_in_two_slots_becomes_one(face: Face, clock: Clock, conserved: Any) -> None:
    # Given one key with several groups, which is several messages in several slots: pending, in flight, and dead
    topic = face.topic("t", merge="append", slots=16, max_attempts=5)
    groups = [f"group{i}" for i in range(12)]
    await topic.trigger_many([Trigger("k", group, group=group) for group in groups])
    flying = await topic.take(100)
    assert len(flying) > 3
    await topic.bury(flying[0])
    await topic.bury(flying[1])
    await topic.trigger_many([Trigger("k", "again", group=group) for group in groups])
    # When they come into one slot
    await topic.reshard(1)
    # Then one of its deliveries is still in flight; the others count as lapsed, and are tried again
    assert sorted(await topic.ack(flying[2:])) == ["lost"] * (len(flying) - 3) + ["ok"]
    stats = await topic.stats()
    assert stats["lapsed"] == len(flying) - 3
    clock.advance("60s")
    (taken,) = await topic.take(100)
    assert taken.payload.count("again") == 12
    await topic.ack(taken)
    assert await topic.dead.redrive() == 2
    (taken,) = await topic.take(100)
    await topic.ack(taken)
    await conserved(topic, ["k"])


async def test_versions_of_acked_messages_move_to_the_slots_of_their_keys(face: Face) -> None:
    # Given versions of keys without a message, half of them in groups
    def build(version: int) -> list[Trigger]:
        grouped = [Trigger(f"{key}-grouped", 1, group=f"group-{key}", version=version) for key in KEYS]
        return grouped + [Trigger(key, 1, version=version) for key in KEYS]

    topic = face.topic("t", slots=1, dedup_retention="100s")
    await topic.trigger_many(build(5))
    while taken := await topic.take(100):
        for delivery in taken:
            await topic.ack(delivery)
    # When they move to other slots
    await topic.reshard(8)
    # Then each is known there
    assert {receipt.status for receipt in await topic.trigger_many(build(4))} == {"dropped"}


async def test_what_two_slots_remember_of_one_key_becomes_one(face: Face, clock: Clock) -> None:
    # Given an event and a version that are remembered in several slots, since the key came with several groups
    topic = face.topic("t", slots=16, dedup_retention="100s")
    groups = [f"group{i}" for i in range(12)]
    await topic.trigger_many([Trigger("k", n, group=group, event_id="e") for n, group in enumerate(groups)])
    await topic.trigger_many([Trigger("v", n, group=group, version=9 - n) for n, group in enumerate(groups[:8])])
    # When they come into one slot
    await topic.reshard(1)
    # Then the event is a duplicate there, and the newest version counts, for as long as it would have
    clock.advance("99s")
    assert (await topic.trigger("k", event_id="e")).status == "duplicate"
    assert (await topic.trigger("v", version=8)).status == "dropped"
    clock.advance("1s")
    assert (await topic.trigger("k", event_id="e")).status == "merged"


@for_each("slots", [0, 3, -2, 32_768, True, "4", None])
async def test_a_number_that_is_none_is_refused(face: Face, slots: Any) -> None:
    topic = face.topic("t", window="60s", slots=2)
    with pytest.raises(InvalidArgument, match="slots"):
        await topic.reshard(slots)
    assert topic.policy.slots == 2


async def test_a_limit_that_could_not_be_shared_out_is_refused(face: Face) -> None:
    topic = face.topic("t", concurrency=4, slots=2)
    with pytest.raises(InvalidArgument, match="less than the 8 slots"):
        await topic.reshard(8)


async def test_who_says_a_former_number_gets_the_stored_one(face: Face, other: Gate) -> None:
    topic = face.topic("t", window="60s", slots=2)
    await topic.trigger("k")
    await topic.reshard(8)
    # A program started with the former number, also one that redefines something else
    again = other.topic("t", window="60s", slots=2)
    assert again.trigger("k").status == "merged"
    assert again.policy.slots == 8
    assert other.topic("t", window="60s", slots=2) is again
    changed = other.topic("t", window="30s", slots=2, revision=1)
    assert changed.trigger("k").status == "merged"
    assert changed.policy.slots == 8
    # But no other number
    with pytest.raises(PolicyChanged, match="idemgate topic reshard t N"):
        other.topic("t", window="30s", slots=4, revision=2).trigger("k")


async def test_while_a_part_is_moved_its_callers_wait(gate: Gate, other: Gate, clock: Clock, three_tries: Any) -> None:
    # Given a change that was killed in the middle of a part
    topic = gate.topic("t", **_policy(1)).aio
    await _filled(topic, clock)
    stale = other.topic("t", **_policy(1))
    stale.open()
    await _steps(gate, "t", 2, 6)
    # Then a call that needs that part fails when it has waited long enough, and nothing was done
    with three_tries(), pytest.raises(StoreUnavailable, match="being moved") as caught:
        stale.trigger("k")
    assert caught.value.executed == "no"
    await topic.reshard(2)
    assert stale.trigger("k").accepted


async def test_letters_of_one_token_in_two_slots_stay_two(face: Face, clock: Clock, conserved: Any) -> None:
    # Given deliveries that were taken from several slots in the same microsecond, and so have the same tokens
    topic = face.topic("t", slots=8)
    await topic.trigger_many([(f"k{i}", i) for i in range(12)])
    taken = await topic.take(100)
    assert len({one.token for one in taken}) < len(taken)
    # When some are buried before their slots become one, some after, and some that are taken then, while no time passes
    await topic.bury(taken[:6])
    await topic.reshard(1)
    assert await topic.bury(taken[6:]) == ["dead"] * 6
    await topic.trigger_many([(f"late{i}", i) for i in range(6)])
    assert await topic.bury(await topic.take(100)) == ["dead"] * 6
    # Then each is a letter of its own
    letters = await topic.dead.list(100)
    assert sorted(one.key for one in letters) == sorted([f"k{i}" for i in range(12)] + [f"late{i}" for i in range(6)])
    assert len({one.id for one in letters}) == 18
    assert (await topic.stats()).dead == 18
    assert await topic.dead.redrive() == 18
    await topic.ack(await topic.take(100))
    await conserved(topic, [])


@pytest.mark.parametrize("missing", ["hgetall", "hkeys", "hdel"])
async def test_a_user_who_may_not_ask_all_of_it_moves_nothing(
    gate: Gate, clock: Clock, users: Any, raw: Any, missing: str
) -> None:
    # Given a topic with something everywhere, and an administrator who lacks a command
    topic = gate.topic("t", **_policy(2)).aio
    flying = await _filled(topic, clock)
    seen = await _seen(topic)
    url = users("admin")
    name = url.partition("://")[2].partition(":")[0]
    raw.execute_command("ACL", "SETUSER", name, f"-{missing}")
    lacking = Gate(url, namespace=gate.namespace, clock=clock, timeout="30s")
    # When it changes the slots again and again, and is refused somewhere
    for _ in range(3):
        with pytest.raises(ServerRejected):
            await lacking.topic("t", **_policy(2)).aio.reshard(8)
    await lacking.aio.close()
    # Then one who may goes on, and nothing is missing or counted twice
    assert (await topic.reshard(8)).after == 8
    assert await _seen(topic) == seen
    assert set(await topic.ack(list(flying.values()))) == {"ok"}


async def test_a_user_who_may_wake_nobody_may_change_the_slots(gate: Gate, users: Any, raw: Any) -> None:
    gate.topic("t", slots=2).trigger_many([(key, 1) for key in KEYS])
    url = users("admin")
    raw.execute_command("ACL", "SETUSER", url.partition("://")[2].partition(":")[0], "-publish")
    with Gate(url, namespace=gate.namespace, timeout="30s") as hushed:
        assert hushed.topic("t", slots=2).reshard(4).moved >= len(KEYS)
    assert gate.topic("t").stats().pending == len(KEYS)


async def test_a_policy_that_is_redefined_meanwhile_is_the_one_that_stays(face: Face, other: Gate) -> None:
    # Given a topic whose policy another process changes while its slots are changed
    topic = face.topic("t", slots=2, window="60s")
    await topic.trigger_many([(key, 1) for key in KEYS])

    def redefine(progress: ReshardProgress) -> None:
        if progress.done == 1:
            other.topic("t", slots=2, window="5s", revision=1).open()

    assert (await topic.reshard(4, redefine)).after == 4
    # Then it has that policy, and those slots
    (stored,) = other.stored_topics()
    assert (stored.policy.window, stored.slots, stored.changing_to) == (5_000, 4, None)
    assert stored.stats.pending == len(KEYS)


@pytest.mark.damages("wrong-type")
@pytest.mark.parametrize("slot", ["1/2", "3/4"])
async def test_a_slot_that_holds_what_is_not_ours_is_found_before_anything_is_closed(
    face: Face, raw: Any, everything: Callable[[], dict[bytes, bytes]], slot: str
) -> None:
    # Given a topic, of whose slots, or of those that it is to have, one holds something foreign
    topic = face.topic("t", slots=2)
    await topic.trigger_many([(key, 1) for key in KEYS])
    raw.delete(key := f"ig2:{{{face.gate.namespace}:topic:t:{slot}}}:dedup")
    raw.rpush(key, "foreign")
    before = everything()
    # When it is to be given those, then nothing is written, and it goes on as it was
    with pytest.raises(UnexpectedData, match="holds a list"):
        await topic.reshard(4)
    assert everything() == before
    raw.delete(key)
    assert len(await topic.take(100)) == len(KEYS)


@pytest.mark.damages("unplaced")
async def test_what_stands_nowhere_is_scheduled_when_the_slots_change(face: Face, raw: Any) -> None:
    # Given a pending message that other hands took out of where it stood
    topic = face.topic("t", slots=1)
    await topic.trigger("k", 1)
    raw.zrem(f"ig2:{{{face.gate.namespace}:topic:t:0/1}}:scheduled", "k")
    assert await topic.take(10) == []
    # When the number of slots is changed
    await topic.reshard(2)
    # Then it is found
    assert [one.payload for one in await topic.take(10)] == [1]


@pytest.mark.damages("conservation")
async def test_what_waits_behind_a_delivery_that_is_gone_is_scheduled_when_the_slots_change(
    face: Face, raw: Any
) -> None:
    # Given a message behind a delivery, of which other programs deleted every part
    topic = face.topic("t", slots=1)
    await topic.trigger("k", 1)
    await topic.take(1)
    await topic.trigger("k", 2)
    part = f"ig2:{{{face.gate.namespace}:topic:t:0/1}}:"
    raw.delete(part + "inflight", part + "leases", part + "messages")
    # When the number of slots is changed
    await topic.reshard(2)
    # Then it is found
    assert [one.payload for one in await topic.take(10)] == [2]


async def test_messages_that_are_ranked_leave_nothing_behind_and_keep_their_order(
    face: Face, everything: Callable[[], dict[bytes, bytes]]
) -> None:
    # Given messages in the order of their priorities, of which one was taken
    topic = face.topic("t", slots=2, priority=True)
    await topic.trigger_many([Trigger(f"k{n}", n, priority=n) for n in range(10)])
    taken = await topic.take(2)
    await topic.reshard(1)
    # Then the former slots hold nothing, and the order is as it was
    assert {key.decode().partition("}:")[2] for key in everything() if b"/2}" in key} == {"meta"}
    left = [one.payload for one in await topic.take(10)]
    assert left == sorted(set(range(10)) - {one.payload for one in taken}, reverse=True)


@pytest.mark.parametrize("flushed", [False, True])
async def test_a_message_keeps_the_reason_for_its_due_time(face: Face, clock: Clock, flushed: bool) -> None:
    topic = face.topic("t", slots=1, window="60s")
    await topic.trigger("k", 1)
    clock.advance("1s")
    if flushed:
        await topic.flush()
    await topic.reshard(2)
    clock.advance(0 if flushed else "59s")
    assert [one.reason for one in await topic.take(10)] == ["flush" if flushed else "window"]


async def test_a_rate_that_is_used_up_is_so_in_every_layout(face: Face, clock: Clock) -> None:
    topic = face.topic("t", slots=1, rate="1/60s")
    await topic.trigger_many([Trigger(f"k{i}", i) for i in range(20)])
    assert len(await topic.take(10)) == 1
    assert (await topic.reshard(2)).moved >= 20
    assert await topic.take(10) == []
    clock.advance("120s")
    assert len(await topic.take(10)) == 2


async def test_a_lease_longer_than_the_topics_is_sound_in_every_new_slot(face: Face, sound: Any) -> None:
    # Given deliveries in flight whose leases were extended beyond the lease of their topic
    topic = face.topic("t", slots=1, lease="30s")
    await topic.trigger_many([(key, 1) for key in KEYS])
    await topic.extend(await topic.take(100), "1h")
    # When the topic is split, and each slot takes messages for the usual lease
    await topic.reshard(2)
    await topic.trigger_many([(f"new-{key}", 1) for key in KEYS])
    taken = await topic.take(100)
    assert {one.slot for one in taken} == {0, 1}
    # Then the audit reports none of the long leases
    sound(face.gate)


async def test_how_far_it_is_is_told(face: Face) -> None:
    topic = face.topic("t", slots=2)
    await topic.trigger_many([(key, 1) for key in KEYS])
    told: list[ReshardProgress] = []
    done = await topic.reshard(4, told.append)
    assert done.moved >= len(KEYS)
    assert told[-1] == ReshardProgress(2, 2, done.moved)
    # While a part is moved, and when it is done
    assert {(one.done, one.parts) for one in told} == {(0, 2), (1, 2), (2, 2)}
    assert [one.moved for one in told] == sorted(one.moved for one in told)


async def test_the_same_number_of_slots_moves_nothing(face: Face) -> None:
    topic = face.topic("t", slots=2)
    await topic.trigger("k", 1)
    done = await topic.reshard(2)
    assert (done.before, done.after, done.moved) == (2, 2, 0)


@pytest.mark.damages("orphan")
async def test_a_policy_that_is_deleted_during_a_change_is_reported(face: Face, raw: Any) -> None:
    topic = face.topic("t")
    await topic.trigger("k", 1)
    # When another program deletes the stored policy, then the change ends with an error that says so
    with pytest.raises(UnexpectedData, match="has no policy of topic t, whose slot count is being changed"):
        await topic.reshard(2, on_progress=lambda _: raw.hdel(topics(face.gate.namespace), "t"))


def _of_slot(name: str, slot: int) -> str:
    """A name that begins so and belongs to that one of two slots."""
    return next(one for n in range(99) if slot_of((one := f"{name}{n}").encode(), 2) == slot)


@pytest.fixture(params=[(0, 1), (1, 0)])
def apart(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Two groups, one in each of two slots, either way round."""
    first, second = request.param
    return _of_slot("a", first), _of_slot("b", second)


async def test_a_key_of_two_groups_keeps_no_place_in_the_other(
    face: Face, clock: Clock, sound: Any, apart: tuple[str, str]
) -> None:
    # Given a key that is between two attempts in one group, and waits behind a live delivery of another
    (a, b), topic = apart, face.topic("t", slots=2)
    await topic.trigger("other", 1, group=b)
    (live,) = await topic.take(1)
    await topic.trigger("k", 1, group=a)
    await topic.nack(await topic.take(1), delay="0s")
    clock.advance("1s")
    await topic.trigger("k", 2, group=b)
    await topic.trigger("next", 3, group=a)
    # When they come into one slot
    await topic.reshard(1)
    # Then it is not handed out beside the live one, and its former group goes on
    sound(face.gate)
    assert [one.key for one in await topic.take(10)] == ["next"]
    await topic.ack(live)
    (taken,) = await topic.take(10)
    assert (taken.key, taken.group) == ("k", b)


async def test_no_group_waits_for_a_time_named_in_another(
    face: Face, clock: Clock, sound: Any, apart: tuple[str, str]
) -> None:
    # Given a key that is between two attempts in one group, and was triggered for a far time in another
    (a, b), topic = apart, face.topic("t", slots=2)
    for number, (held, far) in enumerate(((a, b), (b, a))):
        key = f"k{number}"
        if held == b:
            await topic.trigger(key, 2, group=far, delay="30d")
            clock.advance("1s")
        await topic.trigger(key, 1, group=held)
        (taken,) = await topic.take(1)
        await topic.nack(taken, delay="1s")
        if held == a:
            clock.advance("1ms")
            await topic.trigger(key, 2, group=far, delay="30d")
        await topic.trigger(f"other{number}", 3, group=far)
        await topic.trigger(f"beside{number}", 3, group=held)
        # When they come into one slot
        await topic.reshard(1)
        # Then both groups go on
        sound(face.gate)
        clock.advance("2s")
        taken = await topic.take(10)
        assert sorted(one.key for one in taken) == [f"beside{number}", f"other{number}"]
        await topic.ack(taken)
        await topic.cancel(key, group=a)
        await topic.reshard(2)


async def test_a_key_between_two_attempts_keeps_its_place_in_its_group(
    face: Face, clock: Clock, sound: Any, apart: tuple[str, str]
) -> None:
    # Given a key that waits in one group, and is between two attempts in another one
    (a, b), topic = apart, face.topic("t", slots=2)
    await topic.trigger("other", 1, group=b)
    (live,) = await topic.take(1)
    await topic.trigger("k", 1, group=b)
    clock.advance("1s")
    await topic.trigger("k", 2, group=a)
    await topic.nack(await topic.take(1), delay="10s")
    await topic.trigger("beside", 3, group=a)
    # When they come into one slot
    await topic.reshard(1)
    # Then the next message of that group waits for the key
    sound(face.gate)
    taken = await topic.take(10)
    await topic.ack(live)
    clock.advance("10s")
    taken = taken or await topic.take(10)
    assert [(one.key, one.group) for one in taken] == [("k", a)]


async def test_a_key_that_left_its_group_holds_none(face: Face, sound: Any) -> None:
    # Given a key that is between two attempts in a group, and was triggered without one
    group, key = _of_slot("a", 1), _of_slot("k", 0)
    topic = face.topic("t", slots=2)
    await topic.trigger(key, 1, group=group)
    await topic.nack(await topic.take(1), delay="1h")
    await topic.trigger(key, 2)
    # When they come into one slot
    await topic.reshard(1)
    # Then nothing holds the group, nor the one without a name
    sound(face.gate)
    await topic.flush(key)
    await topic.ack(await topic.take(10))
    sound(face.gate)


@pytest.mark.parametrize("lined", [False, True])
async def test_a_group_does_not_wait_for_a_delivery_of_another(
    face: Face, clock: Clock, sound: Any, apart: tuple[str, str], lined: bool
) -> None:
    # Given a key in flight in one group, and between two attempts in another, in which something waits
    (a, b), topic = apart, face.topic("t", slots=2)
    await topic.trigger("k", 1, group=b)
    await topic.nack(await topic.take(1), delay="1h")
    await topic.trigger("k", 2, group=a)
    (flying,) = await topic.take(1)
    await topic.trigger("other", 3, group=b)
    if lined:
        assert await topic.take(10) == []
    # When they come into one slot
    await topic.reshard(1)
    # Then what waits in the other group goes on, and the key once its delivery is done
    sound(face.gate)
    (other,) = await topic.take(10)
    assert other.key == "other"
    sound(face.gate)
    assert await topic.ack([flying, other]) == ["ok", "ok"]
    sound(face.gate)
    clock.advance("1h")
    assert [one.key for one in await topic.take(10)] == ["k"]


async def test_a_line_goes_on_behind_a_delivery_that_counts_as_lapsed(
    face: Face, sound: Any, apart: tuple[str, str]
) -> None:
    # Given a key in flight in two groups, in each of which something stands in line
    (a, b), topic = apart, face.topic("t", slots=2)
    await topic.trigger_many([Trigger("k", 1, group=group) for group in (a, b)])
    flying = await topic.take(10)
    await topic.trigger_many([Trigger(f"in-{group}", 1, group=group) for group in (a, b)])
    assert await topic.take(10) == []
    # When they come into one slot
    await topic.reshard(1)
    # Then the group of the one that counts as lapsed goes on, and the other when its delivery is done
    sound(face.gate)
    lapsed, kept = (a, b) if slot_of(a.encode(), 2) == 1 else (b, a)
    assert [one.key for one in await topic.take(10)] == [f"in-{lapsed}"]
    assert sorted(await topic.ack(flying)) == ["lost", "ok"]
    assert [one.key for one in await topic.take(10)] == [f"in-{kept}"]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.slow
async def test_whatever_is_done_between_changes_no_group_has_more_live_deliveries_than_it_may(
    gate: Gate, clock: Clock, sound: Any, seed: int
) -> None:
    drawn = random.Random(seed)
    limit = drawn.choice([1, 1, 2])
    topic = gate.topic("t", slots=2, lease="1h", merge="append", max_attempts=9, group_concurrency=limit).aio
    several = [_of_slot(name, slot) for name in "ab" for slot in (0, 1)]
    live: list[Any] = []
    for number in range(50):
        clock.advance("10ms")  # two slots grant the same token only in the same microsecond
        verb = drawn.choice(["trigger", "trigger", "trigger", "take", "end", "reshard"])
        if verb == "trigger":
            delay = {"delay": "30s"} if drawn.random() < 0.2 else {}
            await topic.trigger(f"k{drawn.randrange(3)}", number, group=drawn.choice(several), **delay)
        elif verb == "take":
            live += await topic.take(1)
        elif verb == "end" and live:
            one = live.pop(drawn.randrange(len(live)))
            ends = [topic.ack, topic.release, lambda d: topic.nack(d, delay=drawn.choice(["0s", "20s"]))]
            await drawn.choice(ends)(one)
        elif verb == "reshard":
            await topic.reshard(drawn.choice([1, 2, 4]))
        if live:
            held = await topic.extend(live)
            live = [one for one, answer in zip(live, held, strict=True) if answer == "ok"]
        sound(gate)
        groups = [one.group for one in live]
        assert all(groups.count(one) <= limit for one in groups)
    # And all of it can be done in the end
    await topic.ack(live)
    clock.advance("60s")
    while taken := await topic.take(100):
        await topic.ack(taken)
    stats = await topic.stats()
    assert (stats.pending, stats.in_flight) == (0, 0)


@pytest.mark.parametrize("part", ["in flight", "dead"])
async def test_what_comes_back_in_another_slot_may_be_flushed_with_all_others(face: Any, part: str) -> None:
    # Given a delivery of many triggers, whose slot became another one than that which took the counters
    topic = face.topic("t", slots=1, lease="1h")
    await topic.trigger_many([("a", number) for number in range(9)])
    (running,) = await topic.take(1)
    if part == "dead":
        await topic.bury(running)
    await topic.reshard(2)
    if part == "dead":
        await topic.dead.redrive()
        (running,) = await topic.take(1)
    # When it is to be tried again later, and all is flushed
    assert await topic.nack(running, delay="1h") == "ok"
    assert await topic.flush() == 1
    # Then that is no fault
    assert audit(face.gate).sound
    assert [one.key for one in await topic.take(1)] == ["a"]
