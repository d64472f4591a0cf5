"""The form in which the context of a span is stored: W3C Trace Context, `traceparent`, then a space and `tracestate`.

Any client of the store may have written it. So it is checked here before OpenTelemetry reads it, which would log
invalid parts as they are.
"""

from __future__ import annotations

import re

from opentelemetry.trace import SpanContext, TraceFlags, TraceState

__all__ = ["pack", "unpack"]

MAX_STATE = 512
"""The most characters of a `tracestate`, as OpenTelemetry and the W3C have it. A longer one is not stored."""
_PARENT = re.compile(rb"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_KEY = rb"[a-z0-9][a-z0-9_*/-]{0,240}(?:@[a-z][a-z0-9_*/-]{0,13})?"
_MEMBER = _KEY + rb"=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
_STATE = re.compile(_MEMBER + rb"(?:," + _MEMBER + rb"){0,31}")


def pack(context: SpanContext) -> bytes:
    """Return the stored form of a context. b"" if there is none, or if its trace is not recorded."""
    if not (context.is_valid and context.trace_flags.sampled):
        return b""
    parent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
    if context.trace_state:
        state = context.trace_state.to_header()
        if len(state) <= MAX_STATE and state.isascii():
            parent = f"{parent} {state}"
    return parent.encode()


def unpack(stored: bytes) -> SpanContext | None:
    """Return the context, or None for anything but a valid one. An invalid `tracestate` is left out."""
    parent, _, state = stored.partition(b" ")
    found = _PARENT.fullmatch(parent)
    if found is None:
        return None
    trace_id, span_id, flags = (int(part, 16) for part in found.groups())
    valid = len(state) <= MAX_STATE and _STATE.fullmatch(state)
    context = SpanContext(
        trace_id, span_id, True, TraceFlags(flags), TraceState.from_header([state.decode()]) if valid else TraceState()
    )
    return context if context.is_valid else None
