"""What is broken when: a plan made of a seed alone, and its execution."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import NamedTuple

__all__ = ["Fault", "injecting", "plan"]


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


@contextmanager
def injecting(
    lanes: Mapping[str, Sequence[Fault]], inject: Callable[[Fault], object], over: threading.Event
) -> Generator[list[BaseException]]:
    """Inject the faults at their times during the block, each lane in a thread. Set `over` at its end.

    Yield the errors of `inject` so far: the block should end with the first. At the end they fail the test.
    """
    errors: list[BaseException] = []
    begin = monotonic()

    def run(faults: Sequence[Fault]) -> None:
        try:
            for fault in faults:
                if over.wait(max(0.0, begin + fault.at - monotonic())):
                    return
                inject(fault)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(faults,)) for faults in lanes.values()]
    for thread in threads:
        thread.start()
    try:
        yield errors
    finally:
        over.set()
        for thread in threads:
            thread.join()
        assert not errors, errors  # also if the block failed: a fault that could not be mended explains it
