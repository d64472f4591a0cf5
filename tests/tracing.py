"""A tracer that stores a number for each step, and records what a gate tells it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from idemgate import Gate

__all__ = ["Recorder", "record"]

_current: ContextVar[bytes] = ContextVar("trace", default=b"")


class Noted:
    """A step: `kind`, `of` (its topic or scope), its `trace`, and what was noted: `outcome` and `replayed`."""

    def __init__(self, kind: str, of: str, trace: bytes) -> None:
        self.kind, self.of, self.trace = kind, of, trace
        self.outcome: Any = None
        self.replayed = b""
        self.error: BaseException | None = None

    def note(self, outcome: Any, replayed: bytes = b"") -> None:
        self.outcome, self.replayed = outcome, replayed


class Recorder:
    """The tracer. `steps` are those that began, `ends` the settled deliveries: topic, verb and outcome."""

    def __init__(self) -> None:
        self.steps: list[Noted] = []
        self.ends: list[tuple[str, str, str]] = []

    @contextmanager
    def _begin(self, kind: str, of: str) -> Iterator[Noted]:
        step = Noted(kind, of, f"t{len(self.steps)}".encode())
        self.steps.append(step)
        token = _current.set(step.trace)
        try:
            yield step
        except BaseException as error:
            step.error = error
            raise
        finally:
            _current.reset(token)

    def trigger(self, topic: str, triggers: Sequence[Any], sends: bool = True) -> Any:
        return self._begin("send" if sends else "create", topic)

    def process(self, delivery: Any) -> Any:
        return self._begin("process", delivery.topic)

    def consume(self, source: str) -> Any:
        return self._begin("consume", source)

    def once(self, scope: str, key: Any) -> Any:
        return self._begin("once", scope)

    def run_trace(self) -> bytes:
        return _current.get()

    def record_settlements(
        self, topic: str, settlements: Sequence[Any], outcomes: Sequence[str], seconds: float
    ) -> None:
        assert seconds >= 0
        self.ends += [(topic, one.verb, outcome) for one, outcome in zip(settlements, outcomes, strict=True)]

    def of(self, kind: str) -> list[Noted]:
        return [step for step in self.steps if step.kind == kind]


def record(gate: Gate) -> Recorder:
    """Trace a gate, and return what records it."""
    gate.context.tracer = made = Recorder()
    return made
