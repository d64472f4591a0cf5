"""A callback on what is published to a Pub/Sub channel.

Pub/Sub has no memory: what is published while nobody listens is gone, and nothing is delivered again. So whatever
happens to a message here, the next one comes; what is lost or dropped has a counter, and where events must not be lost,
streams are the means. Every replica hears every message; a callback guarded with `once` runs in one of them.

Counters: `channel.heard`, then one of `.handled`, `.duplicate`, `.in_progress`, `.hopeless`, `.failed` when the
callback ended; `.dropped`: the backlog was full; `.abandoned`: cut short or never started when it stopped; `.gaps`: the
connection was lost, and what was published meanwhile is not known.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from idemgate.core.numbers import whole
from idemgate.errors import InvalidArgument
from idemgate.store.context import Context
from idemgate.store.shielded import to_the_end
from idemgate.subscribers.callback import Callback, checked
from idemgate.subscribers.executor import Lanes

if TYPE_CHECKING:
    from idemgate.store.pubsub import Ear

__all__ = ["Channel", "Heard"]

log = logging.getLogger("idemgate.subscriber")
_GLOB = re.compile(r"[*?\[]")


@dataclass(slots=True)
class Heard:
    """A published message: the channel it was published to (also where a pattern was subscribed to), and its bytes.

    It has no id of its own: a guard's key has to come from the data.
    """

    channel: str
    data: bytes

    def json(self) -> Any:
        """The data as JSON; ValueError if it is none."""
        return json.loads(self.data)


class Channel:
    """A registered callback on a channel or pattern; see `Gate.on`."""

    def __init__(
        self,
        context: Context,
        channel: str,
        callback: Callable[[Heard], object],
        *,
        pattern: bool | None = None,
        concurrency: int = 32,
        backlog: int = 10_000,
    ) -> None:
        self._context = context
        self.channel = channel
        self.pattern = _checked_pattern(channel, pattern)
        self.callback = callback
        self.concurrency = whole("concurrency", concurrency)
        self.backlog = whole("backlog", backlog)
        self._facts = {"channel": channel, "callback": checked(callback)}

    def __repr__(self) -> str:
        return f"<Channel {self.channel!r} -> {self._facts['callback']}>"

    async def run(self, stop: asyncio.Event, *, grace: float = 30.0, ready: Callable[[], None] | None = None) -> None:
        """As `Subscriber.run`. The backlog, too, is worked off within the grace."""
        callback = Callback(self.callback)
        lanes = Lanes[Heard](lambda heard: self._handle(callback, heard), self.concurrency)
        ear = self._context.aio_link.ear()
        try:
            await ear.add(self.channel.encode(), self._listener(lanes), pattern=self.pattern)
            if ready is not None:
                ready()
            await stop.wait()
        finally:
            await to_the_end(self._end(ear, lanes, callback, grace if stop.is_set() else 0), lanes.hurry)

    async def _end(self, ear: Ear, lanes: Lanes[Heard], callback: Callback[Heard], grace: float) -> None:
        await ear.close()
        left = await lanes.finish(grace)
        callback.close()
        if left:
            self._count("abandoned", left)
            log.warning("subscriber.abandoned", extra=self._facts | {"count": left})

    def _listener(self, lanes: Lanes[Heard]) -> Callable[[bytes, bytes | None], None]:
        """Never waits: a slow reader is disconnected by the server, which loses more than one message and does not say
        how many. So a full backlog drops what comes, and counts it."""
        full = False

        def listen(channel: bytes, data: bytes | None) -> None:
            nonlocal full
            if data is None:
                self._count("gaps")
                log.warning("subscriber.gap", extra=self._facts)
                return
            self._count("heard")
            if len(lanes.waiting) < self.backlog:
                full = False
                lanes.add(Heard(channel.decode(errors="surrogateescape"), data))
                return
            self._count("dropped")
            if not full:
                log.error("subscriber.backlog_full", extra=self._facts | {"backlog": self.backlog})
            full = True

        return listen

    async def _handle(self, callback: Callback[Heard], heard: Heard) -> None:
        ending = await callback(heard)
        self._count(ending.outcome)
        if ending.outcome in ("hopeless", "failed"):
            log.error("subscriber.failed", extra=self._facts | {"outcome": ending.outcome}, exc_info=ending.error)

    def _count(self, what: str, n: int = 1) -> None:
        self._context.counters.add(f"channel.{what}", n)


def _checked_pattern(channel: str, pattern: bool | None) -> bool:
    if not isinstance(channel, str) or not channel:
        raise InvalidArgument("channel", channel, "not the name of a channel", "Use a text that is not empty")
    if pattern is None and _GLOB.search(channel):
        raise InvalidArgument(
            "channel",
            channel,
            "looks like a pattern, and nobody publishes to a channel of that name by chance",
            "Say pattern=True, or pattern=False if that is the channel's own name",
        )
    return bool(pattern)
