"""Guarded callbacks for the loops of other libraries, which an exception would end. What consumers count and log."""

from __future__ import annotations

import functools
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Literal

from idemgate.core.counters import Counters
from idemgate.core.scopes import qualified_name
from idemgate.core.text import event_log, message_of, one_line
from idemgate.core.validation import call_blocking, is_async
from idemgate.core.verdict import Verdict
from idemgate.errors import InvalidArgument, StoreError
from idemgate.guard.decorator import build_judge, build_judge_async

__all__ = ["OnFailure", "OnVerdict", "record_settlement", "wrap_callback"]

log: logging.Logger = event_log("idemgate.once")
OnFailure = Literal["raise", "log"]
OnVerdict = Callable[..., object]
"""A function that gets the `Verdict` and the arguments of the callback, and settles the message."""


def wrap_callback(
    guarded: Callable[..., Any], counters: Counters, on_failure: OnFailure, on_verdict: OnVerdict | None
) -> Callable[..., Any]:
    """Return a callback that calls a guarded function, and raises none of the guard's errors."""
    finish = functools.partial(_finish, qualified_name(guarded), on_failure)
    if is_async(guarded):
        judge_async = build_judge_async(guarded)

        @functools.wraps(guarded)
        async def callback_async(*args: Any, **kwargs: Any) -> Any:
            verdict = await judge_async(*args, **kwargs)
            counters.add(f"callback.{verdict.outcome}")
            if on_verdict is not None:
                settled = on_verdict(verdict, *args, **kwargs)
                if isinstance(settled, Awaitable):
                    await settled
            return finish(verdict)

        return callback_async
    _check_blocking_settlement(on_verdict)
    judge = build_judge(guarded)

    @functools.wraps(guarded)
    def callback(*args: Any, **kwargs: Any) -> Any:
        verdict = judge(*args, **kwargs)
        counters.add(f"callback.{verdict.outcome}")
        if on_verdict is not None:
            call_blocking(on_verdict, (verdict, *args), kwargs)
        return finish(verdict)

    return callback


def _finish(name: str, on_failure: OnFailure, verdict: Verdict[Any]) -> Any:
    """Return the value of the call, or raise or log its error."""
    error = verdict.error
    if verdict.outcome == "handled" and not isinstance(error, StoreError | None) and on_failure == "raise":
        raise error  # `on_error` said "complete"
    if error is None or verdict.outcome in ("handled", "duplicate", "in_progress"):
        return verdict.value
    if verdict.ran and verdict.outcome != "lost" and on_failure == "raise":
        raise error
    facts = {"callback": name, "outcome": verdict.outcome}
    log.error("callback.failed callback=%s outcome=%s", name, verdict.outcome, exc_info=error, extra=facts)
    return None


def _check_blocking_settlement(on_verdict: OnVerdict | None) -> None:
    """Raise InvalidArgument for an async `on_verdict`: a blocking callback could not await it."""
    if on_verdict is not None and is_async(on_verdict):
        fix = "Pass a plain function, or decorate an async one"
        raise InvalidArgument("on_verdict", qualified_name(on_verdict), "async, and the callback is not", fix)


def record_settlement(
    counters: Counters, scope: str, verdict: Verdict[Any], message_id: object, error: BaseException | None
) -> None:
    """Count and log one settlement; see `Gate.record_settlement`."""
    facts: dict[str, Any] = {"scope": scope, "id": message_id}
    if error is not None:
        counters.add("consumer.unsettled")
        log.warning(
            "consumer.unsettled scope=%r id=%r outcome=%s: %s: %s", *facts.values(), verdict.outcome,
            type(error).__name__, one_line(message_of(error)), extra=facts | {"outcome": verdict.outcome},
        )  # fmt: skip
        return
    counters.add(f"consumer.{verdict.outcome}")
    facts["attempt"] = verdict.attempt
    if verdict.outcome == "rejected":
        log.error("consumer.rejected scope=%r id=%r attempt=%d", *facts.values(), exc_info=verdict.error, extra=facts)
    elif verdict.outcome == "failed":
        log.warning("consumer.failed scope=%r id=%r attempt=%d", *facts.values(), exc_info=verdict.error, extra=facts)
    elif verdict.outcome == "lost":
        log.warning("consumer.lost scope=%r id=%r attempt=%d", *facts.values(), exc_info=verdict.error, extra=facts)
