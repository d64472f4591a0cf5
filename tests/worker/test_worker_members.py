"""Workers that divide the slots among themselves: what each takes, how slots change hands under work, and what becomes
of messages when a worker is killed, cut off, or wrong about what it serves."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from idemgate import Gate, InvalidArgument, RedisMembership, StoreError, Trigger
from idemgate.core.calls import Call
from idemgate.core.keys import slot_of
from idemgate.membership.member import Membership
from idemgate.membership.rendezvous import owned_slots
from idemgate.store.aio import AsyncLink
from idemgate.testing import Clock
from idemgate.testing.proxy import Proxy
from idemgate.worker.worker import Worker
from tests.worker.crew import GRACE, INTERVAL, TTL, Watched

SLOTS = 64
ALL = frozenset(range(SLOTS))
POLICY: dict[str, Any] = {"slots": SLOTS, "lease": "20s"}


def one_a_slot(name: str) -> dict[int, str]:
    """A key for each slot of the topic."""
    found: dict[int, str] = {}
    number = 0
    while len(found) < SLOTS:
        key = f"{name}{number}"
        found.setdefault(slot_of(key.encode(), SLOTS), key)
        number += 1
    return found


class Hand:
    """A worker on a gate of its own, and what it handled. `busy`: its handlers wait for `go`."""

    def __init__(self, gate: Gate, members: Any, busy: bool = False, **options: Any) -> None:
        self.gate = gate
        self.topic = gate.topic("t", **POLICY)
        self.topic.handler(self._handle)
        self.started: list[Any] = []
        self.handled: list[Any] = []
        self.asked: Counter[int] = Counter()
        self.go = asyncio.Event()
        if not busy:
            self.go.set()
        self.worker = Worker(gate, **{"concurrency": 20, "prefetch": 80, "membership": members, **options})

    async def _handle(self, delivery: Any) -> None:
        self.started.append(delivery)
        await self.go.wait()
        self.handled.append(delivery)

    @property
    def membership(self) -> Any:
        return self.worker.membership

    @property
    def assigned(self) -> frozenset[int]:
        return frozenset(self.membership.assigned_slots("t"))

    @property
    def draining(self) -> frozenset[int]:
        return frozenset(self.membership.draining("t"))

    def share(self) -> frozenset[int]:
        """What it is to serve in the end, of the members that it knows."""
        return owned_slots(self.membership.member, self.membership.members, "t", SLOTS)


Join = Callable[..., Any]


@pytest.fixture
async def join(url: str, namespace: str, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Join]:
    """`hand = await join(busy=True)`: one more worker at work. They end with the test."""
    hands: list[Hand] = []
    real = AsyncLink.run

    async def run(self: AsyncLink, call: Call[Any], within: float | None = None) -> Any:
        if call.script.name in ("topics/take", "topics/settle_and_take"):
            slot = int(bytes(call.keys[0]).partition(b"}")[0].rpartition(b":")[2].partition(b"/")[0])
            for hand in hands:
                hand.asked.update([slot] if hand.gate.aio.context.aio_link is self else [])
        return await real(self, call, within)

    monkeypatch.setattr(AsyncLink, "run", run)
    async with AsyncExitStack() as stack:

        async def join(
            members: Callable[[Gate], Any] = Watched, at: str = url, clock: Clock | None = clock, **options: Any
        ) -> Hand:
            gate = Gate(at, namespace=namespace, clock=clock, timeout="2s")
            stack.push_async_callback(gate.aio.close)
            stack.callback(gate.close)
            hand = Hand(gate, members(gate), **options)
            hands.append(hand)
            await stack.enter_async_context(hand.worker)
            stack.callback(hand.go.set)
            return hand

        yield join


def divided(*hands: Hand) -> bool:
    """Every slot is in one hand, and each has the share that it should have."""
    shares = [hand.assigned for hand in hands]
    return sum(map(len, shares)) == SLOTS and all(hand.assigned == hand.share() for hand in hands)


def keys_of(deliveries: Iterable[Any]) -> list[str]:
    return sorted(delivery.key for delivery in deliveries)


async def at_rest(*hands: Hand) -> None:
    """Until their memberships have nothing more to do at this time."""
    await asyncio.sleep(0.001)
    async with asyncio.timeout(60):
        while not all(hand.membership.at_rest for hand in hands):
            await asyncio.sleep(0.001)


async def test_each_slot_is_asked_by_the_worker_that_serves_it_alone(
    join: Join, clock: Clock, eventually: Any, gate: Gate
) -> None:
    # Given three workers that have divided the slots
    hands = [await join() for _ in range(3)]
    await eventually(lambda: divided(*hands))
    for hand in hands:
        hand.asked.clear()
    # When there is work in every slot, again and again
    topic = gate.topic("t", **POLICY)
    for turn in range(5):
        await topic.aio.trigger_many([(key, turn) for key in one_a_slot("k").values()])
        clock.advance("1s")
        await eventually(lambda turn=turn: sum(len(hand.handled) for hand in hands) == SLOTS * (turn + 1))
    # Then each asked its own slots and no others, and handled what was in them
    for hand in hands:
        assert hand.asked.keys() <= hand.assigned
        assert {delivery.slot for delivery in hand.handled} == hand.assigned


async def test_slots_are_handed_over_drained_and_what_was_not_started_at_once(
    join: Join, clock: Clock, eventually: Any, gate: Gate
) -> None:
    # Given a worker that holds a message of every slot, of which 20 run
    topic, keys = gate.topic("t", **POLICY), one_a_slot("k")
    old = await join(busy=True)
    await eventually(lambda: old.assigned == ALL)
    await topic.aio.trigger_many([(key, 1) for key in keys.values()])
    await eventually(lambda: old.gate.counters["worker.taken"] == SLOTS)
    await eventually(lambda: len(old.started) == 20)
    running = {delivery.slot for delivery in old.started}
    # When another comes
    new = await join()
    share = new.share()
    # Then what the old one has not started of its slots is handled there, and was no attempt before
    await eventually(lambda: new.assigned == share - running)
    await eventually(lambda: keys_of(new.handled) == sorted(keys[slot] for slot in share - running))
    assert {delivery.attempt for delivery in new.handled} == {1}
    # And what runs goes on; its slots are taken from by nobody, whatever comes, and however long it takes
    assert old.draining == share & running
    late = [(one_a_slot("late")[slot], 2) for slot in old.draining]
    for hand in (old, new):
        hand.asked.clear()
    await topic.aio.trigger_many(late)
    for _ in range(int(GRACE) - 1):
        clock.advance("1s")
        await at_rest(old, new)
    assert not (old.asked.keys() | new.asked.keys()) & old.draining
    assert old.draining == share & running == share - new.assigned
    assert len(old.started) == 20
    # And when it ends, they change hands, with what came meanwhile
    old.go.set()
    await eventually(lambda: divided(old, new))
    await eventually(lambda: len(old.handled) + len(new.handled) == SLOTS + len(late))
    assert {delivery.slot for delivery in new.handled} <= share
    await eventually(lambda: old.gate.counters["worker.acked"] + new.gate.counters["worker.acked"] == SLOTS + len(late))
    stats = await topic.aio.stats()
    assert (stats.pending, stats.in_flight, stats["lapsed"], stats["acked"]) == (0, 0, 0, SLOTS + len(late))
    assert old.gate.counters["members.taken_over"] + new.gate.counters["members.taken_over"] == 0


async def test_a_handler_that_does_not_end_keeps_its_slot_for_the_grace_time_and_no_longer(
    join: Join, clock: Clock, eventually: Any, gate: Gate
) -> None:
    # Given a worker whose handlers do not end, and another one that came later
    topic, keys = gate.topic("t", **POLICY), one_a_slot("k")
    old = await join(busy=True, concurrency=SLOTS)
    await eventually(lambda: old.assigned == ALL)
    await topic.aio.trigger_many([(key, 1) for key in keys.values()])
    await eventually(lambda: len(old.started) == SLOTS)
    new = await join()
    await eventually(lambda: old.draining == new.share())
    assert new.assigned == frozenset()
    # When new messages come, and the grace time is over
    await topic.aio.trigger_many([(key, 2) for key in one_a_slot("x").values()])
    for _ in range(int(GRACE + INTERVAL)):
        clock.advance("1s")
        await at_rest(old, new)
    # Then the new one serves its share, and what still runs there is not run twice
    assert new.assigned == new.share()
    await eventually(lambda: {delivery.slot for delivery in new.handled} == new.share())
    assert not {delivery.key for delivery in new.handled} & set(keys.values())
    assert new.gate.counters["members.taken_over"] == len(new.share())


async def test_who_stops_hands_over_at_once_and_leaves_nothing(join: Join, eventually: Any, gate: Gate) -> None:
    # Given two workers, one of which runs messages and holds others
    topic, keys = gate.topic("t", **POLICY), one_a_slot("k")
    old = await join(busy=True, concurrency=2)
    await eventually(lambda: old.assigned == ALL)
    await topic.aio.trigger_many([(key, 1) for key in keys.values()])
    await eventually(lambda: old.gate.counters["worker.taken"] == SLOTS)
    new = await join()
    await eventually(lambda: old.assigned | old.draining | new.assigned == ALL)
    # When that one stops, and time does not pass
    running = {delivery.slot for delivery in old.started}
    old.worker.stop()
    # Then the other one handles all but what still runs
    await eventually(lambda: new.assigned == ALL - running)
    await eventually(lambda: keys_of(new.handled) == sorted(keys[slot] for slot in ALL - running))
    # And is alone when that has ended
    old.go.set()
    await eventually(lambda: new.assigned == ALL)
    await eventually(lambda: new.membership.members == (new.membership.member,))

    async def is_alone() -> bool:  # who leaves releases its slots before it removes itself
        seen = await new.membership.list_members()
        return {*seen.members} == {*seen.holders.values()} == {new.membership.member}

    await eventually(is_alone)
    assert keys_of(old.handled) == sorted(keys[slot] for slot in running)
    await eventually(lambda: new.gate.counters["worker.acked"] + old.gate.counters["worker.acked"] == SLOTS)
    assert (await topic.aio.stats())["taken"] == SLOTS + old.gate.counters["worker.returned"]


async def test_with_fewer_slots_than_workers_the_rest_stands_by(
    url: str, namespace: str, clock: Clock, eventually: Any
) -> None:
    # Given a topic with one slot, and three workers
    gates = [Gate(url, namespace=namespace, clock=clock) for _ in range(3)]
    seen: list[int] = []
    workers = []
    for number, gate in enumerate(gates):
        topic = gate.topic("t")

        @topic.handler
        async def handle(delivery: Any, number: int = number) -> None:
            seen.append(number)

        workers.append(Worker(gate, membership="redis"))
    async with workers[0], workers[1], workers[2]:
        for _ in workers:
            await eventually(
                lambda: sum(len(one.membership.assigned_slots("t")) for one in workers if one.membership) == 1
            )
            # Then one of them does the work
            seen.clear()
            await gates[0].topic("t").aio.trigger_many([(n, n) for n in range(50)])
            await eventually(lambda: len(seen) == 50)
            assert len(set(seen)) == 1
            # And when it stops, another one takes over
            workers[seen[0]].stop()
    for gate in gates:
        await gate.aio.close()
        gate.close()


async def test_what_is_sent_on_is_sent_by_the_slots_own_worker(
    url: str, namespace: str, clock: Clock, eventually: Any, raw: Any
) -> None:
    # Given two workers of a topic that is sent on
    async with AsyncExitStack() as stack:
        gates = [Gate(url, namespace=namespace, clock=clock) for _ in range(2)]
        for gate in gates:
            stack.push_async_callback(gate.aio.close)
            stack.callback(gate.close)
            gate.topic("t", **POLICY).forward("list")
        first, second = [await stack.enter_async_context(gate.aio.worker(membership="redis")) for gate in gates]
        memberships = [worker.membership for worker in (first, second) if worker.membership is not None]
        await eventually(
            lambda: [one.members for one in memberships] == [tuple(sorted(o.member for o in memberships))] * 2
        )
        await eventually(lambda: sum(len(one.assigned_slots("t")) for one in memberships) == SLOTS)
        # When there is a message in every slot
        topic = gates[0].topic("t")
        await topic.aio.trigger_many([(key, 1) for key in one_a_slot("k").values()])
        await eventually(lambda: sum(gate.counters["worker.forwarded"] for gate in gates) == SLOTS)
        # Then each sent on what its slots held
        shares = [len(one.assigned_slots("t")) for one in memberships]
        assert [gate.counters["worker.forwarded"] for gate in gates] == shares
        assert {raw.llen(outbox) for outbox in topic.forward_targets()} == {1}
        # And all of it, when one has stopped
        second.stop()
        await eventually(lambda: len(memberships[0].assigned_slots("t")) == SLOTS)
        await topic.aio.trigger_many([(key, 2) for key in one_a_slot("k").values()])
        await eventually(lambda: {raw.llen(outbox) for outbox in topic.forward_targets()} == {2})


# -- killed, cut off, wrong -------------------------------------------------------------------------------------------


class Everything:
    """A stale membership: whatever the others think, all slots are its own, for ever."""

    member, members, generation = "me", ("me",), 1

    def __init__(self, _: Gate) -> None:
        self._listeners: list[Callable[[], None]] = []

    async def run(self, stop: asyncio.Event, topics: Any) -> None:
        for listener in self._listeners:
            listener()
        await stop.wait()

    def on_change(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)

    def assigned_slots(self, _: str) -> frozenset[int]:
        return ALL

    def draining(self, _: str) -> frozenset[int]:
        return frozenset()

    def resize(self, topic: str, slots: int) -> None: ...

    def release(self, topic: str, slots: Iterable[int]) -> None: ...


async def test_a_worker_with_a_stale_assignment_is_harmless(join: Join, eventually: Any, gate: Gate) -> None:
    # Given two workers that each take everything for their own, and one that keeps to its assignment
    assert isinstance(Everything(gate), Membership)
    hands = [await join(Everything), await join(Everything), await join()]
    topic, running, overlaps = gate.topic("t", **POLICY), Counter[str](), 0

    # When there is work for all, in groups of which no two messages may run at once
    async def handle(hand: Hand, delivery: Any) -> None:
        nonlocal overlaps
        group = delivery.payload
        running[group] += 1
        overlaps += running[group] > 1
        await asyncio.sleep(0.001)
        running[group] -= 1
        hand.handled.append(delivery)

    for hand in hands:
        hand.topic.definition.handler = lambda delivery, hand=hand: handle(hand, delivery)
    await topic.aio.trigger_many([Trigger(f"k{n}", f"g{n % 50}", group=f"g{n % 50}") for n in range(600)])
    await eventually(lambda: sum(len(hand.handled) for hand in hands) >= 600)
    await eventually(lambda: sum(hand.gate.counters["worker.acked"] for hand in hands) == 600)
    # Then each message was handled once, and no group overlapped
    handled = Counter(delivery.key for hand in hands for delivery in hand.handled)
    assert handled == {f"k{n}": 1 for n in range(600)}
    assert overlaps == 0
    assert all(hand.handled for hand in hands[:2])
    stats = await topic.aio.stats()
    assert (stats.pending, stats.in_flight, stats["lapsed"]) == (0, 0, 0)


async def test_a_worker_that_is_cut_off_stops_taking_and_comes_back(
    url: str, join: Join, clock: Clock, eventually: Any, gate: Gate
) -> None:
    topic, keys = gate.topic("t", **POLICY), one_a_slot("k")
    near = await join()
    with Proxy(url) as proxy:
        far = await join(at=proxy.url)
        await eventually(lambda: divided(near, far))
        theirs = far.assigned
        # When the store is away for one of them, for longer than its announcement holds
        far.membership.cut_off = proxy.black_hole = True
        proxy.cut_all()
        await eventually(lambda: far.gate.counters["worker.store_unavailable"] > 0)
        for _ in range(int(TTL + INTERVAL)):
            clock.advance("1s")
            await at_rest(near)
        # Then it serves nothing any more, and the other one everything
        assert far.assigned == frozenset()
        assert near.assigned == ALL
        await topic.aio.trigger_many([(key, 1) for key in keys.values()])
        await eventually(lambda: len(near.handled) == SLOTS)
        # And when the store is back, it serves what it did
        proxy.heal()
        proxy.cut_all()
        far.membership.cut_off = False
        await eventually(lambda: far.membership._failures == 0)
        clock.advance(INTERVAL)
        await eventually(lambda: divided(near, far))
        assert far.assigned == theirs
        await topic.aio.trigger_many([(key, 2) for key in keys.values()])
        await eventually(lambda: len(near.handled) + len(far.handled) == 2 * SLOTS)
        assert {delivery.slot for delivery in far.handled} == theirs
        assert (await topic.aio.stats())["taken"] == 2 * SLOTS
        # (what has not ended yet would be tried, without the proxy, for as long as its lease holds)
        await eventually(lambda: sum(hand.gate.counters["worker.acked"] for hand in (near, far)) == 2 * SLOTS)


@pytest.mark.damages("wrong-type")
async def test_a_foreign_key_in_the_memberships_place_is_an_error_at_the_start(gate: Gate, raw: Any) -> None:
    gate.topic("t").handler(print)
    raw.set(f"ig2:{{{gate.namespace}:members:workers}}:alive", "mine")
    with pytest.raises(StoreError, match="holds a string"):
        await gate.aio.worker(membership="redis").run(asyncio.Event())


@pytest.mark.parametrize("membership", ["Redis", True, 1, RedisMembership])
def test_what_is_no_membership_is_refused(gate: Gate, membership: Any) -> None:
    gate.topic("t").handler(print)
    with pytest.raises(InvalidArgument, match="membership"):
        gate.aio.worker(membership=membership)


@pytest.mark.parametrize("heard", [False, True])
async def test_a_worker_that_is_cancelled_while_it_joins_is_no_member(gate: Gate, heard: bool) -> None:
    # Given a worker whose announcement is under way: it was not heard yet, or its answer has not come
    gate.topic("t", **POLICY).handler(print)
    under_way, go = asyncio.Event(), asyncio.Event()

    class Slow(RedisMembership):
        async def heartbeat(self, said: Any) -> Any:
            if heard:
                roll = await super().heartbeat(said)
            under_way.set()
            await go.wait()
            return roll if heard else await super().heartbeat(said)

    membership = Slow(gate)
    working = asyncio.create_task(gate.aio.worker(membership=membership).run(asyncio.Event()))
    await under_way.wait()
    # When it is cancelled, once
    working.cancel()
    await asyncio.sleep(0)
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await working
    # Then it has left, and holds nothing
    assert (await membership.list_members())[2:] == ({}, {})


async def test_a_worker_that_is_cancelled_twice_while_it_joins_does_not_wait_for_the_store(gate: Gate) -> None:
    gate.topic("t", **POLICY).handler(print)
    under_way = asyncio.Event()

    class Hanging(RedisMembership):
        async def heartbeat(self, said: Any) -> Any:
            under_way.set()
            await asyncio.Event().wait()

    working = asyncio.create_task(gate.aio.worker(membership=Hanging(gate)).run(asyncio.Event()))
    await under_way.wait()
    for _ in range(2):
        working.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(working, 30)


async def test_one_membership_for_two_workers_at_once_is_refused(gate: Gate) -> None:
    membership, topic = RedisMembership(gate), gate.topic("t", **POLICY)
    topic.handler(print)
    async with gate.aio.worker(membership=membership):
        with pytest.raises(InvalidArgument, match="serves another worker already"):
            await gate.aio.worker(membership=membership).run(asyncio.Event())
        # And the first one has not been disturbed
        assert membership.assigned_slots("t") == ALL


async def test_a_membership_may_serve_one_worker_after_another(gate: Gate, eventually: Any) -> None:
    membership, topic, seen = RedisMembership(gate), gate.topic("t", **POLICY), []

    @topic.handler
    async def handle(delivery: Any) -> None:
        seen.append(delivery.key)

    for turn in range(3):
        await topic.aio.trigger(turn)
        async with gate.aio.worker(membership=membership):
            await eventually(lambda turn=turn: gate.counters["worker.acked"] == turn + 1)
        assert membership.assigned_slots("t") == frozenset()
    assert seen == ["0", "1", "2"]
    assert (await membership.list_members())[2:] == ({}, {})
