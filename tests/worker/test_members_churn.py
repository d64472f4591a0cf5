"""Workers that come, leave, die, are cut off and get stuck: every slot has a taker within the stated bound.

Everything is seeded, and time is the test clock's; each step moves it by a second.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable

import pytest

from idemgate import Gate
from idemgate.testing import Clock
from tests.worker.crew import BOUND, GRACE, INTERVAL, TTL, Hand, Slot, World

TOPICS = {"t": 64, "u": 4}
ALL = {(topic, number) for topic, slots in TOPICS.items() for number in range(slots)}


@pytest.fixture(params=["hearing", "deaf"])
async def world(request: pytest.FixtureRequest, gate: Gate, clock: Clock) -> AsyncIterator[World]:
    made = World(gate, clock, deaf=request.param == "deaf")
    yield made
    await made.close()


class Watch:
    """Notes who served which slot when, and who may be late with draining."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.served = dict.fromkeys(ALL, world.now)
        self.changed = world.now
        self.longest = 0.0
        self.shared = 0

    def event(self) -> None:
        """The members change now: waiting is counted from here."""
        self.changed = self.world.now

    async def look(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            self.world.takes.clear()
            await self.world.pass_time(1)
            self._check()

    def _check(self) -> None:
        now = self.world.now
        owners = self.world.owners()  # no slot has two takers, ever
        for slot in ALL:
            if slot in owners:
                self.served[slot] = now
            waited = now - max(self.served[slot], self.changed)
            self.longest = max(self.longest, waited)
            assert waited <= BOUND, f"{slot} waits for {waited} s"
            self._check_handover(slot, owners.get(slot))

    def _check_handover(self, slot: Slot, owner: Hand | None) -> None:
        """What one still drains, another takes from only where it was seized: from the stuck and the cut off."""
        for hand in self.world.hands:
            if owner is not None and hand is not owner and slot in hand.running:
                self.shared += 1
                assert hand.busy is None or hand.membership.cut_off, f"{slot} was taken over while it was drained"


@pytest.mark.timeout(600)
async def test_every_slot_is_served_within_the_bound_whatever_happens(
    world: World, many: Callable[[int], int], record_fault: Callable[..., None]
) -> None:
    chance, changes = random.Random(7), 0
    await world.join(TOPICS, busy=1)
    watch = Watch(world)
    seen: set[str] = set()
    for _ in range(min(many(24), 300)):
        # Given any change of the members, or several in one second
        for _ in range(chance.choice((1, 1, 1, 2, 3))):
            watch.event()
            seen.add(await _happen(world, chance))
            changes += 1
        # Then all is well at each second of what follows
        await watch.look(chance.choice((2, BOUND, BOUND + TTL)))
    assert seen == {"join", "join stuck", "leave", "kill", "cut off", "mend"}
    # And in the end everything is in one hand each
    for hand in world.hands:
        hand.membership.cut_off = False
    watch.event()
    await watch.look(BOUND)
    assert world.owners().keys() == ALL
    # And the worst cases did come up
    assert watch.longest >= TTL
    assert watch.shared > 0
    assert world.gate.counters["members.taken_over"] > 0
    assert world.gate.counters["members.lapsed"] > 0
    fault = "members join, leave, die, are cut off or get stuck: each slot has one taker, within the stated bound"
    record_fault(fault, changes, promises="P14", seed=7, slots_with_two_takers=0)


async def _happen(world: World, chance: random.Random) -> str:
    sound = [hand for hand in world.hands if not hand.membership.cut_off and not hand.stop.is_set()]
    cut_off = [hand for hand in world.hands if hand.membership.cut_off]
    if cut_off and chance.random() < 0.3:
        cut_off[0].membership.cut_off = False
        return "mend"
    if len(sound) < 3 or (len(world.hands) < 6 and chance.random() < 0.4):
        stuck = chance.random() < 0.3
        await world.join(TOPICS, busy=None if stuck else chance.choice((0, 1, GRACE / 2)))
        return "join stuck" if stuck else "join"
    hand = chance.choice(sound)
    match chance.choice(("leave", "kill", "cut off")):
        case "leave":
            await world.leave(hand)
            return "leave"
        case "kill":
            await world.kill(hand)
            return "kill"
        case _:
            hand.membership.cut_off = True
            return "cut off"


async def test_only_what_has_to_moves(world: World) -> None:
    hands = [await world.join(TOPICS) for _ in range(4)]
    await world.pass_time(2 * INTERVAL)
    before = world.owners()
    # When one more comes, slots move to it and nowhere else
    new = await world.join(TOPICS)
    await world.pass_time(2 * INTERVAL)
    after = world.owners()
    assert after.keys() == before.keys() == ALL
    assert new.assigned
    assert {slot for slot in ALL if after[slot] is not before[slot]} == new.assigned
    # And when one goes, with or without a word, its slots move and no others
    gone, killed = hands[0], hands[1]
    lost = gone.assigned | killed.assigned
    await world.leave(gone)
    await world.kill(killed)
    await world.pass_time(TTL + INTERVAL)
    assert {slot for slot in ALL if world.owners()[slot] is not after[slot]} == lost


async def test_a_store_that_was_away_for_all_brings_everybody_back(world: World) -> None:
    hands = [await world.join(TOPICS, busy=1) for _ in range(3)]
    await world.pass_time(2 * INTERVAL)
    before = world.owners()
    # Given a store that is away for a minute: after their ttl nobody takes
    for hand in hands:
        hand.membership.cut_off = True
    await world.pass_time(TTL - INTERVAL)
    assert world.owners() == before
    await world.pass_time(60, step=20)
    assert world.owners() == {}
    # When it is back, the slots are where they were
    for hand in hands:
        hand.membership.cut_off = False
    await world.settle()
    await world.pass_time(3 * INTERVAL)
    assert world.owners() == before
