"""What a gate did in this process lately: failures, refused triggers and durations. `idemgate/presence` reads it."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from idemgate.core.clock import monotonic
from idemgate.core.histogram import Histogram, Sampled

__all__ = ["Activity", "Failure", "TopicTimes"]

KEPT = 20
"""The failures, and the refused triggers, that a process remembers."""


class Failure(NamedTuple):
    """A handler or a guarded function that raised, or a trigger that was refused.

    `of` is the topic or scope. `attempt` is None if it is unknown, and for a trigger. `at` is in seconds of
    `monotonic`. `retry_after` is the delay until the next attempt in seconds, or None if no attempt is scheduled.
    """

    of: str
    key: str
    attempt: int | None
    error: str
    at: float
    retry_after: float | None = None


class TopicTimes:
    """The durations of one topic: from the due time of a message to its take, and from start to end of its handler."""

    __slots__ = ("handling", "lateness")

    def __init__(self) -> None:
        self.handling = Histogram()
        self.lateness = Histogram()


class Activity:
    """The recent failures and durations of one gate in this process.

    Attributes:
        failures: The newest failures of handlers and guarded functions.
        refused: The newest triggers that this process refused.
        topics: Durations of the topics that a worker of this process serves.
        calls: Samples of the durations of single calls of the store, retries not included.
    """

    def __init__(self) -> None:
        self.failures: deque[Failure] = deque(maxlen=KEPT)
        self.refused: deque[Failure] = deque(maxlen=KEPT)
        self.topics: dict[str, TopicTimes] = {}
        self.calls = Sampled()

    def note_failure(self, of: str, key: str, attempt: int | None, error: str, retry_after: float | None) -> None:
        """Remember that a handler or a guarded function failed. Any thread may call it."""
        self.failures.append(Failure(of, key, attempt, error, monotonic(), retry_after))

    def note_refused(self, topic: str, key: str, error: str) -> None:
        """Remember that a trigger was refused. Any thread may call it."""
        self.refused.append(Failure(topic, key, None, error, monotonic()))

    def times_of(self, topic: str) -> TopicTimes:
        """Return the durations of a topic."""
        return self.topics.setdefault(topic, TopicTimes())
