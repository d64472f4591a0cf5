"""Compose the report of a process. All of it is collected then. So calls and deliveries cost nothing more."""

from __future__ import annotations

import os
import socket
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from time import time as wall_clock
from typing import Any

from idemgate.core.activity import Failure
from idemgate.core.clock import monotonic
from idemgate.core.process import program_name
from idemgate.core.text import cut
from idemgate.core.version import VERSION
from idemgate.guard.heartbeat import Heartbeat
from idemgate.presence.location import find_location
from idemgate.presence.report import LISTED, cut_name, pack_report
from idemgate.store.context import Context, Running

__all__ = ["Composer"]

LONGEST_TEXT = 160
_MINUTE, _TEN_MINUTES = 6, 60
"""In reports, of which one is sent every ten seconds."""


class Composer:
    """Composes the reports of one gate in this process."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._started = monotonic()
        self._counters = Past()
        self._histograms = Past()

    def compose(self) -> bytes:
        """Return the report, packed."""
        activity, runners, now = self._context.activity, self._context.runners.now(), monotonic()
        places = [runner.places() for runner in runners]
        facts = {
            "host": cut_name(socket.gethostname()), "pid": os.getpid(), "version": VERSION,
            "program": cut_name(program_name()),
            "role": "+".join(sorted({runner.role for runner in runners}, reverse=True)) or "client",
            "up": _ms(now - self._started), "clock": round(wall_clock() * 1000),
            "places": [sum(one) for one in zip(*places, strict=True)] or [0, 0],
        }  # fmt: skip
        running, failures = sorted(self._running(), key=lambda one: one.since), activity.list_failures()
        last_minute, times, calls = self._list_times()
        # Facts of the entries of lists stand apart: a process of another version may not know them.
        facts |= {
            "calls": calls, "max_run": [one.max_run for one in running[:LISTED]],
            "of_store": [number for number, one in enumerate(failures) if one.of_store],
        }  # fmt: skip
        lists: dict[str, list[Any]] = {
            "running": self._list_running(running[:LISTED], now),
            "failures": [self._pack_failure(one, now) for one in failures],
            "topics": [cut_name(name) for runner in runners for name in runner.topics()],
            "times": times,
            "scopes": [cut_name(name) for name in tuple(self._context.scopes)],
            "refused": [self._pack_failure(one, now) for one in reversed(activity.refused.copy())],
            "held": self._list_keys(activity.held),
            "outdated": self._list_keys(activity.outdated),
            "adopted": [[cut_name(topic), *both] for topic, both in activity.adopted.copy().items()],
            "last_minute": last_minute,
        }
        return pack_report(facts, self._list_counters(), lists, {"running": max(0, len(running) - LISTED)})

    # -- numbers ------------------------------------------------------------------------------------------------------

    def _list_counters(self) -> list[list[Any]]:
        """Return each counter with its increase, the counters that increased lately first."""
        counts = self._context.counters.snapshot()
        minute, ten_minutes = self._counters.differences(counts)
        found = [[name, n, minute.get(name, 0), ten_minutes.get(name, 0)] for name, n in counts.items()]
        return sorted(found, key=lambda one: one[3] == 0)

    def _list_times(self) -> tuple[list[list[Any]], list[list[Any]], list[int]]:
        """Return the durations of topics in the last minute and the last ten, those with the most first, and of calls.

        Those of calls are of ten minutes.
        """
        activity = self._context.activity
        counts = {("calls", ""): activity.calls.counts, **{
            (kind, topic): getattr(times, kind).counts
            for topic, times in activity.topics.copy().items() for kind in ("lateness", "handling")
        }}  # fmt: skip
        flat = {(*name, bucket): n for name, buckets in counts.items() for bucket, n in enumerate(buckets) if n}
        minute, ten_minutes = self._histograms.differences(flat)

        def buckets(recent: Mapping[Any, int], kind: str, topic: str) -> list[int]:
            numbers = [recent.get((kind, topic, bucket), 0) for bucket in range(len(activity.calls.counts))]
            while numbers and not numbers[-1]:
                numbers.pop()
            return numbers

        def by_topic(recent: Mapping[Any, int]) -> list[list[Any]]:
            times = [
                [cut_name(topic), buckets(recent, "lateness", topic), buckets(recent, "handling", topic)]
                for topic in activity.topics.copy()
            ]
            return sorted((one for one in times if one[1] or one[2]), key=lambda one: -sum(one[2]))

        return by_topic(minute), by_topic(ten_minutes), buckets(ten_minutes, "calls", "")

    # -- work ---------------------------------------------------------------------------------------------------------

    def _list_running(self, running: Sequence[Running], now: float) -> list[list[Any]]:
        """Return what runs, each with the line of code where it is."""
        threads = sys._current_frames() if running else {}
        return [
            [
                cut_name(one.of), self._show("key", one.key), _ms(now - one.since),
                _cut_front(find_location(one.runs_in, threads), LONGEST_TEXT),
            ]
            for one in running
        ]  # fmt: skip

    def _running(self) -> Iterator[Running]:
        for runner in self._context.runners.now():
            yield from runner.running()
        for renewal in self._context.heartbeat.living():
            if isinstance(renewal, Heartbeat) and (found := renewal.describe()) is not None:
                yield found

    def _list_keys(self, noted: Iterable[tuple[str, ...]]) -> list[list[str]]:
        """Return the scope or topic, the key and perhaps the group of each, the newest first."""
        return [
            [cut_name(of), self._show("key", key), *(self._show("key", group) for group in groups)]
            for of, key, *groups in reversed(tuple(noted))
        ]

    def _pack_failure(self, failure: Failure, now: float) -> list[Any]:
        after = None if failure.retry_after is None else _ms(failure.retry_after)
        shown = self._show("key", failure.key), failure.attempt, self._show("error", failure.error)
        return [cut_name(failure.of), *shown, _ms(now - failure.at), after]

    def _show(self, kind: str, text: str) -> str:
        """Return what a report may hold of a text."""
        return cut(self._context.redact_text(kind, text), LONGEST_TEXT)


class Past:
    """The former values of numbers that only grow, to tell how much they grew in a minute and in ten minutes."""

    def __init__(self) -> None:
        self._recent: deque[dict[Any, int]] = deque(maxlen=_MINUTE)  # one for each report
        self._older: deque[dict[Any, int]] = deque(maxlen=_TEN_MINUTES // _MINUTE)  # one for each minute
        self._reports = 0

    def differences(self, numbers: dict[Any, int]) -> tuple[Mapping[Any, int], Mapping[Any, int]]:
        """Return how much each number grew in the last minute and in the last ten. Remember them for later calls."""
        found = tuple(
            {name: n - before.get(name, 0) for name, n in numbers.items()}
            for before in (past[0] if past.maxlen == len(past) else {} for past in (self._recent, self._older))
        )
        if self._reports % _MINUTE == 0:
            self._older.append(numbers)
        self._recent.append(numbers)
        self._reports += 1
        return found[0], found[1]


def _ms(seconds: float) -> int:
    return max(0, round(seconds * 1000))


def _cut_front(text: str, most: int) -> str:
    text = text.encode(errors="backslashreplace").decode()
    return text if len(text) <= most else "..." + text[3 - most :]
