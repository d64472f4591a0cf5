"""Triggers inside a guarded run: a crash between the trigger and the end of the run does not count twice."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import pytest

from idemgate import Gate, Trigger
from idemgate.testing import Clock

pytestmark = pytest.mark.one_in(5)


class Crashed(Exception):
    """Stands for the end of the process after the triggers."""


async def _run(face: Any, body: Any, *, key: str = "event-1", **options: Any) -> Any:
    """One attempt of a guarded run."""
    return await face.guard("orders", **options).run(key, body)


@pytest.mark.parametrize(
    ("merge", "payload", "expected"),
    [
        ("sum", 5, 10),
        ("count", None, 2),
        ("append", "a", ["a", "a"]),
        ({"n": "sum", "*": "last"}, {"n": 5, "who": "x"}, {"n": 10, "who": "x"}),
        ("last", "a", "a"),
        ("max", 5, 5),
        ("union", ["a"], ["a"]),
    ],
)
@pytest.mark.parametrize("many", [False, True])
async def test_a_second_attempt_counts_nothing_twice(
    face: Any, gate: Gate, clock: Clock, merge: Any, payload: Any, expected: Any, many: bool
) -> None:
    topic = gate.topic("totals", merge=merge, window="10s")
    crashes = [True, True, False]

    def body() -> None:
        # Given a run that triggers the same key and payload twice
        if many:
            topic.trigger_many([("k", payload), ("k", payload)])
        else:
            topic.trigger("k", payload)
            topic.trigger("k", payload)
        if crashes.pop(0):
            raise Crashed

    # When its first two attempts die after the triggers
    outcomes = [(await _run(face, body)).outcome for _ in range(3)]
    # Then the payload is that of one run
    assert outcomes == ["failed", "failed", "handled"]
    clock.advance(10)
    (delivery,) = topic.take(5)
    assert delivery.payload == expected


async def test_an_attempt_in_another_order_loses_nothing(face: Any, gate: Gate, clock: Clock) -> None:
    topic = gate.topic("totals", merge="sum", window="10s")
    orders = [[1, 20], [20, 1, 300]]

    def body() -> None:
        amounts = orders.pop(0)
        for amount in amounts:
            topic.trigger("k", amount)
        if orders:
            raise Crashed

    await _run(face, body)
    await _run(face, body)
    clock.advance(10)
    assert topic.take(1)[0].payload == 321


async def test_other_keys_runs_and_topics_are_counted(face: Any, gate: Gate, clock: Clock) -> None:
    topic, other = gate.topic("totals", merge="sum", window="10s"), gate.topic("others", merge="sum", window="10s")

    def body() -> None:
        for one in (topic, other):
            one.trigger("a", 1)
            one.trigger("b", 1)

    for key in ("event-1", "event-2"):
        await _run(face, body, key=key)
    clock.advance(10)
    payloads = [delivery.payload for one in (topic, other) for delivery in one.take(5)]
    assert payloads == [2, 2, 2, 2]


async def test_an_event_id_of_the_caller_stays(face: Any, gate: Gate, clock: Clock) -> None:
    topic = gate.topic("totals", merge="sum", window="10s")

    def body() -> None:
        topic.trigger("k", 1, event_id="mine")
        topic.trigger_many([Trigger("k", 1, event_id="mine"), Trigger("k", 1, event_id="other")])

    await _run(face, body)
    clock.advance(10)
    assert topic.take(1)[0].payload == 2


async def test_a_run_without_a_claim_counts_each_trigger(face: Any, gate: Gate, clock: Clock) -> None:
    """Two copies that run in shadow mode are two runs."""
    topic = gate.topic("totals", merge="sum", window="10s")
    for _ in range(3):
        await _run(face, lambda: topic.trigger("k", 1), shadow=True)
    topic.trigger("k", 10)
    topic.trigger("k", 10)
    clock.advance(10)
    assert topic.take(1)[0].payload == 23


async def test_the_stored_policy_decides_in_a_program_that_declares_none(
    url: str, namespace: str, gate: Gate, clock: Clock
) -> None:
    gate.topic("totals", merge="sum", window="10s").trigger("other", 1)
    with Gate(url, namespace=namespace, clock=clock) as plain:
        crashes = [True, False]

        def body() -> None:
            plain.topic("totals").trigger("k", 5)
            if crashes.pop(0):
                raise Crashed

        for _ in range(2):
            plain.guard("orders").run("k", body)
    clock.advance(10)
    assert sorted(delivery.payload for delivery in gate.topic("totals").take(5)) == [1, 5]


async def test_async_triggers_have_event_ids_too(gate: Gate, clock: Clock) -> None:
    topic = gate.topic("totals", merge="append", window="10s").aio
    crashes = [True, False]

    async def body() -> None:
        await asyncio.gather(topic.trigger("k", "a"), topic.trigger("k", "b"))
        await topic.trigger_many([("k", "c"), ("k", "c")])
        if crashes.pop(0):
            raise Crashed

    for _ in range(2):
        await gate.guard("orders").aio.run("k", body)
    clock.advance(10)
    assert sorted((await topic.take(1))[0].payload) == ["a", "b", "c", "c"]


PROGRAM = """
import os, sys
from idemgate import Gate
from idemgate.testing import Clock
url, namespace, now, dies = sys.argv[1], sys.argv[2], float(sys.argv[3]), sys.argv[4] == "dies"
gate = Gate(url, namespace=namespace, clock=Clock(now))
totals = gate.topic("totals", merge="sum", window="60s")


@gate.once(key="{event}", scope="orders", lease="10s")
def credit(event, amount):
    totals.trigger("account", amount)
    if dies:
        os._exit(9)


credit("event-1", 5)
"""


@pytest.mark.slow
def test_a_process_that_dies_between_a_trigger_and_its_completion_counts_once(
    url: str, namespace: str, gate: Gate, clock: Clock
) -> None:
    codes = []
    for dies in ("dies", "lives", "lives"):
        words = [url, namespace, f"{clock.microseconds() / 1_000_000:.6f}", dies]
        codes.append(subprocess.run([sys.executable, "-c", PROGRAM, *words], timeout=60, check=False).returncode)
        clock.advance(11)  # the lease of the process that died has ended
    assert codes == [9, 0, 0]
    clock.advance(60)
    (delivery,) = gate.topic("totals", merge="sum", window="60s").take(5)
    assert (delivery.payload, delivery.count) == (5, 1)
