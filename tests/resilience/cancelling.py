"""Cancels a coroutine at its k-th await: as it begins to wait, or when what it waited for is there and it was not told
yet. `asyncio.Task.cancel` can hit no other moments."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any

__all__ = ["Awaits", "cancelled_at"]


class Awaits:
    """Awaiting this runs the coroutine, and cancels the task that does at the k-th await (from 0), and `gap` awaits
    later once more (0: only once). `count`: how many there were."""

    def __init__(self, work: Coroutine[Any, Any, Any], at: int, late: bool, gap: int) -> None:
        self.work, self.at, self.late, self.gap = work, at, late, gap
        self.count = 0

    def __await__(self) -> Generator[Any, Any, Any]:
        task = asyncio.current_task()
        assert task is not None
        thrown: BaseException | None = None
        sent: Any = None
        while True:
            try:
                waits_for = self.work.throw(thrown) if thrown is not None else self.work.send(sent)
            except StopIteration as end:
                return end.value
            if self.count in (self.at, self.at + self.gap):
                self._cancel(task, waits_for)
            self.count += 1
            try:
                thrown, sent = None, (yield waits_for)
            except BaseException as error:
                thrown = error

    def _cancel(self, task: asyncio.Task[Any], waits_for: Any) -> None:
        if not self.late:
            task.cancel()
        elif waits_for is None:  # it only let others have their turn
            asyncio.get_running_loop().call_soon(task.cancel)
        else:
            waits_for.add_done_callback(lambda _: task.cancel())  # before the task's own: it is added after this


async def cancelled_at(work: Coroutine[Any, Any, Any], at: int, late: bool, gap: int) -> tuple[Any, int]:
    """What came of it (the result, or what was raised), and how many awaits it had."""
    awaits = Awaits(work, at, late, gap)

    async def whole() -> Any:
        return await awaits

    (outcome,) = await asyncio.gather(asyncio.create_task(whole()), return_exceptions=True)
    return outcome, awaits.count
