"""The verdict on one guarded call, from the account of it."""

from __future__ import annotations

from typing import Any

from idemgate.core.keys import text_of
from idemgate.core.text import last_line
from idemgate.core.verdict import Outcome, Verdict, judge_error, verdict_of
from idemgate.errors import AttemptsExhausted
from idemgate.guard.request import FAILURE, KEEP, RELEASE, VALUE, Account, End, Request

__all__ = ["is_last", "judge", "judge_unguarded"]


def judge(request: Request, account: Account) -> Verdict[Any]:
    """Return the verdict on a guarded call."""
    value, error, answer, end, ran = account
    if answer is None:  # the store has not answered
        assert error is not None
        return verdict_of(error)
    reply = answer.reply
    if not ran:
        if error is not None:
            return verdict_of(error)._replace(attempt=reply.attempt)
        if reply.state == "in_progress":
            return Verdict("in_progress", None, None, reply.left_ms / 1000, reply.attempt)
        return Verdict("duplicate", value, None, None, reply.attempt, 0, request.options.on_done == "replay")
    started = reply.state == "started"
    if error is not None:
        return _judge_failure(request, error, end, reply.attempt, reply.token if started else 0)
    if not started:
        return Verdict("unguarded", value, None, None, 0, 0, False, True)
    if end is None:  # a mark is not ended
        return Verdict("handled", value, None, None, reply.attempt, reply.token, False, True)
    outcome: Outcome = "handled" if end.held else "lost"
    return Verdict(outcome, value, end.unended, None, reply.attempt, reply.token, False, True)


def _judge_failure(request: Request, error: BaseException, end: End | None, attempt: int, token: int) -> Verdict[Any]:
    """Return the verdict on a call whose work raised."""
    outcome, value, shown, retry_after, *_ = verdict_of(error)
    if end is None or not end.held:
        pass  # another owner has the key, or none
    elif end.kind == VALUE and end.interruption is None:
        outcome, retry_after = "handled", None  # `on_error` said "complete"
    elif end.kind == FAILURE and end.unended is None:
        outcome, retry_after = "rejected", None  # each later attempt gets the stored failure
    elif outcome == "failed" and end.kind in (RELEASE, KEEP) and token and is_last(request, attempt):
        outcome, retry_after = "rejected", None  # each later attempt is refused
        shown = AttemptsExhausted(text_of(request.key), attempt, request.options.scope, last_line(error))
        shown.__cause__ = error
    elif end.kind == KEEP and retry_after is None:
        retry_after = request.options.lease / 1000  # the claim blocks the key until its lease ends
    return Verdict(outcome, value, shown, retry_after, attempt, token, False, True)


def is_last(request: Request, attempt: int) -> bool:
    """Return True if the key may not be started again after this attempt."""
    return 0 < request.options.max_attempts <= attempt


def judge_unguarded(value: Any, error: BaseException | None = None) -> Verdict[Any]:
    """Return the verdict on a call that ran without a guard."""
    return Verdict("unguarded", value, ran=True) if error is None else judge_error(error)
