"""What the processes of a load have told, judged: nothing lost, nothing done twice, nothing at the same time but where
a lease was lost."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

__all__ = ["Verdict", "find_growth", "median", "read_events"]


class Run(NamedTuple):
    """From its start to its end; one that was killed in between is dead, and its lease goes on."""

    pid: int
    name: str
    group: str
    token: int


class Verdict:
    """Plays the events in their order. Tokens, and ends of leases, are microseconds of the server's clock.

    A run may begin beside another of its key or group only where the other's lease had ended: `lease_us` after its
    token, or after the last heartbeat that its process knows got through. So an owner that is stopped, or kept from the
    server, for longer than a lease is excused, and nobody else. `slack_us`: how far the clock may have been set back
    meanwhile."""

    def __init__(self, events: Iterable[list[Any]], lease_us: int, slack_us: int = 0) -> None:
        self.lease_us, self.slack_us = lease_us, slack_us
        self.wrong: list[str] = []
        self.counted: Counter[str] = Counter()
        self.accepted: set[str] = set()
        self.started: dict[str, dict[int, list[str]]] = defaultdict(dict)
        self.attempts: dict[str, set[int]] = defaultdict(set)
        self.done: dict[str, int] = {}
        self.cancelled: set[str] = set()
        self.excused: set[str] = set()
        self.overtaken: set[tuple[str, int]] = set()
        """Runs that lived on when their lease had ended and another had begun."""
        self._live: dict[tuple[str, int], Run] = {}
        self._renewals: dict[tuple[str, int], list[tuple[int, bool]]] = defaultdict(list)
        self._dead_pids: set[int] = set()
        for what, *facts in events:
            self.counted[what] += 1
            getattr(self, f"_{what}")(*facts)

    def lost(self) -> set[str]:
        """What was accepted, and of which no handler was ever started, though it was not cancelled and did not die."""
        ran = {one for tokens in self.started.values() for ids in tokens.values() for one in ids}
        return self.accepted - ran - self.excused

    @property
    def again(self) -> int:
        """Runs beyond the first of each guarded key."""
        return sum(len(tokens) - 1 for name, tokens in self.started.items() if "/" not in name)

    def starts(self, topic: str) -> int:
        return sum(len(tokens) for name, tokens in self.started.items() if name.startswith(f"{topic}/"))

    # -- one for each word of a load ----------------------------------------------------------------------------------

    def _start(self, pid: int, name: str, group: str, token: int, attempt: int, ids: list[str]) -> None:
        if token in self.started[name]:
            self.wrong.append(f"{name}: two handlers were given token {token}")
        if "/" not in name and attempt in self.attempts[name]:
            self.wrong.append(f"{name}: two runs were attempt {attempt}")
        self.attempts[name].add(attempt)
        for one in ids:
            if token > self.done.get(one, token):
                self.wrong.append(f"{name}: {one} was done under {self.done[one]} and started again under {token}")
        self.started[name][token] = ids
        self._live[name, token] = Run(pid, name, group, token)
        self._apart(self._live[name, token])

    def _end(self, name: str, token: int) -> None:
        self._live.pop((name, token), None)
        self._renewals.pop((name, token), None)

    def _renewed(self, pid: int, name: str, token: int | None, until: int) -> None:
        """A heartbeat got through. That of a guarded key does not say its token: it is the last one here.

        That may be wrong, because a claim whose reply was late is renewed before its run starts: `_ends` corrects it.
        """
        guessed = token is None
        if token is None:
            token = max((one.token for one in self._live.values() if (one.pid, one.name) == (pid, name)), default=None)
        if token is None or (token in self.started[name] and (name, token) not in self._live):
            return  # it has ended, or was not begun
        self._renewals[name, token].append((until, guessed))
        if (name, token) in self._live:
            self._apart(self._live[name, token])

    def _killed(self, pid: int) -> None:
        self._dead_pids.add(pid)

    def _ends(self, run: Run, other: Run) -> int:
        """When the lease of a run ends. A heartbeat after the token of a later run of the same process is of that."""
        renewals, shared = self._renewals.get((run.name, run.token), ()), run.pid == other.pid
        ends = [until for until, guess in renewals if not (guess and shared and until - self.lease_us > other.token)]
        return max([run.token + self.lease_us, *ends])

    def _apart(self, run: Run) -> None:
        for other in self._live.values():
            if other is run or not (other.name == run.name or (run.group and other.group == run.group)):
                continue
            first, second = sorted((run, other), key=lambda one: one.token)
            ends = self._ends(first, second)
            if second.token < ends - self.slack_us:
                self.wrong.append(f"{second} began while {first} was live, until {ends}")
            elif first.pid not in self._dead_pids:
                self.overtaken.add((first.name, first.token))

    def _done(self, key: str) -> None:
        """Under the last token that was granted before: nobody else can complete it."""
        self.done.setdefault(key, max(self.started[key]))

    def _settled(self, name: str, token: int, verb: str, word: str) -> None:
        self.counted[f"{verb} {word}"] += 1
        if (verb, word) != ("ack", "ok"):
            return
        for one in self.started[name].get(token, ()):
            self.done[one] = token
            if one in self.cancelled:
                self.wrong.append(f"{name}: {one} was cancelled, and then done")

    def _accepted(self, topic: str, one: str) -> None:
        self.accepted.add(one)

    def _sent(self, topic: str, one: str) -> None:
        """It may be accepted from now on."""

    def _cancel(self, one: str, answer: str) -> None:
        if answer != "absent":
            self.excused.add(one)
        if answer == "cancelled":
            self.cancelled.add(one)

    def _reschedule(self, one: str, answer: str) -> None:
        """It is delivered at another time."""

    def _dead(self, ids: list[str]) -> None:
        self.excused |= set(ids)

    def _wrong(self, text: str) -> None:
        self.wrong.append(text)


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def _thirds(samples: list[dict[str, float]]) -> Iterator[tuple[str, float, float]]:
    """Yield of each figure the medians of the first and of the last third."""
    third = len(samples) // 3
    for name in samples[0]:
        first, last = samples[:third], samples[-third:]
        yield name, median([one[name] for one in first]), median([one[name] for one in last])


def find_growth(who: str, samples: list[dict[str, float]], most: Mapping[str, tuple[float, float]]) -> list[str]:
    """Return what grew too much from the first third of the samples to the last, and print all figures.

    `most`: of each figure the share of the first median, and the amount on top, by which the last may be larger.
    """
    found: list[str] = []
    for name, first, last in _thirds(samples):
        print(f"{who}: {name} {first:,.0f} -> {last:,.0f}")
        share, amount = most[name]
        if last > first * (1 + share) + amount:
            found.append(f"{who}: {name} grew from {first:,.0f} to {last:,.0f}")
    return found


def read_events(raw: Any, key: str) -> Iterator[list[Any]]:
    """Yield the events that processes pushed to a list as JSON."""
    for start in range(0, raw.llen(key), 10_000):
        yield from map(json.loads, raw.lrange(key, start, start + 9_999))
