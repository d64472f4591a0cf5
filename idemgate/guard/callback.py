"""Guarded callbacks for the loops of other libraries, which an exception would end."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, Literal

from idemgate.core.counters import Counters
from idemgate.core.scopes import qualified_name
from idemgate.core.validation import is_async
from idemgate.core.verdict import Verdict
from idemgate.guard.decorator import build_judge, build_judge_async

__all__ = ["OnFailure", "wrap_callback"]

log = logging.getLogger("idemgate.once")
OnFailure = Literal["raise", "log"]


def wrap_callback(guarded: Callable[..., Any], counters: Counters, on_failure: OnFailure) -> Callable[..., Any]:
    """Return a callback that calls a guarded function, and raises none of the guard's errors."""
    name = qualified_name(guarded)

    def settle(verdict: Verdict[Any]) -> Any:
        """Count the verdict. Return the value of the call, or raise or log its error."""
        counters.add(f"callback.{verdict.outcome}")
        error = verdict.error
        if error is None or verdict.outcome in ("handled", "duplicate", "in_progress"):
            return verdict.value
        if verdict.ran and on_failure == "raise":
            raise error
        facts = {"callback": name, "outcome": verdict.outcome}
        log.error("callback.failed callback=%s outcome=%s", name, verdict.outcome, exc_info=error, extra=facts)
        return None

    if is_async(guarded):
        judge_async = build_judge_async(guarded)

        @functools.wraps(guarded)
        async def callback_async(*args: Any, **kwargs: Any) -> Any:
            return settle(await judge_async(*args, **kwargs))

        return callback_async
    judge = build_judge(guarded)

    @functools.wraps(guarded)
    def callback(*args: Any, **kwargs: Any) -> Any:
        return settle(judge(*args, **kwargs))

    return callback
