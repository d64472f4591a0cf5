"""The commands that one call runs inside its script: they decide what a single call costs the server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from idemgate import Gate
from tests.conftest import Face

pytestmark = pytest.mark.one_in(3)

Run = Callable[[Any], Any]


def _commands(gate: Gate) -> Counter[str]:
    """Return how often the server ran each command."""
    reply = gate.context.link.command("INFO", "commandstats").decode()
    rows = (line.removeprefix("cmdstat_").partition(":calls=") for line in reply.splitlines() if ":calls=" in line)
    return Counter({name: int(calls.partition(",")[0]) for name, _, calls in rows})


@pytest.mark.parametrize(
    ("verb", "most"),
    [
        ("trigger", 14),
        ("trigger again", 14),
        ("take", 18),
        ("take nothing", 10),
        ("ack", 16),
        ("ack merged", 18),
        ("ack flushed", 18),
        ("ack beside a key with a message behind", 17),
        ("ack with a message behind", 22),
        ("trigger with a priority", 14),
        ("trigger with an event id", 25),
    ],
)
async def test_a_single_call_runs_few_commands(face: Face, verb: str, most: int) -> None:
    # Given a topic whose scripts are loaded, and a message in the state that the verb needs
    topic, gate = face.topic("t", priority=True) if "priority" in verb else face.topic("t"), face.gate
    await topic.trigger("warm")
    await topic.ack(await topic.take(1))
    await topic.take(1)
    taken: list[Any] = []
    if verb == "trigger with an event id":
        await topic.trigger("warm", event_id="first")
    if (not verb.startswith("trigger") and verb != "take nothing") or verb == "trigger again":
        await topic.trigger("k")
    if verb == "ack merged":
        await topic.trigger("k")
    if verb == "ack flushed":
        await topic.reschedule("k", delay="60s")
        await topic.flush()
    if verb.startswith("ack"):
        taken = await topic.take(1)
    if verb == "ack with a message behind":
        await topic.trigger("k")
    if verb == "ack beside a key with a message behind":
        await topic.trigger("busy")
        await topic.take(1)
        await topic.trigger("busy")
    calls: dict[str, Callable[[], Any]] = {
        "trigger": lambda: topic.trigger("k"),
        "trigger again": lambda: topic.trigger("k"),
        "trigger with a priority": lambda: topic.trigger("k", priority=2),
        "trigger with an event id": lambda: topic.trigger("k", event_id="e"),
        "take": lambda: topic.take(1),
        "take nothing": lambda: topic.take(1),
    }
    # When it is called once
    before = _commands(gate)
    await calls.get(verb, lambda: topic.ack(taken))()
    ran = _commands(gate) - before
    # Then one script ran, with few commands
    assert ran.pop("evalsha") == 1
    del ran["info"]
    assert sum(ran.values()) <= most, ran


async def test_a_plain_delivery_is_stored_as_its_token(face: Face, raw: Any, namespace: str) -> None:
    topic, slot = face.topic("t"), f"ig2:{{{namespace}:topic:t:0/1}}"
    await topic.trigger("k")
    (delivery,) = await topic.take(1)
    assert raw.zscore(f"{slot}:leases", "k") == delivery.token
    assert not raw.exists(f"{slot}:inflight")
