"""What a worker or subscriber does with a message, by the verdict on it."""

from __future__ import annotations

import pytest
from celery.exceptions import Reject
from celery.exceptions import Retry as CeleryRetry
from dramatiq import Retry as DramatiqRetry
from faststream.exceptions import NackMessage, RejectMessage

from idemgate.core.verdict import HANDLED, Step, Verdict, choose_step, failure_of, verdict_of
from idemgate.errors import (
    AlreadyDone,
    AlreadyInProgress,
    Bury,
    DownstreamUnavailable,
    LeaseLost,
    Overloaded,
    Retry,
    StoreUnavailable,
)
from tests.for_each import for_each

AWAY = StoreUnavailable("away", executed="no")


@for_each(
    ("verdict", "step"),
    [
        pytest.param(HANDLED, "ack", id="handled"),
        pytest.param(Verdict("handled", error=AWAY, ran=True), "ack", id="handled, but not recorded"),
        pytest.param(verdict_of(AlreadyDone("k", "s")), "ack", id="duplicate"),
        pytest.param(verdict_of(Bury("never")), "bury", id="rejected"),
        pytest.param(Verdict("rejected", error=DownstreamUnavailable("away"), ran=True), "bury", id="stored failure"),
        pytest.param(verdict_of(DownstreamUnavailable("away")), "pause", id="downstream"),
        pytest.param(verdict_of(AlreadyInProgress("k", 1.0, "s")), "defer", id="in progress"),
        pytest.param(Verdict("in_progress", retry_after=1.0), "defer", id="in progress, no error"),
        pytest.param(verdict_of(LeaseLost("k", "s")), "defer", id="lost"),
        pytest.param(Verdict("lost", error=AWAY, ran=True), "defer", id="lost, and not recorded"),
        pytest.param(verdict_of(AWAY), "defer", id="no store answered"),
        pytest.param(verdict_of(AWAY)._replace(ran=True), "retry", id="the handler met a store error"),
        pytest.param(verdict_of(Retry("later", delay=1)), "retry", id="retry"),
        pytest.param(verdict_of(ValueError()), "retry", id="failed"),
    ],
)
def test_the_step_that_follows_from_a_verdict(verdict: Verdict[object], step: Step) -> None:
    assert choose_step(verdict) == step


NO = ValueError("no")


@for_each("error", [Retry("not yet", delay=5), CeleryRetry(when=5), DramatiqRetry(delay=5), NackMessage(delay=5)])
def test_a_retry_that_a_handler_asked_for_is_no_failure_unless_it_names_one(error: Exception) -> None:
    error.__context__ = KeyError("no cause")
    assert failure_of(error) is None
    error.__cause__ = NO
    assert failure_of(error) is NO


@for_each(
    ("error", "failure"),
    [
        (CeleryRetry(exc=NO, when=5), NO),
        (NO, NO),
        *((one, one) for one in (Overloaded("429"), DownstreamUnavailable("away"), Bury("no"))),
        *((one, one) for one in (Reject("no"), RejectMessage())),
    ],
)
def test_any_other_error_is_a_failure(error: Exception, failure: Exception) -> None:
    assert failure_of(error) is failure
