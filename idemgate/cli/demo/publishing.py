"""Publishing in order and on time, no faster than the subscribers follow."""

from __future__ import annotations

import time
from collections.abc import Callable

from idemgate.cli.demo.events import Plan
from idemgate.cli.demo.records import Records
from idemgate.gate import Gate

__all__ = ["drain", "publish", "wait_until"]

MOST_BEHIND = 2_000
MOST_BYTES = 2_000_000
"""Pub/Sub does not hold the publisher back: a subscriber that reads too slowly is cut off by the server when its buffer
is full (8 MB for a minute, or 32 MB at once), and hears nothing of what it missed. So the publisher waits for the
slowest."""
STEP = 0.01


def publish(gate: Gate, channel: str, plan: Plan, records: Records, look: Callable[[int], None]) -> float:
    """All of the plan; returns how many seconds it was behind its schedule at the end. `look` is called about ten times
    a second with the number published so far; what it raises ends this."""
    most = _most_behind(plan)
    start = time.monotonic()
    looked = 0.0
    for number, (at, event) in enumerate(plan.publications):
        while (now := time.monotonic()) < start + at or records.lag >= most:
            look(number)
            time.sleep(min(STEP, max(0.001, start + at - now)))
        if now - looked >= 0.1:
            look(number)
            looked = now
        records.publish(event.id, event.path)  # before it is: a report may come before the answer
        gate.context.link.command("PUBLISH", channel, event.json())
    return max(0.0, time.monotonic() - start - plan.publications[-1].at)


def _most_behind(plan: Plan) -> int:
    largest = max(len(event.json()) for _, event in plan.publications)
    return max(1, min(MOST_BEHIND, MOST_BYTES // largest))


def drain(records: Records, patience: float, look: Callable[[], None]) -> bool:
    """Waits until every copy is done with and every trigger delivered; False when for `patience` seconds nothing
    happened any more."""
    left, since = records.remaining, time.monotonic()
    while left and time.monotonic() - since < patience:
        look()
        time.sleep(STEP)
        if (now_left := records.remaining) != left:
            left, since = now_left, time.monotonic()
    return not left


def wait_until(done: Callable[[], bool], seconds: float, look: Callable[[], None]) -> bool:
    """Wait until `done` returns True; return False if the time is over first."""
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() > end:
            return False
        look()
        time.sleep(STEP)
    return True
