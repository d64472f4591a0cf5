"""Checks of a history: the events of attempts in the order in which they happened."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from idemgate.audit.findings import Finding

__all__ = ["Event", "check_history"]

What = Literal["start", "end", "done", "gone"]


@dataclass(frozen=True, slots=True)
class Event:
    """An event of one attempt at a key.

    Attributes:
        what: "start" when the handler begins, "end" when it returns or raises, "done" when the server has confirmed the
            completion or acknowledgement, "gone" when the owner died or lost its lease.
        key: the key. A "gone" with an `owner` and without a key ends all attempts of that owner.
        token: the fencing token, which identifies the attempt.
        attempt: the number of the attempt.
        owner: the owner of the attempt.
        work: the id that must not start again once done: the key of a guarded function, or `delivery.id`.
        group: the group of a topic.
        note: any JSON value of the test.
    """

    what: What
    key: str = ""
    token: int = 0
    attempt: int = 1
    owner: str = ""
    work: str = ""
    group: str = ""
    note: Any = None

    def to_json(self) -> str:
        """Return the event as a line of JSON, to send it to another process."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(line: str | bytes) -> Event:
        """Return the event in a line of JSON."""
        return Event(**json.loads(line))


def check_history(events: Iterable[Event], group_concurrency: int = 1) -> Iterator[Finding]:
    """Check a history of events.

    The tokens of a key must rise from start to start, and done work must not start again. A key has at most one live
    attempt, and a group at most `group_concurrency` live keys. An attempt is live from "start" to any other event.
    """
    last: dict[str, int] = {}
    done: dict[str, int] = {}
    live: dict[tuple[str, int], Event] = {}
    for event in events:
        if event.what == "start":
            yield from _check_start(event, last, done, live, group_concurrency)
            last[event.key] = max(event.token, last.get(event.key, 0))
            live[event.key, event.token] = event
        elif event.what == "gone" and not event.key:
            live = {name: one for name, one in live.items() if one.owner != event.owner}
        else:
            live.pop((event.key, event.token), None)
            if event.what == "done" and event.work:
                done[event.work] = event.token


def _check_start(
    event: Event, last: dict[str, int], done: dict[str, int], live: dict[tuple[str, int], Event], limit: int
) -> Iterator[Finding]:
    before = last.get(event.key, 0)
    if event.token <= before:
        yield Finding("fence-fell", event.key, f"started with token {event.token} after {before}")
    if event.work and event.work in done:
        what = f"{event.work!r} was done under token {done[event.work]} and started again under {event.token}"
        yield Finding("ran-again", event.key, what)
    groups: defaultdict[str, set[str]] = defaultdict(set)
    for (key, token), one in live.items():
        if key == event.key:
            yield Finding("overlap-key", key, f"token {event.token} started while {token} was live")
        groups[one.group].add(key)
    inside = groups[event.group] - {event.key} if event.group else set[str]()
    if len(inside) >= limit:
        what = f"started in group {event.group!r} while {', '.join(sorted(inside))} of it were live"
        yield Finding("overlap-group", event.key, what)
