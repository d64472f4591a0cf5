"""Wait for something to happen, never for time to pass."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

__all__ = ["eventually", "stop_group", "subscribed", "wait_until"]

MISSED = "it did not happen"


async def eventually(check: Callable[[], Any], within: float = 60.0) -> Any:
    """Return what `check` returns, or what that awaits to, once it is true. Fail after `within` seconds."""
    end = time.monotonic() + within
    while True:
        found = check()
        if inspect.isawaitable(found):
            found = await found
        if found:
            return found
        assert time.monotonic() < end, MISSED
        await asyncio.sleep(0.003)


def wait_until(
    check: Callable[[], Any],
    within: float = 60.0,
    why: Callable[[], object] = lambda: MISSED,
    not_yet: tuple[type[Exception], ...] = (),
) -> Any:
    """Return what `check` returns once it is true. Fail with `why` after `within` seconds.

    The errors `not_yet` count as false.
    """
    end = time.monotonic() + within
    while True:
        try:
            if found := check():
                return found
        except not_yet:
            pass
        assert time.monotonic() < end, why()
        time.sleep(0.003)


@contextmanager
def subscribed(client: Any, channel: bytes | str) -> Iterator[Any]:
    """A Pub/Sub connection that gets what is published from now on: the server has confirmed its subscription.

    Without the confirmation, another connection's command may reach the server first.
    """
    with client.pubsub() as heard:
        heard.subscribe(channel)
        assert heard.get_message(timeout=30)["type"] == "subscribe"
        yield heard


def stop_group(group: int) -> None:
    """Stop the processes of a group, and return once all of them stand still.

    On a busy machine the threads of a process go on until the one that gets the signal has its turn.
    """
    os.killpg(group, signal.SIGSTOP)
    wait_until(lambda: all(state in "TtZ" for state in _states(group)))


def _states(group: int) -> list[str]:
    """The states of the processes of a group, where /proc tells them."""
    found: list[str] = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            state, _parent, its_group, *_ = file.read_text().rpartition(") ")[2].split()
            if int(its_group) == group:
                found.append(state)
    return found
