"""Membership kept in Redis: who serves what, how slots change hands, and what becomes of those that are cut off."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from idemgate import Gate, InvalidArgument, StoreError, StoreUnavailable
from idemgate.core import keys
from idemgate.errors import ServerRejected, UnexpectedData
from idemgate.membership import heartbeats as members
from idemgate.membership.member import RedisMembership
from idemgate.membership.ownership import HeartbeatReply, HeartbeatRequest
from idemgate.membership.rendezvous import owner, slot_id
from idemgate.testing import Clock
from idemgate.testing.proxy import Proxy
from tests.waiting import eventually
from tests.worker.crew import GRACE, INTERVAL, TTL, Hand, World

T = {"t": 64}
ALL = {("t", number) for number in range(64)}


@pytest.fixture(params=["hearing", "deaf"])
async def world(request: pytest.FixtureRequest, gate: Gate, clock: Clock) -> AsyncIterator[World]:
    """Once with hints, once without: none of them is needed."""
    made = World(gate, clock, deaf=request.param == "deaf")
    yield made
    await made.close()


async def list_members(world: World) -> members.MemberList:
    return await world.gate.aio.context.aio_link.run(members.list_members(world.gate.namespace, "workers", world.clock))


# -- dividing ---------------------------------------------------------------------------------------------------------


async def test_alone_it_serves_everything(world: World) -> None:
    hand = await world.join({"t": 64, "u": 1})
    assert hand.assigned == ALL | {("u", 0)}
    assert hand.membership.members == (hand.membership.member,)
    # And the store knows
    seen = await list_members(world)
    assert seen.members[hand.membership.member].topics == {"t", "u"}
    assert seen.members[hand.membership.member].lapses_ms == (world.now + TTL) * 1000
    assert set(seen.holders) == hand.assigned
    assert seen.generation == hand.membership.generation > 0


async def test_members_divide_the_slots_by_rendezvous(world: World) -> None:
    hands = [await world.join(T) for _ in range(3)]
    await world.pass_time(2 * INTERVAL)
    # Then each slot is with the one that everybody thinks it is
    owners = {slot: hand.membership.member for slot, hand in world.owners().items()}
    names = [hand.membership.member for hand in hands]
    assert owners == {slot: owner(slot_id(*slot), names) for slot in ALL}
    assert {hand.membership.generation for hand in hands} == {(await list_members(world)).generation}


async def test_slots_of_a_topic_go_to_those_that_serve_it(world: World) -> None:
    one = await world.join({"t": 64, "u": 64})
    other = await world.join(T)
    await world.pass_time(2 * INTERVAL)
    assert {slot for slot in one.assigned if slot[0] == "u"} == {("u", number) for number in range(64)}
    assert world.owners().keys() == ALL | {("u", number) for number in range(64)}
    assert other.assigned


@pytest.mark.parametrize(("before", "after"), [(16, 64), (64, 16)])
async def test_another_number_of_slots_is_learnt_by_one_after_the_other(world: World, before: int, after: int) -> None:
    # Given three that share the slots of a topic, and work on them
    hands = [await world.join({"t": before}, busy=2.0) for _ in range(3)]
    await world.pass_time(2 * INTERVAL)
    # When they learn, one after the other, that it has other slots
    for number, hand in enumerate(hands):
        hand.membership.resize("t", after)
        await world.settle()
        # Then no slot is in two hands, and none of those that were there before and after is without any
        assert world.owners().keys() >= {("t", slot) for slot in range(min(before, after))}
        assert {slot for hand in hands[: number + 1] for _, slot in hand.assigned} <= set(range(after))
    await world.pass_time(2 * INTERVAL)
    # And in the end each is with the one that everybody thinks it is
    names = [hand.membership.member for hand in hands]
    expected = {("t", slot): owner(slot_id("t", slot), names) for slot in range(after)}
    assert {slot: hand.membership.member for slot, hand in world.owners().items()} == expected
    assert (await list_members(world)).holders == expected


async def test_a_clock_that_is_set_back_ends_and_prolongs_nothing(world: World) -> None:
    # Given a member that announced itself, and a clock that is set back by an hour
    first = await world.join(T)
    world.clock.set(world.now - 3600)
    # When another one joins, and time passes as ever
    second = await world.join(T)
    await world.pass_time(2 * INTERVAL)
    # Then the first noticed in time, and they divide the slots
    assert first.assigned
    assert second.assigned
    assert world.owners().keys() == ALL
    # And who is cut off stops taking when its time has passed
    first.membership.cut_off = True
    await world.pass_time(TTL)
    assert not first.assigned


async def test_groups_do_not_know_each_other(world: World) -> None:
    one = await world.join(T)
    other = await world.join(T, group="others")
    await world.pass_time(2 * INTERVAL)
    assert one.assigned == other.assigned == ALL


async def test_the_generation_rises_with_the_members_and_only_then(world: World) -> None:
    one = await world.join(T)
    first = one.membership.generation
    await world.pass_time(3 * INTERVAL)
    assert one.membership.generation == first
    # When one comes, and goes
    two = await world.join(T)
    await world.pass_time(INTERVAL)
    second = one.membership.generation
    await world.leave(two)
    await world.pass_time(2 * INTERVAL)
    # Then it rose each time, once
    assert first < second < one.membership.generation
    assert world.hands == [one]


async def test_lost_keys_are_written_anew_and_the_generation_still_rises(world: World, raw: Any) -> None:
    hand = await world.join(T)
    before = hand.membership.generation
    # When a client deletes everything, the members register again
    raw.delete(*keys.members(world.gate.namespace, "workers"))
    await world.pass_time(INTERVAL)
    assert hand.membership.generation > before
    assert set((await list_members(world)).holders) == hand.assigned == ALL


# -- handing over -----------------------------------------------------------------------------------------------------


async def moved(world: World) -> tuple[Hand, Hand, set[tuple[str, int]]]:
    """An old worker whose handlers do not end, a newcomer, and the slots that are to move to it."""
    old = await world.join(T, busy=None)
    new = await world.join(T)
    await world.pass_time(INTERVAL)
    slots = {slot for slot in ALL if owner(slot_id(*slot), old.membership.members) == new.membership.member}
    assert slots
    assert old.draining == slots
    assert old.assigned == ALL - slots
    assert new.assigned == set()
    return old, new, slots


async def test_a_slot_moves_when_it_is_drained(world: World) -> None:
    old, new, slots = await moved(world)
    one, *_ = slots
    # When the last handler of one slot ends
    del old.running[one]
    old.work()
    await world.settle()
    # Then that slot moves, and at once where hints are heard
    if world.deaf:
        await world.pass_time(INTERVAL)
    await eventually(lambda: new.assigned == {one})
    assert old.draining == slots - {one}
    assert world.gate.counters["members.taken_over"] == 0


async def test_a_slot_that_is_not_drained_is_seized_after_the_grace_time(world: World) -> None:
    old, new, slots = await moved(world)
    # The newcomer learnt of it within an interval of its arrival
    await world.pass_time(GRACE - INTERVAL - 0.001)
    assert new.assigned == set()
    await world.pass_time(INTERVAL)
    assert new.assigned == slots
    assert world.gate.counters["members.taken_over"] == len(slots)
    # And when the old worker's handlers end at last, that changes nothing
    old.running.clear()
    await world.pass_time(2 * INTERVAL)
    assert old.draining == set()
    assert new.assigned == slots


async def test_a_slot_that_comes_back_before_it_was_drained_was_never_away(world: World) -> None:
    old, new, _ = await moved(world)
    await world.leave(new)
    await world.pass_time(INTERVAL)
    assert old.assigned == ALL
    assert old.draining == set()
    # And what is assigned is not let go by mistake
    old.membership.release("t", range(64))
    await world.pass_time(INTERVAL)
    assert old.assigned == ALL


async def test_who_stops_is_succeeded_slot_by_slot_and_ends_with_the_last(world: World) -> None:
    old, new, _ = await moved(world)
    remaining = len(old.assigned)
    old.stop.set()
    await world.pass_time(INTERVAL)
    # Given that it still drains, it takes nothing
    assert old.assigned == set()
    assert not old.task.done()
    assert old.membership.members == (new.membership.member,)
    # When half of what ran has ended
    for slot in sorted(old.running)[: remaining // 2]:
        del old.running[slot]
    await world.pass_time(INTERVAL)
    assert len(new.assigned) >= remaining // 2
    # And the rest
    old.running.clear()
    await world.pass_time(INTERVAL)
    assert world.hands == [new]
    await world.pass_time(INTERVAL)
    assert new.assigned == ALL
    assert list((await list_members(world)).members) == [new.membership.member]


async def test_who_does_not_drain_leaves_after_its_grace_time(world: World) -> None:
    hand = await world.join(T, busy=None)
    await world.leave(hand)
    await world.pass_time(GRACE - 1)
    assert not hand.task.done()
    await world.pass_time(1)
    assert hand.task.done()
    assert world.gate.counters["members.undrained"] == 64
    # And nobody holds anything
    assert (await list_members(world))[2:] == ({}, {})


async def test_the_last_one_to_leave_leaves_nothing_that_stays_for_ever(world: World, raw: Any) -> None:
    hand = await world.join(T)
    await world.leave(hand)
    left = raw.keys(f"ig2:{{{world.gate.namespace}:members:*")
    assert left
    assert [key for key in left if raw.pttl(key) < 0] == []


# -- gone without a word ----------------------------------------------------------------------------------------------


async def test_the_slots_of_the_killed_are_taken_when_its_time_has_passed(world: World) -> None:
    one, two = await world.join(T), await world.join(T)
    await world.pass_time(2 * INTERVAL)
    theirs = two.assigned
    assert theirs
    await world.kill(two)
    # Not before its ttl
    await world.pass_time(TTL - INTERVAL)
    assert one.assigned == ALL - theirs
    # And within ttl + ttl/3, with no grace time: nobody is there to drain
    await world.pass_time(2 * INTERVAL)
    assert one.assigned == ALL
    assert world.gate.counters["members.taken_over"] == 0


async def test_the_cut_off_stops_taking_before_others_take_over(url: str, gate: Gate, clock: Clock) -> None:
    # Given two workers, one of them behind a proxy
    with Proxy(url) as proxy:
        far_gate = Gate(proxy.url, namespace=gate.namespace, clock=clock, timeout="1s")
        world, far_world = World(gate, clock), World(far_gate, clock)
        near, far = await world.join(T), await far_world.join(T)
        await world.pass_time(INTERVAL)
        await far_world.settle()
        await eventually(lambda: len(near.assigned | far.assigned) == 64)
        theirs = far.assigned
        # When the proxy swallows everything
        proxy.black_hole = True
        proxy.cut_all()
        far.membership.cut_off = True  # so that the world does not wait for it to be at rest
        clock.advance(TTL - INTERVAL)
        await world.settle()
        # Then it keeps what it has for its ttl, and nothing after
        assert far.assigned == theirs
        clock.advance(INTERVAL)
        assert far.assigned == set()
        assert far.draining >= theirs
        await world.pass_time(INTERVAL)
        assert near.assigned == ALL
        await eventually(lambda: far_gate.counters["members.lapsed"] == 1)
        # And when the way is free again, it comes back
        proxy.black_hole = False
        proxy.cut_all()
        far.membership.cut_off = False
        await far_world.settle()
        await world.pass_time(INTERVAL)
        await far_world.settle()
        await eventually(lambda: far.assigned == theirs)
        assert near.assigned == ALL - theirs
        await far_world.close()
        await world.close()
        await far_gate.aio.close()
        far_gate.close()


async def test_it_is_the_same_on_the_servers_own_clock(url: str, namespace: str) -> None:
    # Given two workers of a gate without a test clock, one of which drains nothing, and is killed
    gate = Gate(url, namespace=namespace)
    one, two = RedisMembership(gate, ttl="600ms"), RedisMembership(gate, ttl="600ms")
    stop = asyncio.Event()
    tasks = [asyncio.create_task(one.run(stop, T))]
    one.on_change(lambda: one.release("t", one.draining("t")))
    await eventually(lambda: len(one.assigned_slots("t")) == 64)
    tasks.append(asyncio.create_task(two.run(stop, T)))
    await eventually(lambda: 0 < len(one.assigned_slots("t")) == 64 - len(two.assigned_slots("t")) < 64)
    while two.member not in (roll := await one.list_members()).holders.values():
        await asyncio.sleep(0.005)
    tasks[1].cancel()
    await eventually(lambda: len(one.assigned_slots("t")) == 64)
    # Then its slots are taken when its announcement has lapsed, not before, by the server's clock
    assert (await one.list_members()).now_ms >= roll.members[two.member].lapses_ms
    stop.set()
    await tasks[0]
    assert (await one.list_members())[2:] == ({}, {})
    await gate.aio.close()


async def test_a_lost_reply_changes_nothing(url: str, gate: Gate, clock: Clock) -> None:
    with Proxy(url) as proxy:
        far_gate = Gate(proxy.url, namespace=gate.namespace, clock=clock)
        world = World(far_gate, clock)
        hand = await world.join(T)
        generation = hand.membership.generation
        # When the reply of an announcement is lost, the same one goes again
        proxy.cut_reply(b"EVALSHA", times=2)
        await world.pass_time(INTERVAL)
        assert hand.assigned == ALL
        assert hand.membership.generation == generation
        assert far_gate.counters["members.store_unavailable"] == 0
        await world.close()
        await far_gate.aio.close()
        far_gate.close()


# -- the scripts ------------------------------------------------------------------------------------------------------


def said(member: str, number: int, wanted: tuple[tuple[str, int], ...] = (), **more: Any) -> HeartbeatRequest:
    return HeartbeatRequest(member, number, ("t",), 0, (), (), wanted)._replace(**more)


async def first_said(
    gate: Gate, member: str, wanted: tuple[tuple[str, int], ...] = (), **more: Any
) -> HeartbeatRequest:
    """Announces a member, number 1; returns the next announcement, number 2, that knows the generation."""
    first = said(member, 1, **more)
    roll = await gate.aio.context.aio_link.run(members.heartbeat(gate.namespace, "g", gate.context.clock, first, 9000))
    return first._replace(number=2, generation=roll.generation, wanted=wanted)


async def test_a_late_copy_of_an_announcement_changes_nothing(gate: Gate, clock: Clock, raw: Any) -> None:
    def announce(one: HeartbeatRequest) -> Any:
        return gate.aio.context.aio_link.run(members.heartbeat(gate.namespace, "g", clock, one, 9000))

    first = await first_said(gate, "m", (("t", 1),))
    second = first._replace(number=3, wanted=(), released=(("t", 1),))
    await announce(first)
    assert (await announce(first)).holders == {("t", 1): "m"}
    await announce(second)
    await announce(second)
    stored = [raw.dump(key) for key in keys.members(gate.namespace, "g")]
    # When the first comes once more
    with pytest.raises(ServerRejected, match="announced itself from elsewhere"):
        await announce(first)
    assert [raw.dump(key) for key in keys.members(gate.namespace, "g")] == stored
    # And when it has left, none brings it back
    assert await gate.aio.context.aio_link.run(members.leave(gate.namespace, "g", clock, "m"))
    with pytest.raises(ServerRejected, match="has left"):
        await announce(second)
    seen = await gate.aio.context.aio_link.run(members.list_members(gate.namespace, "g", clock))
    assert (seen.members, seen.holders) == ({}, {})


async def test_a_delayed_heartbeat_is_refused_for_a_minute_after_its_member_left(gate: Gate, clock: Clock) -> None:
    # Given a member that left, and another that goes on
    link, group = gate.aio.context.aio_link, (gate.namespace, "g", clock)
    late, other = await first_said(gate, "late"), await first_said(gate, "other")
    await link.run(members.leave(*group, "late"))
    # When a heartbeat of the first arrives almost a minute later
    clock.advance("59.999s")
    await link.run(members.heartbeat(*group, other, 90_000))
    with pytest.raises(ServerRejected, match="has left"):
        await link.run(members.heartbeat(*group, late, 9000))
    # Then it is no member
    assert list((await link.run(members.list_members(*group))).members) == ["other"]


async def test_nobody_gets_a_slot_for_members_of_another_day(gate: Gate, clock: Clock) -> None:
    # Given a member that holds a slot, and one that knows an older generation
    link, group = gate.aio.context.aio_link, (gate.namespace, "g", clock)
    late = await first_said(gate, "late")
    holder = await first_said(gate, "holder", (("t", 1),))
    await link.run(members.heartbeat(*group, holder, 9000))
    # When it seizes the one and wants the other, it gets neither, and learns who is there
    roll = await link.run(members.heartbeat(*group, late._replace(taken_over=(("t", 1),), wanted=(("t", 2),)), 9000))
    assert roll.holders == {("t", 1): "holder", ("t", 2): ""}
    assert roll.members is not None
    # And with that it gets both
    again = late._replace(number=3, generation=roll.generation, taken_over=(("t", 1),), wanted=(("t", 2),))
    roll = await link.run(members.heartbeat(*group, again, 9000))
    assert roll == (again.generation, None, {("t", 1): "late", ("t", 2): "late"})


async def test_nothing_of_the_gone_stays(gate: Gate, clock: Clock, raw: Any) -> None:
    # Given one that was killed with slots of a topic that nobody serves any more, one that left, and one that is there
    link, group = gate.aio.context.aio_link, (gate.namespace, "g", clock)
    for name, slots in (("killed", (("u", 1), ("u", 2))), ("left", (("t", 1),))):
        second = await first_said(gate, name, slots, topics=("t", "u"))
        roll = await link.run(members.heartbeat(*group, second, 9000))
        assert set(roll.holders.values()) == {name}
    await link.run(members.leave(*group, "left"))
    clock.advance("2m")
    roll = await link.run(members.heartbeat(*group, await first_said(gate, "there", (("t", 1),)), 9000))
    # Then only that one is known
    assert roll.holders == {("t", 1): "there"}
    assert list((await link.run(members.list_members(*group))).members) == ["there"]
    alive, facts, held = keys.members(gate.namespace, "g")
    assert raw.zrange(alive, 0, -1) == [b"there"]
    assert set(raw.hkeys(facts)) == {b"v", b"g", b"m:there"}
    assert raw.hgetall(held) == {b"t:1": b"there"}
    # And no key outlives the last member by more than a day
    assert all(0 < raw.pttl(key) <= 86_400_000 for key in (alive, facts, held))


async def test_a_full_server_does_not_end_a_membership(gate: Gate, clock: Clock, raw: Any) -> None:
    link, group = gate.aio.context.aio_link, (gate.namespace, "g", clock)
    second = await first_said(gate, "m", (("t", 1),))
    raw.config_set("maxmemory", 1)
    try:
        roll = await link.run(members.heartbeat(*group, second, 9000))
    finally:
        raw.config_set("maxmemory", 0)
    assert roll.holders == {("t", 1): "m"}


@pytest.mark.damages("wrong-type")
@pytest.mark.parametrize("part", [0, 1, 2])
async def test_keys_of_others_are_refused_untouched(gate: Gate, clock: Clock, raw: Any, part: int) -> None:
    key = keys.members(gate.namespace, "workers")[part]
    raw.set(key, "mine")
    with pytest.raises(UnexpectedData, match="holds a string") as caught:
        await RedisMembership(gate).run(asyncio.Event(), T)
    assert caught.value.redis_key == key.decode()
    assert raw.get(key) == b"mine"
    assert raw.keys(f"ig2:{{{gate.namespace}:*") == [key]


@pytest.mark.damages("wrong-type")
async def test_another_layout_is_refused(gate: Gate, raw: Any) -> None:
    raw.hset(keys.members(gate.namespace, "workers")[1], "v", 3)
    with pytest.raises(UnexpectedData, match="has layout 3"):
        await RedisMembership(gate).run(asyncio.Event(), T)


async def test_a_store_that_is_away_at_the_start_is_an_error() -> None:
    gate = Gate("redis://127.0.0.1:1", timeout="50ms")
    with pytest.raises(StoreError):
        await RedisMembership(gate).run(asyncio.Event(), T)
    await gate.aio.close()


async def test_one_that_is_away_just_after_the_first_announcement_is_waited_for(gate: Gate) -> None:
    class Interrupted(RedisMembership):
        async def heartbeat(self, said: HeartbeatRequest) -> HeartbeatReply:
            if 2 <= said.number <= 3:
                raise StoreUnavailable("away", "no")
            return await super().heartbeat(said)

    membership, stop = Interrupted(gate), asyncio.Event()
    task = asyncio.create_task(membership.run(stop, T))
    await eventually(lambda: task.done() or len(membership.assigned_slots("t")) == 64)
    assert gate.counters["members.store_unavailable"] == 2
    stop.set()
    await eventually(lambda: bool(membership.draining("t")))
    membership.release("t", membership.draining("t"))
    await task


@pytest.mark.parametrize(
    ("options", "name"), [({"group": "a b"}, "group"), ({"ttl": 0}, "ttl"), ({"grace": -1}, "grace")]
)
def test_bad_input_is_named(gate: Gate, options: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidArgument, match=name):
        RedisMembership(gate, **options)


async def test_when_a_member_leaves_the_others_are_another_generation(gate: Gate, clock: Clock) -> None:
    # Given two members
    run, group = gate.aio.context.aio_link.run, (gate.namespace, "g", clock)
    for name in ("stays", "leaves"):
        await run(members.heartbeat(*group, members.HeartbeatRequest(name, 1, ("t",), 0, (), (), ()), 10_000))
    before = (await run(members.list_members(*group))).generation
    # When one of them leaves, then the next reader divides the slots again
    assert await run(members.leave(*group, "leaves"))
    assert (await run(members.list_members(*group))).generation > before


async def test_to_leave_what_one_is_no_member_of_changes_nothing(gate: Gate, raw: Any, clock: Clock) -> None:
    assert not await gate.aio.context.aio_link.run(members.leave(gate.namespace, "g", clock, "nobody"))
    assert raw.exists(*keys.members(gate.namespace, "g")) == 0
