"""A recorder of runs, for what no store can show: whether two ran at once, and whether something ran again."""

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
    """Events in the order in which they were told, from any thread: `with history.run("k", token): ...` in a handler,
    `history.done("k", token)` once the store has said so; `audit(gate, history=history.findings())` checks them.

    `tell` sends each event somewhere else too, such as `lambda event: redis.rpush(name, event.packed())`, so that
    processes share one; `History.of` is what came together there.
    """

    def __init__(self, tell: Callable[[Event], object] | None = None) -> None:
        self._lock = Lock()
        self._tell = tell
        self.events: list[Event] = []

    @staticmethod
    def of(lines: Iterable[str | bytes]) -> History:
        """One whose events were packed."""
        made = History()
        made.events = [Event.of(line) for line in lines]
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
        """An attempt, from its start to its end. A process that is killed inside leaves no end: say `gone`."""
        started = Event("start", key, token, attempt, _owner(), work, group, note)
        self.add(started)
        try:
            yield
        finally:
            self.add(replace(started, what="end", note=None))

    def delivery(self, delivery: Delivery[Any], note: Any = None) -> Any:
        """`run` of a delivery."""
        return self.run(
            delivery.key, delivery.token, delivery.attempt, work=delivery.id, group=delivery.group, note=note
        )

    def done(self, key: str, token: int, *, work: str = "") -> None:
        """The store has said that it is completed, or acknowledged."""
        self.add(Event("done", key, token, work=work))

    def gone(self, owner: str) -> None:
        """This owner died: nothing of it is live any more."""
        self.add(Event("gone", owner=owner))

    def findings(self, group_concurrency: int = 1) -> list[Finding]:
        """What it must not show: "fence-fell", "ran-again", "overlap-key", "overlap-group"."""
        with self._lock:
            return list(check_history(self.events, group_concurrency))


def _owner() -> str:
    return f"{os.getpid()}:{get_ident()}"
