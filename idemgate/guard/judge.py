"""The verdict on one guarded call, from the state that its attempt reached."""

from __future__ import annotations

import logging
from typing import Any

from idemgate.core.keys import text_of
from idemgate.core.validation import call_blocking
from idemgate.core.verdict import Outcome, Verdict, verdict_of
from idemgate.guard.attempt import ClaimAttempt, DuplicateResult, OnReplay
from idemgate.store.context import Context

__all__ = ["judge", "judge_unguarded", "record_hook_failure", "report_replay", "warn_of_model"]

log = logging.getLogger("idemgate.once")
_FAILURE = b"e"
"""The kind of a stored failure."""


def judge(attempt: ClaimAttempt, value: Any, error: BaseException | None = None) -> Verdict[Any]:
    """Return the verdict on a guarded call that returned `value` or raised `error`."""
    if not attempt.ran:
        return _judge_duplicate(attempt, value, error)
    entry = attempt.entry
    if error is not None:
        return _judge_failure(attempt, error)
    if entry.state != "started":
        return Verdict("unguarded", value, None, None, 0, 0, False, True)
    outcome: Outcome = "lost" if attempt.lost else "handled"
    return Verdict(outcome, value, attempt.unended, None, entry.attempt, entry.token, False, True)


def judge_unguarded(value: Any, error: BaseException | None = None) -> Verdict[Any]:
    """Return the verdict on a call that ran without a guard."""
    return Verdict("unguarded", value, ran=True) if error is None else verdict_of(error)._replace(ran=True)


def _judge_duplicate(attempt: ClaimAttempt, value: Any, error: BaseException | None) -> Verdict[Any]:
    """Return the verdict on a call that did not run the work."""
    entry = attempt.entry
    if error is not None:
        return verdict_of(error)._replace(attempt=entry.attempt)
    if entry.state == "in_progress":
        return Verdict("in_progress", None, None, entry.left_ms / 1000, entry.attempt)
    return Verdict("duplicate", value, None, None, entry.attempt, 0, attempt.options.on_done == "replay")


def _judge_failure(attempt: ClaimAttempt, error: BaseException) -> Verdict[Any]:
    """Return the verdict on a call whose work raised."""
    entry, verdict = attempt.entry, verdict_of(error)
    outcome, retry_after = verdict.outcome, verdict.retry_after
    if attempt.result[0] == _FAILURE and attempt.unended is None and not attempt.lost:
        outcome, retry_after = "rejected", None  # each later attempt gets the stored failure
    elif attempt.kept and retry_after is None:
        retry_after = attempt.options.lease / 1000  # the claim blocks the key until its lease ends
    token = entry.token if entry.state == "started" else 0
    return Verdict(outcome, verdict.value, error, retry_after, entry.attempt, token, False, True)


def report_replay(context: Context, hook: OnReplay, attempt: ClaimAttempt, duplicate: DuplicateResult) -> None:
    """Call `on_replay` for a duplicate of a done key. Count and log an error of the hook instead of raising it."""
    if attempt.entry.state != "done":
        return
    key = text_of(attempt.key)
    try:
        call_blocking(hook, (key, _judge_duplicate(attempt, duplicate.value, duplicate.error)), {})
    except Exception as error:  # noqa: BLE001 - the hook must not change what the caller gets
        record_hook_failure(context, attempt, "on_replay", error)


def record_hook_failure(context: Context, attempt: ClaimAttempt, hook: str, error: Exception) -> None:
    """Count and log an error of a function that the user passed as an option."""
    context.counters.add("once.hook_failed")
    facts = attempt.log_facts()
    log.error(
        "once.hook_failed scope=%r key=%r hook=%s", *facts.values(), hook,
        exc_info=error, extra=facts | {"hook": hook},
    )  # fmt: skip


def warn_of_model(attempt: ClaimAttempt) -> None:
    """Log that a model is replayed as a dict, because no return annotation names it."""
    facts = attempt.log_facts()
    log.warning(
        "once.model_not_annotated scope=%r key=%r: no return annotation names its model, so duplicates get a dict",
        *facts.values(), extra=facts,
    )  # fmt: skip
