"""The steps of a scheduler that blocks, from the few verbs in which such libraries differ."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from benchmarks.peers.scheduling import drain, pace, settled
from benchmarks.peers.speak import Answer, Tally, payload, timed

__all__ = ["Send", "Start", "beside", "enqueuing", "paced", "steps"]

Send = Callable[[dict[str, Any], float], object]
"""(data, seconds of delay)."""
Start = Callable[[Tally], Callable[[], object]]
"""Starts a worker of other threads, which tells the tally; answers what stops it."""


def enqueuing(send: Send) -> Callable[..., Answer]:
    """Step `enqueue`."""

    def enqueue(tag: str, n: int, delay: float) -> Answer:
        with timed(n) as answer:
            for number in range(n):
                send(payload(number), delay)
        return answer

    return enqueue


def steps(send: Send, start: Start) -> dict[str, Callable[..., Answer]]:
    """Steps `enqueue`, `drain` and `steady`."""

    def steady(tag: str, rate: int, seconds: float, delay: float) -> Answer:
        tally = Tally(int(rate * seconds))
        stop = start(tally)
        try:
            paced(send, rate, seconds, delay)
            return settled(tally)
        finally:
            stop()

    return {"enqueue": enqueuing(send), "drain": lambda tag, n, wait: drain(start, n, wait), "steady": steady}


def paced(send: Send, rate: int, seconds: float, delay: float) -> None:
    """Sends so many a second, each due `delay` seconds later."""
    began = time.time()
    for after in pace(rate, seconds):
        time.sleep(max(0.0, began + after - time.time()))
        send({"due": time.time() + delay}, delay)


def beside(work: Callable[[], object]) -> threading.Thread:
    """Runs it in a thread of its own."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread
