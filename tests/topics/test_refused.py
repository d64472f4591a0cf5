"""Triggers that the client refuses for their payload are counted in the topic."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from idemgate import Gate, InvalidArgument, Trigger, union
from idemgate.errors import TooLarge
from idemgate.testing import Clock
from idemgate.topics import topic as blocking
from idemgate.topics import topic_aio as awaiting
from tests.conftest import Face

LARGE = b"x" * 300_000


@pytest.fixture
async def other(face: Face, gate: Gate, url: str, clock: Clock) -> AsyncIterator[Face]:
    """Another program on the same store."""
    made = Gate(url, namespace=gate.namespace, clock=clock)
    yield Face(made, face.awaiting)
    await made.aio.close()
    made.close()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for the count of a refusal. A busy machine may take longer than a caller would wait."""
    for module in (blocking, awaiting):
        monkeypatch.setattr(module, "COUNT_WITHIN", 60.0)


async def _refuse(topic: Any, payload: object, kind: type[InvalidArgument] = InvalidArgument) -> None:
    """Send a payload, alone and as one of two, that the topic refuses."""
    with pytest.raises(kind, match=r"^payload.*\(topic 't', key 'k'\)$"):
        await topic.trigger("k", payload)
    with pytest.raises(kind, match=r"^payload.*\(topic 't', key 'k'\)$"):
        await topic.trigger_many([("fine", 1), ("k", payload)])


@pytest.mark.usefixtures("patient")
async def test_refused_payloads_are_counted_by_their_reason(face: Face, gate: Gate) -> None:
    topic = face.topic("t", merge={"n": "sum", "items": union()}, slots=4)
    await topic.open()
    # When payloads cannot be merged, cannot be stored, or are too large
    for payload in (1, {"n": "text"}, {"x": object()}):
        with pytest.raises(InvalidArgument):
            await topic.trigger("k", payload)
    with pytest.raises(TooLarge):
        await topic.trigger("k", {"x": LARGE})
    # Then the topic counts them, and so does the process; no message was written
    stats = await topic.stats()
    assert dict(stats.counters) == {"refused_payload": 3, "refused_too_large": 1}
    assert stats.pending == 0
    assert (gate.counters["topic.refused_payload"], gate.counters["topic.refused_too_large"]) == (3, 1)
    # And the counts stay when the slots change
    await topic.reshard(1)
    assert dict((await topic.stats()).counters) == {"refused_payload": 3, "refused_too_large": 1}


async def test_other_arguments_are_not_counted(face: Face, gate: Gate) -> None:
    topic = face.topic("t", merge="sum")
    await topic.open()
    for options in ({"priority": 1}, {"delay": "soon"}, {"version": "1"}):
        with pytest.raises(InvalidArgument):
            await topic.trigger("k", 1, **options)
    assert dict((await topic.stats()).counters) == {}
    assert gate.counters["topic.refused_payload"] == 0


@pytest.mark.usefixtures("patient")
async def test_a_guarded_run_counts_each_payload_once(face: Face) -> None:
    topic = face.topic("t", merge="append")
    async with face.inside("run", scope="s"):
        await topic.trigger("fine", 1)
        await _refuse(topic, object())
        await _refuse(topic, LARGE, TooLarge)
    assert [(await topic.stats())[f"refused_{why}"] for why in ("payload", "too_large")] == [2, 2]


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("options", [{}, {"merge": "sum"}], ids=["without options", "with options"])
async def test_a_program_whose_first_trigger_is_refused_counts_it(
    face: Face, other: Face, options: dict[str, Any]
) -> None:
    # Given a topic that another program uses
    topic = face.topic("t", merge="sum")
    await topic.trigger("fine", 1)
    # When all triggers of this program are refused
    await _refuse(other.topic("t", **options), "text")
    assert (await topic.stats())["refused_payload"] == 2


async def test_a_refused_trigger_creates_no_topic(
    face: Face, gate: Gate, everything: Callable[[], dict[bytes, Any]]
) -> None:
    await _refuse(face.topic("t", merge="sum"), "text")
    assert everything() == {}
    assert gate.counters["topic.refused_payload"] == 2


async def test_a_deleted_topic_stays_deleted(face: Face, other: Face) -> None:
    # Given a program that opened a topic, which another one deletes
    topic = face.topic("t", merge="sum", slots=2)
    await topic.trigger("k", 1)
    await other.topic("t").delete(discard=True)
    # When it triggers with a payload that is refused
    await _refuse(topic, "text")
    # Then the topic is not created again
    assert await face.stored_topics() == []


async def test_a_store_that_is_away_changes_no_error(face: Face) -> None:
    gate = Gate("redis://127.0.0.1:1", namespace="away", timeout="60s")
    await _refuse(Face(gate, face.awaiting).topic("t", merge="sum"), "text")
    assert gate.counters["topic.refused_payload"] == 2
    await gate.aio.close()
    gate.close()


async def test_a_store_that_hangs_delays_the_error_for_a_moment(
    face: Face, raw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (blocking, awaiting):
        monkeypatch.setattr(module, "COUNT_WITHIN", 0.05)
    topic = face.topic("t", merge="sum")
    await topic.open()
    # Given a server that answers nobody for a minute
    raw.execute_command("CLIENT", "PAUSE", 60_000, "WRITE")
    # Then the error comes, and the process has counted it
    await _refuse(topic, "text")
    raw.execute_command("CLIENT", "UNPAUSE")
    assert face.gate.counters["topic.refused_payload"] == 2


def test_a_packed_trigger_is_counted_in_its_process_only(gate: Gate) -> None:
    topic = gate.topic("t", merge="sum")
    topic.open()
    with pytest.raises(InvalidArgument):
        topic.pack_trigger(Trigger("k", "text"))
    assert gate.counters["topic.refused_payload"] == 1
    assert topic.stats()["refused_payload"] == 0
