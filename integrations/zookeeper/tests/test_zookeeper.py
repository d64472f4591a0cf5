"""Membership kept in ZooKeeper, on a real server: what `idemgate.types.Member` promises holds here, too."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from idemgate_zookeeper import ZooKeeperMembership
from kazoo.client import KazooClient
from kazoo.security import make_acl

from idemgate import Gate, InvalidArgument, StoreUnavailable
from idemgate.errors import ServerRejected
from idemgate.types import Membership
from integrations.zookeeper.tests.hand import SLOTS, Hand
from tests.waiting import eventually

TTL, GRACE, TICK = 2.0, 30.0, 0.2
ALL = frozenset(range(SLOTS))
paths = (f"/test/{number}" for number in itertools.count())
Join = Callable[..., Awaitable[Hand]]


@pytest.fixture
def path() -> str:
    return next(paths)


@pytest.fixture
async def join(server: Any, gate: Gate, path: str) -> AsyncIterator[Join]:
    """`hand = await join(busy=True, grace=1)`: one more worker, which has announced itself."""
    hands: list[Hand] = []

    async def join(busy: bool = False, **options: Any) -> Hand:
        hand = Hand(ZooKeeperMembership(gate, server.hosts, path, **{"ttl": TTL, "grace": GRACE, **options}), busy)
        hands.append(hand)
        await eventually(lambda: hand.membership.generation > 0 or hand.task.done())
        return hand

    yield join
    for hand in hands:
        hand.task.cancel()
    await asyncio.gather(*(hand.task for hand in hands), return_exceptions=True)


@pytest.fixture
def raw(server: Any) -> Iterator[Any]:
    client = KazooClient(server.hosts)
    client.start()
    yield client
    client.stop()
    client.close()


def divided(*hands: Hand) -> bool:
    """All know each other, and everything is in exactly one hand."""
    names = tuple(sorted(hand.membership.member for hand in hands))
    shares = [hand.assigned for hand in hands]
    agreed = all(hand.membership.members == names for hand in hands)
    return agreed and sum(map(len, shares)) == SLOTS and frozenset().union(*shares) == ALL


async def test_members_divide_the_slots_and_hand_them_over(join: Join, raw: Any, path: str) -> None:
    patient = {"ttl": 10}  # nobody is gone because the machine is busy
    one: Membership = (first := await join(**patient)).membership
    await eventually(lambda: first.assigned == ALL)
    # When others come
    second, third = await join(**patient), await join(**patient)
    await eventually(lambda: divided(first, second, third))
    # Then all agree on who is there, and the server knows who holds what
    names = tuple(sorted(hand.membership.member for hand in (first, second, third)))
    await eventually(lambda: one.members == second.membership.members == third.membership.members == names)
    assert len({hand.membership.generation for hand in (first, second, third)}) == 1
    assert {
        number: raw.get(f"{path}/held/t:{number}")[0].decode() for number in ALL
    } == {number: hand.membership.member for hand in (first, second, third) for number in hand.assigned}  # fmt: skip


@pytest.mark.parametrize("request_name", ["ensure_path_async", "get_children_async", "create_async"])
@pytest.mark.slow
async def test_a_connection_that_is_lost_while_it_joins_does_not_end_it(
    join: Join, monkeypatch: pytest.MonkeyPatch, request_name: str
) -> None:
    # Given a connection that is lost just before the first request of a kind, and another after it
    asked, send = itertools.count(), getattr(KazooClient, request_name)

    def lose_then_send(client: Any, *args: Any, **options: Any) -> Any:
        if next(asked) < 2:
            client._connection._socket.shutdown(socket.SHUT_RDWR)
        return send(client, *args, **options)

    monkeypatch.setattr(KazooClient, request_name, lose_then_send)
    # Then the member joins all the same
    hand = await join()
    await eventually(lambda: hand.assigned == ALL or hand.task.done())
    assert not hand.task.done()
    assert next(asked) > 2


@pytest.mark.slow
async def test_an_error_that_stays_ends_the_first_announcement_at_once(
    join: Join, raw: Any, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    # Given a path below which no node can be made
    raw.create(path, ephemeral=True, makepath=True)
    asked, send = list[str](), KazooClient.ensure_path_async

    def note_then_send(client: Any, at: str, **options: Any) -> Any:
        asked.append(at)
        return send(client, at, **options)

    monkeypatch.setattr(KazooClient, "ensure_path_async", note_then_send)
    # Then the run ends with the reason, after one try
    hand = await join()
    with pytest.raises(StoreUnavailable, match="NoChildrenForEphemerals"):
        await hand.task
    assert asked.count(f"{path}/members") == 1


@pytest.mark.slow
async def test_little_moves_and_the_generation_rises(join: Join) -> None:
    hands = [await join(), await join(), await join()]
    await eventually(lambda: divided(*hands))
    before = {hand: hand.assigned for hand in hands}
    generation = hands[0].membership.generation
    # When one leaves
    hands[2].stop.set()
    await hands[2].task
    await eventually(lambda: divided(*hands[:2]))
    # Then the others keep what they had
    assert all(hand.assigned >= before[hand] for hand in hands[:2])
    assert hands[0].membership.generation > generation


async def test_a_slot_moves_when_it_is_drained(join: Join) -> None:
    old = await join(busy=True)
    await eventually(lambda: old.assigned == ALL)
    new = await join()
    await eventually(lambda: bool(old.membership.draining("t")))
    moving = old.membership.draining("t")
    assert old.assigned == ALL - moving
    # Given that nothing is drained, the newcomer gets nothing, over several intervals
    await asyncio.sleep(TTL)
    assert new.assigned == frozenset()
    # When one slot is drained, it moves
    one = min(moving)
    old.finish({one})
    await eventually(lambda: new.assigned == {one})
    old.finish(set(moving))
    await eventually(lambda: new.assigned == moving)


@pytest.mark.slow
async def test_a_slot_that_is_not_drained_is_seized_after_the_grace_time(join: Join, gate: Gate) -> None:
    old = await join(busy=True)
    await eventually(lambda: old.assigned == ALL)
    joined = monotonic()
    new = await join(grace=1)
    await eventually(lambda: bool(old.membership.draining("t")))
    moving = old.membership.draining("t")
    await eventually(lambda: new.assigned == moving)
    assert monotonic() - joined >= 1
    assert gate.counters["members.taken_over"] == len(moving)
    # And the old worker's late release does not take them from the new one
    old.finish(set(ALL))
    await asyncio.sleep(TTL)
    assert new.assigned == moving
    assert old.assigned == ALL - moving


async def test_who_leaves_ends_when_it_is_drained_and_leaves_nothing(join: Join, raw: Any, path: str) -> None:
    hand = await join(busy=True)
    await eventually(lambda: hand.assigned == ALL)
    hand.stop.set()
    await eventually(lambda: hand.membership.draining("t") == ALL)
    assert hand.assigned == frozenset()
    assert not hand.task.done()
    hand.finish(set(ALL))
    await asyncio.wait_for(hand.task, 60)
    assert raw.get_children(f"{path}/members") == raw.get_children(f"{path}/held") == []


@pytest.fixture
def child(server: Any, path: str) -> Iterator[Child]:
    made = Child(server.hosts, path)
    yield made
    made.process.kill()
    made.process.wait()
    assert made.process.stdout is not None
    made.process.stdout.close()


class Child:
    """A worker in a process of its own."""

    def __init__(self, hosts: str, path: str) -> None:
        command = [sys.executable, str(Path(__file__).with_name("hand.py")), hosts, path, f"{TTL:g}s"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE)

    async def says(self) -> set[int]:
        """What it is assigned, when that changes."""
        assert self.process.stdout is not None
        line = await asyncio.wait_for(asyncio.to_thread(self.process.stdout.readline), 20)
        return set(json.loads(line)[1])


@pytest.mark.slow  # a busy machine is late
async def test_the_slots_of_the_killed_are_taken_within_the_bound(join: Join, child: Child) -> None:
    while await child.says() != ALL:
        pass
    hand = await join()
    await eventually(lambda: bool(hand.assigned))
    assert hand.assigned < ALL
    # When it is killed
    child.process.kill()
    killed = monotonic()
    await eventually(lambda: hand.assigned == ALL)
    # Then all is served when its session has ended, and not before: its last ping may be a third of it old
    assert TTL / 2 < monotonic() - killed < TTL + TTL / 3 + 2 * TICK


@pytest.mark.slow
async def test_the_frozen_lose_their_slots_and_come_back(join: Join, child: Child) -> None:
    while await child.says() != ALL:
        pass
    hand = await join()
    while (theirs := await child.says()) == ALL:
        pass
    await eventually(lambda: hand.assigned == ALL - theirs)
    # When its process stands still for longer than its ttl
    child.process.send_signal(signal.SIGSTOP)
    await eventually(lambda: hand.assigned == ALL)
    # And goes on
    child.process.send_signal(signal.SIGCONT)
    # Then it has stopped taking, and gets its slots again
    while (told := await child.says()) == theirs:
        pass
    assert told == set()
    while await child.says() != theirs:
        pass
    await eventually(lambda: hand.assigned == ALL - theirs)


@pytest.mark.slow  # the server is a Java process: it takes seconds of CPU time to start again
async def test_while_the_server_is_away_nobody_takes_beyond_the_ttl(join: Join, server: Any, gate: Gate) -> None:
    hands = [await join(), await join()]
    await eventually(lambda: divided(*hands))
    before = [hand.assigned for hand in hands]
    # When the server stands still, they keep what they have for a time
    server.away()
    gone = monotonic()
    try:
        assert [hand.assigned for hand in hands] == before
        await eventually(lambda: not any(hand.assigned for hand in hands))
        assert TTL / 3 < monotonic() - gone <= TTL + 0.2
        await eventually(lambda: gate.counters["members.lapsed"] == 2)
    finally:
        server.back()
    # And when it is back, everything is where it was
    await eventually(lambda: [hand.assigned for hand in hands] == before)


async def test_a_server_that_is_away_at_the_start_is_an_error() -> None:
    gate = Gate("redis://127.0.0.1:1", timeout="200ms")
    with pytest.raises(StoreUnavailable, match="no answer from ZooKeeper"):
        await ZooKeeperMembership(gate, "127.0.0.1:1").run(asyncio.Event(), {"t": 1})


@pytest.mark.slow
async def test_a_path_that_is_not_ours_is_refused(server: Any, gate: Gate, raw: Any, path: str) -> None:
    raw.ensure_path(f"{path}/held")
    raw.create(f"{path}/members", acl=[make_acl("world", "anyone", read=True)])
    with pytest.raises(ServerRejected, match="NoAuth"):
        await ZooKeeperMembership(gate, server.hosts, path).run(asyncio.Event(), {"t": 1})


@pytest.mark.parametrize(
    ("options", "name"),
    [({"hosts": ""}, "hosts"), ({"path": "idemgate"}, "path"), ({"path": "/"}, "path"), ({"ttl": 0}, "ttl")],
)
def test_bad_input_is_named(gate: Gate, options: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidArgument, match=name):
        ZooKeeperMembership(gate, **{"hosts": "localhost:2181", **options})


@pytest.mark.slow
async def test_the_example_runs_as_it_stands(server: Any) -> None:
    example = Path(__file__).parents[1] / "example.py"
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(example), server.hosts, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    told, complaints = await asyncio.wait_for(process.communicate(), 60)
    # On a busy machine a reply may come late enough to be logged as an outage
    others = [line for line in complaints.splitlines() if not line.startswith(b"members.store_")]
    assert (process.returncode, others) == (0, []), told.decode() + complaints.decode()
    lines = told.decode().splitlines()
    everything = list(range(64))
    # Anna has everything first, and Boris last; between, they divide it
    assert lines[:2] == ["anna comes", f"anna takes from {everything}"]
    assert f"boris takes from {everything}" in lines[lines.index("anna leaves") :]
    middle = lines[lines.index("boris comes") : lines.index("anna leaves")]
    last = {line.split()[0]: json.loads(line.partition("from ")[2]) for line in middle[1:]}
    assert sorted(last["anna"] + last["boris"]) == everything
