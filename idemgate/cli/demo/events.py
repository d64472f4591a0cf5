"""Events of the demo: read from a file or generated, with their due times and their duplicates."""

from __future__ import annotations

import gzip
import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from io import TextIOWrapper
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from idemgate.errors import InvalidArgument

__all__ = ["DemoEvent", "Plan", "Publication", "made_up", "plan_of", "read"]

FIELDS = ("id", "ts", "path", "change")
SECONDS = 25.0
"""How long a file lasts if nothing is said: long enough to watch, short enough to wait for."""
TWICE = 0.05
"""The share of events that is published twice, at most `LATER` publications later."""
LATER = 50
YEAR_2000, YEAR_2100 = 946_684_800, 4_102_444_800


@dataclass(frozen=True, slots=True)
class DemoEvent:
    """A change of a path; `ts` in seconds. Events with one id are one event."""

    id: str
    ts: float
    path: str
    change: str

    def json(self) -> str:
        return json.dumps(asdict(self))


class Publication(NamedTuple):
    """An event and when to publish it, in seconds from the start."""

    at: float
    event: DemoEvent


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that will be published, in order. `stream` and `duration` are the length of the stream after its gaps
    were cut, in its own seconds and in ours; `speed` is the factor between them. `years`: its first and last time, if
    they are times at all."""

    publications: Sequence[Publication]
    events: int
    paths: int
    stream: float
    speed: float
    years: tuple[float, float] | None

    @property
    def duration(self) -> float:
        return self.stream / self.speed


def plan_of(events: Sequence[DemoEvent], speed: float | None, max_gap: float, seed: int) -> Plan:
    """When to publish what. `speed` None: so that it takes `SECONDS`. A gap beyond `max_gap` counts as `max_gap`."""
    gaps = (min(max(after.ts - before.ts, 0.0), max_gap) for before, after in pairwise(events))
    offsets = list(accumulate(gaps, initial=0.0))
    stream = offsets[-1]
    factor = speed or (stream / SECONDS if stream else 1.0)
    due = [offset / factor for offset in offsets]
    publications = [Publication(due[place], event) for place, event in _with_some_twice(events, seed)]
    paths = len({event.path for event in events})
    first, last = events[0].ts, events[-1].ts
    years = (first, last) if all(YEAR_2000 < ts < YEAR_2100 for ts in (first, last)) else None
    return Plan(publications, len(events), paths, stream, factor, years)


def _with_some_twice(events: Sequence[DemoEvent], seed: int) -> Iterator[tuple[int, DemoEvent]]:
    """Each event with the place of the event it is published with: its own, or for a second time a later one's."""
    chance = random.Random(seed)
    order: list[tuple[float, DemoEvent]] = []
    for place, event in enumerate(events):
        order.append((place, event))
        if chance.random() < TWICE:
            order.append((place + chance.randint(0, LATER) + 0.5, event))
    for after, event in sorted(order, key=lambda entry: entry[0]):
        yield min(int(after), len(events) - 1), event


def made_up(count: int, seed: int) -> list[DemoEvent]:
    """A stream as a busy repository has it: bursts of changes with pauses between, few paths that change often, many
    that rarely do. 200 events a second on average."""
    chance = random.Random(seed)
    events: list[DemoEvent] = []
    ts = 0.0
    while len(events) < count:
        burst = min(1 + int(chance.expovariate(1 / 20)), count - len(events))
        for _ in range(burst):
            path = f"src/part{min(int(chance.paretovariate(0.7)), 400):03}.py"
            events.append(DemoEvent(f"e{len(events):06}", round(ts, 3), path, chance.choices("MAD", (8, 1, 1))[0]))
            ts += chance.expovariate(1000.0)
        ts += chance.expovariate(1 / (burst * 0.004))
    return events


def read(path: Path, limit: int | None) -> list[DemoEvent]:
    """Read events from a file of JSON lines, which may be gzipped.

    Args:
        path: The file.
        limit: Most events to read; None means all.

    Raises:
        InvalidArgument: A line is not an event.
    """
    events: list[DemoEvent] = []
    try:
        with path.open("rb") as raw:
            packed = raw.peek(2)[:2] == b"\x1f\x8b"
            lines = TextIOWrapper(gzip.GzipFile(fileobj=raw) if packed else raw, encoding="utf-8")
            for number, line in enumerate(lines, 1):
                if len(events) == limit:
                    break
                if line.strip():
                    events.append(_event(line, f"{path}:{number}"))
    except (OSError, EOFError, UnicodeDecodeError) as error:
        fix = "Name a file of JSON lines, gzipped or not"
        raise InvalidArgument("input", str(path), f"cannot be read ({error})", fix) from None
    if not events:
        raise InvalidArgument(
            "input", str(path), "holds no events", f"One JSON object a line, with {', '.join(FIELDS)}"
        )
    return events


def _event(line: str, place: str) -> DemoEvent:
    fix = 'Each line is like {"id": "a1-0", "ts": 1387731401, "path": "pom.xml", "change": "M"}'
    try:
        found: dict[str, Any] = json.loads(line)
        event = DemoEvent(**{name: found[name] for name in FIELDS})
    except (ValueError, TypeError, KeyError) as error:
        raise InvalidArgument(place, line.strip(), f"is not an event ({error!r})", fix) from None
    if not all(isinstance(value, str) and value for value in (event.id, event.path, event.change)):
        raise InvalidArgument(place, line.strip(), "id, path and change are texts that are not empty", fix)
    if isinstance(event.ts, bool) or not isinstance(event.ts, int | float) or not math.isfinite(event.ts):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(place, line.strip(), "ts is a number, seconds since the epoch", fix)
    return event
