"""Spans and metrics of a gate, as the OpenTelemetry SDK exports them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from idemgate_otel import instrument
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased, TraceIdRatioBased
from opentelemetry.trace import SpanKind, StatusCode, get_current_span

from idemgate import Bury, Gate, InvalidArgument, Trigger
from idemgate.subscribers import PubSubMessage
from idemgate.testing import Clock
from tests.waiting import eventually

Trace = Callable[..., Any]


def context_of(span: ReadableSpan) -> Any:
    """Return the ids of a span, for comparison with links and parents."""
    return span.context.trace_id, span.context.span_id


def links_of(span: ReadableSpan) -> list[Any]:
    return [(link.context.trace_id, link.context.span_id) for link in span.links]


class Face:
    """The same calls, blocking and awaited."""

    def __init__(self, gate: Gate, awaiting: bool) -> None:
        self.gate, self.awaiting = gate, awaiting

    async def trigger(self, topic: Any, *args: Any, **options: Any) -> Any:
        return await topic.aio.trigger(*args, **options) if self.awaiting else topic.trigger(*args, **options)

    async def trigger_many(self, topic: Any, triggers: Any) -> Any:
        return await topic.aio.trigger_many(triggers) if self.awaiting else topic.trigger_many(triggers)

    def handle(self, topic: Any, body: Callable[[Any], Any]) -> None:
        async def handle(delivery: Any) -> Any:
            return body(delivery)

        topic.handler(handle if self.awaiting else body)

    async def work(self, until: Callable[[], Any]) -> None:
        async with self.gate.aio.worker():
            await eventually(until)

    def once(self, body: Callable[[str], Any], **options: Any) -> Callable[[str], Any]:
        """Return an async function of a key that is guarded."""
        if not self.awaiting:
            guarded = self.gate.once(key="{key}", scope="charge", retention="1h", **options)(body)
            return lambda key: asyncio.to_thread(guarded, key)

        async def run(key: str) -> Any:
            return body(key)

        return self.gate.once(key="{key}", scope="charge", retention="1h", **options)(run)


@pytest.fixture(params=[False, True], ids=["blocking", "awaiting"])
def face(gate: Gate, request: pytest.FixtureRequest) -> Face:
    return Face(gate, request.param)


async def test_a_delivery_links_to_every_trigger_that_it_merged(face: Face, clock: Clock, trace: Trace) -> None:
    traced, topic = trace(), face.gate.topic("images", window="10s", merge="append")
    inside: list[Any] = []
    face.handle(topic, lambda delivery: inside.append(get_current_span().get_span_context()))
    for n in range(3):
        await face.trigger(topic, "k", n)
    clock.advance("10s")
    await face.work(lambda: traced.spans("ack"))
    sent, (process,), (ack,) = traced.spans("trigger"), traced.spans("process"), traced.spans("ack")
    assert links_of(process) == [context_of(span) for span in sent]
    assert [span.attributes["idemgate.trigger.status"] for span in sent] == ["scheduled", "merged", "merged"]
    assert (process.parent, process.context.trace_id == inside[0].trace_id) == (None, True)
    assert [(span.name, span.kind) for span in (sent[0], process, ack)] == [
        ("trigger images", SpanKind.PRODUCER), ("process images", SpanKind.CONSUMER), ("ack images", SpanKind.CLIENT)
    ]  # fmt: skip
    assert process.attributes == {
        "messaging.system": "idemgate", "messaging.operation.type": "process", "messaging.operation.name": "process",
        "messaging.destination.name": "images", "idemgate.delivery.count": 3, "idemgate.delivery.attempt": 1,
        "idemgate.delivery.reason": "window", "idemgate.outcome": "handled",
    }  # fmt: skip
    assert (ack.parent.span_id, ack.attributes["idemgate.settle.outcome"]) == (process.context.span_id, "ok")
    assert ack.instrumentation_scope.schema_url == "https://opentelemetry.io/schemas/1.44.0"


async def test_links_are_bounded_and_their_loss_is_counted(face: Face, clock: Clock, trace: Trace) -> None:
    traced, topic = trace(), face.gate.topic("images", window="10s", merge="count")
    face.handle(topic, lambda delivery: None)
    for _ in range(40):
        await face.trigger(topic, "k")
    clock.advance("10s")
    await face.work(lambda: traced.spans("process"))
    (process,), sent = traced.spans("process"), traced.spans("trigger")
    assert links_of(process) == [context_of(span) for span in (*sent[:15], sent[-1])]
    assert (process.attributes["idemgate.links.dropped"], process.attributes["idemgate.delivery.count"]) == (24, 40)


async def test_triggers_of_one_call_have_one_span(face: Face, trace: Trace) -> None:
    traced, topic = trace(), face.gate.topic("images")
    face.handle(topic, lambda delivery: None)
    await face.trigger_many(topic, [(f"k{n}", n) for n in range(5)])
    await face.work(lambda: len(traced.spans("ack")) == 5)
    (sent,) = traced.spans("trigger")
    assert (sent.attributes["messaging.batch.message_count"], sent.attributes["idemgate.trigger.accepted"]) == (5, 5)
    assert [links_of(span) for span in traced.spans("process")] == [[context_of(sent)]] * 5


async def test_a_child_by_option_and_a_retry_links(face: Face, clock: Clock, trace: Trace) -> None:
    traced, topic = trace(parent=True), face.gate.topic("images", backoff="1s", max_attempts=2)
    failures = iter([ValueError("no")])

    def handle(delivery: Any) -> None:
        for failure in failures:
            raise failure

    face.handle(topic, handle)
    with traced.tracer.start_as_current_span("request") as request:
        await face.trigger(topic, "k")
    async with face.gate.aio.worker():
        await eventually(lambda: traced.spans("nack"))
        clock.advance("5s")
        await eventually(lambda: traced.spans("ack"))
    (sent,), (first, second) = traced.spans("trigger"), traced.spans("process")
    assert (first.parent.span_id, links_of(first)) == (sent.context.span_id, [])
    assert {first.context.trace_id, sent.context.trace_id} == {request.get_span_context().trace_id}
    assert (second.parent, links_of(second)) == (None, [context_of(sent)])
    assert (first.status.status_code, first.attributes["error.type"]) == (StatusCode.ERROR, "builtins.ValueError")
    assert (second.status.status_code, second.attributes["idemgate.delivery.attempt"]) == (StatusCode.UNSET, 2)


async def test_a_merged_delivery_is_nobodys_child(face: Face, clock: Clock, trace: Trace) -> None:
    traced, topic = trace(parent=True), face.gate.topic("images", window="10s")
    face.handle(topic, lambda delivery: None)
    for n in range(2):
        await face.trigger(topic, "k", n)
    clock.advance("10s")
    await face.work(lambda: traced.spans("process"))
    (process,) = traced.spans("process")
    assert (process.parent, len(process.links)) == (None, 2)


async def test_a_replay_links_to_its_run(face: Face, trace: Trace) -> None:
    traced, charge = trace(), face.once(lambda key: key.upper())
    assert [await charge("k"), await charge("k")] == ["K", "K"]
    run, replay = traced.spans("once")
    assert (run.kind, run.name, links_of(run)) == (SpanKind.INTERNAL, "once charge", [])
    assert run.attributes == {"idemgate.scope": "charge", "idemgate.outcome": "handled", "idemgate.attempt": 1}
    assert (links_of(replay), replay.links[0].attributes) == ([context_of(run)], {"idemgate.link": "replayed"})
    assert (replay.attributes["idemgate.outcome"], replay.attributes["idemgate.replayed"]) == ("duplicate", True)


async def test_a_failed_run_is_an_error(face: Face, trace: Trace) -> None:
    def fail(key: str) -> None:
        raise ValueError("no")

    traced, charge = trace(), face.once(fail)
    with pytest.raises(ValueError, match="no"):
        await charge("k")
    (span,) = traced.spans("once")
    assert (span.status.status_code, span.attributes["error.type"]) == (StatusCode.ERROR, "builtins.ValueError")
    assert span.attributes["idemgate.outcome"] == "failed"


async def test_steps_inside_a_handler_are_its_children(face: Face, trace: Trace) -> None:
    traced, topic, next_topic = trace(), face.gate.topic("images"), face.gate.topic("thumbs")
    face.handle(topic, lambda delivery: next_topic.trigger("k"))
    await face.trigger(topic, "k")
    await face.work(lambda: traced.spans("ack"))
    (process,), (inner,) = traced.spans("process"), traced.spans("trigger thumbs")
    assert (inner.parent.span_id, inner.context.trace_id) == (process.context.span_id, process.context.trace_id)


async def test_messages_of_subscribers_have_spans(face: Face, trace: Trace) -> None:
    traced, gate, inside = trace(), face.gate, list[str]()

    def note(message: Any) -> None:
        inside.append(f"{get_current_span().get_span_context().span_id:x}")
        if isinstance(message, PubSubMessage):
            raise ValueError("no")

    async def note_async(message: Any) -> None:
        note(message)

    callback = note_async if face.awaiting else note
    name = gate.namespace
    gate.stream(f"{name}.stream", group="g")(callback)
    gate.consume_list(f"{name}.list")(callback)
    gate.subscribe(f"{name}.*", pattern=True)(callback)
    async with gate.aio.subscribers():
        for words in (("XADD", f"{name}.stream", "*", "f", "v"), ("RPUSH", f"{name}.list", "v")):
            await asyncio.to_thread(gate.context.link.command, *words)
        await asyncio.to_thread(gate.context.link.command, "PUBLISH", f"{name}.channel", "v")
        await eventually(lambda: len(traced.spans("process")) == 3)
        with pytest.raises(InvalidArgument, match="a worker or a subscriber"):
            traced.instrumentation.uninstrument()
            instrument(gate)
    spans = {span.name.rpartition(".")[2]: span for span in traced.spans("process")}
    assert sorted(spans) == ["*", "list", "stream"]
    assert {f"{span.context.span_id:x}" for span in spans.values()} == {*inside}
    assert spans["stream"].attributes == {
        "messaging.system": "redis", "messaging.operation.type": "process", "messaging.operation.name": "process",
        "messaging.destination.name": f"{name}.stream", "idemgate.outcome": "handled",
    }  # fmt: skip
    assert (spans["list"].kind, spans["list"].parent) == (SpanKind.CONSUMER, None)
    assert spans["*"].attributes["error.type"] == "builtins.ValueError"
    durations = traced.metrics()["messaging.process.duration"]
    assert sum(one.count for one in durations) == 3


async def test_a_letter_is_buried_and_redriven_with_its_link(face: Face, trace: Trace) -> None:
    traced, topic, failures = trace(), face.gate.topic("images"), iter([Bury("no")])

    def handle(delivery: Any) -> None:
        for failure in failures:
            raise failure

    face.handle(topic, handle)
    await face.trigger(topic, "k")
    async with face.gate.aio.worker():
        await eventually(lambda: traced.spans("bury"))
        await topic.aio.dead.redrive()
        await eventually(lambda: traced.spans("ack"))
    (sent,), processed, (bury,) = traced.spans("trigger"), traced.spans("process"), traced.spans("bury")
    assert [links_of(span) for span in processed] == [[context_of(sent)]] * 2
    assert (bury.attributes["idemgate.settle.outcome"], processed[0].attributes["idemgate.outcome"]) == (
        "dead",
        "rejected",
    )


def test_a_program_without_a_worker_opens_the_span(gate: Gate, trace: Trace) -> None:
    traced, topic = trace(), gate.topic("images")
    topic.trigger("k")
    (delivery,) = topic.take()
    with traced.instrumentation.process(delivery):
        pass
    assert topic.ack(delivery) == "ok"
    assert topic.ack(delivery) == "lost"
    process, ok, lost = traced.spans()[1:]
    assert [span.parent.span_id for span in (ok, lost)] == [process.context.span_id] * 2
    assert (ok.status.status_code, lost.status.status_code) == (StatusCode.UNSET, StatusCode.ERROR)


def test_a_relay_links_to_what_was_packed(gate: Gate, trace: Trace) -> None:
    traced, topic = trace(), gate.topic("images", window="10s")
    packed = topic.pack_trigger(Trigger("k", 1))
    topic.trigger_many([topic.unpack_trigger(packed)])
    created, sent = traced.spans("trigger")
    assert (created.attributes["messaging.operation.type"], links_of(sent)) == ("create", [context_of(created)])
    pending = topic.peek("k").pending
    assert pending is not None
    assert [trace[:52] for trace in pending.traces] == [b"00-%032x-%016x" % context_of(created)]


def test_a_trigger_that_is_refused_is_an_error(gate: Gate, trace: Trace) -> None:
    traced, topic = trace(), gate.topic("images", merge="sum")
    with pytest.raises(InvalidArgument):
        topic.trigger("k", "text")
    (span,) = traced.spans()
    assert (span.status.status_code, span.attributes["error.type"]) == (
        StatusCode.ERROR, "idemgate.errors.InvalidArgument"
    )  # fmt: skip


@pytest.mark.parametrize("sampler", [ALWAYS_OFF, ParentBased(TraceIdRatioBased(0))])
def test_what_is_not_sampled_is_not_stored(gate: Gate, trace: Trace, sampler: Any) -> None:
    traced, topic = trace(sampler=sampler), gate.topic("images", window="10s")
    topic.trigger("k")
    pending = topic.peek("k").pending
    assert pending is not None
    assert (pending.traces, traced.spans()) == ((), [])


def test_no_span_has_a_key_unless_it_is_asked_for(gate: Gate, trace: Trace) -> None:
    def run(traced: Any) -> str:
        topic = gate.topic("images")
        topic.trigger("ann@example.org")
        (delivery,) = topic.take()
        with traced.instrumentation.process(delivery):
            gate.guard("charge", retention="1h").run("ann@example.org", lambda: None)
        topic.ack(delivery)
        return repr([span.to_json() for span in traced.spans()])

    traced = trace()
    assert "ann@example.org" not in run(traced)
    traced.instrumentation.uninstrument()
    traced = trace(keys=True)
    run(traced)
    keys = [span.attributes.get("idemgate.key") for span in traced.spans()]
    assert keys == ["ann@example.org"] * 3 + [None]


async def test_metrics_count_messages_and_durations(face: Face, trace: Trace) -> None:
    traced, topic = trace(), face.gate.topic("images")
    face.handle(topic, lambda delivery: None)
    await face.trigger_many(topic, [(f"k{n}", n) for n in range(5)])
    await face.work(lambda: len(traced.spans("ack")) == 5)
    found = traced.metrics()
    assert [(name, points[0].value) for name, points in sorted(found.items()) if "messages" in name] == [
        ("messaging.client.consumed.messages", 5), ("messaging.client.sent.messages", 5)
    ]  # fmt: skip
    (process,) = found["messaging.process.duration"]
    assert (process.count, process.attributes["messaging.destination.name"]) == (5, "images")
    assert process.explicit_bounds[:2] == (0.005, 0.01)
    operations = {
        point.attributes["messaging.operation.name"] for point in found["messaging.client.operation.duration"]
    }
    assert operations == {"trigger", "ack"}


async def test_a_gate_is_instrumented_once_and_before_its_worker(gate: Gate, trace: Trace) -> None:
    traced = trace()
    with pytest.raises(InvalidArgument, match="it has a tracer"):
        instrument(gate.aio)
    traced.instrumentation.uninstrument()
    traced.instrumentation.uninstrument()
    gate.topic("images").handler(lambda delivery: None)
    async with gate.aio.worker():
        with pytest.raises(InvalidArgument, match="worker"):
            instrument(gate)
    gate.topic("images").trigger("k")
    assert traced.spans() == []


def test_without_a_provider_nothing_is_stored(gate: Gate) -> None:
    instrument(gate)
    topic = gate.topic("images", window="10s")
    topic.trigger("k")
    pending = topic.peek("k").pending
    assert pending is not None
    assert pending.traces == ()
