"""Subscriber of a Pub/Sub channel.

Pub/Sub stores nothing: a message published without a subscriber is lost, and no message is delivered again. Lost and
dropped messages are counted. Use streams if no event may be lost. Every replica receives every message; a callback
guarded with `once` runs in one of them.

Counters:

- `channel.heard`: messages received.
- `channel.handled`, `.duplicate`, `.in_progress`, `.rejected`, `.failed`, `.lost`, `.unguarded`, `.skipped`: verdict on
  the message.
- `channel.dropped`: messages dropped because the backlog was full.
- `channel.abandoned`: messages cancelled or never started at the stop.
- `channel.gaps`: lost connections. Messages published meanwhile are missed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from idemgate.core.text import event_log
from idemgate.core.validation import check_int
from idemgate.core.waits import finish_despite_cancel
from idemgate.errors import InvalidArgument
from idemgate.store.context import Context
from idemgate.subscribers.callback import Callback, check_callback
from idemgate.subscribers.executor import BoundedExecutor

if TYPE_CHECKING:
    from idemgate.store.pubsub import Subscription

__all__ = ["Channel", "PubSubMessage"]

log: logging.Logger = event_log("idemgate.subscriber")
_GLOB = re.compile(r"[*?\[]")


@dataclass(slots=True)
class PubSubMessage:
    """A published message: its channel and its bytes.

    With a pattern, `channel` is the channel that the message was published to. A message has no id, so the key of a
    guard must come from the data.
    """

    channel: str
    data: bytes

    def json(self) -> Any:
        """Decode the data as JSON; raise ValueError if it is invalid."""
        return json.loads(self.data)


class Channel:
    """A callback registered for a channel or pattern; see `Gate.subscribe`."""

    def __init__(
        self,
        context: Context,
        channel: str,
        callback: Callable[[PubSubMessage], object],
        *,
        pattern: bool | None = None,
        concurrency: int = 32,
        backlog: int = 10_000,
    ) -> None:
        self._context = context
        self.channel = channel
        self.pattern: bool = _check_pattern(channel, pattern)
        self.callback = callback
        self.concurrency: int = check_int("concurrency", concurrency)
        self.backlog: int = check_int("backlog", backlog)
        self._facts = {"channel": channel, "callback": check_callback(callback)}

    def __repr__(self) -> str:
        return f"<Channel {self.channel!r} -> {self._facts['callback']}>"

    async def run(self, stop: asyncio.Event, *, grace: float = 30.0, ready: Callable[[], None] | None = None) -> None:
        """Run the subscriber; see `Subscriber.run`. The grace time also covers the backlog."""
        callback = Callback(self.callback, self._context, self.channel)
        executor = BoundedExecutor[PubSubMessage](lambda heard: self._handle(callback, heard), self.concurrency)
        subscription = self._context.aio_link.subscription()
        try:
            await subscription.add(self.channel.encode(), self._listener(executor), pattern=self.pattern)
            if ready is not None:
                ready()
            await stop.wait()
        finally:
            await finish_despite_cancel(
                self._end(subscription, executor, callback, grace if stop.is_set() else 0), executor.hurry
            )

    async def _end(
        self,
        subscription: Subscription,
        executor: BoundedExecutor[PubSubMessage],
        callback: Callback[PubSubMessage],
        grace: float,
    ) -> None:
        await subscription.close()
        left = await executor.finish(grace)
        callback.close()
        if left:
            self._count("abandoned", left)
            log.warning("subscriber.abandoned", extra=self._facts | {"count": left})

    def _listener(self, executor: BoundedExecutor[PubSubMessage]) -> Callable[[bytes, bytes | None], None]:
        """Return the function that queues a message, or drops and counts it if the backlog is full.

        It never waits: the server disconnects a slow reader, which would lose an unknown number of messages.
        """
        full = False

        def on_message(channel: bytes, data: bytes | None) -> None:
            nonlocal full
            if data is None:
                self._count("gaps")
                log.warning("subscriber.gap", extra=self._facts)
                return
            self._count("heard")
            if len(executor.waiting) < self.backlog:
                full = False
                executor.add(PubSubMessage(channel.decode(errors="surrogateescape"), data))
                return
            self._count("dropped")
            if not full:
                log.error("subscriber.backlog_full", extra=self._facts | {"backlog": self.backlog})
            full = True

        return on_message

    async def _handle(self, callback: Callback[PubSubMessage], heard: PubSubMessage) -> None:
        verdict = await callback(heard)
        self._count(verdict.outcome)
        if verdict.outcome in ("rejected", "failed"):
            log.error("subscriber.failed", extra=self._facts | {"outcome": verdict.outcome}, exc_info=verdict.error)

    def _count(self, what: str, n: int = 1) -> None:
        self._context.counters.add(f"channel.{what}", n)


def _check_pattern(channel: str, pattern: bool | None) -> bool:
    if not isinstance(channel, str) or not channel:
        raise InvalidArgument("channel", channel, "not the name of a channel", "Use a non-empty string")
    if pattern is None and _GLOB.search(channel):
        raise InvalidArgument(
            "channel",
            channel,
            "looks like a pattern, which is an unlikely name of a channel",
            "Pass pattern=True, or pattern=False if the channel has this name",
        )
    return bool(pattern)
