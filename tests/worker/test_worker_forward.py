"""Forwarding by workers: due messages in a list or a stream, where consumers block; none lost, none early."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import time
from typing import Any

import pytest

from idemgate import Gate, InvalidArgument
from idemgate.testing import Clock
from tests.waiting import wait_until


@pytest.mark.usefixtures("no_polls")
async def test_what_is_due_is_sent_on_and_nothing_before(
    gate: Gate, clock: Clock, raw: Any, eventually: Any, listening: Any
) -> None:
    # Given a topic with a window, sent on into the lists beside its slots
    topic = gate.topic("mails", window="10s", merge="append", slots=4)
    topic.forward("list")
    async with gate.aio.worker():
        await listening(topic)
        await topic.aio.trigger_many([(n, n) for n in range(20)] + [(n, -n) for n in range(20)])
        # When it is over but for a millisecond
        clock.advance("9999ms")
        assert (await topic.aio.stats()).scheduled == 20
        assert gate.counters["worker.forwarded"] == 0
        # Then one millisecond more sends all, without a poll
        clock.advance("1ms")
        await eventually(lambda: gate.counters["worker.forwarded"] == 20)
    found = [topic.decode_forwarded(entry) for box in topic.forward_targets() for entry in raw.lrange(box, 0, -1)]
    assert {one.key: one.payload for one in found} == {str(n): [n, -n] for n in range(20)}
    stats = await topic.aio.stats()
    assert (stats.pending, stats.in_flight, stats["forwarded"]) == (0, 0, 20)


@pytest.mark.usefixtures("no_polls")
async def test_a_consumer_blocks_on_the_list_and_gets_it_when_it_is_due(live: Gate, raw: Any, listening: Any) -> None:
    # Given a consumer that waits, and does not poll
    topic = live.topic("jobs")
    topic.forward("list", f"jobs-{live.namespace}")
    waiting = asyncio.create_task(asyncio.to_thread(raw.blpop, f"jobs-{live.namespace}", 30))
    async with live.aio.worker():
        await listening(topic)
        began = time.time()
        await topic.aio.trigger("a", {"n": 1}, delay="300ms")
        _, entry = await waiting
        late = time.time() - began - 0.3
    # Then it wakes when the message is due, not before, and without a poll
    assert late >= -0.001
    delivery = topic.decode_forwarded(entry)
    assert (delivery.key, delivery.payload, delivery.attempt) == ("a", {"n": 1}, 1)


async def test_a_group_of_consumers_blocks_on_the_stream(live: Gate, raw: Any) -> None:
    # Given two members of a consumer group that wait
    topic, stream = live.topic("jobs"), f"jobs-{live.namespace}"
    topic.forward("stream", stream)
    raw.xgroup_create(stream, "workers", mkstream=True)

    def consume(member: str) -> Any:
        ((_, [(entry_id, fields)]),) = raw.xreadgroup("workers", member, {stream: ">"}, count=1, block=20_000)
        assert raw.xack(stream, "workers", entry_id) == 1
        return topic.decode_forwarded(fields)

    waiting = [asyncio.create_task(asyncio.to_thread(consume, member)) for member in ("ann", "bob")]
    async with live.aio.worker():
        await topic.aio.trigger_many([("a", 1), ("b", 2)])
        found = await asyncio.gather(*waiting)
    # Then each message reaches one of them
    assert sorted((one.key, one.payload) for one in found) == [("a", 1), ("b", 2)]
    assert raw.xpending(stream, "workers")["pending"] == 0
    raw.delete(stream)


async def test_a_consumer_that_is_guarded_drops_what_is_repeated(live: Gate, raw: Any) -> None:
    # Given a consumer that is guarded by the token
    topic, done = live.topic("jobs"), []
    topic.forward("list")

    @live.once(key="{delivery.token}", retention="1h", on_done="skip")
    def consume(delivery: Any) -> None:
        done.append((delivery.key, delivery.payload))

    async with live.aio.worker():
        await topic.aio.trigger("a", 1)
        _, entry = await asyncio.to_thread(raw.blpop, topic.forward_targets()[0], 20)
        # When it gets the same entry twice, as after a crash between its work and its acknowledgement
        for _ in range(2):
            await asyncio.to_thread(consume, topic.decode_forwarded(entry))
        # And another message of the same key
        await topic.aio.trigger("a", 2)
        _, entry = await asyncio.to_thread(raw.blpop, topic.forward_targets()[0], 20)
        await asyncio.to_thread(consume, topic.decode_forwarded(entry))
    # Then each message was worked at once
    assert done == [("a", 1), ("a", 2)]


@pytest.mark.usefixtures("no_polls")
async def test_a_paused_topic_sends_nothing_on_until_it_is_resumed(
    live: Gate, raw: Any, eventually: Any, listening: Any
) -> None:
    topic = live.topic("jobs", slots=2)
    topic.forward("list")
    async with live.aio.worker():
        await listening(topic)
        await topic.aio.pause()
        await topic.aio.trigger_many([(n, n) for n in range(10)])
        # Given that nobody gets anything out of it
        assert await topic.aio.forward_once() == 0
        assert (await topic.aio.stats()).ready == 10
        assert live.counters["worker.forwarded"] == 0
        # When it is resumed
        await topic.aio.resume()
        # Then all is sent, without a poll
        await eventually(lambda: live.counters["worker.forwarded"] == 10)
    assert sum(raw.llen(box) for box in topic.forward_targets()) == 10


async def test_more_than_one_call_can_carry_goes_on_at_once_through_several_workers(
    url: str, namespace: str, clock: Clock, raw: Any, eventually: Any
) -> None:
    # Given two workers and a crowd that comes due in the same moment
    gates = [Gate(url, namespace=namespace, clock=clock) for _ in range(2)]
    topics = [gate.topic("jobs", slots=2) for gate in gates]
    for topic in topics:
        topic.forward("stream")
    await topics[0].aio.trigger_many([(n, n) for n in range(3000)])
    async with gates[0].aio.worker(), gates[1].aio.worker():
        await eventually(lambda: sum(gate.counters["worker.forwarded"] for gate in gates) == 3000)
    # Then each was sent once
    found = [topics[0].decode_forwarded(fields) for box in topics[0].forward_targets() for _, fields in raw.xrange(box)]
    assert sorted(one.payload for one in found) == list(range(3000))
    for gate in gates:
        await gate.aio.close()
        gate.close()


async def test_what_a_handler_left_in_flight_is_sent_on_when_its_lease_ends(
    gate: Gate, clock: Clock, raw: Any, eventually: Any
) -> None:
    # Given a delivery of a worker that vanished
    topic = gate.topic("jobs", lease="30s")
    await topic.aio.trigger("a", 1)
    assert len(await topic.aio.take()) == 1
    # When the topic is sent on from now on, and the lease ends
    topic.forward("list")
    async with gate.aio.worker():
        clock.advance("30s")
        await eventually(lambda: gate.counters["worker.forwarded"] == 1)
    (entry,) = raw.lrange(topic.forward_targets()[0], 0, -1)
    found = topic.decode_forwarded(entry)
    # Then its message comes, with what is known of it
    assert (found.key, found.attempt, found.failure[:12]) == ("a", 2, "lease lapsed")
    assert gate.counters["worker.lapsed"] == 1


async def test_a_target_that_is_something_else_stops_its_slot_only(gate: Gate, raw: Any, eventually: Any) -> None:
    # Given a topic of two slots, one of which cannot be sent on
    topic = gate.topic("jobs", slots=2)
    topic.forward("list")
    spoilt = topic.forward_targets()[0]
    raw.set(spoilt, "text")
    async with gate.aio.worker():
        await topic.aio.trigger_many([(n, n) for n in range(20)])
        await eventually(lambda: raw.llen(topic.forward_targets()[1]))
        await eventually(lambda: gate.counters["worker.store_unavailable"] >= 2)
        # When that is mended, nothing is missing
        raw.delete(spoilt)
        await eventually(lambda: gate.counters["worker.forwarded"] == 20)
    assert sum(raw.llen(box) for box in topic.forward_targets()) == 20


async def test_recurring_triggers_can_be_sent_on(gate: Gate, clock: Clock, raw: Any, eventually: Any) -> None:
    topic = gate.topic("reports")
    topic.every("0 * * * *", name="hourly", payload=7)
    topic.forward("list")
    async with gate.aio.worker():
        await eventually(lambda: gate.counters["worker.planned"] == 1)
        clock.advance("1h")
        await eventually(lambda: gate.counters["worker.forwarded"] == 1)
    (entry,) = raw.lrange(topic.forward_targets()[0], 0, -1)
    assert topic.decode_forwarded(entry).payload == 7


def forward_until_killed(url: str, namespace: str) -> None:
    async def work() -> None:
        gate = Gate(url, namespace=namespace)
        gate.topic("jobs", slots=2).forward("list", f"jobs-{namespace}", keep=0)
        async with gate.aio.worker():
            await asyncio.Event().wait()

    asyncio.run(work())


@pytest.mark.slow
def test_nothing_is_lost_or_sent_twice_by_workers_that_are_killed(url: str, namespace: str, raw: Any) -> None:
    # Given messages that come due all the time
    target, total = f"jobs-{namespace}", 4000
    context = multiprocessing.get_context("spawn")
    with Gate(url, namespace=namespace) as gate:
        topic = gate.topic("jobs", slots=2)
        topic.trigger_many([(n, n) for n in range(total // 2)])
        for kill in range(4):
            # When a worker is killed as soon as it has begun to send
            before = raw.llen(target)
            topic.trigger_many([(n, n) for n in range(total // 2 + kill * 500, total // 2 + (kill + 1) * 500)])
            process = context.Process(target=forward_until_killed, args=(url, namespace))
            process.start()
            wait_until(lambda before=before: raw.llen(target) != before)
            os.kill(process.pid or 0, signal.SIGKILL)
            process.join()
        # And the rest is sent by one that lives
        topic.forward("list", target)
        while topic.forward_once():
            pass
        # Then every message is there, once
        found = [topic.decode_forwarded(entry) for entry in raw.lrange(target, 0, -1)]
        assert sorted(one.payload for one in found) == list(range(total))
        assert topic.stats().pending == 0
    raw.delete(target)


async def test_forward_once_sends_at_most_as_many_as_asked(face: Any, clock: Clock, raw: Any) -> None:
    # Given a program that owns its loop
    topic = face.topic("jobs", slots=2)
    with pytest.raises(InvalidArgument, match="no forward target"):
        await topic.forward_once()
    face.gate.topic("jobs").forward("list")
    await topic.trigger_many([(n, n) for n in range(1100)])
    await topic.trigger("later", delay="1m")
    # When it sends on
    assert await topic.forward_once(7) == 7
    assert await topic.forward_once() == 1000
    assert await topic.forward_once() == 93
    assert await topic.forward_once() == 0
    # Then what is due later is still there
    clock.advance("1m")
    assert await topic.forward_once() == 1
    assert (await topic.stats())["forwarded"] == 1101


@pytest.mark.parametrize(("options", "trims"), [({}, True), ({"trim": False}, False), ({"target": 1}, False)])
async def test_a_worker_trims_what_every_group_has_acknowledged(
    gate: Gate, clock: Clock, raw: Any, eventually: Any, options: dict[str, Any], trims: bool
) -> None:
    # Given a stream whose only group has acknowledged everything
    topic, named = gate.topic("jobs"), f"jobs-{gate.namespace}"
    topic.forward("stream", **(options | {"target": named} if "target" in options else options))
    stream = named if "target" in options else topic.forward_targets()[0]
    raw.xgroup_create(stream, "g", "0", mkstream=True)
    async with gate.aio.worker():
        await topic.aio.trigger_many([(n, n) for n in range(500)])
        await eventually(lambda: gate.counters["worker.forwarded"] == 500)
        raw.xack(stream, "g", *[one for one, _ in raw.xreadgroup("g", "c", {stream: ">"})[0][1]])
        # When the worker forwards again after ten seconds
        clock.advance("10s")
        await topic.aio.trigger("later")
        await eventually(lambda: gate.counters["worker.forwarded"] == 501)
        # Then the stream is trimmed, unless it is a named one or the option is off
        if trims:
            await eventually(lambda: raw.xlen(stream) <= 110)
    assert (gate.counters["worker.trimmed"] > 0) == trims
    assert raw.xlen(stream) == 501 - gate.counters["worker.trimmed"]
    raw.delete(stream)
