"""Triggers of one tick of an event loop, from all tasks, in one script call a slot: it costs a fifth of one call each,
and nobody waits for it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from idemgate.topics.calls import Asked, TopicCalls
from idemgate.topics.messages import Receipt

if TYPE_CHECKING:
    from idemgate.store.aio import AsyncLink

__all__ = ["Gathering"]

_Entry = tuple[Asked, "asyncio.Future[Receipt]"]


class Gathering:
    """What was put in since the last tick; for one event loop and one topic."""

    __slots__ = ("_link", "_waiting")

    def __init__(self, link: AsyncLink) -> None:
        self._link = link
        self._waiting: list[_Entry] = []

    def add(self, calls: TopicCalls, asked: Asked) -> asyncio.Future[Receipt]:
        """The receipt of one trigger, as `calls` checked it. Cancelling it does not take the trigger out."""
        loop = asyncio.get_running_loop()
        receipt: asyncio.Future[Receipt] = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._send, calls)
        self._waiting.append((asked, receipt))
        return receipt

    def _send(self, calls: TopicCalls) -> None:
        entries, self._waiting = self._waiting, []
        self._link.spawn(self._sent(calls, entries))

    async def _sent(self, calls: TopicCalls, entries: list[_Entry]) -> None:
        try:
            receipts = await self._link.run_all(calls.put_many([asked for asked, _ in entries]))
        except asyncio.CancelledError:
            for _, future in entries:
                future.cancel()
            raise
        except Exception as error:  # noqa: BLE001 - it is for those who asked
            for _, future in entries:
                if not future.done():
                    future.set_exception(error)
        else:
            for (_, future), receipt in zip(entries, receipts, strict=True):
                if not future.done():
                    future.set_result(receipt)
