"""Events of the demo: read from a file or made up, with the times to publish them and their duplicates."""

from __future__ import annotations

import gzip
import json
import math
import random
from collections import defaultdict
from collections.abc import Sequence
from io import TextIOWrapper
from itertools import accumulate, islice, pairwise
from pathlib import Path
from typing import NamedTuple

from idemgate.errors import InvalidArgument

__all__ = ["DemoEvent", "Plan", "made_up", "plan_of", "read"]

SECONDS = 25.0
"""How long a file takes without --speed."""
MAX_GAP = 60.0
"""Longest pause, in the file's time: the nights and holidays of years would be all there is to see."""
TWICE = 0.05
"""The share of events that is published twice, at most `LATER` events later."""
LATER = 50
SHAPE = 'Each line is like {"id": "a1-0", "ts": 1387731401, "path": "pom.xml", "change": "M"}; no text is empty'


class DemoEvent(NamedTuple):
    """A change of a path; `ts` in seconds. Events with one id are one event."""

    id: str
    ts: float
    path: str
    change: str

    def json(self) -> str:
        return json.dumps(self._asdict())


class Plan(NamedTuple):
    """The events, each with its seconds from the start. `speed` is the factor between the file's time and ours."""

    publications: list[tuple[float, DemoEvent]]
    events: int
    speed: float

    @property
    def duration(self) -> float:
        return self.publications[-1][0]


def plan_of(events: Sequence[DemoEvent], speed: float | None) -> Plan:
    """Plan when to publish what. A `speed` of None: so that it takes `SECONDS`."""
    offsets = list(accumulate((min(max(b.ts - a.ts, 0.0), MAX_GAP) for a, b in pairwise(events)), initial=0.0))
    factor = speed or offsets[-1] / SECONDS or 1.0
    chance = random.Random(1)
    publications: list[tuple[float, DemoEvent]] = []
    again: defaultdict[int, list[DemoEvent]] = defaultdict(list)
    for place, (offset, event) in enumerate(zip(offsets, events, strict=True)):
        if chance.random() < TWICE:
            again[min(place + chance.randint(0, LATER), len(events) - 1)].append(event)
        publications += [(offset / factor, one) for one in (event, *again[place])]
    return Plan(publications, len(events), factor)


def made_up(count: int) -> list[DemoEvent]:
    """Make up a stream like that of a busy repository: bursts with pauses between, and few paths that change often.

    It has 200 events a second on average.
    """
    chance = random.Random(1)
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
    """Read at most `limit` events from a file of JSON lines, which may be gzipped.

    Raises:
        InvalidArgument: The file cannot be read, or holds no events, or a line is no event.
    """
    try:
        with path.open("rb") as raw:
            packed = raw.peek(2)[:2] == b"\x1f\x8b"
            lines = TextIOWrapper(gzip.GzipFile(fileobj=raw) if packed else raw, encoding="utf-8")
            found = (_event(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip())
            events = list(islice(found, limit))
    except (OSError, EOFError, UnicodeDecodeError) as error:
        fix = "Name a file of JSON lines, gzipped or not"
        raise InvalidArgument("input", str(path), f"cannot be read ({error})", fix) from None
    if not events:
        raise InvalidArgument("input", str(path), "holds no events", SHAPE)
    return events


def _event(line: str, place: str) -> DemoEvent:
    try:
        found = json.loads(line)
        event = DemoEvent(*(found[name] for name in DemoEvent._fields))
        texts = all(isinstance(text, str) and text for text in (event.id, event.path, event.change))
        if texts and not isinstance(event.ts, bool) and math.isfinite(event.ts):
            return event
    except (ValueError, TypeError, KeyError):
        pass
    raise InvalidArgument(place, line.strip(), "is not an event", SHAPE)
