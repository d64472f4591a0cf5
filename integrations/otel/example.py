"""Two triggers, one delivery and a replay, and the spans of all: `python example.py`. The server is in here, too."""

from __future__ import annotations

import asyncio

from idemgate_otel import instrument
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from idemgate import Delivery, Gate

memory = InMemorySpanExporter()  # in place of an exporter to your collector
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(memory))

gate = Gate("embedded://", namespace="otel-example")
instrument(gate, tracer_provider=provider)
thumbnails = gate.topic("thumbnails", window="100ms", merge="union")
done = asyncio.Event()


@gate.once(key="{image}", scope="charge", retention="1h")
async def charge(image: str) -> str:
    return f"charged {image}"


@thumbnails.handler
async def render(delivery: Delivery) -> None:
    for _ in range(2):
        await charge(delivery.key)
    done.set()


async def main() -> None:
    for size in (64, 128):
        await thumbnails.aio.trigger("img-7", [size])
    async with gate.aio.worker():
        await asyncio.wait_for(done.wait(), 30)
    await gate.aio.close()
    names = {span.context.span_id: f"{span.name} {span.context.span_id:016x}" for span in memory.get_finished_spans()}
    for span in memory.get_finished_spans():
        links = ", ".join(names[link.context.span_id] for link in span.links)
        print(f"{span.name} {span.context.span_id:016x}", f"links to {links}" if links else "")


asyncio.run(main())
gate.close()
