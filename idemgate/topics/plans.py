"""The two drivers of a plan (`core.resizing`): carry each batch, hand its answers back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from idemgate.core.calls import Batch
from idemgate.topics.reshard import Plan

__all__ = ["awaited", "performed"]

T = TypeVar("T")


def performed(plan: Plan[T], run: Callable[[Batch[list[Any]]], list[Any]]) -> T:
    """Blocks until it is done."""
    try:
        batch = next(plan)
        while True:
            batch = plan.send(run(batch))
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


async def awaited(plan: Plan[T], run: Callable[[Batch[list[Any]]], Awaitable[list[Any]]]) -> T:
    """As `performed`, awaiting."""
    try:
        batch = next(plan)
        while True:
            batch = plan.send(await run(batch))
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
