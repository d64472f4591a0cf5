"""What a worker or subscriber does with a message, by the verdict on it."""

from __future__ import annotations

import pytest

from idemgate.core.verdict import HANDLED, Step, Verdict, choose_step, verdict_of
from idemgate.errors import (
    AlreadyDone,
    AlreadyInProgress,
    Bury,
    DownstreamUnavailable,
    LeaseLost,
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
