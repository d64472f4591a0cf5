"""The loop that everything of a worker turns in: sleep until there is work, do it, go on by itself after the store was
away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from idemgate.errors import StoreError

if TYPE_CHECKING:
    from idemgate.topics.topic import Topic

__all__ = ["Post", "keep_up"]

log = logging.getLogger("idemgate.worker")


class Post(Protocol):
    """Where there is work for a topic now and then."""

    @property
    def topic(self) -> Topic: ...
    @property
    def wake(self) -> asyncio.Event: ...
    def pause(self) -> float:
        """How many seconds to sleep; `wake` ends that sooner."""
        ...


async def keep_up(post: Post, turn: Callable[[], Awaitable[None]], halt: asyncio.Event) -> None:
    """Takes a turn whenever the post has work, until `halt` is set and it was woken."""
    failures, topic = 0, post.topic
    while not halt.is_set():
        try:
            if (pause := post.pause()) > 0:
                await _nap(post.wake, pause)
            if not halt.is_set():
                await turn()
            failures = 0
        except StoreError as error:
            if failures == 0:
                log.warning("worker.store_away", extra={"topic": topic.name, "error": str(error)})
            failures += 1
            topic.opening.context.counters.add("worker.store_away")
            await _nap(post.wake, min(1.0, 0.02 * 2 ** min(failures, 6)))


async def _nap(wake: asyncio.Event, seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await wake.wait()
    wake.clear()
