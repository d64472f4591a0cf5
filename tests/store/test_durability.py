"""`durability=`: what is not on as many copies as asked is refused, and only then."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from idemgate import Gate, InvalidArgument
from idemgate.core.calls import Batch, Call
from idemgate.errors import NotConfigured, NotDurable, ServerRejected
from idemgate.guard.manage import mark_calls
from idemgate.lua import names, script, source
from idemgate.store.clients import SOCKET_TIMEOUT
from idemgate.store.durability import parse_durability
from idemgate.store.embedded.server import find_server
from idemgate.store.endpoint import Endpoint
from idemgate.store.replication import make_durability_check
from tests.cluster import server, unused_ports, wait_for
from tests.for_each import for_each
from tests.replication import Pair, pair
from tools.reliability import server_of

OLD = tuple(map(int, find_server().version.split(".")))[:2] < (7, 2)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with pair(tmp_path_factory.mktemp("pair")) as one:
        yield one


@pytest.fixture
def two(made: Pair) -> Iterator[Pair]:
    """A primary and its replica, which have the same."""
    yield made
    made.link.heal()
    made.link.cut_all()  # what was swallowed leaves a hole in the stream: begin anew
    made.catch_up()


async def test_what_the_replica_has_is_answered_as_ever(two: Pair, asker: Any) -> None:
    ask = asker(two.urls[0], durability="replicas")
    topic = ask.gate.topic("t")
    face = topic.aio if ask.awaiting else topic
    # When a key is claimed and completed, and a message triggered, taken and settled
    claim = ask.claims.claim(ask.claims.key("s", "k"), b"o" * 16, 30_000, 60_000)
    entry = await ask.run(claim)
    assert entry.state == "started"
    assert await ask.run(ask.claims.complete(claim.keys, b"o" * 16, entry.token, 60_000, b"v", b"\xc0"))
    assert (await done(face.trigger, "k", 1)).status == "scheduled"
    # Then the replica has all of it
    keys = set(two.replica.keys(f"*{ask.gate.namespace}:*"))
    assert {text.rpartition(":")[2] for text in keys} >= {"k}", "scheduled", "messages", "durability}"}
    assert 0 < two.replica.pttl(f"ig2:{{{ask.gate.namespace}:durability}}") <= 3_600_000


async def test_what_the_replica_has_not_is_refused_though_it_was_executed(
    two: Pair, asker: Any, many: Callable[[int], int], record_fault: Callable[..., None]
) -> None:
    # Given a primary whose replica is cut off
    ask = asker(two.urls[0], durability=1, timeout="2s")
    assert (await ask.run(mark(ask, "before"))).state == "started"
    two.cut()
    # When something is written
    call = mark(ask, "k")
    with pytest.raises(NotDurable, match="0 of 1 replicas") as refused:
        await ask.run(call)
    # Then the caller learns that it is in memory
    assert refused.value.executed == "yes"
    assert two.primary.exists(call.keys[0])
    assert not two.replica.exists(call.keys[0])
    # And so do others, as often as they ask
    others = [mark(ask, f"other{n}") for n in range(min(many(1), 20))]
    for one in others:
        with pytest.raises(NotDurable):
            await ask.run(one)
    # And a copy of the request, which writes nothing, over a connection that has written nothing, is refused too
    other = asker(two.urls[0], durability=1, timeout="2s")
    with pytest.raises(NotDurable):
        await other.run(call)
    # While what only reads is answered
    assert (await ask.run(ask.claims.inspect(call.keys))).state == "done"
    # And when the replica is back, the same request has its answer, once
    two.link.heal()
    two.link.cut_all()
    two.catch_up()
    for one in (call, *others):
        assert (await ask.run(one)).state == "started"
        assert two.replica.exists(one.keys[0])
    fault = "replica cut off, durability=1: what it lacks is refused, and counts as executed"
    record_fault(fault, len(others) + 2, promises="P6 P15", server=server_of(two.urls[0]))


async def test_it_is_tried_until_the_deadline(two: Pair, asker: Any) -> None:
    # Given a call that is not durable yet
    ask = asker(two.urls[0], durability="replicas", timeout="30s")
    two.cut()
    asking = asyncio.create_task(ask.run(mark(ask, "k")))
    await asyncio.to_thread(wait_for, lambda: two.primary.keys(f"*{ask.gate.namespace}*"))
    # When the replica comes back before its deadline
    two.link.heal()
    two.link.cut_all()
    # Then it is answered
    assert (await asking).state == "started"


async def test_a_batch_waits_once_and_is_refused_as_a_whole(two: Pair, asker: Any) -> None:
    ask, hasty = (asker(two.urls[0], durability="replicas", timeout=timeout) for timeout in ("30s", "500ms"))
    await ask.run_all(marks(ask, ["so", "that the script is known"]))
    two.primary.config_resetstat()
    assert await ask.run_all(marks(ask, [f"k{n}" for n in range(50)])) == [[True] * 50]
    assert two.primary.info("commandstats")["cmdstat_wait"]["calls"] == 1
    two.cut()
    with pytest.raises(NotDurable):
        await hasty.run_all(marks(hasty, [f"l{n}" for n in range(3)]))


async def test_calls_of_one_tick_wait_together(two: Pair, namespace: str) -> None:
    gate = Gate(two.urls[0], namespace=namespace, durability="replicas")
    await gate.aio.first("so that the script is known", "60s")
    two.primary.config_resetstat()
    assert await asyncio.gather(*(gate.aio.first(n, "60s") for n in range(100))) == [True] * 100
    assert two.primary.info("commandstats")["cmdstat_wait"]["calls"] <= 5
    await gate.aio.close()


async def test_a_claim_that_is_not_durable_is_given_back(two: Pair, asker: Any) -> None:
    # Given a guarded function
    ask, runs = asker(two.urls[0], durability="replicas", timeout="2s"), []

    @ask.gate.once(key="{n}", scope="s", lease="1h")
    def charge(n: int) -> str:
        runs.append(n)
        return "receipt"

    @ask.gate.once(key="{n}", scope="s", lease="1h")
    async def acharge(n: int) -> str:
        return charge.__wrapped__(n)

    call = acharge if ask.awaiting else lambda n: asyncio.to_thread(charge, n)
    two.cut()
    # When its claim is not durable
    with pytest.raises(NotDurable):
        await call(1)
    # Then it did not run, and nobody holds the key
    assert not runs
    assert (await ask.run(ask.claims.inspect(ask.claims.key("s", 1)))).state in ("absent", "released")
    two.link.heal()
    two.link.cut_all()
    two.catch_up()
    assert await call(1) == "receipt"


async def test_a_batch_of_claims_that_is_not_durable_is_given_back(two: Pair, asker: Any) -> None:
    ask = asker(two.urls[0], durability="replicas", timeout="2s")

    async def claim_many(keys: list[str]) -> Any:
        if ask.awaiting:
            return await ask.gate.aio.claim_many(keys, lease="1h")
        return await asyncio.to_thread(ask.gate.claim_many, keys, lease="1h")

    assert [one.started for one in await claim_many(["a", "b"])] == [True, True]
    two.cut()
    with pytest.raises(NotDurable):
        await claim_many(["c", "d", "e"])
    states = [(await ask.run(ask.claims.inspect(ask.claims.key("claim", key)))).state for key in "abcde"]
    assert states[:2] == ["in_progress"] * 2
    assert set(states[2:]) <= {"absent", "released"}


async def test_a_completion_that_is_not_durable_is_counted(two: Pair, asker: Any) -> None:
    # Given a function during whose run the replica is lost
    ask = asker(two.urls[0], durability="replicas", timeout="2s")

    def cut(_n: int) -> str:
        two.cut()
        return "receipt"

    @ask.gate.once(key="{n}", scope="s", lease="1s")
    async def acharge(n: int) -> str:
        return cut(n)

    charge = ask.gate.once(key="{_n}", scope="s", lease="1s")(cut)
    # Then its result is given, the record says done, and a counter that it may be forgotten
    assert await (acharge(1) if ask.awaiting else asyncio.to_thread(charge, 1)) == "receipt"
    assert ask.gate.counters["once.not_durable"] == 1
    assert (await ask.run(ask.claims.inspect(ask.claims.key("s", 1)))).state == "done"


async def test_a_worker_goes_on_and_counts_what_is_not_durable(two: Pair, namespace: str) -> None:
    # Given a message, and a worker that loses the replica while it handles it
    gate, handled = Gate(two.urls[0], namespace=namespace, durability="replicas", timeout="2s"), asyncio.Event()
    topic = gate.topic("t", lease="3s")
    await topic.aio.trigger("k", 1)

    @topic.handler
    async def handle(_: Any) -> None:
        two.cut()
        handled.set()

    async with gate.aio.worker():
        await asyncio.wait_for(handled.wait(), 30)
    # Then it was settled, in memory
    assert gate.counters["worker.not_durable"] == 1
    plain = Gate(two.urls[0], namespace=namespace)
    assert plain.topic("t").stats()["acked"] == 1
    await gate.aio.close()
    gate.close()
    plain.close()


async def test_what_the_server_cannot_is_told_before_anything_is_written(
    two: Pair, asker: Any, record_fault: Callable[..., None]
) -> None:
    # Given a server that has no WAITAOF, or no append-only file
    ask = asker(two.urls[0], durability="fsync")
    cause = "unknown command" if OLD else "appendonly"
    # When something is written, one call or many, the first time or again
    for _ in range(2):
        with pytest.raises(ServerRejected, match=rf"{cause}.*needs Redis 7.2 or Valkey, `appendonly yes`"):
            await ask.run(mark(ask, "k"))
        with pytest.raises(ServerRejected, match=r"Nothing was written"):
            await ask.run_all(marks(ask, ["a", "b"]))
    # Then nothing was, and what only reads is answered
    assert not two.primary.keys(f"*{ask.gate.namespace}*")
    fault = "server that cannot sync (no append-only file or no WAITAOF), durability=fsync"
    record_fault(fault, 4, promises="P15", server=server_of(two.urls[0]), written=0)
    assert (await ask.run(ask.claims.inspect(ask.claims.key("s", "k")))).state == "absent"


async def test_a_function_does_not_run_where_the_server_cannot(two: Pair, asker: Any) -> None:
    ask, runs = asker(two.urls[0], durability="fsync"), list[int]()

    @ask.gate.once(key="{n}", scope="s")
    def charge(n: int) -> None:
        runs.append(n)

    with pytest.raises(ServerRejected):
        await asyncio.to_thread(charge, 1)
    assert not runs
    # And a worker does not start
    ask.gate.topic("t").handler(print)
    with pytest.raises(ServerRejected):
        async with ask.gate.aio.worker():
            pass


@pytest.mark.usefixtures("has_waitaof")
@pytest.mark.parametrize("policy", ["always", "everysec"])
async def test_what_is_on_disk_is_answered(tmp_path: Path, asker: Any, policy: str) -> None:
    (port,) = unused_ports(1)
    with server(tmp_path / "s", port, "--appendonly", "yes", "--appendfsync", policy):
        # (It is synced once a second; on a busy disk later.)
        ask = asker(f"redis://127.0.0.1:{port}/0", durability="fsync", timeout="30s")
        assert (await ask.run(mark(ask, "k"))).state == "started"


@pytest.mark.usefixtures("has_waitaof")
async def test_an_append_only_file_that_comes_and_goes_is_noticed(
    tmp_path: Path, asker: Any, record_fault: Callable[..., None]
) -> None:
    (port,) = unused_ports(1)
    with server(tmp_path / "s", port, "--appendonly", "no") as client:
        # (Redis 8.10 takes some 5 s to begin a file.)
        ask = asker(f"redis://127.0.0.1:{port}/0", durability="fsync", timeout="30s")
        with pytest.raises(ServerRejected):
            await ask.run(mark(ask, "a"))
        # When there is one, by the command that the refusal names, then it is answered
        client.config_set("appendonly", "yes")
        assert (await ask.run(mark(ask, "a"))).state == "started"
        # And when there is none any more, the one write that finds out is in memory, and there is no other
        client.config_set("appendonly", "no")
        with pytest.raises(NotDurable, match="appendonly"):
            await ask.run(mark(ask, "b"))
        with pytest.raises(ServerRejected):
            await ask.run(mark(ask, "c"))
        assert len(client.keys(f"*{ask.gate.namespace}:once*")) == 2
        fault = "append-only file that comes and goes, durability=fsync"
        record_fault(fault, 2, promises="P15", server=server_of(f"redis://127.0.0.1:{port}"))


@pytest.mark.usefixtures("has_waitaof")
async def test_what_is_never_synced_is_refused(
    tmp_path: Path, asker: Any, many: Callable[[int], int], record_fault: Callable[..., None]
) -> None:
    n = min(many(1), 30)
    (port,) = unused_ports(1)
    with server(tmp_path / "s", port, "--appendonly", "yes", "--appendfsync", "no"):
        ask = asker(f"redis://127.0.0.1:{port}/0", durability="fsync", timeout="2s")
        for turn in range(n):
            with pytest.raises(NotDurable, match="not in the append-only file"):
                await ask.run(mark(ask, f"k{turn}"))
        fault = "appendfsync no, durability=fsync: what WAITAOF does not see on disk is refused"
        record_fault(fault, n, promises="P15", server=server_of(f"redis://127.0.0.1:{port}"))


async def test_a_forgotten_script_is_sent_again_and_waited_for(two: Pair, asker: Any) -> None:
    ask = asker(two.urls[0], durability="replicas")
    await ask.run(mark(ask, "a"))
    two.primary.script_flush()
    assert (await ask.run(mark(ask, "b"))).state == "started"
    two.primary.script_flush()
    assert await ask.run_all(marks(ask, ["c", "d"])) == [[True, True]]


@for_each("asked", [0, -1, 101, True, 1.0, "memory", "2", []])
def test_what_is_no_durability_is_refused(asked: Any) -> None:
    with pytest.raises(InvalidArgument, match="durability"):
        Gate("redis://localhost", durability=asked)


def test_a_try_waits_for_longer_than_syncs_are_apart_and_less_long_than_a_reply_may_take() -> None:
    made = make_durability_check(parse_durability("fsync", "n"), Endpoint("single", {}), 5.0)
    assert made is not None
    # `everysec` looks ten times a second whether one has passed since the last sync
    assert 1100 < int(made.requests[-1].split()[-1]) < 1000 * SOCKET_TIMEOUT


async def test_a_cluster_refuses_it_before_anything_is_written(asker: Any) -> None:
    ask = asker("redis+cluster://127.0.0.1:1", durability="replicas")
    with pytest.raises(NotConfigured, match="cluster"):
        await ask.run(mark(ask, "k"))


def mark(ask: Any, key: str) -> Any:
    return ask.claims.mark(ask.claims.key("s", key), key.encode().ljust(16, b"-"), 60_000)


def marks(ask: Any, keys: list[str]) -> Batch[Any]:
    _, calls = mark_calls(ask.gate.context, keys, "60s", "s")
    return Batch(calls, list)


async def done(call: Callable[..., Any], *args: Any) -> Any:
    found = await asyncio.to_thread(call, *args)
    return await found if asyncio.iscoroutine(found) else found


def test_what_is_waited_for_is_what_was_asked_for() -> None:
    for asked, wait in (("fsync", ("WAITAOF", 1, 0, 50)), ("replicas", ("WAIT", 1, 50)), (2, ("WAIT", 2, 50))):
        made = parse_durability(asked, "n")
        assert made is not None
        assert made.commands(50)[1] == wait


def test_of_what_is_not_waited_for_nothing_is_relied_on() -> None:
    asked = parse_durability("replicas", "n")
    assert asked is not None
    exempt = {name for name in names() if not asked.applies_to(Call(script(name), (), (), str))}
    reads = {name for name in names() if "Writes nothing." in source(name)}
    leases = {"guard/renew", "topics/take", "topics/extend", "membership/heartbeat", "membership/leave"}
    counts = {"topics/count_refused"}  # best-effort: the caller raises an error, and does not wait
    reports = {"presence/beat", "presence/leave"}  # the next one follows
    assert exempt == reads | leases | counts | reports


@for_each(
    ("asked", "reply", "missing"),
    [
        ("fsync", [1, 0], None),
        ("fsync", [2, 0], None),
        ("fsync", [0, 3], "it is not in the append-only file on disk yet"),
        ("replicas", 1, None),
        (2, 3, None),
        (2, 1, "1 of 2 replicas acknowledged it"),
    ],
)
def test_what_is_missing_is_said(asked: Any, reply: Any, missing: str | None) -> None:
    asks = parse_durability(asked, "n")
    assert asks is not None
    assert asks.shortfall(reply) == missing
