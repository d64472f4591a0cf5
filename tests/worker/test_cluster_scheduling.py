"""What workers do, on a real cluster of three primaries: members, limits that find themselves, partial success, dead
letters, recurring triggers, pauses, and more slots for a topic that is in use."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from idemgate import Adaptive, Gate, PartialFailure
from idemgate.cli import main
from idemgate.core import keys
from idemgate.errors import ServerRejected
from idemgate.membership.member import RedisMembership
from idemgate.testing import Clock
from tests import cluster as servers

SLOTS = 8


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[int]]:
    with servers.cluster(tmp_path_factory.mktemp("cluster")) as found:
        yield found


@pytest.fixture
async def make(
    ports: list[int], namespace: str, clock: Clock, sound: Callable[[Gate], None]
) -> AsyncIterator[Callable[..., Gate]]:
    """Gates of one namespace, as several processes would have; audited at the end. Nodes of a cluster may lose a hint:
    who waits for one while the time of `clock` stands still waits for ever."""
    made: list[Gate] = []

    def gate(clock: Clock | None = clock) -> Gate:
        where = ",".join(f"127.0.0.1:{port}" for port in ports)
        made.append(Gate(f"redis+cluster://{where}", namespace=namespace, clock=clock))
        return made[-1]

    yield gate
    for one in made:
        await one.aio.close()
        one.close()
    if made:
        sound(made[0])


async def test_a_worker_on_the_url_of_a_single_node_ends_with_an_error(ports: list[int], namespace: str) -> None:
    # Given a gate whose URL names one node, which has the policy of a topic and some of its slots
    gates = [Gate(f"redis://127.0.0.1:{port}", namespace=namespace) for port in ports]
    topics = [gate.topic(f"t{n}", slots=32) for gate in gates for n in range(20)]
    opened = []
    for topic in topics:
        with suppress(ServerRejected):
            await topic.aio.open()
            opened.append(topic)
    topic = opened[0]

    @topic.handler
    async def handle(delivery: Any) -> None: ...

    # When it runs a worker, then that ends with the fix
    (gate,) = (gate for gate in gates if gate.topics.get(topic.name) is topic)
    with pytest.raises(ServerRejected, match=r"the URL names it alone: use redis\+cluster://"):
        async with asyncio.timeout(30):
            await gate.aio.worker(topic.name).run(asyncio.Event())
    for gate in gates:
        await gate.aio.close()
        gate.close()


@pytest.mark.parametrize("kind", ["stream", "list"])
async def test_a_consumer_on_the_url_of_a_single_node_ends_when_its_slot_moves(
    kind: str, ports: list[int], namespace: str, eventually: Any
) -> None:
    # Given a consumer whose URL names the node that has its key
    operator, name = servers.Operator(ports), f"{namespace}:{kind}"
    gate, got = Gate(f"redis://127.0.0.1:{operator.port(operator.owner(name))}", namespace=namespace), list[object]()
    if kind == "stream":
        gate.stream(name, group="g")(got.append)
    else:
        gate.consume_list(name)(got.append)
    running = asyncio.create_task(gate.aio.subscribers().run(asyncio.Event()))
    node = operator.nodes[operator.owner(name)]
    (node.xadd(name, {"n": 1}) if kind == "stream" else node.rpush(name, 1))
    await eventually(lambda: got)
    # When the slot of the key moves to another node, then it ends with the fix
    for _ in operator.move(name):
        pass
    with pytest.raises(ServerRejected, match=r"the URL names it alone: use redis\+cluster://"):
        async with asyncio.timeout(30):
            await running
    await gate.aio.close()
    gate.close()
    operator.close()


async def test_a_member_on_the_url_of_a_single_node_ends_when_its_slot_moves(
    ports: list[int], namespace: str, eventually: Any
) -> None:
    # Given a member whose URL names the node that has the keys of its group
    operator, name = servers.Operator(ports), keys.members(namespace, "g")[0].decode()
    gate = Gate(f"redis://127.0.0.1:{operator.port(operator.owner(name))}", namespace=namespace)
    member = RedisMembership(gate, "g", ttl="1s")
    running = asyncio.create_task(member.run(asyncio.Event(), {"t": 4}))
    await eventually(lambda: running.done() or member.assigned_slots("t"))
    # When their slot moves to another node, then it ends with the fix
    for _ in operator.move(name):
        pass
    with pytest.raises(ServerRejected, match=r"the URL names it alone: use redis\+cluster://"):
        async with asyncio.timeout(30):
            await running
    # And another one does not join
    with pytest.raises(ServerRejected, match=r"the URL names it alone: use redis\+cluster://"):
        async with asyncio.timeout(30):
            await RedisMembership(gate, "g").run(asyncio.Event(), {"t": 4})
    await gate.aio.close()
    gate.close()
    operator.close()


@pytest.mark.parametrize("awaiting", [False, True])
async def test_each_face_on_the_url_of_a_single_node_names_the_fix(
    awaiting: bool, ports: list[int], namespace: str
) -> None:
    # Given a gate whose URL names one node, which has some of the keys
    gate = Gate(f"redis://127.0.0.1:{ports[0]}", namespace=namespace)
    face = gate.aio if awaiting else gate

    async def find_refusals(use: Callable[[str], Any]) -> list[str]:
        refusals = []
        for n in range(20):
            try:
                found = await asyncio.to_thread(use, str(n))
                if awaiting:
                    await found
            except ServerRejected as error:
                refusals.append(str(error))
        return refusals

    # When keys of other nodes are used, then each error names the fix
    uses: dict[str, Callable[[str], Any]] = {
        "first": lambda n: face.first(n, "1h"), "dedup": lambda n: face.dedup("s" + n, "1h").add(n),
        "topic": lambda n: face.topic("t" + n).trigger("k"), "topics": lambda n: face.topic("s", slots=32).stats(),
        "inspect": face.inspect,
    }  # fmt: skip
    for name, use in uses.items():
        refusals = await find_refusals(use)
        assert refusals or name == "topics", name
        assert all("the URL names it alone: use redis+cluster://" in refusal for refusal in refusals), (name, refusals)
    await gate.aio.close()
    gate.close()


def test_the_audit_and_the_commands_on_the_url_of_a_single_node_name_the_fix(
    ports: list[int], namespace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    # Given topics whose slots are on all nodes
    where = ",".join(f"127.0.0.1:{port}" for port in ports)
    with Gate(f"redis+cluster://{where}", namespace=namespace) as gate:
        gate.topic("t", slots=32).trigger_many([(n, n) for n in range(100)])
    refused = False
    for port in ports:
        url = f"redis://127.0.0.1:{port}"
        for command in (["topic", "ls"], ["doctor", "--audit"], ["doctor"]):
            status = main([*command, "--url", url, "--namespace", namespace])
            said = capsys.readouterr()
            text = " ".join((said.out + said.err).split())
            assert "redis+cluster://" in text, (command, port, text)
            refused = refused or (status != 0 and "the URL names it alone" in text)
            assert "Traceback" not in text
    assert refused


async def test_members_divide_the_slots_and_hand_them_over(make: Any, eventually: Any) -> None:
    # Given two workers that divide the slots of a topic among themselves, so many that each is certain to have some
    slots = 32
    seen: Counter[str] = Counter()
    gates = [make(clock=None), make(clock=None)]
    topics = [gate.topic("t", slots=slots) for gate in gates]
    for topic in topics:

        @topic.handler
        async def handle(delivery: Any) -> None:
            seen[delivery.key] += 1

    async with gates[0].aio.worker(membership="redis") as first:
        async with gates[1].aio.worker(membership="redis") as second:
            both = (first.membership, second.membership)
            await eventually(
                lambda: (
                    sum(len(one.assigned_slots("t")) for one in both) == slots
                    and all(one.assigned_slots("t") for one in both)
                ),
                within=60,
            )
            # When messages come for all slots
            await topics[0].aio.trigger_many([(f"k{n}", n) for n in range(200)])
            await eventually(lambda: len(seen) == 200, within=60)
        # Then they were handled, and who stays gets the slots of who leaves
        await eventually(lambda: len(first.membership.assigned_slots("t")) == slots, within=60)
        await topics[0].aio.trigger_many([(f"l{n}", n) for n in range(50)])
        await eventually(lambda: len(seen) == 250, within=60)
    assert set(seen.values()) == {1}


async def test_only_what_failed_returns_and_dead_letters_are_sent_back_by_filter(
    make: Any, clock: Clock, eventually: Any
) -> None:
    gate = make()
    topic = gate.topic("t", slots=SLOTS, merge="append", max_attempts=2, backoff=[1])
    got: list[tuple[str, list[int]]] = []
    refuse = True

    @topic.handler
    def handle(delivery: Any) -> PartialFailure | None:
        got.append((delivery.key, delivery.payload))
        return PartialFailure([one for one in delivery.payload if one % 2], "odd") if refuse else None

    # Given messages of which half the items fail, until they are given up
    for n in range(40):
        await topic.aio.trigger(f"k{n % 10}", n)
    async with gate.aio.worker():
        for letters in (0, 5):
            await eventually(lambda: (now := topic.stats()).in_flight + now.ready == 0, within=60)
            await eventually(lambda letters=letters: topic.stats().dead == letters, within=60)
            clock.advance("2s")
        # When some of the letters are sent back, and nothing fails any more
        refuse = False
        assert await topic.aio.dead.redrive(key="k[1-5]", reason="odd") == 3
        await eventually(lambda: (now := topic.stats()).dead == 2 and now.pending + now.in_flight == 0, within=60)
    # Then only odd items came a second time, and those of the chosen letters a third
    returned = [(key, items) for key, items in got if all(item % 2 for item in items)]
    assert {key for key, _ in returned} == {"k1", "k3", "k5", "k7", "k9"}
    assert Counter(key for key, _ in returned) == {"k1": 3, "k3": 3, "k5": 3, "k7": 2, "k9": 2}


async def test_pause_recurring_and_limits_work_over_slots(make: Any, clock: Clock, eventually: Any) -> None:
    gate = make()
    topic = gate.topic("t", slots=SLOTS, adaptive=Adaptive(least=1, most=4), concurrency=SLOTS)
    seen: list[str] = []
    running, most = 0, 0

    @topic.handler
    async def handle(delivery: Any) -> None:
        nonlocal running, most
        running, most = running + 1, max(most, running + 1)
        await asyncio.sleep(0)
        running -= 1
        seen.append(delivery.key)

    topic.every("* * * * *", name="each minute")
    async with gate.aio.worker():
        # Given a topic that is paused, nothing is handed out, on no slot
        await topic.aio.pause()
        await topic.aio.trigger_many([(f"k{n}", n) for n in range(40)])
        assert await topic.aio.take(10) == []
        # When it goes on, everything is, within the limit
        await topic.aio.resume()
        await eventually(lambda: sum(key.startswith("k") for key in seen) == 40, within=60)
        assert most <= 4
        # And the recurring trigger comes once for each minute
        for minute in (1, 2):
            # What is still in flight would lose its lease, and run again.
            await eventually(lambda: (now := topic.stats()).scheduled == 1 and now.in_flight == 0, within=60)
            clock.advance("60s")
            await eventually(
                lambda minute=minute: sum(key.startswith("each minute@") for key in seen) == minute, within=60
            )


async def test_a_topic_in_use_gets_more_slots(make: Any, clock: Clock) -> None:
    # Given pending messages, some of them of a group, one in flight
    gate = make()
    topic = gate.topic("t", slots=2, window="60s", merge="count")
    await topic.aio.trigger_many([(f"k{n}", None) for n in range(60)])
    await topic.aio.trigger("grouped", group="g")
    clock.advance("61s")
    [running] = await topic.aio.take(1)
    # When the number of its slots is changed, by another program
    await make().aio.topic("t").reshard(SLOTS)
    # Then nothing is lost: who took goes on to hold it, and the rest is taken, once, by the program that did not notice
    assert await topic.aio.ack(running) == "ok"
    taken = await topic.aio.take(1000)
    assert len(taken) == 60
    assert len({delivery.key for delivery in taken} | {running.key}) == 61
    assert set(await topic.aio.ack(taken)) == {"ok"}
    [stored] = await gate.aio.stored_topics()
    assert (stored.name, stored.slots) == ("t", SLOTS)
