"""What a gate tells a tracer, such as that of `idemgate-otel`. Without one, nothing of this is called or stored."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

__all__ = ["MAX_TRACE", "Step", "Tracer"]

MAX_TRACE = 600
"""The most bytes of a trace: a `traceparent` of 55 characters and a `tracestate` of 512 fit."""


class Step(Protocol):
    """A step that began. Its block ends it, also if it raises.

    Attributes:
        trace: What is stored with a trigger or a result, so that a later step can name this one. At most 600 bytes
            (MAX_TRACE). b"" stores nothing.
    """

    @property
    def trace(self) -> bytes: ...

    def note(self, outcome: Any, replayed: bytes = b"") -> None:
        """Note the outcome: the receipts of triggers, or the verdict on a delivery or on a guarded call.

        `replayed` is the trace that was stored with the result of an earlier run, if a call replays one.
        """
        ...


class Tracer(Protocol):
    """Observes the steps of a gate: set it as `gate.context.tracer`. Its methods must not raise.

    A worker asks for it when it starts.
    """

    def trigger(self, topic: str, triggers: Sequence[Any], sends: bool = True) -> AbstractContextManager[Step]:
        """Begin to send triggers. `sends` is False for one that is packed only, to be stored elsewhere."""
        ...

    def process(self, delivery: Any) -> AbstractContextManager[Step]:
        """Begin the handler of a delivery. `delivery.traces` are those of its triggers."""
        ...

    def once(self, scope: str, key: Any) -> AbstractContextManager[Step]:
        """Begin a guarded call: before its claim."""
        ...

    def run_trace(self) -> bytes:
        """Return the trace of the guarded call that runs in this task or thread, to be stored with its result."""
        ...

    def settled(self, topic: str, settlements: Sequence[Any], outcomes: Sequence[str], seconds: float) -> None:
        """Note deliveries that were settled by one call, which took this long.

        An outcome is "ok", "dead", "cancelled", "lost", or "unknown" after an error of the store.
        """
        ...
