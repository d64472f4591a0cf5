"""Triggers as bytes, for programs that store them before they send them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import msgpack
import pytest

from idemgate import Gate, InvalidArgument, Trigger
from idemgate.errors import DecodeError
from idemgate.testing import Clock

AT = datetime(2030, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    "trigger",
    [
        Trigger("k"),
        Trigger(b"\0\xff", {"price": Decimal("1.50"), "at": AT, "pair": (1, 2)}, group=7, at=AT, version=2),
        Trigger(7, "text", priority=-3, event_id="e1"),
    ],
)
def test_a_trigger_comes_back_as_it_was(gate: Gate, trigger: Trigger) -> None:
    topic = gate.topic("t", priority=True)
    assert topic.aio.unpack_trigger(topic.pack_trigger(trigger)) == trigger


def test_a_delay_counts_from_the_packing(gate: Gate, clock: Clock) -> None:
    topic = gate.topic("t")
    packed = topic.pack_trigger(Trigger("k", 1, delay="1m"))
    clock.advance("59s")
    topic.trigger_many([topic.unpack_trigger(packed)])
    assert topic.take(1) == []
    clock.advance("1s")
    assert [one.key for one in topic.take(1)] == ["k"]


def test_what_the_topic_refuses_is_refused(gate: Gate) -> None:
    topic = gate.topic("t", merge="sum")
    for trigger in (Trigger("k", "text"), Trigger("k", 1, priority=1), Trigger("", 1), Trigger("k", 1, delay="soon")):
        with pytest.raises(InvalidArgument):
            topic.pack_trigger(trigger)
    assert gate.stored_topics() == []


@pytest.mark.parametrize("packed", [b"", b"\xc0", msgpack.packb({"key": 1}), b"no trigger at all"])
def test_other_bytes_are_refused(gate: Gate, packed: Any) -> None:
    with pytest.raises(DecodeError):
        gate.topic("t").unpack_trigger(packed)


def test_without_a_test_clock_a_delay_counts_from_now(url: str, namespace: str) -> None:
    with Gate(url, namespace=namespace) as gate:
        trigger = gate.topic("t").unpack_trigger(gate.topic("t").pack_trigger(Trigger("k", delay="1h")))
    assert trigger.at is not None
    assert abs(trigger.at - datetime.now(UTC) - timedelta(hours=1)) < timedelta(seconds=30)
