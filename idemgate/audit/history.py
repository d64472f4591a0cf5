"""What was run when: events in the order in which they happened, and what they must never show."""

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
    """Something that happened to an attempt at a key, which `token`, its fencing token, names.

    "start" when its handler begins; "end" when it has left the handler, however; "done" when the store has said that
    it is completed or acknowledged; "gone" when its owner died or lost its lease: of an `owner` and no key, all of
    them. `work` is what must not run again once done: of a guarded function the key, of a topic `delivery.id`. `note`
    is the test's own, of what JSON knows.
    """

    what: What
    key: str = ""
    token: int = 0
    attempt: int = 1
    owner: str = ""
    work: str = ""
    group: str = ""
    note: Any = None

    def packed(self) -> str:
        """As a line of JSON: to send it from one process to another."""
        return json.dumps(asdict(self))

    @staticmethod
    def of(line: str | bytes) -> Event:
        """An event that was `packed`."""
        return Event(**json.loads(line))


def check_history(events: Iterable[Event], group_concurrency: int = 1) -> Iterator[Finding]:
    """Tokens of a key rise from start to start; nothing that is done starts again; of a key no two attempts are live
    at a time, and of a group no more than `group_concurrency`. Live: started, and neither ended, done nor gone."""
    last: dict[str, int] = {}
    done: dict[str, int] = {}
    live: dict[tuple[str, int], Event] = {}
    for event in events:
        if event.what == "start":
            yield from _started(event, last, done, live, group_concurrency)
            last[event.key] = max(event.token, last.get(event.key, 0))
            live[event.key, event.token] = event
        elif event.what == "gone" and not event.key:
            live = {name: one for name, one in live.items() if one.owner != event.owner}
        else:
            live.pop((event.key, event.token), None)
            if event.what == "done" and event.work:
                done[event.work] = event.token


def _started(
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
