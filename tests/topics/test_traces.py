"""Traces: what a tracer gives to triggers comes with the delivery, through each merge, retry and move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from idemgate import Bury, Gate, InvalidArgument, Trigger
from idemgate.errors import UnexpectedData
from idemgate.store.context import MAX_TRACE
from idemgate.testing import Clock
from idemgate.topics.messages import Forward
from tests.conftest import Face
from tests.messages import pack_message, unpack_message
from tests.tracing import record
from tests.waiting import eventually

pytestmark = pytest.mark.one_in(3)


def _traces(*numbers: int) -> tuple[bytes, ...]:
    return tuple(f"t{number}".encode() for number in numbers)


async def test_without_a_tracer_nothing_is_stored(face: Face, everything: Callable[[], Any]) -> None:
    topic = face.topic("t", window="60s")
    await topic.trigger("k", 1)
    await topic.trigger("k", 2)
    (packed,) = [value for fields in everything().values() if isinstance(fields, dict) for value in fields.values()
                 if value.startswith(b"\x00\x01")]  # fmt: skip
    assert unpack_message(packed).keys().isdisjoint({"attempts", "traces"})
    assert (await topic.peek("k")).pending.traces == ()


@pytest.mark.parametrize("merge", ["last", "first", "append", "union", "count", "sum"])
async def test_a_delivery_has_the_traces_of_all_that_it_merged(face: Face, clock: Clock, merge: str) -> None:
    recorder, topic = record(face.gate), face.topic("t", window="60s", merge=merge)
    receipts = [await topic.trigger("k", [n] if merge == "union" else n) for n in range(3)]
    assert [receipt.status for receipt in receipts] == ["scheduled", "merged", "merged"]
    assert [step.outcome[0].status for step in recorder.steps] == [receipt.status for receipt in receipts]
    clock.advance("60s")
    (delivery,) = await topic.take(1)
    assert (delivery.traces, delivery.dropped_traces, delivery.count) == (_traces(0, 1, 2), 0, 3)
    assert await topic.ack(delivery) == "ok"
    assert recorder.ends == [("t", "ack", "ok")]


async def test_of_many_traces_the_oldest_and_the_newest_are_stored(face: Face) -> None:
    record(face.gate)
    topic = face.topic("t", window="60s", merge="count")
    for _ in range(20):
        await topic.trigger("k")
    pending = (await topic.peek("k")).pending
    assert (pending.traces, pending.dropped_traces) == (_traces(*range(15), 19), 4)


async def test_triggers_of_one_call_share_a_trace(face: Face) -> None:
    recorder, topic = record(face.gate), face.topic("t", window="60s", slots=2)
    receipts = await topic.trigger_many([(f"k{n % 50}", n) for n in range(100)])
    assert (len(recorder.steps), recorder.steps[0].outcome) == (1, receipts)
    for n in range(50):
        pending = (await topic.peek(f"k{n}")).pending
        assert (pending.traces, pending.dropped_traces, pending.count) == (_traces(0), 0, 2)


async def test_a_step_that_makes_no_trace_stores_none(face: Face) -> None:
    recorder, topic = record(face.gate), face.topic("t", window="60s")
    await topic.trigger("k")
    recorder.steps[0].trace = b""
    face.gate.context.tracer = None
    await topic.trigger("k")
    await topic.trigger_many([("k", 1)])
    assert ((await topic.peek("k")).pending.traces, (await topic.peek("k")).pending.count) == (_traces(0), 3)


@pytest.mark.parametrize("options", [{}, {"group": "g"}, {"priority": 3}, {"group": "g", "priority": 3}])
async def test_options_and_traces_go_together(face: Face, options: dict[str, Any]) -> None:
    record(face.gate)
    topic = face.topic("t", priority=True, group_concurrency=1)
    for key in ("a", "b"):
        await topic.trigger(key, key, version=1, event_id="e", **options)
        await topic.trigger(key + "2", key, **options)
    taken = []
    while found := await topic.take(10):
        taken += found
        await topic.ack(found)
    assert {one.key: one.traces for one in taken} == {
        "a": _traces(0), "a2": _traces(1), "b": _traces(2), "b2": _traces(3)
    }  # fmt: skip
    assert {(one.group, one.priority) for one in taken} == {(options.get("group", ""), options.get("priority", 0))}


async def test_a_retry_has_the_traces_of_both_messages(face: Face) -> None:
    record(face.gate)
    topic = face.topic("t", merge="append", backoff="1s")
    await topic.trigger("k", 1)
    (delivery,) = await topic.take(1)
    await topic.trigger("k", 2)  # behind the delivery
    assert await topic.nack(delivery, delay=0, reason="no") == "ok"
    (again,) = await topic.take(1)
    assert (again.traces, again.payload) == (_traces(0, 1), [1, 2])
    assert await topic.nack(again, delay=0, items=[1]) == "ok"
    (part,) = await topic.take(1)
    assert (part.traces, part.payload) == (_traces(0, 1), [1])


async def test_a_dead_letter_keeps_its_traces(face: Face) -> None:
    record(face.gate)
    topic = face.topic("t")
    await topic.trigger("k", 1)
    await topic.bury(await topic.take(1), reason="no")
    (letter,) = await topic.dead.list()
    assert letter.message.traces == _traces(0)
    assert await topic.dead.redrive() == 1
    (delivery,) = await topic.take(1)
    assert (delivery.traces, delivery.attempt) == (_traces(0), 1)


async def test_more_slots_keep_the_traces(face: Face) -> None:
    record(face.gate)
    topic = face.topic("t", window="60s", slots=1)
    for n in range(64):
        await topic.trigger(f"k{n}", n, priority=None)
    await topic.reshard(4)
    assert [(await topic.peek(f"k{n}")).pending.traces for n in range(64)] == [_traces(n) for n in range(64)]


def test_a_forwarded_message_has_its_traces(gate: Gate, raw: Any) -> None:
    record(gate)
    topic = gate.topic("t")
    topic.trigger("k", 1)
    gate.context.link.run(topic.open().forward(0, Forward("list", None, 0), 10))
    (entry,) = raw.lrange(topic.forward_targets()[0], 0, -1)
    assert topic.decode_forwarded(entry).traces == _traces(0)


def test_a_trigger_that_is_packed_keeps_the_trace_of_its_packing(gate: Gate) -> None:
    recorder, topic = record(gate), gate.topic("t", window="60s")
    packed = topic.pack_trigger(Trigger("k", 1))
    found = topic.unpack_trigger(packed)
    assert (found.trace, recorder.steps[0].kind) == (b"t0", "create")
    topic.trigger_many([found, Trigger("other", 1)])
    seen = [topic.peek(key).pending for key in ("k", "other")]
    assert [message and message.traces for message in seen] == [_traces(0), _traces(1)]


@pytest.mark.parametrize("trace", [b"x" * (MAX_TRACE + 1), "text", 7])
async def test_no_trace_is_larger_than_it_may_be(face: Face, trace: Any) -> None:
    with pytest.raises(InvalidArgument, match="trace"):
        await face.topic("t").trigger_many([Trigger("k", 1, trace=trace)])
    assert face.gate.stored_topics() == []


async def test_a_step_ends_with_the_error_that_the_caller_gets(face: Face) -> None:
    recorder, topic = record(face.gate), face.topic("t", merge="sum")
    with pytest.raises(InvalidArgument) as raised:
        await topic.trigger("k", "text")
    (step,) = recorder.steps
    assert (step.error, step.outcome) == (raised.value, None)


@pytest.mark.damages("undecodable")
@pytest.mark.parametrize("traces", [7, [], [b"text"], [0, 7]])
async def test_corrupt_traces_are_refused_before_a_merge(face: Face, raw: Any, traces: Any) -> None:
    topic = face.topic("t", window="60s")
    await topic.trigger("k", 1)
    (name,) = raw.scan_iter(match=f"ig2:{{{face.gate.namespace}:*messages")
    raw.hset(name, "k", pack_message(**unpack_message(raw.hget(name, "k")) | {"traces": traces}))
    with pytest.raises(UnexpectedData):
        await topic.trigger("k", 2)


@pytest.mark.parametrize("awaiting", [False, True])
async def test_a_worker_traces_its_handlers_and_their_settlements(gate: Gate, clock: Clock, awaiting: bool) -> None:
    recorder, topic, seen = record(gate), gate.topic("t", max_attempts=2, backoff="10ms"), list[Any]()

    def handle(delivery: Any) -> None:
        seen.append((delivery.key, delivery.attempt, delivery.traces))
        if delivery.key == "bad":
            raise Bury("no")
        if delivery.key == "once more" and delivery.attempt == 1:
            raise ValueError

    async def handle_async(delivery: Any) -> None:
        handle(delivery)

    topic.handler(handle_async if awaiting else handle)
    for key in ("good", "bad", "once more"):
        topic.trigger(key)
    async with gate.aio.worker():
        await eventually(lambda: len(recorder.ends) == 3)
        clock.advance("1s")
        await eventually(lambda: len(recorder.ends) == 4)
    assert sorted(seen) == [
        ("bad", 1, _traces(1)), ("good", 1, _traces(0)), ("once more", 1, _traces(2)), ("once more", 2, _traces(2))
    ]  # fmt: skip
    outcomes = sorted(step.outcome.outcome for step in recorder.of("process"))
    assert outcomes == [
        "failed",
        "handled",
        "handled",
        "rejected",
    ]
    assert sorted(recorder.ends) == [
        ("t", "ack", "ok"), ("t", "ack", "ok"), ("t", "bury", "dead"), ("t", "nack", "ok")
    ]  # fmt: skip
