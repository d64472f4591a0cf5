"""Events of the demo: read from a file or made up. Each has the times to publish it and its duplicates."""

from __future__ import annotations

import contextlib
import gzip
import json
import math
import random
import zlib
from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate, islice, pairwise
from pathlib import Path
from typing import NamedTuple

from idemgate.errors import InvalidArgument

__all__ = ["DemoEvent", "DemoPlan", "made_up", "plan_of", "read", "read_lines"]

SECONDS = 25.0
"""The longest time without --speed."""
MAX_GAP = 60.0
"""Longest pause in the file's time. Otherwise the nights and holidays of years would be all there is to see."""
TWICE = 0.05
"""The share of events that is published twice. The second copy is at most `LATER` events later."""
LATER = 50
SHAPE = 'Each line is like {"id": "a1-0", "ts": 1387731401, "path": "pom.xml", "change": "M"}; no text is empty'


class DemoEvent(NamedTuple):
    """A change of a path; `ts` in seconds. Events with one id are one event."""

    id: str
    ts: float
    path: str
    change: str


DemoPlan = list[tuple[float, DemoEvent]]


def plan_of(events: Sequence[DemoEvent], speed: float | None) -> tuple[DemoPlan, float]:
    """Return the events with their seconds from the start and the speed. None: it takes `SECONDS` at most."""
    pauses = (min(max(after.ts - before.ts, 0.0), MAX_GAP) for before, after in pairwise(events))
    offsets = list(accumulate(pauses, initial=0.0))
    speed = speed or max(1.0, offsets[-1] / SECONDS)
    chance, plan = random.Random(1), DemoPlan()
    again: defaultdict[int, list[DemoEvent]] = defaultdict(list)
    for place, (offset, event) in enumerate(zip(offsets, events, strict=True)):
        if chance.random() < TWICE:
            again[min(place + chance.randint(0, LATER), len(events) - 1)].append(event)
        plan += [(offset / speed, one) for one in (event, *again[place])]
    return plan, speed


def made_up(count: int) -> list[DemoEvent]:
    """Make up a busy repository: 200 changes a second on average of few paths that change often."""
    chance = random.Random(1)
    times = accumulate(chance.expovariate(200) for _ in range(count))
    paths = (f"src/part{min(int(chance.paretovariate(0.7)), 400):03}.py" for _ in range(count))
    return [DemoEvent(f"e{n:06}", ts, path, "M") for n, (ts, path) in enumerate(zip(times, paths, strict=True))]


def read(path: Path, limit: int | None) -> list[DemoEvent]:
    """Read at most `limit` events from a file of JSON lines. It may be gzipped.

    Raises:
        InvalidArgument: The file cannot be read, or holds no events, or a line is no event.
    """
    lines = enumerate(read_lines(path, "input"), 1)
    found = (_event(line, f"{path}:{number}") for number, line in lines if line.strip())
    if not (events := list(islice(found, limit))):
        raise InvalidArgument("input", str(path), "holds no events", SHAPE)
    return events


def read_lines(path: Path, option: str) -> list[str]:
    """Return the lines of a file, gzipped or not. Raise InvalidArgument about `option` if it cannot be read."""
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data).decode().split("\n")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        fix = "Name a file of JSON lines, gzipped or not"
        raise InvalidArgument(option, str(path), f"cannot be read ({error})", fix) from None


def _event(line: str, place: str) -> DemoEvent:
    with contextlib.suppress(ValueError, TypeError, KeyError, OverflowError):
        found = json.loads(line)
        event = DemoEvent(*(found[name] for name in DemoEvent._fields))
        texts = all(isinstance(text, str) and text for text in (event.id, event.path, event.change))
        if texts and not isinstance(event.ts, bool) and math.isfinite(event.ts):
            return event
    raise InvalidArgument(place, line.strip(), "is not an event", SHAPE)
