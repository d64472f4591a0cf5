"""What is asked at the end of every fault test: is the store sound, and is what was run on it?"""

from __future__ import annotations

from typing import Any

from idemgate import Gate
from idemgate.testing import Event, History, audit

__all__ = ["check_sound", "history_of", "over"]


def history_of(raw: Any, namespace: str) -> History:
    """What the processes of a scene ran, each of which has ended since: none of its attempts is live any more."""
    return History.of(raw.lrange(f"{namespace}:history", 0, -1))


def over(raw: Any, namespace: str) -> None:
    """A process of a scene has ended, by whatever means: what it still had in hand is gone."""
    for owner in {event.owner for event in history_of(raw, namespace).events if event.what == "start"}:
        raw.rpush(f"{namespace}:history", Event("gone", owner=owner).packed())


def check_sound(gate: Gate, raw: Any) -> None:
    """The store is as it must be, and so is what was run on it."""
    report = audit(gate, history=history_of(raw, gate.namespace).findings())
    assert report.sound, str(report)
