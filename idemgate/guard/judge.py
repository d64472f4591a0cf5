"""The verdict on one guarded call, from the account of it."""

from __future__ import annotations

from typing import Any

from idemgate.core.verdict import Outcome, Verdict, judge_error, verdict_of
from idemgate.guard.request import FAILURE, KEEP, Account, End, Request

__all__ = ["judge", "judge_unguarded"]


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
    verdict = verdict_of(error)
    outcome, retry_after = verdict.outcome, verdict.retry_after
    if end is not None and end.kind == FAILURE and end.unended is None and end.held:
        outcome, retry_after = "rejected", None  # each later attempt gets the stored failure
    elif end is not None and end.kind == KEEP and retry_after is None:
        retry_after = request.options.lease / 1000  # the claim blocks the key until its lease ends
    return Verdict(outcome, verdict.value, verdict.error, retry_after, attempt, token, False, True)


def judge_unguarded(value: Any, error: BaseException | None = None) -> Verdict[Any]:
    """Return the verdict on a call that ran without a guard."""
    return Verdict("unguarded", value, ran=True) if error is None else judge_error(error)
