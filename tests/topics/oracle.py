"""What a topic's deliveries must be, in plain Python: no code shared with the package, times in whole seconds."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from functools import reduce
from itertools import groupby
from typing import Any, NamedTuple

APPEND_CAP = 3


class Delivered(NamedTuple):
    due: float
    key: str
    count: int
    first: float
    last: float
    payload: Any
    reason: str


MERGES: dict[str, Callable[[list[Any]], Any]] = {
    "last": lambda payloads: payloads[-1],
    "first": lambda payloads: payloads[0],
    "append": lambda payloads: payloads[:APPEND_CAP],
    "union": lambda payloads: list(dict.fromkeys(item for payload in payloads for item in payload)),
    "count": len,
    "sum": lambda payloads: reduce(operator.add, payloads),
    "min": min,
    "max": max,
    "fields": lambda payloads: {field: MERGES[field]([p[field] for p in payloads]) for field in payloads[0]},
}


def deliveries(
    events: Iterable[tuple[float, str, Any]], merge: str, *, window: float = 0, quiet: float = 0, max_delay: float = 0
) -> list[Delivered]:
    """Of (time, key, payload) in the order of their times; what comes out is in the order of due times, then of keys.

    A message whose time has come is delivered before what is triggered at that time.
    """
    open_: dict[str, tuple[float, str, list[tuple[float, Any]]]] = {}
    done: list[Delivered] = []

    def deliver(until: float) -> None:
        for key in [key for key, (due, _, _) in open_.items() if due <= until]:
            due, reason, seen = open_.pop(key)
            payload = MERGES[merge]([payload for _, payload in seen])
            done.append(Delivered(due, key, len(seen), seen[0][0], seen[-1][0], payload, reason))

    for time, group in groupby(events, key=operator.itemgetter(0)):
        deliver(time)
        for _, key, payload in group:
            due, reason, seen = open_.get(key, (time + window, "window", []))
            if merge == "append" and len(seen) == APPEND_CAP:
                continue  # dropped
            seen.append((time, payload))
            if quiet:
                due, reason = min(
                    (time + quiet, "quiet"), (seen[0][0] + max_delay, "max_delay"), key=lambda bound: bound[0]
                )
            open_[key] = (due, reason, seen)
    deliver(float("inf"))
    return sorted(done, key=lambda one: (one.due, one.key.encode()))
