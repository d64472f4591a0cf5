"""What the processes of a load have told, judged: nothing lost, nothing done twice, nothing at the same time but where
a lease was lost."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

__all__ = ["Verdict", "median", "thirds"]


class Verdict:
    """Plays the events in their order. `lease_us`: how far apart the tokens are of two attempts that were live at a
    time, at least: the second got its token when the first's lease had ended. (Tokens are microseconds of the server's
    clock.)"""

    def __init__(self, events: Iterable[list[Any]], lease_us: int) -> None:
        self.lease_us = lease_us
        self.wrong: list[str] = []
        self.counted: Counter[str] = Counter()
        self.accepted: set[str] = set()
        self.started: dict[str, dict[int, list[str]]] = defaultdict(dict)
        self.attempts: dict[str, set[int]] = defaultdict(set)
        self.done: dict[str, int] = {}
        self.cancelled: set[str] = set()
        self.excused: set[str] = set()
        self._live: dict[tuple[str, int], str] = {}
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

    def _start(self, name: str, group: str, token: int, attempt: int, ids: list[str]) -> None:
        if token in self.started[name]:
            self.wrong.append(f"{name}: two handlers were given token {token}")
        if "/" not in name and attempt in self.attempts[name]:
            self.wrong.append(f"{name}: two runs were attempt {attempt}")
        self.attempts[name].add(attempt)
        for one in ids:
            if token > self.done.get(one, token):
                self.wrong.append(f"{name}: {one} was done under {self.done[one]} and started again under {token}")
        for (other, before), of in self._live.items():
            if (other == name or (group and of == group)) and abs(token - before) < self.lease_us:
                self.wrong.append(f"{name}: token {token} started while {other} was live under {before}")
        self.started[name][token] = ids
        self._live[name, token] = group

    def _end(self, name: str, token: int) -> None:
        self._live.pop((name, token), None)

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


def thirds(samples: list[dict[str, float]]) -> Iterator[tuple[str, float, float]]:
    """Of each figure the medians of the first and of the last third."""
    third = len(samples) // 3
    for name in samples[0]:
        first, last = samples[:third], samples[-third:]
        yield name, median([one[name] for one in first]), median([one[name] for one in last])
