"""A namespace with something in every part of it, and sound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from idemgate import Gate
from idemgate.membership import heartbeats as members
from idemgate.testing import Clock, Report, audit


@pytest.fixture
async def gate(entry: str, clock: Clock, namespace: str) -> Any:
    """As everywhere, but not audited at the end: these tests do damage."""
    made = Gate(entry, namespace=namespace, clock=clock)
    yield made
    await made.aio.close()
    made.close()


@pytest.fixture
def full(gate: Gate, clock: Clock) -> Gate:
    """Topic "t", one slot: "waits" is scheduled, "flies" is in flight in group "g" with one more of its key behind it,
    "behind" is due and stands in the line of "g", "again" is between two attempts in group "h", "died" is a dead
    letter, "e1" an event id. Topic "r", with priorities: "first" is ready. Guarded: "done", "runs", "given"."""
    topic = gate.topic("t", lease="1h", backoff="1h")
    topic.trigger("died", 1)
    topic.bury(topic.take(1))
    topic.trigger("flies", 1, group="g")
    topic.trigger("again", 1, group="h")
    flies, again = topic.take(2)
    assert flies.key == "flies"
    topic.nack(again)
    topic.trigger("behind", 1, group="g")
    assert topic.take(5) == []
    topic.trigger("flies", 2, group="g")
    topic.trigger("waits", 1, delay="1h", event_id="e1", version=3)
    ranked = gate.topic("r", priority=True)
    ranked.trigger("first", 1, priority=1)
    ranked.trigger("second", 1)
    assert [one.key for one in ranked.take(1)] == ["first"]
    with gate.claim("done") as claim:
        claim.complete(1)
    gate.claim("runs")
    gate.claim("given").release()
    gate.context.link.run(members.heartbeat(gate.namespace, "crew", clock, _said(("t", 0), known=0), 10_000))
    generation = gate.context.link.run(members.list_members(gate.namespace, "crew", clock)).generation
    gate.context.link.run(members.heartbeat(gate.namespace, "crew", clock, _said(("t", 0), known=generation), 10_000))
    return gate


def _said(slot: tuple[str, int], known: int) -> members.HeartbeatRequest:
    return members.HeartbeatRequest("m1", 1 if known == 0 else 2, ("t",), known, (), (), (slot,))


@pytest.fixture
def found(full: Gate) -> Callable[..., Report]:
    """`found()`: what an audit of it says."""
    return lambda **options: audit(full, **options)
