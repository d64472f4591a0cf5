"""Stored contexts: what is none is ignored, whoever wrote it, and never logged."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
from idemgate_otel.w3c import pack, unpack
from opentelemetry.trace import SpanContext, TraceFlags, TraceState

from idemgate import Gate, Trigger

PARENT = b"00-" + b"a1" * 16 + b"-" + b"b2" * 8 + b"-01"


def test_a_context_comes_back() -> None:
    state = TraceState([("vendor", "a;b:c"), ("tenant@sys", "1")])
    context = SpanContext(int("a1" * 16, 16), int("b2" * 8, 16), False, TraceFlags(1), state)
    assert pack(context) == PARENT + b" vendor=a;b:c,tenant@sys=1"
    found = unpack(pack(context))
    assert found is not None
    assert (found.trace_id, found.span_id, found.trace_flags) == (context.trace_id, context.span_id, 1)
    assert (dict(found.trace_state), found.is_remote) == (dict(state), True)


def test_a_state_that_is_too_long_is_left_out() -> None:
    state = TraceState([(f"v{n}", "x" * 250) for n in range(3)])
    assert pack(SpanContext(1, 1, False, TraceFlags(1), state)) == b"00-%032x-%016x-01" % (1, 1)


@pytest.mark.parametrize("context", [SpanContext(0, 1, False, TraceFlags(1)), SpanContext(1, 1, False, TraceFlags(0))])
def test_what_nobody_records_is_not_stored(context: SpanContext) -> None:
    assert pack(context) == b""


@pytest.mark.parametrize(
    "stored",
    [
        b"", b"\x1b[31m", PARENT[:-1], PARENT + b"-more", b"ff" + PARENT[2:], PARENT.upper(), b"\n" + PARENT,
        b"00-" + b"0" * 32 + PARENT[35:], PARENT[:36] + b"0" * 16 + b"-01", PARENT + b"\n",
    ],
)  # fmt: skip
def test_other_bytes_are_no_context(stored: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        assert unpack(stored) is None
    assert caplog.records == []


@pytest.mark.parametrize(
    "state",
    [
        b"\x1b[31m", b"a=\x1b", b"no pair", b"=x", b"A=1", b"a=1,", b"a=1\n", b"\xff\xfe=1", b"a=" + b"x" * 600,
        b",".join(b"a%d=1" % n for n in range(40)), b"a=1 ",
    ],
)  # fmt: skip
def test_an_invalid_state_is_left_out_and_not_logged(state: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        found = unpack(PARENT + b" " + state)
    assert found is not None
    assert (len(found.trace_state), caplog.records) == (0, [])


def test_a_stranger_s_traces_are_ignored_and_counted(
    gate: Gate, trace: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    traced, topic = trace(), gate.topic("images", window="10s", merge="append")
    for stored in (b"\x1b[31mtext", PARENT, b"\xff" * 600):
        topic.trigger_many([Trigger("k", 1, trace=stored)])
    topic.flush()
    (delivery,) = topic.take()
    with caplog.at_level(logging.DEBUG), traced.instrumentation.process(delivery):
        pass
    (span,) = traced.spans("process")
    assert [link.context.span_id for link in span.links] == [int("b2" * 8, 16)]
    assert (span.attributes["idemgate.links.dropped"], caplog.records) == (2, [])
