"""Ctrl-C and SIGTERM, recorded and checked later, so that they interrupt no start and no end."""

from __future__ import annotations

import signal
from collections.abc import Generator
from contextlib import contextmanager

__all__ = ["Interrupted", "Signals", "watching"]


class Interrupted(BaseException):
    """The user, or the system, wants this program to end. `code` is its exit code: 128 + the signal's number."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.code: int = 128 + number

    def __str__(self) -> str:
        return signal.Signals(self.args[0]).name


class Signals:
    """The number of the first signal; 0 before one arrives."""

    def __init__(self) -> None:
        self.number: int = 0

    def note(self, number: int, _frame: object) -> None:
        self.number = self.number or number

    def check(self) -> None:
        """Raise Interrupted if a signal has arrived. Call it wherever it is safe to end, several times a second."""
        if self.number:
            raise Interrupted(self.number)


@contextmanager
def watching() -> Generator[Signals]:
    """Record SIGINT and SIGTERM instead of acting on them."""
    signals = Signals()
    before = {number: signal.signal(number, signals.note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
