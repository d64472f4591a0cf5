"""Recorder of runs, for errors that the store cannot show: overlapping runs, and runs after a completion."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import replace
from threading import Lock, get_ident
from typing import Any

from idemgate.audit.findings import Finding
from idemgate.audit.history import Event, check_history
from idemgate.topics.messages import Delivery

__all__ = ["Event", "History"]


class History:
    """The events of runs in the order of their arrival, from any thread.

    Use `with history.run("k", token): ...` in a handler, and `history.record_done("k", token)` once the store has
    confirmed.
    `audit(gate, history=history.findings())` checks the events.

    Args:
        tell: Function that also sends each event to another place, such as
            `lambda event: redis.rpush(name, event.to_json())`. So several processes can share one history, which
            `History.of` reads.
    """

    def __init__(self, tell: Callable[[Event], object] | None = None) -> None:
        self._lock = Lock()
        self._tell = tell
        self.events: list[Event] = []

    @staticmethod
    def of(lines: Iterable[str | bytes]) -> History:
        """Build a history from packed events."""
        made = History()
        made.events = [Event.from_json(line) for line in lines]
        return made

    def add(self, event: Event) -> None:
        with self._lock:
            self.events.append(event)
            if self._tell is not None:
                self._tell(event)

    @contextmanager
    def run(
        self, key: str, token: int, attempt: int = 1, *, work: str = "", group: str = "", note: Any = None
    ) -> Generator[None]:
        """Record an attempt from its start to its end. If its process is killed, call `record_death`."""
        started = Event("start", key, token, attempt, _owner(), work, group, note)
        self.add(started)
        try:
            yield
        finally:
            self.add(replace(started, what="end", note=None))

    def delivery(self, delivery: Delivery[Any], note: Any = None) -> Any:
        """Record an attempt of a delivery; see `run`."""
        return self.run(
            delivery.key, delivery.token, delivery.attempt, work=delivery.id, group=delivery.group, note=note
        )

    def record_done(self, key: str, token: int, *, work: str = "") -> None:
        """Record that the store has confirmed a completion or an acknowledgement."""
        self.add(Event("done", key, token, work=work))

    def record_death(self, owner: str) -> None:
        """Record that an owner died: its runs have ended."""
        self.add(Event("gone", owner=owner))

    def findings(self, group_concurrency: int = 1) -> list[Finding]:
        """Return the violations: "fence-fell", "ran-again", "overlap-key", "overlap-group"."""
        with self._lock:
            return list(check_history(self.events, group_concurrency))


def _owner() -> str:
    return f"{os.getpid()}:{get_ident()}"
