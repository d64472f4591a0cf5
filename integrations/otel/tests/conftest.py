"""A gate on the embedded server whose time is moved, traced into memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from idemgate_otel import Instrumentation, instrument
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import Sampler

from idemgate import Gate
from idemgate.testing import Clock


class Traced:
    """What the tests see of one gate: `spans("process")` are the ended ones whose names start so."""

    def __init__(self, gate: Gate, sampler: Sampler | None = None, **options: Any) -> None:
        self._memory, self._reader = InMemorySpanExporter(), InMemoryMetricReader()
        self.provider = TracerProvider(sampler=sampler)
        self.provider.add_span_processor(SimpleSpanProcessor(self._memory))
        self.tracer = self.provider.get_tracer("test")
        meters = MeterProvider([self._reader])
        self.instrumentation: Instrumentation = instrument(
            gate, tracer_provider=self.provider, meter_provider=meters, **options
        )

    def spans(self, name: str = "") -> list[ReadableSpan]:
        return [span for span in self._memory.get_finished_spans() if span.name.startswith(name)]

    def metrics(self) -> dict[str, Any]:
        """Return the points of each metric by its name."""
        data = self._reader.get_metrics_data()
        found = [metric for one in data.resource_metrics for scope in one.scope_metrics for metric in scope.metrics]
        return {metric.name: list(metric.data.data_points) for metric in found}


@pytest.fixture
async def gate(store: str, namespace: str, clock: Clock) -> AsyncIterator[Gate]:
    made = Gate(store, namespace=namespace, clock=clock)
    yield made
    await made.aio.close()
    made.close()


@pytest.fixture
def trace(gate: Gate) -> Callable[..., Traced]:
    return lambda **options: Traced(gate, **options)
