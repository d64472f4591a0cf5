"""A server without memory: what would need more is refused whole. A backlog is taken, and what ends work goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import redis

from idemgate import Gate, Trigger
from idemgate.errors import ServerRejected
from idemgate.store.embedded.server import start
from idemgate.testing import Clock
from tests.conftest import Face
from tests.dedup.dedup_calls import calls_of

pytestmark = pytest.mark.one_in(3)

Dumps = Callable[[], dict[bytes, bytes]]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server of this module's own: others would not like what is done to it."""
    with start() as server:
        yield server.url


@pytest.fixture(scope="module")
def raw(url: str) -> Iterator[Any]:
    with redis.Redis.from_url(url) as client:
        yield client


@pytest.fixture
def full(raw: Any) -> Iterator[Callable[[], None]]:
    """`full()` takes all memory away, until the test has ended."""
    yield lambda: raw.config_set("maxmemory", 1)
    raw.config_set("maxmemory", 0)


@pytest.fixture
async def gate(url: str, clock: Clock, namespace: str) -> AsyncIterator[Gate]:
    made = Gate(url, namespace=namespace, clock=clock)
    yield made
    await made.aio.close()
    made.close()


@pytest.fixture
def everything(raw: Any, namespace: str) -> Dumps:
    """As that of all tests of topics, by content: a large hash is dumped in another order after it was only read."""

    def content(key: bytes) -> bytes:
        kind = raw.type(key)
        if kind == b"hash":
            return repr(sorted(raw.hgetall(key).items())).encode()
        return repr(raw.zrange(key, 0, -1, withscores=True)).encode() if kind == b"zset" else bytes(raw.dump(key))

    return lambda: {key: content(key) for key in raw.scan_iter(match=f"ig2:{{{namespace}:*", count=1000)}


async def _refused(call: Any, everything: Dumps) -> None:
    before = everything()
    with pytest.raises(ServerRejected, match=r"maxmemory|OOM"):
        await call
    assert everything() == before


async def test_what_needs_memory_is_refused_whole(face: Face, everything: Dumps, full: Any) -> None:
    # Given topics in use, of each kind, and nothing known of a claim
    topic, leading = face.topic("t", window="60s"), face.topic("l", window="60s", edge="leading")
    await topic.trigger_many([("pending", 1), ("due", 1)])
    await topic.flush("due")
    await leading.trigger("k")
    # When the server has no memory left
    full()
    # Then nothing new gets in, and nothing is half done
    await _refused(topic.trigger("new", "payload", event_id="e", version=1), everything)
    await _refused(topic.trigger("pending", "payload", delay="5s"), everything)
    await _refused(topic.trigger_many([(n, "payload") for n in range(100)]), everything)
    await _refused(leading.trigger("new"), everything)
    await _refused(face.claim("new"), everything)
    await _refused(face.first("new", "1h"), everything)
    await _refused(face.dedup("s", "1h").add("new"), everything)
    await _refused(face.dedup("s", "1h").add_many(range(2000)), everything)
    await _refused(face.dedup("s", "1h").get_or_set("new", 1), everything)
    await _refused(face.topic("another", window="5s").trigger("k"), everything)
    # And looking at it works
    assert (await topic.stats()).pending == 2
    assert (await topic.peek("pending")).pending.count == 1


async def test_what_ends_work_goes_on(face: Face, clock: Clock, everything: Dumps, full: Any, conserved: Any) -> None:
    # Given deliveries in flight, one message that waits behind one of them, one that is pending, and two dead letters
    topic = face.topic("t", backoff=0, lease="60s")
    await topic.trigger_many([(key, key) for key in ("d1", "d2", "ack", "nack", "bury", "give", "cancelled", "extend")])
    taken = {one.key: one for one in await topic.take(10)}
    await topic.bury([taken["d1"], taken["d2"]], reason="no")
    await topic.trigger_many([("ack", "behind"), ("pending", 1)])
    letters = {letter.key: letter for letter in await topic.dead.list()}
    # When the server has no memory left
    full()
    # Then each can still be ended, kept, or called off
    clock.advance("30s")
    assert await topic.ack(taken["ack"]) == "ok"
    assert await topic.nack(taken["nack"], reason="why", delay="10s") == "ok"
    assert await topic.bury(taken["bury"], reason="why") == "dead"
    assert await topic.release(taken["give"]) == "ok"
    assert await topic.extend(taken["extend"]) == "ok"
    assert await topic.cancel("cancelled") == "in_flight"
    assert await topic.cancel("pending") == "cancelled"
    assert await topic.cancel("absent") == "absent"
    assert await topic.reschedule("nack", delay="20s") == "rescheduled"
    assert await topic.flush("nack") == 1
    assert await topic.dead.redrive([letters["d1"].id]) == 1
    assert await topic.dead.delete([letters["d2"].id]) == 1
    # And all of it happened
    stats = await topic.stats()
    assert (stats.ready, stats.scheduled, stats.in_flight, stats.dead) == (4, 0, 2, 1)
    assert await topic.nack(taken["cancelled"]) == "cancelled"
    await conserved(topic, [*taken, "pending"])


BACKLOGS: list[dict[str, Any]] = [
    {},
    {"priority": True},
    {"priority": "10s", "group_concurrency": 2},
    {"rate": "1000/s", "burst": 50, "concurrency": 60},
    {"edge": "leading", "window": "1s"},
    {"result_retention": "1h"},
]


@pytest.mark.parametrize("policy", BACKLOGS, ids=lambda policy: "-".join(policy) or "plain")
async def test_a_backlog_drains_without_memory(
    face: Face, clock: Clock, full: Any, conserved: Any, policy: dict[str, Any]
) -> None:
    # Given a backlog of messages with and without a group, and deliveries whose lease lapses
    topic = face.topic("t", backoff=0, max_attempts=3, lease="1s", **policy)
    grouped = [Trigger(f"g{n}", n, group=f"g{n % 3}") for n in range(20)]
    await topic.trigger_many([*((f"k{n}", n) for n in range(100)), *grouped])
    orphaned = await topic.take(10)
    keys = [f"k{n}" for n in range(100)] + [one.key for one in grouped]
    # When the server has no memory left
    full()
    clock.advance("2s")
    # Then all of it is taken and settled, also what fails at first
    failed, rounds = set[str](), 0
    while (stats := await topic.stats()).pending or stats.in_flight:
        rounds += 1
        assert rounds < 100
        clock.advance("100ms")
        for one in await topic.take(40):
            if int(one.payload) % 10 == 9 and one.key not in failed:
                failed.add(one.key)
                assert await topic.nack(one) == "ok"
            else:
                assert await topic.ack(one) == "ok"
    assert (stats["lapsed"], stats["nacked"], stats["acked"]) == (len(orphaned), len(failed), 120)
    assert len(orphaned) == 10
    assert len(failed) == 12
    await conserved(topic, keys)


async def test_a_worker_drains_a_backlog_without_memory(gate: Gate, full: Any) -> None:
    topic, handled, done = gate.topic("t", backoff=0), list[int](), asyncio.Event()

    @topic.handler
    async def handle(delivery: Any) -> None:
        handled.append(delivery.payload)
        if len(handled) == 300:
            done.set()

    guarded, ran = gate.topic("guarded", max_attempts=1), list[str]()

    @guarded.handler
    @gate.once(key="{delivery.key}")
    async def guard(delivery: Any) -> None:
        ran.append(delivery.key)

    await topic.aio.trigger_many([(n, n) for n in range(300)])
    await guarded.aio.trigger("k")
    # When the server has no memory left before the worker begins
    full()

    async def deferred() -> None:
        while not (await guarded.aio.stats())["deferred"]:
            await asyncio.sleep(0.01)

    async with gate.aio.worker():
        await asyncio.wait_for(asyncio.gather(done.wait(), deferred()), 30)
    # Then it has handled each message once
    assert (sorted(handled), gate.counters["worker.acked"]) == (list(range(300)), 300)
    stats = await topic.aio.stats()
    assert (stats.pending, stats.in_flight) == (0, 0)
    # And what cannot claim its key has not run, and has all its attempts
    stats = await guarded.aio.stats()
    assert (ran, stats.pending, stats["deferred"], stats["buried"]) == ([], 1, 1, 0)


async def test_a_worker_waits_for_the_memory_to_store_a_policy(
    gate: Gate, raw: Any, full: Any, caplog: pytest.LogCaptureFixture
) -> None:
    topic, handled = gate.topic("t"), asyncio.Event()

    @topic.handler
    async def handle(delivery: Any) -> None:
        handled.set()

    # Given a server without memory, which has no policy of the topic
    full()

    async def refused(times: int) -> None:
        while gate.counters["worker.store_unavailable"] < times:
            await asyncio.sleep(0.01)

    def records(event: str) -> list[str]:
        return [record.message for record in caplog.records if record.message.startswith(event)]

    # When a worker starts, then it says once why it waits, and a stop ends it
    stop = asyncio.Event()
    running = asyncio.create_task(gate.aio.worker().run(stop))
    await asyncio.wait_for(refused(2), 30)
    assert len(records("worker.store_unavailable topic='t' error=")) == 1
    assert "maxmemory" in caplog.text
    stop.set()
    await asyncio.wait_for(running, 30)
    # And another one begins when there is memory
    before, stop = gate.counters["worker.store_unavailable"], asyncio.Event()
    running = asyncio.create_task(gate.aio.worker().run(stop))
    await asyncio.wait_for(refused(before + 1), 30)
    raw.config_set("maxmemory", 0)
    await topic.aio.trigger("k")
    await asyncio.wait_for(handled.wait(), 30)
    assert len(records("worker.store_back")) == 1
    stop.set()
    await asyncio.wait_for(running, 30)


async def test_a_partial_success_is_told_without_memory(face: Face, full: Any, conserved: Any) -> None:
    topic = face.topic("t", merge="append", backoff=0)
    await topic.trigger_many([("k", 1), ("k", 2), ("k", 3)])
    (delivery,) = await topic.take(1)
    full()
    assert await topic.nack(delivery, items=[2]) == "ok"
    peek = await topic.peek("k")
    assert (peek.pending.payload, (await topic.stats())["acked_triggers"]) == ([2], 2)
    await conserved(topic, ["k"])


async def test_groups_and_limits_go_on_too(face: Face, clock: Clock, everything: Dumps, full: Any) -> None:
    # Given groups with lines, one whose delivery is out and one whose retry is due, of a topic with priorities
    topic = face.topic("t", backoff=0, lease="60s", priority=True)
    face.gate.topic("t").forward("list")
    await topic.trigger_many([Trigger(f"{group}{n}", group=group) for group in "abcd" for n in range(3)])
    taken = {one.key: one for one in await topic.take(10)}
    assert sorted(taken) == ["a0", "b0", "c0", "d0"]
    await topic.trigger("b0", "behind", group="other")
    # When the server has no memory left
    full()
    # Then what is out can be ended, its group goes on, and the topic can be paused
    assert await topic.ack(taken["a0"]) == "ok"
    assert await topic.nack(taken["b0"]) == "ok"
    assert await topic.bury(taken["c0"]) == "dead"
    assert await topic.cancel("d1", group="d") == "cancelled"
    assert await topic.pause() is True
    assert await topic.resume() is True
    stats = await topic.stats()
    assert (stats.ready, stats.blocked, stats.in_flight, stats.dead) == (4, 4, 1, 1)
    # And nothing is moved into a target, or half so
    await _refused(topic.forward_once(), everything)
    # And what is ready goes out
    assert len(await topic.take(10)) == 4


async def test_dead_letters_can_be_deleted_where_only_some_slots_hold_any(face: Face, full: Any) -> None:
    # Given dead letters in the last slot only, and replies that each slot has just stored
    topic = face.topic("t", slots=2)
    await topic.trigger_many([(n, "payload") for n in range(20)])
    taken = await topic.take(100)
    dead = [one for one in taken if one.slot == 1]
    await topic.ack([one for one in taken if one.slot == 0])
    await topic.bury(dead)
    letters = [letter.id for letter in await topic.dead.list()]
    # When the server has no memory left
    full()
    # Then the letters can be deleted, and a letter that is gone is no error
    assert await topic.dead.delete() == len(dead) > 0
    assert await topic.dead.redrive(letters) == 0


async def test_a_flush_of_any_size_goes_on(face: Face, full: Any) -> None:
    # Given messages that are due later, one of them behind a delivery, and stored replies
    topic = face.topic("t")
    await topic.trigger("flying")
    (delivery,) = await topic.take(1)
    await topic.trigger_many([Trigger(key, 1, delay="1h") for key in ("flying", "a", "b", "c")])
    # When the server has no memory left
    full()
    # Then one, none and all can be made due
    assert await topic.flush("a") == 1
    assert await topic.flush("a") == 0
    assert await topic.flush("absent") == 0
    assert await topic.flush() == 3
    assert await topic.flush() == 0
    assert await topic.ack(delivery) == "ok"
    assert (await topic.stats()).ready == 4


async def test_a_second_ack_is_answered(face: Face, full: Any) -> None:
    topic = face.topic("t")
    await topic.trigger("k")
    taken = await topic.take(1)
    full()
    # When an ack is sent twice to a full server, the second returns "lost"
    assert await topic.ack(taken) == ["ok"]
    assert await topic.ack(taken) == ["lost"]
    assert await topic.cancel("k") == "absent"
    assert (await topic.stats())["lost"] == 1


async def test_claims_can_be_ended(face: Face, clock: Clock, full: Any) -> None:
    # Given three claims
    claims = [await face.claim(key, lease="60s") for key in ("complete", "release", "extend")]
    assert [claim.started for claim in claims] == [True] * 3
    # When the server has no memory left
    full()
    # Then what was started can be completed, given back and kept
    clock.advance("30s")
    assert await claims[0].complete({"a": "result"}) is True
    assert await claims[1].release() is True
    assert await claims[2].extend("60s") is True
    clock.advance("40s")
    assert (await face.inspect("extend")).state == "in_progress"
    assert (await face.inspect("complete")).state == "done"


async def test_without_memory_a_dedup_set_answers_duplicates_and_refuses_new_ids(
    face: Face, clock: Clock, everything: Dumps, full: Any
) -> None:
    # Given two pages, of which the older is later three retentions old, though the server has not expired it
    dedup, calls = face.dedup("s", "1h"), calls_of(face.gate, "s", 3_600_000)
    assert await dedup.add("older")
    clock.advance("1h")
    shard = calls.add("older").keys
    beside = [key for key in range(1000) if calls.add(key).keys == shard]
    assert all(await dedup.add_many(beside))
    # When the server has no memory left
    full()
    # Then duplicates are answered
    assert not any(await dedup.add_many(beside))
    # And a new id is refused without a change, whether its page exists or a new one would replace the older
    await _refused(dedup.add("older"), everything)
    clock.advance("2h")
    await _refused(dedup.add("older"), everything)


async def test_work_goes_on_when_there_is_memory_again(face: Face, raw: Any, full: Any, clock: Clock) -> None:
    topic = face.topic("t", window="60s")
    await topic.trigger("k", 1)
    full()
    with pytest.raises(ServerRejected):
        await topic.trigger("k", 2)
    raw.config_set("maxmemory", 0)
    # Then it is as if nothing had been tried
    assert (await topic.trigger("k", 2)).status == "merged"
    clock.advance("60s")
    assert [(one.count, one.payload) for one in await topic.take(1)] == [(2, 2)]
