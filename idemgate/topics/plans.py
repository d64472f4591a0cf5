"""The two drivers of a plan (`topics.reshard`): run each batch and send its answers back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from idemgate.core.calls import Batch
from idemgate.topics.reshard import Plan

__all__ = ["run_plan", "run_plan_async"]

T = TypeVar("T")


def run_plan(plan: Plan[T], run: Callable[[Batch[list[Any]]], list[Any]]) -> T:
    """Run a plan to its end and return its result. Blocks."""
    try:
        batch = next(plan)
        while True:
            batch = plan.send(run(batch))
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


async def run_plan_async(plan: Plan[T], run: Callable[[Batch[list[Any]]], Awaitable[list[Any]]]) -> T:
    """Run a plan to its end and return its result. Awaits each batch."""
    try:
        batch = next(plan)
        while True:
            batch = plan.send(await run(batch))
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
