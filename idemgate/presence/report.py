"""The report of a process: its facts, packed into at most 4 KiB, and decoded again.

A report holds no time, only ages: the reader adds them to the time of the report by the server's clock. So a wrong
clock of the process does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import chain, repeat, zip_longest
from typing import Any

from idemgate.core.activity import BOUNDS
from idemgate.core.codec.decoding import unpack, wrap_decode_errors
from idemgate.core.codec.packing import pack
from idemgate.core.text import cut

__all__ = [
    "MAX_BYTES",
    "Counter",
    "Process",
    "RunningWork",
    "Times",
    "WorkFailure",
    "cut_name",
    "decode_report",
    "pack_report",
]

MAX_BYTES = 4096
"""The most bytes of a report."""
COUNTERS_BYTES = 1536
"""The most bytes of its counters. They are packed first, because they are the same for a busy and an idle process."""
LISTED = 20
"""The most running deliveries, failures and refused triggers of a report."""
_COUNTERS = "counters"
_FACTS = {"host": str, "pid": int, "version": str, "program": str, "role": str, "up": int, "places": list}


@dataclass(slots=True)
class Counter:
    """A counter of a process: since its start, and in about the last minute and the last ten minutes."""

    total: int
    last_minute: int
    last_10_minutes: int


@dataclass(slots=True)
class Times:
    """The durations of one topic: the number of them in each bucket of `BOUNDS`."""

    lateness: tuple[int, ...]
    handling: tuple[int, ...]


@dataclass(slots=True)
class RunningWork:
    """A delivery or guarded call that ran at the time of the report. `of` is its topic or scope.

    `location` is the file, the line and the function where it was. It is empty if that is unknown. `max_run` is that of
    a guarded call in ms, 0 without a limit. It is None of a delivery, and of a version that does not report it.
    """

    of: str
    key: str
    since: datetime
    location: str
    max_run: int | None = None


@dataclass(slots=True)
class WorkFailure:
    """A failed delivery or guarded call, or a refused trigger, which has no `attempt`. `of` is its topic or scope.

    `next_at` is the time of the next attempt; None if none follows. It is `at` of a guarded key that is free: whether
    another call follows is unknown. `of_store` is true if a server failed, and not the handler.
    """

    of: str
    key: str
    attempt: int | None
    error: str
    at: datetime
    next_at: datetime | None
    of_store: bool = False


@dataclass(frozen=True, slots=True)
class Process:
    """The report of a process at `seen_at`. A process with several gates of the namespace is there for each.

    Attributes:
        id: Its id; a forked child has another one.
        seen_at: The time of the report by the server's clock.
        role: "worker", "subscriber", "worker+subscriber" or "client".
        started_at: The time when the process began to use the gate.
        busy, places: How many handlers run, and how many may run.
        topics: The topics that it serves.
        scopes: The scopes that it uses.
        counters: Its counters that are not 0.
        times: Durations of the last ten minutes, by topic.
        last_minute: Durations of about the last minute, by topic. Empty of a version that does not report them.
        calls: Durations of calls of the store in the last ten minutes, by bucket.
        running: The oldest deliveries and guarded calls that run.
        failures: At most ten messages and guarded keys that failed often. Other failures follow. Of both the newest
            come first. What failed often may have succeeded since.
        refused: The newest triggers that it refused, the newest first.
        held: The newest keys that it found held, as scope and key. They may be decided by now.
        outdated: The newest keys of which a trigger was dropped with a version: topic, key and group, "" for none.
        adopted: Topics of which the stored policy has a higher revision than the program declares: the topic, the
            stored revision and the declared one.
        ahead: The seconds that its clock is ahead of the server's, up to the second that a report takes. None of a
            version that does not report it.
        dropped: How many entries of each list did not fit into the report.
    """

    id: str
    seen_at: datetime
    host: str
    pid: int
    version: str
    program: str
    role: str
    started_at: datetime
    busy: int
    places: int
    topics: tuple[str, ...]
    scopes: tuple[str, ...]
    counters: Mapping[str, Counter]
    times: Mapping[str, Times]
    last_minute: Mapping[str, Times]
    calls: tuple[int, ...]
    running: tuple[RunningWork, ...]
    failures: tuple[WorkFailure, ...]
    refused: tuple[WorkFailure, ...]
    held: tuple[tuple[str, str], ...]
    outdated: tuple[tuple[str, str, str], ...]
    adopted: tuple[tuple[str, int, int], ...]
    ahead: float | None
    dropped: Mapping[str, int]

    @property
    def name(self) -> str:
        """The host and the process id, as `worker ls` shows them."""
        return f"{self.host}:{self.pid}"


# -- pack -------------------------------------------------------------------------------------------------------------


def pack_report(
    facts: Mapping[str, Any], counters: Iterable[Any], lists: Mapping[str, Sequence[Any]], unlisted: Mapping[str, int]
) -> bytes:
    """Pack a report. What does not fit is dropped, and counted as `dropped`.

    Args:
        facts: What is always in it; short.
        counters: The counters, the most important first.
        lists: The other lists by name, the most important entry of each first. They share the space fairly.
        unlisted: How many entries of a list were not given. They count as dropped.
    """
    kept: dict[str, list[Any]] = {_COUNTERS: [], **{name: [] for name in lists}}
    dropped = dict.fromkeys(kept, 0)
    headers = 2 * len(kept)  # a list of more than 15 entries has a longer one
    left = MAX_BYTES - headers - len(pack({**facts, **kept, "dropped": dict.fromkeys(kept, 2**31)}))
    room = given = min(left, COUNTERS_BYTES)
    for entry in counters:
        room = _add(entry, _COUNTERS, room, kept, dropped)
    left -= given - room
    for entries in zip_longest(*lists.values()):
        for name, entry in zip(lists, entries, strict=True):
            if entry is not None:
                left = _add(entry, name, left, kept, dropped)
    dropped = {name: n + unlisted.get(name, 0) for name, n in dropped.items()}
    return pack({**facts, **kept, "dropped": {name: n for name, n in dropped.items() if n}})


def _add(entry: Any, name: str, room: int, kept: dict[str, list[Any]], dropped: dict[str, int]) -> int:
    """Keep an entry if there is room. Return the room that is left."""
    size = len(pack(entry))
    if size > room or dropped[name]:
        dropped[name] += 1
        return room
    kept[name].append(entry)
    return room - size


def cut_name(name: str) -> str:
    """Return what a report holds of the name of a topic, a scope, a host or a program."""
    return cut(name, 64)


# -- decode -----------------------------------------------------------------------------------------------------------


def decode_report(process: str, seen_at: datetime, packed: bytes) -> Process:
    """Decode the report of a process. Raises DecodeError.

    Args:
        process: The id of the process.
        seen_at: The time of the report.
        packed: The report.
    """
    with wrap_decode_errors("the report of a process"):
        facts = unpack(packed, "the report of a process", raw=False)
        for name, kind in _FACTS.items():
            if not isinstance(facts[name], kind):
                raise TypeError(f"{name} is a {type(facts[name]).__name__}")
        busy, places = map(_number, facts["places"])
        return Process(
            process, seen_at, facts["host"], facts["pid"], facts["version"], facts["program"], facts["role"],
            _ago(seen_at, facts["up"]), busy, places,
            tuple(map(_text, facts["topics"])), tuple(map(_text, facts["scopes"])),
            {_text(name): Counter(*map(_number, counts)) for name, *counts in facts[_COUNTERS]},
            _times(facts["times"]), _times(facts.get("last_minute", ())),
            _buckets(facts["calls"]),
            tuple(
                RunningWork(
                    _text(of), _text(key), _ago(seen_at, age), _text(location), None if most is None else _number(most)
                )
                for (of, key, age, location), most in zip(
                    facts["running"], chain(facts.get("max_run", ()), repeat(None)), strict=False
                )
            ),
            tuple(
                _decode_failure(seen_at, failure, number in facts.get("of_store", ()))
                for number, failure in enumerate(facts["failures"])
            ),
            tuple(_decode_failure(seen_at, failure) for failure in facts["refused"]),
            tuple((_text(of), _text(key)) for of, key in facts.get("held", ())),
            tuple((_text(of), _text(key), _text(group)) for of, key, group in facts.get("outdated", ())),
            tuple((_text(of), _number(one), _number(mine)) for of, one, mine in facts.get("adopted", ())),
            None if facts.get("clock") is None else _number(facts["clock"]) / 1000 - seen_at.timestamp(),
            {_text(name): _number(n) for name, n in facts["dropped"].items()},
        )  # fmt: skip


def _decode_failure(seen_at: datetime, failure: Any, of_store: bool = False) -> WorkFailure:
    of, key, attempt, error, age, after = failure
    at = _ago(seen_at, age)
    return WorkFailure(
        _text(of), _text(key), None if attempt is None else _number(attempt), _text(error), at,
        None if after is None else at + timedelta(milliseconds=_number(after)), of_store,
    )  # fmt: skip


def _ago(seen_at: datetime, age_ms: Any) -> datetime:
    return seen_at - timedelta(milliseconds=_number(age_ms))


_text: Callable[[Any], str] = str.__str__
_number: Callable[[Any], int] = int.__int__


def _times(rows: Any) -> dict[str, Times]:
    return {_text(name): Times(_buckets(late), _buckets(handling)) for name, late, handling in rows}


def _buckets(values: Any) -> tuple[int, ...]:
    """Return the numbers of all buckets. The last ones are left out if they are 0."""
    counts = tuple(map(_number, values))
    if len(counts) > len(BOUNDS) + 1:
        raise ValueError("too many buckets")
    return counts + (0,) * (len(BOUNDS) + 1 - len(counts))
