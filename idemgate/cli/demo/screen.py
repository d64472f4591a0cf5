"""Screens of the demo: their protocol, plain lines, and the formatting of numbers."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, Self, TextIO

if TYPE_CHECKING:
    from idemgate.cli.demo.records import Records

__all__ = ["Lines", "Screen", "rows", "took"]

EVERY = 1.0
LABELS = {
    "published": "published",
    "copies_received": "copies received",
    "handled": "handled once",
    "duplicates_dropped": "duplicates dropped",
    "triggers": "triggers",
    "deliveries": "deliveries",
    "merge_ratio": "merge ratio",
    "lateness_p50_ms": "lateness p50",
    "lateness_p99_ms": "lateness p99",
    "elapsed_s": "elapsed",
}


class Screen(Protocol):
    """A display of the demo's progress, from entering to leaving."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...
    def say(self, text: str) -> None:
        """Print a permanent line."""
        ...

    def tick(self, phase: str, done: int, total: int, records: Records) -> None:
        """Update the numbers; it may be called often. `done` of `total` events are published."""
        ...


class Lines:
    """A screen that prints at most one line a second."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._start = self._shown = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def say(self, text: str) -> None:
        print(text, file=self._out, flush=True)

    def tick(self, phase: str, done: int, total: int, records: Records) -> None:
        now = time.monotonic()
        if now - self._shown < EVERY:
            return
        self._shown = now
        numbers = records.numbers()
        shown = ", ".join(f"{label} {shown_as(name, numbers[name])}" for name, label in _SHORT.items())
        self.say(f"{now - self._start:5.1f} s  {phase}: published {done:,} of {total:,}, {shown}")


_SHORT = {
    "copies_received": "received",
    "handled": "handled",
    "duplicates_dropped": "dropped",
    "deliveries": "deliveries",
    "lateness_p99_ms": "late p99",
}


def rows(numbers: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the label and the text of each number."""
    return [(label, shown_as(name, numbers[name])) for name, label in LABELS.items() if name in numbers]


def shown_as(name: str, value: float) -> str:
    if name.endswith("_ms"):
        return f"{value:,.1f} ms"
    if name.endswith("_s"):
        return f"{value:,.1f} s"
    return f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"


def took(seconds: float) -> str:
    """Format a duration: 0.172 -> "172 ms", 522,415 -> "6d 1h"."""
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    days, hours, minutes = minutes // 1440, minutes // 60 % 24, minutes % 60
    parts = [f"{days}d" if days else "", f"{hours}h" if hours else "", f"{minutes}m" if minutes and not days else ""]
    return " ".join(part for part in parts if part)
