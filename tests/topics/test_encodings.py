"""Large hashes and sets of a slot are tables on the server, and what makes them tables is never taken for a message."""

from __future__ import annotations

from typing import Any

import pytest

from idemgate import Gate, Trigger
from idemgate.core import keys

MANY = 20
MARKER = "-" * 65
"""The member by which `topics/lib/slot/add_entries` makes a table of a set."""


def encodings(raw: Any, gate: Gate) -> dict[str, bytes]:
    """The server's form of each part of the slot that exists."""
    parts = zip(keys.PARTS, keys.slot(gate.namespace, "t", 0, 1), strict=True)
    return {part: raw.object("encoding", key) for part, key in parts if raw.exists(key)}


@pytest.mark.parametrize("plain", [True, False])
def test_many_deliveries_are_in_tables(gate: Gate, raw: Any, plain: bool) -> None:
    # Given many messages of one call
    topic = gate.topic("t")
    for _ in range(1 if plain else 2):
        topic.trigger_many([(f"k{number}", number) for number in range(MANY)])
    found = encodings(raw, gate)
    assert (found["scheduled"], found["messages"]) == (b"skiplist", b"hashtable")
    # When all are taken by one call
    deliveries = topic.take(MANY)
    # Then what is in flight and the replies are tables, without anything else in them
    found = encodings(raw, gate)
    assert (found["leases"], found.get("inflight")) == (b"skiplist", None if plain else b"hashtable")
    assert {form for part, form in found.items() if part.startswith("replies")} == {b"hashtable"}
    slot = dict(zip(keys.PARTS, keys.slot(gate.namespace, "t", 0, 1), strict=True))
    assert (raw.zcard(slot["leases"]), raw.hlen(slot["inflight"])) == (MANY, 0 if plain else MANY)
    assert len(deliveries) == MANY


def test_a_key_like_the_marker_is_a_message_like_others(gate: Gate) -> None:
    # Given a message whose key is the marker, of the same call as many others
    topic = gate.topic("t")
    names = [*(f"k{number}" for number in range(MANY)), MARKER]
    topic.trigger_many([(name, 1) for name in names])
    # When all are taken and settled, then it is one of them
    deliveries = topic.take(MANY + 1)
    assert {one.key for one in deliveries} == {*names}
    topic.ack(deliveries)
    assert (topic.stats().scheduled, topic.stats().in_flight) == (0, 0)


def test_a_key_like_the_marker_that_is_in_flight_is_not_scheduled_by_others(gate: Gate) -> None:
    # Given a delivery in flight whose key is the marker, and a message behind it
    topic = gate.topic("t")
    topic.trigger(MARKER, 1)
    (running,) = topic.take(1)
    topic.trigger(MARKER, 2)
    # When many others are triggered and taken by one call, then it stays as it is
    topic.trigger_many([(f"k{number}", 1) for number in range(MANY)])
    assert topic.stats().ready == MANY
    assert MARKER not in {one.key for one in topic.take(MANY + 1)}
    # And the message behind it is taken after it
    topic.ack([running])
    assert [(one.key, one.payload) for one in topic.take(1)] == [(MARKER, 2)]


def test_equal_receipts_are_replayed(gate: Gate) -> None:
    # Given a call whose triggers have all the same receipt
    calls = gate.topic("t", window="1h").open()
    call = calls.trigger_many([Trigger(f"k{number}", 1) for number in range(MANY)]).calls[0]
    first = gate.context.link.run(call)
    # When it is sent again, then each trigger has the receipt of before
    assert gate.context.link.run(call) == first
    assert len(first) == MANY
