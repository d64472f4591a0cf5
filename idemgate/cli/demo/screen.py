"""Screens of the demo: their protocol, plain lines, and the formatting of numbers."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, Self, TextIO

if TYPE_CHECKING:
    from idemgate.cli.demo.records import Records

__all__ = ["Lines", "Screen", "rows", "took", "wrap_words"]

EVERY = 1.0
LABELS = {
    "published": ("published", "events, of which 1 in 20 twice"),
    "copies_received": ("copies received", "by all subscribers together"),
    "handled": ("handled once", "first copies, which the guard let through"),
    "duplicates_dropped": ("duplicates dropped", "further copies, which the guard stopped"),
    "triggers": ("triggers", "of the topic, one for each event"),
    "deliveries": ("deliveries", "to the worker, one a path and window"),
    "repeated": ("repeated", "deliveries of the killed worker, done again"),
    "merge_ratio": ("merge ratio", "triggers in a delivery, on average"),
    "lateness_p50_ms": ("lateness p50", "of the handler's start, after the due time"),
    "lateness_p99_ms": ("lateness p99", "of 99 % of the deliveries at most"),
    "elapsed_s": ("elapsed", "with starting and ending the processes"),
}
"""Label and meaning of each number."""


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
        print(wrap_words(text), file=self._out, flush=True)

    def tick(self, phase: str, done: int, total: int, records: Records) -> None:
        now = time.monotonic()
        if now - self._shown < EVERY:
            return
        self._shown = now
        shown = phase
        if done:
            numbers = records.numbers()
            counts = ", ".join(f"{label} {shown_as(name, numbers[name])}" for name, label in _SHORT.items())
            shown = f"{phase}: {done:,} of {total:,}; {counts}"
        self.say(f"{now - self._start:4.0f} s  {shown}")


_SHORT = {"handled": "handled", "duplicates_dropped": "dropped", "deliveries": "delivered"}
WIDTH = 80


def wrap_words(text: str, indent: str = " " * 8) -> str:
    """Break lines of more than 80 characters between words. Continued lines begin with `indent`."""
    lines = (
        textwrap.wrap(line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False) or [""]
        for line in text.splitlines()
    )
    return "\n".join(line for part in lines for line in part)


def rows(numbers: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return the label, the text and the meaning of each number."""
    return [
        (label, shown_as(name, numbers[name]), meaning) for name, (label, meaning) in LABELS.items() if name in numbers
    ]


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
