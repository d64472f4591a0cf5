"""What is broken when: a plan made of a seed alone."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["Fault", "plan"]


class Fault(NamedTuple):
    """`at`: seconds from the beginning; `amount`: at least 0 and below 1, how long or which, as the fault understands
    it."""

    at: float
    name: str
    amount: float


def plan(seed: int, seconds: float, lanes: Mapping[str, tuple[float, tuple[str, ...]]]) -> dict[str, list[Fault]]:
    """`lanes`: what may fail beside one another, each with the mean pause between its faults and their names."""
    made: dict[str, list[Fault]] = {}
    for lane, (pause, names) in lanes.items():
        drawn, at = random.Random(f"{seed} {lane}"), 0.0
        made[lane] = []
        while (at := at + drawn.uniform(0.5, 1.5) * pause) < seconds:
            made[lane].append(Fault(round(at, 3), drawn.choice(names), int(drawn.random() * 1000) / 1000))
    return made
