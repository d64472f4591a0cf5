"""A gate that reports, and what the store holds of the processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from idemgate import Gate
from idemgate.core.calls import run_plan
from idemgate.presence.calls import read_processes
from idemgate.presence.presence import Presence
from idemgate.presence.report import Process

Seen = Callable[[], list[Process]]


@pytest.fixture
def gate(url: str, raw: Any, namespace: str, sound: Callable[[Gate], None]) -> Iterator[Gate]:
    """A gate by the server's clock, so that it reports. Audited at the end."""
    with Gate(url, namespace=namespace) as made:
        yield made
        sound(made)
    raw.flushdb()


@pytest.fixture
def seen(url: str, namespace: str) -> Iterator[Seen]:
    """`seen()`: the processes that report, read by another gate, which does not."""
    with Gate(url, namespace=namespace, presence=False) as reader:
        yield lambda: run_plan(read_processes(namespace, None), reader.context.link.run_all)[0]


def report(gate: Gate) -> None:
    """Send the report of a gate now."""
    presence_of(gate).begin()
    presence_of(gate).beat()


def presence_of(gate: Gate) -> Presence:
    return cast(Presence, gate.context.observer)
