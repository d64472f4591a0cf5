"""A gate leaves deliveries larger than its `max_bytes` to gates with a larger limit."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from idemgate import Gate
from idemgate.testing import Clock
from idemgate.topics.merge import NAMES
from tests.conftest import Face

pytestmark = pytest.mark.one_in(5)

LARGE = "x" * 2_000


@pytest.fixture
def small_face(face: Face, small: Gate) -> Face:
    return Face(small, face.awaiting)


async def test_a_take_defers_what_is_too_large(
    face: Face, small_face: Face, small: Gate, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    # Given a delivery that is too large for a gate, between two others
    topic, lesser = face.topic("t", max_attempts=1), small_face.topic("t", max_attempts=1)
    for key, payload in (("a", 1), ("large", LARGE), ("z", 2)):
        await topic.trigger(key, payload)
        clock.advance("1ms")
    # When that gate takes, then it gets the others
    taken = await lesser.take(3)
    assert [one.payload for one in taken] == [1, 2]
    assert await lesser.take(3) == []
    # And the delivery was deferred, counted and logged
    assert small.counters["topic.too_large"] == 1
    (record,) = [record for record in caplog.records if record.name == "idemgate.topic"]
    assert (record.levelno, record.topic, record.key) == (logging.ERROR, "t", "large")  # type: ignore[attr-defined]
    assert (record.size, record.max_bytes) == (2_004, 1_000)  # type: ignore[attr-defined]
    assert "topic.too_large topic='t' key='large' size=2004 max_bytes=1000" in record.getMessage()
    peeked = await topic.peek("large")
    assert (peeked.in_flight, peeked.pending.attempts) == (None, 0)
    # And a gate with a larger limit gets it as its first attempt
    await lesser.ack(taken)
    clock.advance("30s")
    (one,) = await topic.take(3)
    assert (one.payload, one.attempt) == (LARGE, 1)
    await topic.ack([one])
    assert (await topic.stats()).dead == 0


CASES: list[tuple[Any, list[Any], bool]] = [
    ("append", ["x" * 400] * 9, True),
    ("append", ["x", LARGE], False),
    ("union", [["x" * 100, "y" * 100], ["z" * 900]], True),
    ("union", [["x"], [LARGE]], False),
    ({"a": "append", "*": "last"}, [{"a": "x" * 600, "b": "y" * 600}], True),
    ({"a": "append", "*": "last"}, [{"a": LARGE}], False),
    ({"a": "append", "*": "last"}, [{"b": LARGE}], False),
    ({"n": "max", "*": "last"}, [{"n": 1, "b": "x" * 900, "c": "y" * 900}], True),
    ("count", [LARGE, LARGE], True),
    ("sum", [1, 2], True),
    ("min", [1, 2], True),
    ("max", [1, 2], True),
    ("last", [1, LARGE], False),
    ("first", [LARGE, 1], False),
]


def test_each_policy_has_a_case() -> None:
    assert {merge for merge, _, _ in CASES if isinstance(merge, str)} == {*NAMES}


@pytest.mark.parametrize(("merge", "payloads", "fits"), CASES)
async def test_the_limit_applies_to_each_value(
    face: Face, small_face: Face, merge: Any, payloads: list[Any], fits: bool
) -> None:
    """As for the trigger: `max_bytes` is the limit of a payload, and an append or union holds many of them."""
    topic, lesser = face.topic("t", merge=merge), small_face.topic("t", merge=merge)
    for payload in payloads:
        await topic.trigger("k", payload)
    taken = await lesser.take()
    assert bool(taken) is fits
    if taken:
        assert taken[0].payload is not None
        await lesser.ack(taken)
