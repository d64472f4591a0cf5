"""Where the store is more than one server: a real cluster of three primaries, and a primary that a sentinel names."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count, islice
from typing import Any

import pytest
import redis
import redis.asyncio as aredis

from idemgate import Gate, Trigger
from idemgate.core.backoff import SOCKET_TIMEOUT
from idemgate.core.calls import Batch, Call, new_id, run_plan
from idemgate.core.keys import record, scopes
from idemgate.errors import ServerRejected, StoreUnavailable
from idemgate.guard.claim_calls import ClaimReply
from idemgate.guard.heartbeat import note
from idemgate.history.calls import find_guard_history
from idemgate.operate.scopes import move_scope
from idemgate.store.cluster import topology
from idemgate.store.cluster.topology import REFRESH_INTERVAL, hash_slot_of
from idemgate.testing import Clock
from tests import cluster as servers
from tests.claims import claims_of
from tests.conftest import Awaited, Face

pytestmark = pytest.mark.one_in(3)

HOWS = ["url", "client", "awaiting client"]


@pytest.fixture(scope="session")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[int]]:
    """Of three primaries that share all slots."""
    with servers.cluster(tmp_path_factory.mktemp("cluster")) as found:
        yield found


@pytest.fixture(scope="session")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, int]]:
    """Ports of a primary and of the sentinel that calls it shop."""
    with servers.sentinel(tmp_path_factory.mktemp("sentinel"), "shop") as found:
        yield found


@pytest.fixture(params=["url", pytest.param("client", marks=pytest.mark.slow), "awaiting client"])
async def gate(
    request: pytest.FixtureRequest, ports: list[int], clock: Clock, namespace: str, sound: Callable[[Gate], None]
) -> AsyncIterator[Gate]:
    """A gate on the cluster, by URL or by a client of either kind; audited at the end of each test."""
    options: dict[str, Any] = {"namespace": namespace, "clock": clock}
    if request.param == "url":
        made = Gate("redis+cluster://" + ",".join(f"127.0.0.1:{port}" for port in ports), **options)
    elif request.param == "client":
        with redis.RedisCluster(port=ports[1], host="127.0.0.1", decode_responses=True) as client:
            made = Gate(client, **options)
    else:
        async with aredis.RedisCluster(host="127.0.0.1", port=ports[2], protocol=3) as awaiting:
            made = Gate(awaiting, **options)
    yield made
    await made.aio.close()
    made.close()
    sound(made)
    gc.collect()  # what redis-py left behind is to be this test's


@pytest.fixture
def on_nodes(ports: list[int], namespace: str) -> Callable[[], list[set[str]]]:
    """Which keys of this test each node holds, except the scopes, which the heartbeat thread registers at any time."""

    def look() -> list[set[str]]:
        found = []
        for port in ports:
            with redis.Redis(port=port, decode_responses=True) as node:
                found.append(set(node.scan_iter(f"ig2:{{{namespace}:*", count=1000)) - {scopes(namespace).decode()})
        return found

    return look


async def test_of_all_copies_one_runs(face: Face, on_nodes: Any) -> None:
    # Given a guarded function
    ran: list[int] = []

    @face.once(key="{n}")
    def work(n: int) -> int:
        ran.append(n)
        return n * n

    # When it is called three times for each of thirty keys
    results = await asyncio.gather(*(work(n) for n in range(30)))
    again = [await work(n) for n in range(30)]
    # Then it ran once for each, all got its result, and all three nodes took part
    assert sorted(ran) == list(range(30))
    assert results == again == [n * n for n in range(30)]
    assert all(on_nodes())
    assert sum(len(keys) for keys in on_nodes()) == 30


async def test_the_first_of_many_is_asked_of_all_nodes(face: Face, on_nodes: Any) -> None:
    keys = [f"k{i}" for i in range(40)]
    assert await face.first_many([*keys, "k7"], "20s") == [True] * 40 + [False]
    assert await face.first_many(keys, "20s") == [False] * 40
    # And of equal keys in one call the first is first
    assert await face.first_many(["same"] * 30, "20s") == [True] + [False] * 29
    assert all(on_nodes())


async def test_a_dedup_set_is_spread_over_all_nodes(face: Face, on_nodes: Any) -> None:
    dedup = face.dedup("s", "20s")
    assert await dedup.add_many([*range(500), 7]) == [True] * 500 + [False]
    assert await dedup.add_many(range(400, 600)) == [False] * 100 + [True] * 100
    assert not await dedup.add(7)
    assert all(one.first for one in await dedup.get_or_set_many([(number, number) for number in range(500)]))
    assert [await dedup.get(number) for number in (7, 499, 500)] == [7, 499, None]
    assert all(on_nodes())


async def test_a_call_is_in_the_sample_of_durations(face: Face, gate: Gate) -> None:
    await face.claim("k")  # connects
    sampled = gate.context.activity.calls
    before, sampled.due = sum(sampled.counts), 0.0
    assert (await face.claim("k")).state == "in_progress"
    assert sum(sampled.counts) == before + 1


@pytest.mark.usefixtures("no_polls")
async def test_a_waiting_claim_is_woken_across_nodes(face: Face, ports: list[int]) -> None:
    # Given claims of several keys, on whichever nodes, and others who wait for them
    for key in ("a", "b", "c", "d"):
        owner = await face.claim(key, lease="10s")
        waiter = await face.claim(key)
        assert waiter.state == "in_progress"
        waiting = asyncio.create_task(waiter.wait("1h"))
        await _heard_somewhere(claims_of(face.gate).key("claim", key)[0], ports)
        # When the owner completes
        assert await owner.complete("result")
        # Then the other wakes, although it never polls
        assert await asyncio.wait_for(waiting, 60) == "done"
        assert waiter.result == "result"


async def _heard_somewhere(channel: bytes, ports: list[int]) -> None:
    """Wait until a client has subscribed to the channel, at any node."""
    deadline = time.monotonic() + 60
    with ExitStack() as stack:
        nodes = [stack.enter_context(redis.Redis(port=port)) for port in ports]
        while not any(node.pubsub_numsub(channel)[0][1] for node in nodes):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.005)


async def test_slots_move_over_the_nodes(face: Face, clock: Clock, on_nodes: Any, namespace: str) -> None:
    # Given a topic of one slot, on one node, and a delivery of it
    topic = face.topic("t", window="60s", merge="append", slots=1)
    await topic.trigger_many([("first", 0)])
    clock.advance("60s")
    (flying,) = await topic.take(1)
    await topic.trigger_many([Trigger(f"k{i % 100}", i, event_id=str(i)) for i in range(200)])
    assert sum(any("/1}" in key for key in keys) for keys in on_nodes()) == 1
    # When it is given sixteen
    done = await topic.reshard(16)
    assert (done.before, done.after) == (1, 16)
    # Then every node holds some of them, each slot whole, and nothing but a note of the former one
    slots = [{key.partition("}")[0] for key in keys if "/16}" in key} for keys in on_nodes()]
    assert all(slots)
    assert len(set().union(*slots)) == sum(len(found) for found in slots) == 16
    left = [key for keys in on_nodes() for key in keys if "/1}" in key]
    assert {key.partition("}:")[2] for key in left} == {"meta"}
    # And it is the same topic, here and for those who only ask the store
    (stored,) = await face.stored_topics()
    assert (stored.name, stored.slots, stored.stats.scheduled, stored.stats.in_flight) == ("t", 16, 100, 1)
    assert await topic.ack(flying) == "ok"
    assert (await topic.trigger("k0", 0, event_id="0")).status == "duplicate"
    clock.advance("60s")
    taken = await topic.take(1000)
    assert sorted(one.payload[1] for one in taken) == list(range(100, 200))
    await topic.ack(taken)
    # And empty it is forgotten, on every node
    assert (await topic.delete()).known
    assert await face.stored_topics() == []
    assert {key.partition("}:")[2] for keys in on_nodes() for key in keys} <= {"meta", "replies0", "replies1"}


async def test_histories_are_on_all_nodes(face: Face, clock: Clock, on_nodes: Any) -> None:
    # Given messages of all slots that were cancelled, and runs that failed
    topic = face.topic("t", window="60s", slots=8, history=64)
    keys = [f"k{n}" for n in range(64)]
    await topic.trigger_many([Trigger(key, event_id=key) for key in keys])
    for key in keys:
        await topic.cancel(key)
        note(face.gate.context, "s", key, "failed")
    face.gate.context.notes.flush()  # type: ignore[union-attr]
    # Then every node has some of the histories, and all of them are found
    assert all(any(":history" in key for key in found) for found in on_nodes())
    for key in keys:
        [trace] = (await face.trace(key)).found
        assert (trace.key, trace.outcome) == (key, "cancelled")
        plan = find_guard_history(face.gate.context, key, ["s"])
        assert [one.what for one in run_plan(plan, face.gate.context.link.run_all)["s"].transitions] == ["failed"]


async def test_a_topic_spreads_over_the_nodes(face: Face, clock: Clock, on_nodes: Any) -> None:
    # Given a topic of eight slots, and 200 triggers of 50 keys
    topic = face.topic("t", window="60s", merge="count", slots=8)
    receipts = await topic.trigger_many([(f"k{i % 50}", i) for i in range(200)])
    assert sum(one.status == "scheduled" for one in receipts) == 50
    assert (await topic.trigger("k0")).status == "merged"
    # Then every node holds some of its slots, each slot whole
    slots = [{key.partition("}")[0] for key in keys if ":topic:t:" in key} for keys in on_nodes()]
    assert all(slots)
    assert sum(len(found) for found in slots) == 8
    # When the window has ended
    clock.advance("60s")
    deliveries = await topic.take(1000)
    # Then every key comes once with all its triggers, and is acknowledged on its own node
    assert {one.key: one.payload for one in deliveries} == {f"k{i}": 4 + (i == 0) for i in range(50)}
    assert await topic.extend(deliveries) == ["ok"] * 50
    assert await topic.ack(deliveries[:40]) == ["ok"] * 40
    assert await topic.nack(deliveries[40], delay="0s") == "ok"
    assert await topic.bury(deliveries[41:]) == ["dead"] * 9
    stats = await topic.stats()
    assert (stats["accepted"], stats["acked"], stats.dead, stats.pending, stats.in_flight) == (201, 40, 9, 1, 0)
    assert len(await topic.dead.list(100)) == 9
    assert await topic.dead.redrive() == 9
    assert len(await topic.take(1000)) == 10


async def test_a_batch_is_many_calls_and_one_answer(face: Face) -> None:
    topic = face.topic("t", window="60s", slots=4)
    keys = [f"k{i}" for i in range(20)]
    await topic.trigger_many([(key, None) for key in keys])
    assert [await topic.cancel(key) for key in keys[:3]] == ["cancelled"] * 3
    assert await topic.flush() == 17
    assert len(await topic.take(100)) == 17


@pytest.fixture
def operator(ports: list[int]) -> Iterator[servers.Operator]:
    made = servers.Operator(ports)
    for node in made.nodes:
        node.flushall()  # slots that are moved hold keys of this test only
    yield made
    made.close()


@pytest.mark.parametrize("gate", ["url"], indirect=True)
async def test_a_moved_record_is_followed(gate: Gate, operator: servers.Operator, face: Face) -> None:
    # Given a record whose slot moves to another node while the link knows only the old one
    claim = await face.claim("k", lease="60s")
    for _ in operator.move(claims_of(gate).key("claim", "k")[0].decode()):
        # Then a claim in the middle of the move is answered
        assert (await face.claim("k")).state == "in_progress"
    # And so is its owner afterwards
    assert await claim.complete("moved")
    assert (await face.claim("k")).result == "moved"


@pytest.mark.parametrize("connections", [1, 2, 3, 4])
@pytest.mark.parametrize("gate", ["url"], indirect=True)
async def test_a_record_is_served_while_its_slot_moves(
    gate: Gate, operator: servers.Operator, face: Face, connections: int
) -> None:
    # Given a link with some connections to the node to which a record has moved, while its slot is still moving
    for number in operator.primaries():
        operator.nodes[number].flushall()  # what earlier tests left may lie in the same slot
    await face.claim("k", lease="60s")
    key = claims_of(gate).key("claim", "k")[0].decode()
    target = next(number for number in operator.primaries() if number != operator.owner(key))
    moving = operator.move(key)
    assert [next(moving), next(moving)] == [0, 1]
    there = (f"o{n}" for n in count() if operator.owner(claims_of(gate).key("claim", f"o{n}")[0].decode()) == target)
    await asyncio.gather(*(face.claim(one) for one in islice(there, connections)))
    # Then a claim is answered all the same
    for _ in range(3):
        assert (await face.claim("k")).state == "in_progress"
    assert list(moving) == []


@pytest.mark.parametrize("awaiting", [False, True])
@pytest.mark.parametrize("gate", ["url"], indirect=True)
async def test_a_slot_that_is_half_moved_is_waited_for(
    gate: Gate, operator: servers.Operator, awaiting: bool, three_tries: Any
) -> None:
    # Given a topic whose slot stays half moved: its scripts need keys here and there
    topic, link = gate.topic("t", window="60s", merge="count"), _link(gate, awaiting)
    assert topic.trigger("a").status == "scheduled"
    moving = operator.move(topic.open().keys(0)[0].decode())
    assert [next(moving), next(moving)] == [0, 1]
    # Then a call is tried again and again, and is known not to have been executed
    call = topic.open().trigger(Trigger("a"))
    with three_tries(), pytest.raises(StoreUnavailable) as told:
        await link.run(call, within=20.0)
    assert told.value.executed == "no"
    # When the move ends while it is tried again
    waiting = asyncio.create_task(link.run(call, within=20.0))
    for _ in moving:
        await asyncio.sleep(0.05)
    # Then it is executed, and copies of it have no second effect
    assert (await waiting).status == "merged"
    assert (await link.run(call)).status == "merged"
    assert topic.stats()["accepted"] == 2


@pytest.mark.parametrize("awaiting", [False, True])
@pytest.mark.parametrize("gate", ["url"], indirect=True)
async def test_a_slot_that_nobody_serves_is_waited_for(
    gate: Gate, operator: servers.Operator, awaiting: bool, three_tries: Any
) -> None:
    # Given a topic whose slot is not served by any node
    topic, link = gate.topic("t", window="60s", merge="count"), _link(gate, awaiting)
    assert topic.trigger("a").status == "scheduled"
    key = topic.open().keys(0)[0].decode()
    owner = operator.nodes[operator.owner(key)]
    slot = owner.execute_command("CLUSTER KEYSLOT", key)
    owner.execute_command("CLUSTER DELSLOTS", slot)
    try:
        # Then a call is tried again and again, and is known not to have been executed
        call = topic.open().trigger(Trigger("a"))
        with three_tries(), pytest.raises(StoreUnavailable) as told:
            await link.run(call, within=20.0)
        assert told.value.executed == "no"
        waiting = asyncio.create_task(link.run(call, within=20.0))
        await asyncio.sleep(0.1)
    finally:
        owner.execute_command("CLUSTER ADDSLOTS", slot)
    # And when it is served again, it is executed
    assert (await waiting).status == "merged"
    assert topic.stats()["accepted"] == 2
    servers.wait_for(lambda: all("cluster_state:ok" in _info(node) for node in operator.nodes))


def _info(node: Any) -> str:
    info = node.execute_command("CLUSTER INFO")
    return "\n".join(f"{name}:{value}" for name, value in info.items()) if isinstance(info, dict) else str(info)


def _link(gate: Gate, awaiting: bool) -> Any:
    return gate.aio.context.aio_link if awaiting else Awaited(gate.context.link)


# -- by node ----------------------------------------------------------------------------------------------------------


def test_slots_are_those_of_the_server(operator: servers.Operator) -> None:
    chance = random.Random(5)
    keys = [b"", b"{}", b"{}{a}", b"a{b}c{d}", b"a{b", b"}a{b}", b"{{a}}", b"123456789"]
    keys += [bytes(chance.choices(b"{}ab\x00\xff", k=chance.randrange(12))) for _ in range(200)]
    assert [hash_slot_of(key) for key in keys] == [
        operator.nodes[0].execute_command("CLUSTER KEYSLOT", key) for key in keys
    ]


def claims(gate: Gate, keys: list[str]) -> list[Call[ClaimReply]]:
    return [claims_of(gate).claim(claims_of(gate).key("s", key), new_id(), 30_000, 60_000) for key in keys]


def reads(operator: servers.Operator) -> list[int]:
    return [node.info("stats")["total_reads_processed"] for node in operator.nodes]


async def fewest_reads(operator: servers.Operator, send: Callable[[], Awaitable[object]]) -> list[int]:
    """Return how often each node reads while `send` runs: the fewest of four times.

    Something else may add reads: a connection that another test closed ends late, or a node that has just learned of a
    moved slot answers MOVED. The link then reads the table again, but not sooner than `REFRESH_INTERVAL` after the last
    time. Nothing takes a read away.
    """
    counted = list[list[int]]()
    for _ in range(4):
        before = reads(operator)
        await send()
        question = 1  # the one for `before`
        counted.append([after - was - question for after, was in zip(reads(operator), before, strict=True)])
        await asyncio.sleep(REFRESH_INTERVAL)
    return [min(of_node) for of_node in zip(*counted, strict=True)]


@pytest.mark.parametrize("awaiting", [False, True])
@pytest.mark.parametrize("gate", ["url"], indirect=True)
async def test_a_batch_is_one_write_to_each_node(gate: Gate, operator: servers.Operator, awaiting: bool) -> None:
    link = _link(gate, awaiting)

    async def claim() -> None:
        entries = await link.run_all(Batch(claims(gate, [new_id().hex() for _ in range(100)]), list))
        assert {one.state for one in entries} == {"started"}

    assert await fewest_reads(operator, claim) == [1] * 3


@pytest.mark.parametrize("gate", ["url"], indirect=True)
async def test_claims_of_a_batch_are_one_write_to_each_node(gate: Gate, operator: servers.Operator, face: Face) -> None:
    async def claim_and_complete() -> None:
        claims = await face.claim_many([new_id().hex() for _ in range(100)])
        assert {claim.state for claim in claims} == {"started"}
        assert await face.complete_many([(claim, 1) for claim in claims]) == [True] * 100

    assert await fewest_reads(operator, claim_and_complete) == [2] * 3


@pytest.mark.parametrize("gate", ["url"], indirect=True)
async def test_calls_of_one_tick_are_one_write_to_each_node(gate: Gate, operator: servers.Operator) -> None:
    link = gate.aio.context.aio_link

    async def claim() -> None:
        calls = claims(gate, [new_id().hex() for _ in range(100)])
        assert {one.state for one in await asyncio.gather(*map(link.run, calls))} == {"started"}

    assert await fewest_reads(operator, claim) == [1] * 3


@pytest.mark.parametrize("awaiting", [False, True])
@pytest.mark.parametrize("gate", ["url"], indirect=True)
async def test_calls_of_one_key_keep_their_order_while_its_slot_moves(
    gate: Gate, operator: servers.Operator, awaiting: bool
) -> None:
    # Given a link that knows the nodes, and a slot that has moved, or is about to
    link, key = _link(gate, awaiting), claims_of(gate).key("s", "same")[0].decode()
    await link.run_all(Batch(claims(gate, [f"w{n}" for n in range(50)]), list))
    for _ in operator.move(key):
        # When many claim it in one batch, among others
        calls = claims(gate, [f"o{n}" if n % 2 else "same" for n in range(60)])
        entries = await link.run_all(Batch(calls, list))
        # Then the first is first
        assert [one.state for one in entries[::2]] == ["started"] + ["in_progress"] * 29
        await link.run(claims_of(gate).release(claims_of(gate).key("s", "same"), calls[0].args[4], 0))


@pytest.mark.parametrize("awaiting", [False, True])
@pytest.mark.parametrize("gate", ["url"], indirect=True)
@pytest.mark.slow
async def test_nothing_is_left_open_when_the_nodes_are_looked_for_anew(
    gate: Gate, operator: servers.Operator, awaiting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a link with one caller, and so with one connection to each node, which looks as often as it likes
    monkeypatch.setattr(topology, "REFRESH_INTERVAL", 0.0)
    link, keys = _link(gate, awaiting), [f"k{n}" for n in range(12)]
    await link.run_all(Batch(claims(gate, keys), list))
    for node in operator.nodes:
        node.ping()
    before = [_connected(node) for node in operator.nodes]
    for round_ in range(6):
        # When a slot moves, or all connections break, and it reads anew which node serves what
        if round_ % 2:
            list(operator.move(claims_of(gate).key("s", keys[round_])[0].decode()))
        else:
            for node in operator.nodes:
                node.client_kill_filter(_type="normal", skipme=True)
        for key in keys:
            await link.run(claims_of(gate).inspect(claims_of(gate).key("s", key)))
    # Then no node has more connections than before
    servers.wait_for(lambda: all(_connected(node) <= was for node, was in zip(operator.nodes, before, strict=True)))


def _connected(node: Any) -> int:
    return int(node.info("clients")["connected_clients"])


@pytest.mark.parametrize("awaiting", [False, True])
async def test_seeds_that_are_gone_are_passed_over(ports: list[int], namespace: str, awaiting: bool) -> None:
    nodes = ",".join(f"127.0.0.1:{port}" for port in (1, 2, ports[2]))
    with Gate(f"redis+cluster://{nodes}", namespace=namespace) as gate:
        entries = await _link(gate, awaiting).run_all(Batch(claims(gate, [f"k{n}" for n in range(30)]), list))
        assert {one.state for one in entries} == {"started"}
        await gate.aio.close()


@pytest.mark.parametrize("awaiting", [False, True])
@pytest.mark.parametrize("kind", ["ip", "hostname", "unknown-endpoint"])
async def test_nodes_are_found_however_they_are_named(
    operator: servers.Operator, ports: list[int], namespace: str, kind: str, awaiting: bool
) -> None:
    # Given nodes that announce their address, a name, or nothing
    try:
        for number, node in enumerate(operator.nodes):
            node.config_set("cluster-announce-hostname", "localhost" if number else "")  # one has no name
            node.config_set("cluster-preferred-endpoint-type", kind)
    except redis.ResponseError:
        pytest.skip("this server has no names of nodes")
    try:
        servers.wait_for(lambda: all(_names(port).count("localhost") == 2 for port in ports) or kind != "hostname")
        with Gate(f"redis+cluster://127.0.0.1:{ports[1]}", namespace=namespace) as gate:
            link = _link(gate, awaiting)
            await link.run_all(Batch(claims(gate, [f"k{n}" for n in range(30)]), list))
            # Then all are found, by the table and by redirections
            for _ in operator.move(claims_of(gate).key("s", "k1")[0].decode()):
                assert (await link.run(claims_of(gate).inspect(claims_of(gate).key("s", "k1")))).state == "in_progress"
            assert (await link.run(claims_of(gate).inspect(claims_of(gate).key("s", "k1")))).state == "in_progress"
            await gate.aio.close()
    finally:
        for node in operator.nodes:
            node.config_set("cluster-announce-hostname", "")
            node.config_set("cluster-preferred-endpoint-type", "ip")


def _names(port: int) -> str:
    """As this node knows the others."""
    with redis.Redis(port=port, decode_responses=True) as node:
        return str(node.execute_command("CLUSTER", "NODES"))  # as one word redis-py 5 leaves names out


@pytest.mark.parametrize("awaiting", [False, True])
async def test_every_node_gets_the_credentials(
    operator: servers.Operator, ports: list[int], namespace: str, awaiting: bool
) -> None:
    # Given nodes that want a user's password
    for node in operator.nodes:
        node.execute_command("ACL", "SETUSER", "ann", "on", ">secret", "~*", "&*", "+@all")
    try:
        for password, refused in (("secret", False), ("wrong", True)):
            with Gate(f"redis+cluster://ann:{password}@127.0.0.1:{ports[0]}", namespace=namespace) as gate:
                work = _link(gate, awaiting).run_all(Batch(claims(gate, [f"k{n}" for n in range(30)]), list))
                # Then they get it, and a wrong one fails at once
                if refused:
                    with pytest.raises(ServerRejected, match="invalid username-password pair"):
                        await work
                else:
                    assert {one.state for one in await work} == {"started"}
                await gate.aio.close()
    finally:
        for node in operator.nodes:
            node.execute_command("ACL", "DELUSER", "ann")


def blocked(ports: list[int]) -> int:
    """Clients that wait in a blocking command, on all nodes."""
    found = 0
    for port in ports:
        with redis.Redis(port=port) as node:
            found += node.info("clients")["blocked_clients"]
    return found


@pytest.mark.parametrize("gate", ["url"], indirect=True)
async def test_plain_commands_find_their_node(gate: Gate, ports: list[int], namespace: str) -> None:
    link = gate.aio.context.aio_link
    for ask in (gate.aio.context.aio_link.command, Awaited(gate.context.link).command):
        for number in range(6):
            stream = f"{namespace}:{number}"
            await ask("XADD", stream, "*", "a", "b")
            with suppress(ServerRejected):  # it is there
                await ask("XGROUP", "CREATE", stream, "g", "0")
            ((name, entries),) = await link.blocking(
                "XREADGROUP", "GROUP", "g", "c", "COUNT", 1, "BLOCK", 1000, "STREAMS", stream, ">", within=10
            )
            assert (name, len(entries)) == (stream.encode(), 1)
        assert len(await ask("TIME")) == 2
        assert await ask("PING") == b"PONG"
        assert await ask("PUBLISH", "c", "x") >= 0
    # And a read that waits while others are asked is its own
    stream = f"{namespace}:0"
    read = ("XREADGROUP", "GROUP", "g", "c", "COUNT", 1, "BLOCK", 20_000, "STREAMS", stream, ">")
    waiting = asyncio.create_task(link.blocking(*read, within=30))
    await asyncio.sleep(0.05)
    await link.command("XADD", stream, "*", "a", "late")
    assert (await waiting)[0][1][0][1] == [b"a", b"late"]
    # And a cancelled one takes nothing, once the server knows that it is gone
    waiting = asyncio.create_task(link.blocking(*read, within=30))
    await asyncio.to_thread(servers.wait_for, lambda: blocked(ports) == 1)
    waiting.cancel()
    await asyncio.wait([waiting])
    await asyncio.to_thread(servers.wait_for, lambda: blocked(ports) == 0)
    await link.command("XADD", stream, "*", "a", "next")
    assert (await link.blocking(*read, within=30))[0][1][0][1] == [b"a", b"next"]


def test_nobody_there_is_not_an_error_of_redis_py() -> None:
    with Gate("redis+cluster://127.0.0.1:1", timeout="100ms") as gate, pytest.raises(StoreUnavailable):
        gate.first("k", "1s")


# -- Sentinel ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", HOWS)
async def test_the_primary_is_found_through_sentinels(how: str, asker: Any, watched: tuple[int, int]) -> None:
    # Given a sentinel, after one that is not there
    primary, watching = watched
    nodes = [("127.0.0.1", 1), ("127.0.0.1", watching)]
    if how == "url":
        ask = asker("redis+sentinel://" + ",".join(f"{host}:{port}" for host, port in nodes) + "/shop/2")
    else:
        sentinel = (redis if how == "client" else aredis).Sentinel(nodes)
        ask = asker(sentinel.master_for("shop", db=2, decode_responses=True, protocol=3))
    # When a key is claimed
    key = ask.claims.key("s", new_id().hex())
    states = [(await ask.run(ask.claims.claim(key, new_id(), 1000, 1000))).state for _ in range(2)]
    assert states == ["started", "in_progress"]
    # Then its record is on the primary, in that database
    with redis.Redis(port=primary, db=2) as client:
        assert client.exists(key[0])
    # And a wake-up is heard there
    if ask.awaiting:
        async with ask.gate.aio.context.aio_link.waiting(b"c") as event:
            await ask.command("PUBLISH", b"c", b"x")
            await asyncio.wait_for(event.wait(), 60)
    else:
        with ask.gate.context.link.waiting(b"c") as waiter:
            await ask.command("PUBLISH", b"c", b"x")
            assert waiter.wait(60)


async def test_an_unknown_service_is_not_executed(asker: Any, watched: tuple[int, int]) -> None:
    ask = asker(f"redis+sentinel://127.0.0.1:{watched[1]}/other", timeout="1s")
    with pytest.raises(StoreUnavailable, match="other") as told:
        await ask.run(ask.claims.inspect(ask.claims.key("s", "k")))
    assert told.value.executed == "no"


@pytest.fixture
def silent() -> Iterator[Callable[[], int]]:
    """`silent()`: the port of a server that takes connections and never answers."""
    with ExitStack() as stack:

        def listen() -> int:
            # The kernel completes the connections.
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=64))
            return int(listener.getsockname()[1])

        yield listen


@pytest.mark.parametrize(
    ("others", "place", "bound"),
    [
        (20, 0, 10.0),
        (20, 10, 10.0),
        (20, 20, 10.0),
        *(pytest.param(3, place, SOCKET_TIMEOUT, marks=pytest.mark.slow) for place in (0, 1, 3)),
    ],
)
async def test_silent_sentinels_hold_nothing_up(
    asker: Any, watched: tuple[int, int], silent: Callable[[], int], others: int, place: int, bound: float
) -> None:
    # Given a sentinel among others that are silent
    ports = [silent() for _ in range(others)]
    ports.insert(place, watched[1])
    nodes = ",".join(f"127.0.0.1:{port}" for port in ports)
    ask = asker(f"redis+sentinel://{nodes}/shop", timeout="60s")
    began = time.monotonic()
    # When a key is claimed
    claimed = await ask.run(ask.claims.claim(ask.claims.key("s", new_id().hex()), new_id(), 1000, 1000))
    # Then it did not wait for one after the other, which takes 2 s each. A quiet machine waits for none of them.
    assert claimed.state == "started"
    assert time.monotonic() - began < bound


@pytest.mark.parametrize("kind", ["sentinels", "server"])
@pytest.mark.parametrize(
    ("seconds", "bound"),
    [
        (0.5, 10.0),
        pytest.param(0.2, 1.1, marks=pytest.mark.slow),
        pytest.param(2.2, 5.1, marks=pytest.mark.slow),
    ],
)
async def test_the_timeout_bounds_a_call_if_none_answers(
    asker: Any, silent: Callable[[], int], kind: str, seconds: float, bound: float
) -> None:
    # Given servers that take connections and never answer
    nodes = ",".join(f"127.0.0.1:{silent()}" for _ in range(40))
    url = f"redis+sentinel://{nodes}/shop" if kind == "sentinels" else f"redis://127.0.0.1:{silent()}"
    ask = asker(url, timeout=seconds)
    for _ in range(2):
        began = time.monotonic()
        # When a call fails
        with pytest.raises(StoreUnavailable):
            await ask.run(ask.claims.inspect(ask.claims.key("s", "k")))
        # Then it took its timeout once, not once for each of 40 servers; a busy machine takes a little longer
        assert time.monotonic() - began < bound


@contextmanager
def stopped(port: int, ports: list[int]) -> Iterator[None]:
    """Stop a node. The other nodes wait longer for it than a test takes."""
    with ExitStack() as stack:
        nodes = [stack.enter_context(redis.Redis(port=each)) for each in ports]
        for node in nodes:
            node.config_set("cluster-node-timeout", 120_000)
        pid = redis.Redis(port=port).info("server")["process_id"]
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)
            for node in nodes:
                node.config_set("cluster-node-timeout", 5000)


async def test_a_node_that_does_not_answer_costs_no_lease_of_another_node(
    ports: list[int], clock: Clock, namespace: str
) -> None:
    # Given claims of keys on all nodes, and a gate that tries each call for longer than this test takes
    keys = [f"k{i}" for i in range(20)]
    answering = [key for key in keys if hash_slot_of(record(namespace, "s", key)) < 2 * 16384 // 3]
    assert 0 < len(answering) < len(keys)
    with (
        Gate(f"redis+cluster://127.0.0.1:{ports[0]}", namespace=namespace, clock=clock, timeout="60s") as gate,
        gate.claim_many(keys, scope="s", lease="3s") as claims,
        # When a node does not answer any more
        stopped(ports[2], ports),
    ):
        # Then the leases on the others are renewed
        async with asyncio.timeout(20):
            for _ in range(4):
                clock.advance("1s")
                while any((gate.inspect(key, scope="s").lease_left or 0) < 2.5 for key in answering):
                    await asyncio.sleep(0.01)
        # And their owner knows that
        assert not [key for key, claim in zip(keys, claims, strict=True) if claim.lease_lost and key in answering]


async def test_the_keys_of_a_scope_move_to_other_nodes(gate: Gate, on_nodes: Callable[[], list[set[str]]]) -> None:
    for n in range(100):
        gate.first(str(n), "1h", scope="old")
    # When the scope is moved, whose keys then have other slots
    assert move_scope(gate, {"scope": "old", "to": "new"})["moved"] == 100
    # Then each key is done in the new one, on whichever node
    assert gate.first_many(map(str, range(100)), "1h", scope="new") == [False] * 100
    assert all(sum(":once:new:" in key for key in keys) > 10 for keys in on_nodes())
    assert not any(":once:old:" in key for keys in on_nodes() for key in keys)


async def test_a_drain_runs_what_is_due_on_each_node(gate: Gate) -> None:
    topic = gate.topic("t", slots=64)
    topic.handler(lambda delivery: None)
    await topic.aio.trigger_many([(str(n), None) for n in range(300)])
    assert (await gate.aio.drain()).delivered == 300
