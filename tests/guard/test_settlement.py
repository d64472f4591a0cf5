"""The counters and the log of consumers of all integrations."""

from __future__ import annotations

import logging
from typing import Any, get_args

import pytest

from idemgate import Gate, Verdict
from idemgate.types import Outcome
from tests.for_each import for_each

LEVELS = {"rejected": "ERROR", "failed": "WARNING", "lost": "WARNING"}


@for_each("outcome", get_args(Outcome))
def test_a_settlement_is_counted_by_its_outcome(gate: Gate, caplog: pytest.LogCaptureFixture, outcome: Any) -> None:
    caplog.set_level(logging.DEBUG, "idemgate.once")
    before, logged = gate.counters[f"consumer.{outcome}"], len(caplog.records)
    gate.record_settlement("orders", Verdict(outcome, error=ValueError("a\nb"), attempt=2), "m-1\x1b")
    assert gate.counters[f"consumer.{outcome}"] == before + 1
    shown = [(each.levelname, each.getMessage()) for each in caplog.records[logged:]]
    text = f"consumer.{outcome} scope='orders' id='m-1\\x1b' attempt=2"
    assert shown == ([(LEVELS[outcome], text)] if outcome in LEVELS else [])


def test_a_message_that_its_broker_redelivers_is_unsettled(gate: Gate, caplog: pytest.LogCaptureFixture) -> None:
    gate.record_settlement("orders", Verdict("handled"), 7, error=ConnectionError("no\nanswer"))
    assert (gate.counters["consumer.unsettled"], gate.counters["consumer.handled"]) == (1, 0)
    (record,) = caplog.records
    assert record.getMessage() == (
        "consumer.unsettled scope='orders' id=7 outcome=handled: ConnectionError: no\\nanswer"
    )
