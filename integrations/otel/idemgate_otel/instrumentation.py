"""The tracer of a gate: spans and metrics of OpenTelemetry, by its conventions for messaging, version 1.44."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from opentelemetry import context as contexts
from opentelemetry import metrics, trace
from opentelemetry.trace import Link, NonRecordingSpan, Span, SpanContext, SpanKind, Status, StatusCode

from idemgate import AioGate, Delivery, Gate
from idemgate.errors import DecodeError, InvalidArgument
from idemgate.types import Verdict, check_gate
from idemgate_otel.w3c import pack, unpack

if TYPE_CHECKING:
    from opentelemetry.metrics import Histogram, MeterProvider
    from opentelemetry.trace import TracerProvider

    from idemgate.store.context import Context

__all__ = ["Instrumentation", "Step", "instrument"]

SCHEMA = "https://opentelemetry.io/schemas/1.44.0"
"""The version of the semantic conventions. Those for messaging are in development, so a later one may rename some."""
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
"""Seconds, as the conventions advise."""
Attributes = dict[str, str | int | bool]
_FAILED = ("rejected", "failed", "lost")
"""The outcomes of a delivery or a guarded call that are errors. In progress elsewhere is none."""
_UNSETTLED = ("lost", "unknown")


def instrument(
    gate: Gate | AioGate,
    *,
    tracer_provider: TracerProvider | None = None,
    meter_provider: MeterProvider | None = None,
    parent: bool = False,
    keys: bool = False,
) -> Instrumentation:
    """Trace a gate: triggers, deliveries, messages of subscribers, guarded calls. Call it before a worker starts.

    Args:
        gate: The gate. Its blocking and its async form share the instrumentation.
        tracer_provider: Makes the spans. None: the global one.
        meter_provider: Makes the metrics. None: the global one.
        parent: True makes the span of a delivery a child of its trigger's if it has one trigger and this is its first
            attempt. All other deliveries begin a trace of their own, with links.
        keys: True adds keys and ids of messages to spans. They may name persons.

    Returns:
        The instrumentation. Its `uninstrument` ends it.

    Raises:
        InvalidArgument: The gate has a tracer, or a worker of it runs.
    """
    check_gate(gate, Gate, AioGate)
    if gate.context.tracer is not None:
        raise InvalidArgument("gate", gate, "it has a tracer", "Instrument it once, or call uninstrument() first")
    if gate.context.runners.now():
        raise InvalidArgument("gate", gate, "a worker or a subscriber of it runs", "Instrument it before that starts")
    gate.context.tracer = made = Instrumentation(gate.context, tracer_provider, meter_provider, parent, keys)
    return made


class Instrumentation:
    """The instrumentation of one gate, made by `instrument`. It implements `idemgate.types.Tracer`."""

    def __init__(
        self,
        context: Context,
        tracer_provider: TracerProvider | None,
        meter_provider: MeterProvider | None,
        parent: bool,
        keys: bool,
    ) -> None:
        self._context = context
        self._parent = parent
        self._keys = keys
        self._tracer = trace.get_tracer("idemgate_otel", None, tracer_provider, SCHEMA)
        meter = metrics.get_meter("idemgate_otel", "", meter_provider, SCHEMA)
        self._operations = meter.create_histogram(
            "messaging.client.operation.duration", "s", "Duration of calls that send triggers or settle deliveries",
            explicit_bucket_boundaries_advisory=BUCKETS,
        )  # fmt: skip
        self._handlers = meter.create_histogram(
            "messaging.process.duration", "s", "Duration of handlers", explicit_bucket_boundaries_advisory=BUCKETS
        )
        self._sent = meter.create_counter("messaging.client.sent.messages", "{message}", "Triggers that were sent")
        self._consumed = meter.create_counter("messaging.client.consumed.messages", "{message}", "Deliveries begun")

    def uninstrument(self) -> None:
        """Trace no further steps. A worker that runs goes on tracing until it stops."""
        if self._context.tracer is self:
            self._context.tracer = None

    def trigger(self, topic: str, triggers: Sequence[Any], sends: bool = True) -> Step:
        """Begin to send triggers, or to pack one; see `idemgate.types.Tracer`."""
        named = _named("send" if sends else "create", "trigger", topic)
        attributes, packed = named.copy(), _contexts(one.trace for one in triggers if one.trace)
        if len(triggers) != 1:
            attributes["messaging.batch.message_count"] = len(triggers)
        elif self._keys:
            attributes["idemgate.key"] = str(triggers[0].key)
        span = self._tracer.start_span(
            f"trigger {topic}", kind=SpanKind.PRODUCER, attributes=attributes, links=_links(packed)
        )
        if sends:
            self._sent.add(len(triggers), named)
        return Step(span, self._operations if sends else None, named)

    def process(self, delivery: Delivery[Any]) -> Step:
        """Begin the handler of a delivery. A worker calls it.

        Use it as a context manager around what handles a delivery of `topic.take`, or a forwarded one.
        """
        named, topic = _named("process", "process", delivery.topic), delivery.topic
        attributes, found, dropped, single = named.copy(), list[SpanContext](), 0, False
        try:
            found = _contexts(delivery.traces)
            dropped = delivery.dropped_traces + len(delivery.traces) - len(found)
            single = delivery.count == 1 and delivery.attempt == 1 and len(found) == 1
            attributes |= {
                "idemgate.delivery.count": delivery.count,
                "idemgate.delivery.attempt": delivery.attempt,
                "idemgate.delivery.reason": delivery.reason,
            }
            if self._keys:
                attributes |= {"messaging.message.id": delivery.id, "idemgate.key": delivery.key}
        except DecodeError:
            pass  # the handler meets it, too
        context = contexts.Context()
        if dropped:
            attributes["idemgate.links.dropped"] = dropped
        if self._parent and single:
            context, found = trace.set_span_in_context(NonRecordingSpan(found[0]), context), []
        span = self._tracer.start_span(f"process {topic}", context, SpanKind.CONSUMER, attributes, _links(found))
        delivery.span = span.get_span_context()
        self._consumed.add(1, named)
        return Step(span, self._handlers, named)

    def consume(self, source: str) -> Step:
        """Begin the callback of a subscriber; see `idemgate.types.Tracer`."""
        named = _named("process", "process", source, system="redis")
        self._consumed.add(1, named)
        span = self._tracer.start_span(f"process {source}", contexts.Context(), SpanKind.CONSUMER, named)
        return Step(span, self._handlers, named)

    def once(self, scope: str, key: Any) -> Step:
        """Begin a guarded call; see `idemgate.types.Tracer`."""
        attributes: Attributes = {"idemgate.scope": scope}
        if self._keys:
            attributes["idemgate.key"] = key if isinstance(key, str) else str(key)
        return Step(self._tracer.start_span(f"once {scope}", attributes=attributes))

    def run_trace(self) -> bytes:
        """Return what is stored with the result of the guarded call that runs here."""
        return pack(trace.get_current_span().get_span_context())

    def record_settlements(
        self, topic: str, settlements: Sequence[Any], outcomes: Sequence[str], seconds: float
    ) -> None:
        """Record deliveries that were settled by one call. Their spans are children of those that handled them."""
        end = time.time_ns()
        start = end - int(seconds * 1e9)
        for settlement, outcome in zip(settlements, outcomes, strict=True):
            handled: SpanContext | None = getattr(settlement.delivery, "span", None)
            if handled is None:  # it was not handled
                continue
            named = _named("settle", settlement.verb, topic)
            attributes = {**named, "idemgate.settle.outcome": outcome}
            within = trace.set_span_in_context(NonRecordingSpan(handled), contexts.Context())
            name = f"{settlement.verb} {topic}"
            span = self._tracer.start_span(name, within, SpanKind.CLIENT, attributes, start_time=start)
            if outcome in _UNSETTLED:
                span.set_attribute("error.type", outcome)
                span.set_status(Status(StatusCode.ERROR))
            span.end(end)
        for verb in {settlement.verb for settlement in settlements}:
            self._operations.record(seconds, _named("settle", verb, topic))


class Step:
    """A span that is current within its block, and the duration that is recorded at its end.

    Attributes:
        span: The span.
        trace: What is stored for later spans, which link to this one. b"" if the span is not recorded.
    """

    __slots__ = ("_began", "_durations", "_labels", "_token", "span", "trace")

    def __init__(
        self, span: Span, durations: Histogram | None = None, labels: Mapping[str, str | int | bool] | None = None
    ) -> None:
        self.span: Span = span
        self.trace: bytes = pack(span.get_span_context())
        self._durations = durations
        self._labels = dict(labels or {})
        self._began = time.perf_counter()

    def __enter__(self) -> Self:
        self._token = contexts.attach(trace.set_span_in_context(self.span))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        contexts.detach(self._token)
        if error is not None:
            self._fail(error)
        self.span.end()
        if self._durations is not None:
            self._durations.record(time.perf_counter() - self._began, self._labels)

    def note(self, outcome: Any, replayed: bytes = b"") -> None:
        """Note receipts or a verdict; see `idemgate.types.Tracer`."""
        if not isinstance(outcome, Verdict):
            self._note_receipts(outcome)
            return
        verdict: Verdict[Any] = outcome
        self.span.set_attribute("idemgate.outcome", verdict.outcome)
        if verdict.attempt:
            self.span.set_attribute("idemgate.attempt", verdict.attempt)
        if verdict.replayed:
            self.span.set_attribute("idemgate.replayed", True)
        if replayed and (run := unpack(replayed)) is not None:
            self.span.add_link(run, {"idemgate.link": "replayed"})
        if verdict.error is not None and verdict.outcome in _FAILED:
            self._fail(verdict.error)

    def _note_receipts(self, receipts: Sequence[Any]) -> None:
        if len(receipts) == 1:
            self.span.set_attribute("idemgate.trigger.status", receipts[0].status)
        else:
            self.span.set_attribute("idemgate.trigger.accepted", sum(receipt.accepted for receipt in receipts))

    def _fail(self, error: BaseException) -> None:
        kind = type(error)
        self._labels["error.type"] = name = f"{kind.__module__}.{kind.__qualname__}"
        self.span.set_attribute("error.type", name)
        self.span.record_exception(error)
        self.span.set_status(Status(StatusCode.ERROR))


def _named(kind: str, name: str, topic: str, system: str = "idemgate") -> Attributes:
    return {
        "messaging.system": system,
        "messaging.operation.type": kind,
        "messaging.operation.name": name,
        "messaging.destination.name": topic,
    }


def _contexts(traces: Iterable[bytes]) -> list[SpanContext]:
    """Return the contexts of stored traces. Those that are invalid are left out."""
    return [context for stored in traces if (context := unpack(stored)) is not None]


def _links(found: Iterable[SpanContext]) -> list[Link]:
    return [Link(context) for context in {(one.trace_id, one.span_id): one for one in found}.values()]
