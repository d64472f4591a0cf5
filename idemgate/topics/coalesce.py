"""Coalescing of asyncio triggers: one script call per slot and tick of the event loop.

A coalesced trigger costs a fifth of a separate call. No task waits for others to arrive.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from idemgate.topics.calls import PackedTrigger, TopicCalls
from idemgate.topics.messages import Receipt

if TYPE_CHECKING:
    from idemgate.store.aio import AsyncLink

__all__ = ["TriggerCoalescer"]

_Entry = tuple[PackedTrigger, "asyncio.Future[Receipt]"]


class TriggerCoalescer:
    """The triggers of all tasks since the last tick, for one event loop and one topic."""

    __slots__ = ("_link", "_waiting")

    def __init__(self, link: AsyncLink) -> None:
        self._link = link
        self._waiting: list[_Entry] = []

    def add(self, calls: TopicCalls, packed: PackedTrigger) -> asyncio.Future[Receipt]:
        """Add a packed trigger and return the future of its receipt.

        Cancelling the future does not withdraw the trigger.
        """
        loop = asyncio.get_running_loop()
        receipt: asyncio.Future[Receipt] = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._flush, calls)
        self._waiting.append((packed, receipt))
        return receipt

    def _flush(self, calls: TopicCalls) -> None:
        entries, self._waiting = self._waiting, []
        try:
            self._link.spawn(self._send(calls, entries))
        except Exception as error:  # noqa: BLE001 - every waiting task raises it
            _fail(entries, error)

    async def _send(self, calls: TopicCalls, entries: list[_Entry]) -> None:
        try:
            receipts = await self._link.run_all(calls.trigger_packed([packed for packed, _ in entries]))
        except asyncio.CancelledError:
            for _, future in entries:
                future.cancel()
            raise
        except Exception as error:  # noqa: BLE001 - every waiting task raises it
            _fail(entries, error)
        else:
            for (_, future), receipt in zip(entries, receipts, strict=True):
                if not future.done():
                    future.set_result(receipt)


def _fail(entries: list[_Entry], error: Exception) -> None:
    for _, future in entries:
        if not future.done():
            future.set_exception(error)
