"""Assertions about one key: what they accept, and what they say."""

from __future__ import annotations

import pytest

from idemgate import Gate
from idemgate.testing import Clock, assert_merged, assert_ran_once


def test_a_key_that_ran_once_passes(gate: Gate) -> None:
    @gate.once(key="{order}", scope="charge")
    def charge(order: str) -> str:
        return order

    charge("o1")
    charge("o1")
    assert_ran_once(gate, charge.key("o1"), scope=charge.scope)
    gate.first("f", "1h")
    assert_ran_once(gate, "f", scope="first")
    with gate.claim("c") as claim:
        claim.complete()
    assert_ran_once(gate, "c")


def test_a_key_that_did_not_run_once_is_described(gate: Gate, clock: Clock) -> None:
    fails = True

    @gate.once(key="{order}", scope="charge")
    def charge(order: str) -> None:
        if fails:
            raise ValueError("no")

    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            charge("o1")
    with pytest.raises(AssertionError, match=r"^key 'o1' of scope 'charge' is not done but released: <Record released"):
        assert_ran_once(gate, "o1", scope="charge")
    fails = False
    charge("o1")
    with pytest.raises(AssertionError, match="was started 3 times: <Record done attempts=3"):
        assert_ran_once(gate, "o1", scope="charge")
    with pytest.raises(AssertionError, match="never run; it has a record in 'charge': pass scope=: <Record absent"):
        assert_ran_once(gate, "o1")
    claim = gate.claim("c")
    with pytest.raises(AssertionError, match="is not done but in_progress"):
        assert_ran_once(gate, "c")
    claim.release()


def test_merged_triggers_are_counted(gate: Gate, clock: Clock) -> None:
    topic = gate.topic("images", window="2s")
    topic.trigger_many([("a", n) for n in range(40)])
    assert_merged(topic, "a", triggers=40)
    with pytest.raises(
        AssertionError, match=r"^topic 'images', key 'a': 40 triggers are merged, not 39: <Message .* count=40"
    ):
        assert_merged(topic, "a", triggers=39)
    clock.advance("2s")
    topic.ack(topic.take())
    with pytest.raises(AssertionError, match="0 triggers are merged, not 40: no message is pending"):
        assert_merged(topic, "a", triggers=40)
