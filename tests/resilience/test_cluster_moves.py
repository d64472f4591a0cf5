"""A cluster of three primaries with replicas, under load, while primaries hand over and slots move key by key.

The load is everything at once, through both links: guarded functions, and topics that merge, rank, wait for a time, go
by groups, are limited, and are forwarded to streams. What must hold is the same as on one server: nothing is lost,
nothing runs again after it was done, groups do not overlap, the counters balance. No process dies and nothing that was
acknowledged is forgotten here, so every handler runs once for each message.

A round is a hand-over of each primary and a move of a slot of each topic; `IDEMGATE_KILLS` adds one for each 50.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from typing import Any

import pytest
import redis

from idemgate import Gate
from idemgate.core.calls import Batch, Call, new_id
from idemgate.worker.worker import Worker
from tests import cluster as servers
from tests.claims import claims_of
from tools.reliability import server_of

POLICIES: dict[str, dict[str, Any]] = {
    "merged": {"window": "100ms", "merge": "append", "slots": 16},
    "ranked": {"priority": True, "slots": 4},
    "timed": {"slots": 4},
    "grouped": {"slots": 8},
    "limited": {"concurrency": 4, "slots": 4},
    "sent": {"slots": 4},
    "taken": {"slots": 4},
}
HANDLED = ("merged", "ranked", "timed", "grouped", "limited")


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[int]]:
    with servers.cluster(tmp_path_factory.mktemp("cluster"), replicas=True) as found:
        yield found


@pytest.fixture
def operator(ports: list[int]) -> Iterator[servers.Operator]:
    made = servers.Operator(ports)
    yield made
    made.close()


@pytest.fixture(scope="module")
def restarted(ports: list[int]) -> Iterator[ExitStack]:
    """Nodes that were killed and started again; they live as long as the others."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
async def gates(ports: list[int], namespace: str) -> AsyncIterator[Callable[..., Gate]]:
    made: list[Gate] = []

    def make(**options: Any) -> Gate:
        nodes = ",".join(f"127.0.0.1:{port}" for port in ports[:3])
        made.append(Gate(f"redis+cluster://{nodes}", **{"namespace": namespace, "timeout": "20s", **options}))
        return made[-1]

    yield make
    for gate in made:
        await gate.aio.close()
        gate.close()
    gc.collect()  # what was left open is to be this test's


class Load:
    """Producers, workers and guarded functions; and what they saw."""

    def __init__(self, gate: Gate, workers: list[Gate]) -> None:
        self.gate = gate
        self.topics = {name: gate.topic(name, lease="30s", **policy) for name, policy in POLICIES.items()}
        self.numbers = itertools.count()
        self.sent: dict[str, set[int]] = defaultdict(set)
        self.seen: dict[str, list[Any]] = defaultdict(list)
        self.charged = Counter[str]()
        self.claimed: set[str] = set()
        self.running = Counter[str]()
        self.most = 0
        self.problems: list[str] = []
        self.stop, self.sent_all = threading.Event(), threading.Event()
        self.lock = threading.Lock()
        for worker in workers:
            for name in HANDLED:
                topic = worker.topic(name, lease="30s", **POLICIES[name])
                topic.handler(self.handle_async if name in ("merged", "grouped", "limited") else self.handle)
        workers[0].topic("sent", lease="30s", **POLICIES["sent"]).forward("stream")
        self.topics["sent"].forward("stream")
        self.charge = gate.once(key="{key}", scope="charge", lease="30s")(self._charge)
        self.charge_async = gate.once(key="{key}", scope="charge", lease="30s")(self._charge_async)

    # -- what runs --------------------------------------------------------------------------------------------------

    def _charge(self, key: str) -> str:
        with self.lock:
            self.charged[key] += 1
        return f"receipt for {key}"

    async def _charge_async(self, key: str) -> str:
        return self._charge(key)

    @contextmanager
    def noted(self, delivery: Any) -> Iterator[None]:
        """While a handler runs: how many do, of its group and of the limited topic."""
        name = delivery.topic if delivery.topic == "limited" else f"group {delivery.group}" if delivery.group else ""
        with self.lock:
            self.running[name] += 1
            if delivery.group and self.running[name] > 1:
                self.problems.append(f"two of {name} at once")
            self.most = max(self.most, self.running["limited"])
            if delivery.token // 1000 < delivery.due_ms:
                self.problems.append(f"{delivery} came early")
        yield
        with self.lock:
            self.running[name] -= 1
            self.seen[delivery.topic].append(delivery)

    def handle(self, delivery: Any) -> None:
        with self.noted(delivery):
            pass

    async def handle_async(self, delivery: Any) -> None:
        with self.noted(delivery):
            await asyncio.sleep(0.002)

    # -- who asks for it ----------------------------------------------------------------------------------------------

    def next(self, producer: str) -> tuple[str, str, int, dict[str, Any]]:
        """Topic, key, payload, and how it is triggered. The messages of a group come from one producer, in order."""
        with self.lock:
            number = next(self.numbers)
            name = list(POLICIES)[number % len(POLICIES)]
            self.sent[name].add(number)
        options: dict[str, Any] = {}
        if name == "ranked":
            options["priority"] = number % 10
        elif name == "timed":
            options["delay"] = number % 1500 / 1000
        elif name == "grouped":
            options["group"] = f"{producer}-{number % 3}"
        return name, f"k{number % 40}" if name == "merged" else f"k{number:08}", number, options

    async def produce_async(self, producer: str) -> None:
        while not self.stop.is_set():
            name, key, number, options = self.next(producer)
            receipt = await self.topics[name].aio.trigger(key, number, event_id=number, **options)
            self.check(receipt.accepted, f"{name} {number}: {receipt}")
            charged = f"c{number % 300}"
            self.claimed.add(charged)
            said = await self.charge_async(charged)
            self.check(said == f"receipt for {charged}", said)

    def produce(self, producer: str) -> None:
        while not self.stop.is_set():
            name, key, number, options = self.next(producer)
            receipt = self.topics[name].trigger(key, number, event_id=number, **options)
            self.check(receipt.accepted, f"{name} {number}: {receipt}")
            charged = f"s{number % 300}"
            self.claimed.add(charged)
            said = self.charge(charged)
            self.check(said == f"receipt for {charged}", said)

    def take(self) -> None:
        """A loop of its own, blocking, over one topic: until all was sent and nothing is left."""
        topic = self.topics["taken"]
        while True:
            last = self.sent_all.is_set()
            taken = topic.take(20)
            self.check(topic.ack(taken) == ["ok"] * len(taken), "a delivery was lost")
            self.seen["taken"] += taken
            if last and not taken and not topic.stats().pending:
                return
            time.sleep(0.005)

    def check(self, holds: bool, said: str) -> None:
        if not holds:
            self.problems.append(said)


async def under_load(load: Load, workers: list[Gate], upheaval: Callable[[], None]) -> None:
    """Everything at work while `upheaval` happens, and then until all is done."""
    async with AsyncExitStack() as stack:
        for worker in workers:
            await stack.enter_async_context(Worker(worker, concurrency=8))
        taking = asyncio.create_task(asyncio.to_thread(load.take))
        producing = asyncio.gather(
            *(load.produce_async(f"async{number}") for number in range(6)),
            *(asyncio.to_thread(load.produce, f"sync{number}") for number in range(2)),
        )
        try:
            await asyncio.to_thread(upheaval)
        finally:
            load.stop.set()
            await asyncio.wait([producing])
            load.sent_all.set()
        await producing
        await taking
        end = time.monotonic() + 60
        while left := [name for name, topic in load.topics.items() if _left(await topic.aio.stats())]:
            assert time.monotonic() < end, left
            await asyncio.sleep(0.05)


def _server(ports: list[int]) -> str:
    return server_of(f"redis://127.0.0.1:{ports[0]}")


def _left(stats: Any) -> int:
    return int(stats.pending + stats.in_flight)


@pytest.mark.timeout(0)
async def test_killed_primaries_are_replaced(
    gates: Any, operator: servers.Operator, ports: list[int], restarted: ExitStack, kills: int, record_fault: Any
) -> None:
    """Each primary is killed at a quiet moment, with its replica up to date: what it acknowledged is not forgotten."""
    gate, rounds = gates(), min(1 + kills // 50, 10)
    numbers, owners = itertools.count(), dict[str, bytes]()
    stop = threading.Event()

    def claim() -> Call[Any]:
        key, owner = f"k{next(numbers)}", new_id()
        owners[key] = owner
        return claims_of(gate).claim(claims_of(gate).key("s", key), owner, 3_600_000, 3_600_000)

    async def claim_async() -> None:
        while not stop.is_set():
            assert (await gate.aio.context.aio_link.run(claim(), within=60)).state == "started"
            entries = await gate.aio.context.aio_link.run_all(Batch([claim() for _ in range(9)], list), within=60)
            assert {one.state for one in entries} == {"started"}

    def claim_blocking() -> None:
        while not stop.is_set():
            assert gate.context.link.run(claim(), within=60).state == "started"
            entries = gate.context.link.run_all(Batch([claim() for _ in range(9)], list), within=60)
            assert {one.state for one in entries} == {"started"}

    async def claiming_while(happens: Callable[[int], None]) -> None:
        """`happens` gets the number of claims before it. With a primary gone, soon every caller waits for it."""
        stop.clear()
        before = len(owners)
        callers = [*(claim_async() for _ in range(6)), *(asyncio.to_thread(claim_blocking) for _ in range(2))]
        working = asyncio.gather(*callers)
        try:
            await asyncio.to_thread(happens, before)
        finally:
            stop.set()
            await asyncio.wait([working])
        await working

    def wait_for_claims(number: int, before: int) -> None:
        servers.wait_for(lambda: len(owners) >= before + number)

    for _ in range(rounds):
        for primary in operator.primaries():
            # Given calls that have made their connections
            await claiming_while(lambda before: wait_for_claims(300, before))
            # When a primary is killed, and its replica takes over while calls want its slots
            operator.settle(primary)
            replica, home = operator.replica(primary), operator.kill(primary)

            def replace(before: int, replica: int = replica) -> None:
                wait_for_claims(8, before)
                operator.take_over(replica)
                wait_for_claims(300, len(owners))

            await claiming_while(replace)
            restarted.enter_context(operator.restarted(primary, home))
    # Then every call was answered, by what it did itself and once
    records = await gate.aio.context.aio_link.run_all(
        Batch([claims_of(gate).inspect(claims_of(gate).key("s", key)) for key in owners], list), within=60
    )
    assert [one.owner for one in records] == [owner.hex() for owner in owners.values()]
    assert {one.attempts for one in records} == {1}
    record_fault(
        "SIGKILL of a primary whose replica has all, under claims",
        3 * rounds,
        promises="P1 P2 P6",
        server="cluster of " + _server(ports),
        calls=len(owners),
        lost=0,
        repeated=0,
    )


@pytest.mark.timeout(0)
async def test_nothing_is_lost_or_repeated_while_primaries_hand_over_and_slots_move(
    gates: Any, operator: servers.Operator, ports: list[int], namespace: str, kills: int, record_fault: Any
) -> None:
    gate, workers = gates(), [gates(), gates()]
    load, rounds = Load(gate, workers), 1 + kills // 50
    moved = Counter[str]()

    def upheaval() -> None:
        for _ in range(rounds):
            hand_over()
            move_slots()

    def hand_over() -> None:
        # When each primary hands over to its replica in the middle of the load
        for primary in operator.primaries():
            operator.fail_over(primary)
            before = next(load.numbers)
            servers.wait_for(lambda before=before: next(load.numbers) > before + 100)

    def move_slots() -> None:
        # And a slot of each topic, and that of a guarded key, move to other nodes, key by key
        first = {name: topic.open().keys(0)[1].decode() for name, topic in load.topics.items()}
        first["guarded"] = claims_of(gate).key("charge", "c0")[0].decode()
        for name, key in first.items():
            for keys in operator.move(key):
                moved[name] += keys > 0
                time.sleep(0.03)  # for calls to meet the slot as it is now, half here and half there

    # Given load on everything, through both links
    await under_load(load, workers, upheaval)
    # Then every guarded function ran once for each key
    assert load.problems == []
    assert set(load.charged) == load.claimed
    assert set(load.charged.values()) == {1}
    # And every message came once, also those that were sent on
    with redis.RedisCluster(host="127.0.0.1", port=ports[1]) as raw:
        entries = [fields for box in load.topics["sent"].forward_targets() for _, fields in raw.xrange(box)]
    load.seen["sent"] = [load.topics["sent"].decode_forwarded(fields) for fields in entries]
    for name, sent in load.sent.items():
        found = [one.payload for one in load.seen[name]]
        assert Counter(itertools.chain(*found) if name == "merged" else found) == Counter(sent), name
    # And of a group in order, and of the limited ones no more than four at once
    for group in {one.group for one in load.seen["grouped"]}:
        numbers = [one.payload for one in load.seen["grouped"] if one.group == group]
        assert numbers == sorted(numbers)
    assert load.most <= 4
    # And the counters balance
    for name, topic in load.topics.items():
        stats = await topic.aio.stats()
        done = stats["forwarded_triggers"] if name == "sent" else stats["acked_triggers"]
        assert (stats["accepted"], done, stats.dead) == (len(load.sent[name]), len(load.sent[name]), 0), (name, stats)
        assert (stats["lapsed"], stats["lost"], stats["duplicate"]) == (0, 0, 0), (name, stats)
    # And it was not too easy: slots were met half moved, and the topic of sixteen slots is on every primary
    assert all(moved[name] > 0 for name in (*POLICIES, "guarded"))
    assert operator.met("TRYAGAIN") > 0
    assert operator.met("MOVED") > 0
    assert operator.met("ASK") > 0
    assert all(operator.keys(f"ig2:{{{namespace}:topic:merged:*"))
    messages, runs = sum(map(len, load.sent.values())), load.charged.total()
    record_fault(
        "a primary hands over, or a hash slot moves key by key, under load",
        (3 + len(moved)) * rounds,
        promises="P1 P2 P7 P10",
        server="cluster of " + _server(ports),
        triggers=messages,
        guarded_runs=runs,
        lost=0,
        repeated=0,
        TRYAGAIN_met=operator.met("TRYAGAIN"),
    )
    if kills:
        met = ", ".join(f"{operator.met(error)} {error}" for error in ("MOVED", "ASK", "TRYAGAIN", "CLUSTERDOWN"))
        print(
            f"\n{3 * rounds} primaries handed over, {len(moved) * rounds} slots moved in {moved.total()} keys; {met};"
        )
        print(f"{messages} triggers of {len(POLICIES)} topics and {runs} guarded runs: lost 0, repeated 0, overlaps 0")
