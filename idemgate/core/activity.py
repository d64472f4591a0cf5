"""The recent activity of a gate in this process: failures, refused triggers and durations."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from typing import NamedTuple, TypeVar

from idemgate.core.clock import monotonic

__all__ = ["BOUNDS", "OFTEN", "Activity", "Failure", "Sampled", "TopicTimes"]

BOUNDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
"""The largest seconds of each bucket. The last bucket, after these, has no bound. The same for all histograms, so that
readers can add them up."""


SAMPLED_EVERY = 0.05
"""Seconds between two samples. To count each duration would cost a delivery 5 % of its instructions."""


class Sampled:
    """The number of durations in each bucket since the start of the process, of a sample every 50 ms.

    The caller asks `begin` before it knows the duration, or when one ends. To ask when one ends whether it began after
    the last sample would leave out the long ones. Any thread may add one, without a lock. An increment may be lost if
    two threads add at the same moment.
    """

    __slots__ = ("counts", "due")

    def __init__(self) -> None:
        self.counts: list[int] = [0] * (len(BOUNDS) + 1)
        self.due: float = 0.0

    def begin(self, now: float) -> bool:
        """Return True if a duration that begins or ends now is to be counted. Frequent callers compare `due` first."""
        if now <= self.due:
            return False
        self.due = now + SAMPLED_EVERY
        return True

    def add(self, seconds: float) -> None:
        """Count one duration. A negative one, of clocks that differ, belongs to the first bucket."""
        self.counts[bisect_left(BOUNDS, seconds)] += 1


K = TypeVar("K")
V = TypeVar("V")
KEPT = 20
"""The newest entries of each kind that a process remembers."""
OFTEN = 3
"""The attempts from which on a message fails often."""


class Failure(NamedTuple):
    """A handler or a guarded function that raised, or a trigger that was refused.

    `of` is the topic or scope. `attempt` is None if it is unknown, and for a trigger. `at` is in seconds of
    `monotonic`. `retry_after` is the delay until the next attempt in seconds, or None if no attempt follows. It is 0 of
    a guarded function whose key is free: whether another call follows is unknown. `of_store` is true if the failure was
    that of a server, and not of the handler.
    """

    of: str
    key: str
    attempt: int | None
    error: str
    at: float
    retry_after: float | None = None
    of_store: bool = False


class TopicTimes:
    """The durations of one topic: from the due time of a message to its take, and from start to end of its handler.

    Lateness is that of all messages of a sampled take.
    """

    __slots__ = ("handling", "lateness")

    def __init__(self) -> None:
        self.handling: Sampled = Sampled()
        self.lateness: Sampled = Sampled()


class Activity:
    """The recent failures and durations of one gate in this process.

    Attributes:
        failures: The newest failures of handlers and guarded functions.
        failing: The newest failure of each message or guarded key that failed often and may be tried again, by topic or
            scope, and key. Other failures do not push it out: they may be many between two attempts of one message. It
            is taken out if a later attempt is the last one or a server failed in it, but not if that succeeds.
        refused: The newest triggers that this process refused.
        topics: Durations of the topics that a worker of this process serves.
        held: The keys that this process found held, as scope and key. The store may know better by now.
        outdated: The keys of which a trigger was dropped with a version, as topic, key and group, "" for none.
        adopted: By topic, the revision of the stored policy that this process follows, and the lower one that it
            declares.
        calls: Samples of the durations of single calls of the store, retries not included.
    """

    def __init__(self) -> None:
        self.failures: deque[Failure] = deque(maxlen=KEPT)
        self.failing: dict[tuple[str, str], Failure] = {}
        self.refused: deque[Failure] = deque(maxlen=KEPT)
        self.topics: dict[str, TopicTimes] = {}
        self.held: dict[tuple[str, str], None] = {}
        self.outdated: dict[tuple[str, str, str], None] = {}
        self.adopted: dict[str, tuple[int, int]] = {}
        self.calls: Sampled = Sampled()

    def note_failure(
        self, of: str, key: str, attempt: int | None, error: str, retry_after: float | None, of_store: bool = False
    ) -> None:
        """Remember that a handler or a guarded function failed. Any thread may call it."""
        one = Failure(of, key, attempt, error, monotonic(), retry_after, of_store)
        self.failures.append(one)
        if retry_after is not None and (attempt or 0) >= OFTEN and not of_store:
            _keep(self.failing, (of, key), one)
        else:
            self.failing.pop((of, key), None)

    def list_failures(self) -> list[Failure]:
        """Return at most `KEPT` failures: first those of messages that fail often. Of both kinds the newest come first.

        Half of the places are for other failures, because what failed often may have succeeded since.
        """
        failing = tuple(self.failing.values())[-KEPT // 2 :]
        known = {(one.of, one.key) for one in failing}
        others = [one for one in self.failures.copy() if (one.of, one.key) not in known]
        return [*reversed(failing), *reversed(others)][:KEPT]

    def note_refused(self, topic: str, key: str, error: str) -> None:
        """Remember that a trigger was refused. Any thread may call it."""
        self.refused.append(Failure(topic, key, None, error, monotonic()))

    def note_held(self, scope: str, key: str) -> None:
        """Remember that a key waits for a decision. Any thread may call it."""
        _keep(self.held, (scope, key), None)

    def note_outdated(self, topic: str, key: str, group: str) -> None:
        """Remember that a trigger with a version was dropped. Any thread may call it."""
        _keep(self.outdated, (topic, key, group), None)

    def note_adopted(self, topic: str, revision: int, declared: int) -> None:
        """Remember that the stored policy has a higher revision than this program declares. Any thread may call it."""
        _keep(self.adopted, topic, (revision, declared))

    def times_of(self, topic: str) -> TopicTimes:
        """Return the durations of a topic."""
        return self.topics.setdefault(topic, TopicTimes())


def _keep(newest: dict[K, V], key: K, value: V) -> None:
    newest.pop(key, None)
    newest[key] = value
    for old in tuple(newest)[:-KEPT]:
        newest.pop(old, None)
